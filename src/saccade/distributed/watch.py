"""Wait for messages that may not come: between GPUs headers are read on arrival, between hosts a thread waits."""

from __future__ import annotations

import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .errors import PeerError
from .parcel import Parcel

_PAUSE = 0.05
# seconds between checks whether another rank has raised
_ASK = 0.25


# (until, the queue for its result), or None at the end
Work = queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]


class Waiter:
    """A thread that waits, because waits of gloo can neither be interrupted nor split into shorter ones."""

    def __init__(self) -> None:
        self.work: Work | None = None

    def wait(self, until: Callable[[], Any], ask: Callable[[], Any]) -> Any:
        """The result of until(), or of ask() as soon as that is not None; the wait then continues unobserved.

        Raises what until() raises.
        """
        if self.work is None:
            self.work = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(self.work,), daemon=True)
            thread.start()
            self.end = weakref.finalize(self, self._stop, self.work, thread)
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.work.put((until, done))
        while True:
            try:
                result, error = done.get(timeout=_ASK)
            except queue.Empty:
                answer = ask()
                if answer is None:
                    continue
                # the thread remains blocked in this wait, and then ends
                self.work.put(None)
                self.end.detach()
                self.work = None
                return answer
            if error is not None:
                raise error
            return result

    @staticmethod
    def _run(work: Work) -> None:
        while job := work.get():
            until, done = job
            result = error = None
            try:
                result = until()
            except BaseException as raised:
                error = raised
            # until refers to the process group, which the caller may destroy next
            del job, until
            done.put((result, error))
            del done, result, error

    @staticmethod
    def _stop(work: Work, thread: threading.Thread) -> None:
        """End the thread. A thread that still destroys objects of gloo when Python ends would abort the process."""
        work.put(None)
        # the thread itself may be what drops the last reference to its Waiter
        if thread is not threading.current_thread():
            thread.join()


class Messages(Protocol):
    """The part of `comm.Pending` that is used here: the messages of one step of a call."""

    receives: dict[int, Parcel]
    # seconds that a rank may keep others waiting
    limit: float

    def verify(self, rank: int, head: Sequence[int]) -> None:
        """Raise PeerError unless the header of a message from `rank` is the expected one."""
        ...

    def refused(self) -> PeerError | None:
        """The error to raise if another rank raised in this call, else None."""
        ...

    def late(self, rank: int | None) -> PeerError:
        """The error to raise if nothing came from this rank; None: from the first rank of the step."""
        ...


class Watch:
    """The messages of one group in flight between devices.

    While there are any, a thread checks them every 50 ms. After an error it stores the error for the next call, prints
    it, and aborts the communicator, because kernels would otherwise wait forever.
    """

    def __init__(self, group: Callable[[], Any]) -> None:
        # a weak reference to the process group
        self.group = group
        self.lock = threading.Lock()
        # (event after the messages, their headers on the host, the messages)
        self.waiting: list[tuple[Any, dict[int, torch.Tensor], Messages]] = []
        # the time of the last progress
        self.moved = 0.0
        self.thread: threading.Thread | None = None
        self.error: PeerError | None = None

    def add(self, pending: Messages) -> None:
        """Watch messages for which the current stream waits."""
        heads = {
            r: torch.empty(parcel.head.shape, dtype=torch.int64, pin_memory=True).copy_(parcel.head, non_blocking=True)
            for r, parcel in pending.receives.items()
        }
        event = torch.cuda.Event()
        event.record()
        with self.lock:
            if not self.waiting:
                self.moved = time.monotonic()
            self.waiting.append((event, heads, pending))
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, daemon=True)
                self.thread.start()

    def check(self) -> None:
        """Raise the error since the last check, if there is one."""
        self._look()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Wait for all messages; raise the error, if there is one."""
        while self.waiting and self.error is None:
            self._look()
            time.sleep(0.0005)
        self.check()

    def _look(self) -> None:
        with self.lock:
            while self.waiting and self.error is None:
                event, heads, pending = self.waiting[0]
                try:
                    if event.query():
                        self.waiting.pop(0)
                        self.moved = time.monotonic()
                        for rank, head in heads.items():
                            pending.verify(rank, head.tolist())
                        continue
                    quiet = time.monotonic() - self.moved
                    refused = pending.refused() if quiet > _ASK else None
                    if refused is None and quiet < pending.limit:
                        return
                    self.error = refused or pending.late(min(heads, default=None))
                except PeerError as error:
                    self.error = error

    def _run(self) -> None:
        while True:
            time.sleep(_PAUSE)
            self._look()
            if self.error is not None:
                print(f"saccade: {self.error}", file=sys.stderr, flush=True)
                if group := self.group():
                    group.abort()
                return
            with self.lock:
                if not self.waiting:
                    self.thread = None
                    return
