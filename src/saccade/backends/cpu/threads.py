"""How many threads the CPU backend's calls take, and whose they are."""

from __future__ import annotations

import ctypes
import os

from ._core import join_team as join_openmp

# of a call, the calling one among them
number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_num_threads(n: int) -> None:
    """Use at most n threads, the calling one among them."""
    global number
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the number of threads is {n!r}; expected an integer of at least 1")
    number = n


def get_num_threads() -> int:
    """How many threads a call may use."""
    return number


def join_team(library: str | None) -> None:
    """Run the calling thread's calls by the OpenMP runtime at this path, which others keep awake; None: our threads."""
    runtime = ctypes.CDLL(library) if library else None
    run, pause = (
        ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value if hasattr(runtime, name) else None
        for name in ("GOMP_parallel", "omp_pause_resource_all")
    )
    join_openmp(run or 0, pause or 0)
