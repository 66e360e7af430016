"""Which positions of a sequence each rank holds: data, not code.

A layout is "contiguous", "zigzag", "striped", or for every rank a list of affine runs (start, step, length). A rank
holds its runs one behind the other in this order; every position belongs to one rank. Nothing is padded, so slices
may be of different lengths, or empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MOST_RUNS = 16
NAMED = ("contiguous", "zigzag", "striped")
# a layout as callers give it
Layout = str | Sequence[Iterable[Sequence[int]]]


class Run(NamedTuple):
    """The positions start, start + step, ..., length of them."""

    start: int
    step: int
    length: int

    @property
    def slice(self) -> slice:
        """What takes these positions from the whole sequence."""
        return slice(self.start, self.start + self.step * (self.length - 1) + 1, self.step)


# the runs of every rank
Runs = tuple[tuple[Run, ...], ...]


def runs_of(layout: Layout, world: int, length: int) -> Runs:
    """The runs of each of `world` ranks over `length` positions; runs without a position are left out.

    contiguous: rank r holds the r-th of P chunks (Liu et al., 2023). zigzag: chunks r and 2P - 1 - r of 2P, which
    balances a causal mask. striped: positions r, r + P, ... (Brandon et al., 2023). Chunks differ by one position at
    most. Raises ValueError for another name, or for runs that do not hold every position once.
    """
    if isinstance(layout, str):
        return _named(layout, world, length)
    try:
        rows = tuple(tuple(tuple(run) for run in rank) for rank in layout)
        runs = tuple(tuple(Run(*(int(n) for n in run)) for run in rank) for rank in rows)
    except (TypeError, ValueError):
        raise ValueError(
            f"layout is {layout!r}; expected one of {', '.join(NAMED)}, or for each rank a list of (start, step, "
            "length)"
        ) from None
    return _checked(runs, world, length)


@lru_cache(maxsize=256)
def _named(layout: str, world: int, length: int) -> Runs:
    if layout == "striped":
        runs = [[Run(r, world, -(-(length - r) // world))] for r in range(world)]
    elif layout == "contiguous":
        runs = [[chunk] for chunk in _chunks(world, length)]
    elif layout == "zigzag":
        chunks = _chunks(2 * world, length)
        runs = [[chunks[r], chunks[-1 - r]] for r in range(world)]
    else:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(NAMED)}, or lists of runs")
    return tuple(tuple(run for run in rank if run.length > 0) for rank in runs)


def _chunks(n: int, length: int) -> list[Run]:
    # the first length mod n chunks hold one position more
    bounds = [length // n * i + min(i, length % n) for i in range(n + 1)]
    return [Run(a, 1, b - a) for a, b in itertools.pairwise(bounds)]


@lru_cache(maxsize=64)
def _checked(layout: Runs, world: int, length: int) -> Runs:
    if len(layout) != world:
        raise ValueError(f"layout has runs for {len(layout)} ranks; expected {world}, one list for each rank")
    ranks = np.zeros(length, np.int64)
    for rank, runs in enumerate(layout):
        if len(runs) > MOST_RUNS:
            raise ValueError(f"layout has {len(runs)} runs on rank {rank}; expected at most {MOST_RUNS}: join them")
        for run in runs:
            last = run.start + run.step * (run.length - 1)
            if run.step < 1 or run.length < 0 or (run.length and not 0 <= run.start <= last < length):
                raise ValueError(
                    f"layout has the run {tuple(run)} on rank {rank}; expected step >= 1 and positions in [0, {length})"
                )
            if run.length:
                ranks[run.slice] += 1
    wrong = np.flatnonzero(ranks != 1)
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"layout holds position {at} {int(ranks[at])} times; expected once, on one rank")
    return tuple(tuple(run for run in runs if run.length) for runs in layout)


def count(runs: Iterable[Run]) -> int:
    """How many positions a rank with these runs holds."""
    return sum(run.length for run in runs)


def positions(runs: Sequence[Run]) -> np.ndarray:
    """int64 [count]: the positions of a rank with these runs, in the order it holds them."""
    parts = [np.arange(run.length, dtype=np.int64) * run.step + run.start for run in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
