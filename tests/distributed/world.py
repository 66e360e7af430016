"""Worlds of processes that run many cases: `world(4).run(function, ...)` calls it on each of four gloo ranks.

Processes are forked off one that has imported torch, so that a world starts in a second, and stay for the next case.
A function that ranks run is at the top level of a file, and its arguments can be pickled.
"""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
_context = mp.get_context("forkserver")


class World:
    """`size` ranks. A rank that raises sends its error; `limit` seconds without an answer end them all."""

    def __init__(self, size: int, limit: float = 240.0) -> None:
        self.size, self.limit = size, limit
        self.folder = tempfile.TemporaryDirectory()
        _context.set_forkserver_preload(["torch", "torch.distributed", "saccade.frameworks.torch"])
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(size):
            here, there = _context.Pipe()
            args = rank, size, f"{self.folder.name}/store", there
            # the main module of a test run is pytest, which children must not import
            process = _context.Process(target=_rank, args=args, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> list[Any]:
        """What function(*args, **named) gave on every rank; raises what a rank raised, with its traceback."""
        results = self.outcomes(function, *args, **named)
        for rank, (fine, result) in enumerate(results):
            if not fine:
                self.close()
                raise AssertionError(f"rank {rank} of {self.size}: {result}")
        return [result for _, result in results]

    def outcomes(self, function: Callable[..., Any], *args: Any, **named: Any) -> list[tuple[bool, Any]]:
        """(True, result), or (False, traceback), of every rank; (False, "") for one whose process is gone."""
        source = sys.modules[function.__module__].__file__
        for pipe in self.pipes:
            pipe.send((str(source), function.__name__, args, named))
        found: list[tuple[bool, Any]] = []
        for pipe in self.pipes:
            try:
                found.append(pipe.recv() if pipe.poll(self.limit) else (False, f"no answer for {self.limit} s"))
            except (EOFError, ConnectionResetError):
                found.append((False, ""))
        return found

    @property
    def alive(self) -> bool:
        """Whether every rank is there."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """End the ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []
        self.folder.cleanup()


def _rank(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    import saccade

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    saccade.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    while True:
        try:
            source, name, args, named = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(module_of(source), name)(*args, **named)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def module_of(source: str) -> Any:
    """The module of a file, found by its path: tests are no package."""
    name = f"ranks_{Path(source).stem}"
    if name not in sys.modules:
        sys.path.insert(0, str(Path(source).parent))
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_worlds: dict[int, World] = {}


def world(size: int) -> World:
    """The world of this size, started at its first use; at most two are kept, for processes take memory."""
    found = _worlds.pop(size, None)
    if found is None or not found.alive:
        found = World(size)
    _worlds[size] = found
    while len(_worlds) > 2:
        _worlds.pop(next(iter(_worlds))).close()
    return found


def close_all() -> None:
    """End every world."""
    while _worlds:
        _worlds.popitem()[1].close()
