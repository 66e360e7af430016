"""Layouts: which positions of a sequence each rank has.

A layout is "contiguous", "zigzag", "striped", or a list of affine runs (start, step, length) per rank. The slice of a
rank is the concatenation of its runs in this order; every position belongs to one rank. Nothing is padded, so slices
may differ in length or be empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MOST_RUNS = 16
NAMED = ("contiguous", "zigzag", "striped")
# a layout as callers pass it
Layout = str | Sequence[Iterable[Sequence[int]]]


class Run(NamedTuple):
    """`length` positions start, start + step, ..."""

    start: int
    step: int
    length: int

    @property
    def slice(self) -> slice:
        """The slice object that selects these positions from the whole sequence."""
        return slice(self.start, self.start + self.step * (self.length - 1) + 1, self.step)


# the runs of every rank
Runs = tuple[tuple[Run, ...], ...]


def runs_of(layout: Layout, world: int, length: int) -> Runs:
    """The runs of positions of each rank in a layout.

    Args:
        layout: "contiguous": rank r has the r-th of P chunks (Liu et al., 2023). "zigzag": chunks r and 2P - 1 - r of
            2P, which balances a causal mask. "striped": positions r, r + P, ... (Brandon et al., 2023). Chunks differ
            by at most one position. Or a list of runs (start, step, length) per rank.
        world: the number of ranks, P.
        length: the number of positions.

    Returns:
        For each rank a tuple of runs (start, step, length), without empty ones.

    Raises:
        ValueError: an unknown name, or the runs do not contain every position once.

    Examples:
        >>> from saccade.distributed import runs_of
        >>> runs_of("zigzag", 2, 16)[0]
        (Run(start=0, step=1, length=4), Run(start=12, step=1, length=4))
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
    # the first length mod n chunks have one position more
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
    """The number of positions of a rank with these runs."""
    return sum(run.length for run in runs)


def positions(runs: Sequence[Run]) -> np.ndarray:
    """int64 [count]: the positions of a rank with these runs, in the order of its slice."""
    parts = [np.arange(run.length, dtype=np.int64) * run.step + run.start for run in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
