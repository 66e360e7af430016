"""The number of threads that calls of the CPU backend use, and the runtime that owns them."""

from __future__ import annotations

import ctypes
import os

from ._core import join_team as join_openmp
from ._core import set_ffi_threads

# threads that a call may ask for
MOST = 4096
# threads per call, the calling one included
number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
set_ffi_threads(number)


def set_num_threads(n: int) -> None:
    """Use at most n threads, the calling one included, and never more than 4096.

    Examples:
        >>> saccade.set_num_threads(1)  # for example in each worker process of a data loader
    """
    global number
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the number of threads is {n!r}; expected an integer of at least 1")
    number = min(n, MOST)
    set_ffi_threads(number)


def get_num_threads() -> int:
    """The number of threads that a call may use.

    Examples:
        >>> threads = saccade.get_num_threads()
    """
    return number


def join_team(library: str | None) -> None:
    """Run the calling thread's calls on the OpenMP runtime at this path; None: on Saccade's own threads.

    A framework keeps the threads of its runtime awake between calls.
    """
    runtime = ctypes.CDLL(library) if library else None
    run, pause = (
        ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value if hasattr(runtime, name) else None
        for name in ("GOMP_parallel", "omp_pause_resource_all")
    )
    join_openmp(run or 0, pause or 0)
