"""The clocks of all benchmarks: the host's, for one process or for ranks, a GPU's events, replays of a CUDA graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Function = Callable[[], Any]

# an idle OpenMP thread spins for milliseconds on a core that the next provider needs
PAUSE = 0.01
WARM_SECONDS = 0.004
# a sample is at least this long, so that the clock's own cost is negligible
SAMPLE_SECONDS = 1e-3


class Timing(NamedTuple):
    """Seconds of a call: median and the tenth and ninetieth percentiles of `samples` samples; NaN without samples."""

    median: float = math.nan
    p10: float = math.nan
    p90: float = math.nan
    samples: int = 0


def timing(seconds: Sequence[float]) -> Timing:
    """The percentiles of these samples."""
    p10, median, p90 = np.percentile(seconds, (10, 50, 90))
    return Timing(float(median), float(p10), float(p90), len(seconds))


def by_clock(
    call: Function,
    *,
    rounds: int = 10,
    warm: int = 2,
    inside: int = 1,
    before: Function | None = None,
    after: Function | None = None,
) -> list[float]:
    """Seconds of a call by the host's clock: `rounds` samples of `inside` calls, after `warm` calls.

    before: runs before every sample, untimed; after: runs after its calls, timed, for example to wait for a device.
    """
    for _ in range(warm):
        call()
    samples: list[float] = []
    for _ in range(rounds):
        if before:
            before()
        start = time.perf_counter()
        for _ in range(inside):
            call()
        if after:
            after()
        samples.append((time.perf_counter() - start) / inside)
    return samples


def in_turn(
    calls: Mapping[str, Function], *, seconds: float = 4.0, rounds: tuple[int, int] = (5, 60)
) -> dict[str, Timing]:
    """Time every call in turn by the host's clock, round after round, so that a disturbance affects all.

    The number of rounds is what fits in `seconds`, within the bounds `rounds`. Short calls are repeated in a sample.
    Before a sample there is a pause, in which the other provider's worker threads fall asleep, and then untimed calls
    until Saccade's are awake: on a virtual machine, waking a core takes half a millisecond.
    """
    estimate = {name: _estimate(call) for name, call in calls.items()}
    inner = {name: max(1, min(2000, math.ceil(SAMPLE_SECONDS / t))) for name, t in estimate.items()}
    warm = {name: math.ceil(WARM_SECONDS / t) if t < 0.05 else 0 for name, t in estimate.items()}
    one_round = sum(inner[name] * t for name, t in estimate.items())
    n = min(rounds[1], max(rounds[0], int(seconds / max(one_round, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(n):
        for name, call in calls.items():
            time.sleep(PAUSE)
            samples[name] += by_clock(call, rounds=1, warm=warm[name], inside=inner[name])
    return {name: timing(values) for name, values in samples.items()}


def _estimate(call: Function) -> float:
    (first,) = by_clock(call, rounds=1, warm=1)
    if first > SAMPLE_SECONDS:
        return first
    return max(by_clock(call, rounds=1, warm=0, inside=10)[0], 1e-9)


def over_ranks(call: Function, device: Any, *, rounds: int, warm: int) -> list[float]:
    """Seconds of a call on the slowest rank, by the hosts' clocks; before every sample all ranks wait for each other.

    device: this rank's torch.device.
    """
    import torch
    import torch.distributed as dist

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def meet() -> None:
        dist.all_reduce(torch.zeros(1, device=device))
        finish()

    samples = by_clock(call, rounds=rounds, warm=warm, before=meet, after=finish)
    slowest = torch.tensor(samples, device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def by_events(call: Function, *, warm: float = 0.06, seconds: float = 0.25) -> list[float]:
    """Seconds of a call by a GPU's events, its cache emptied before each, after about `warm` seconds of calls."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(call, warmup=int(1e3 * warm), rep=int(1e3 * seconds), return_mode="all")
    return [1e-3 * ms for ms in milliseconds]


def by_replays(call: Function, *, inside: int = 20) -> list[float]:
    """Seconds of a call inside a captured CUDA graph of `inside` calls: the GPU's share alone."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inside):
            call()
    return [seconds / inside for seconds in by_events(graph.replay, warm=0.03, seconds=0.15)]
