"""Messages that may not come: between GPUs headers are read when they arrive, between hosts a thread waits for them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .errors import PeerError
from .parcel import Parcel

_PAUSE = 0.05
# seconds between two questions whether another rank has raised
_ASK = 0.25


class Waiter:
    """Waits in a thread of its own, as gloo's waits can neither be interrupted nor waited for in pieces."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] | None = None

    def wait(self, until: Callable[[], Any], ask: Callable[[], Any]) -> Any:
        """What until() returns; or what ask() returns instead, when it is not None, while the wait goes on unheard."""
        if self.work is None:
            self.work = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self.work,), daemon=True).start()
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.work.put((until, done))
        while True:
            try:
                return done.get(timeout=_ASK)
            except queue.Empty:
                answer = ask()
            if answer is not None:
                # the thread is lost to this wait
                self.work = None
                return answer

    @staticmethod
    def _run(work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]) -> None:
        while True:
            until, done = work.get()
            done.put(until())


class Messages(Protocol):
    """What was sent and is awaited in one step of a call, as `comm.Pending` has it."""

    receives: dict[int, Parcel]
    # seconds that a rank may keep others waiting
    limit: float

    def verify(self, rank: int, head: Sequence[int]) -> None:
        """Raises PeerError where the header of a message from `rank` is not the expected one."""
        ...

    def refused(self) -> PeerError | None:
        """The error to raise where another rank raised in this call."""
        ...

    def late(self, rank: int | None) -> PeerError:
        """The error to raise where nothing came, from this rank or, for None, from the first of the step."""
        ...


class Watch:
    """What of one group is on its way between devices.

    A thread looks at it every twentieth of a second while there is any. When something is wrong it keeps the error for
    the next call, prints it, and aborts the communicator, or kernels would wait for ever.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.abort = abort
        self.lock = threading.Lock()
        # event after the messages, their headers on the host, the messages
        self.waiting: list[tuple[Any, dict[int, torch.Tensor], Messages]] = []
        # when something last moved
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
        """Raises what went wrong since the last look."""
        self._look()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Waits for all messages; raises what went wrong."""
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
                self.abort()
                return
            with self.lock:
                if not self.waiting:
                    self.thread = None
                    return
