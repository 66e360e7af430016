"""The schedule of a ring: which rank works on which keys at which step, and which messages are sent.

It is data that every rank computes without messages. Rank r of P works at step t on the keys of rank (r - t) mod P (Liu
et al., 2023). The block of keys of rank y moves from neighbour to neighbour while some later rank sees any of it. Its
gradients start on the first rank that sees it, travel with it, and return from the last.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..mask import Mask
from ..mask.excerpt import Hull, Places, excerpt
from ..mask.forms import STRIDE, LoweredHeads
from ..mask.lowering import lower
from ..mask.memo import Memo
from ..mask.size import TooManyBands
from .layout import Run, Runs, count, positions

_SCHEDULES = Memo(64)


class Piece(NamedTuple):
    """Rows [q_begin, q_end) of a rank, keys [k_begin, k_end) of a block, and the masks between them."""

    rows: slice
    keys: slice
    heads: LoweredHeads


class Schedule:
    """The steps of every rank for a mask over T positions that are divided by `runs`."""

    def __init__(self, heads: LoweredHeads, runs: Runs) -> None:
        self.heads, self.runs = heads, runs
        self.world = len(runs)
        self.counts = [count(rank) for rank in runs]

    @cached_property
    def pairs(self) -> np.ndarray:
        """[P, P]: at [r, y] an upper bound of the allowed pairs of rows of rank r and keys of rank y; 0 is exact."""
        cut = [self._spans(rank) for rank in self.runs]
        pairs = np.zeros((self.world, self.world))
        for r, y in np.ndindex(pairs.shape):
            hulls = [_hull(self.heads, q, k) for _, q in cut[r] for _, k in cut[y]]
            pairs[r, y] = sum(hull.pairs for hull in hulls if hull is not None)
        return pairs

    @cached_property
    def sees(self) -> np.ndarray:
        """bool [P, P]: at [r, y] whether rank r may see a key of rank y; False is exact."""
        return self.pairs > 0

    @cached_property
    def reach(self) -> list[tuple[int, int]]:
        """For every block the first and the last step after step 0 in which a rank works on it; (0, 0) for none."""
        steps_of: list[tuple[int, int]] = []
        for y in range(self.world):
            steps = [d for d in range(1, self.world) if self.sees[(y + d) % self.world, y]]
            steps_of.append((steps[0], steps[-1]) if steps else (0, 0))
        return steps_of

    def moves(self, block: int, step: int) -> bool:
        """Whether a block moves from its rank of this step to that of the next."""
        return step < self.reach[block][1]

    def returns(self, block: int, step: int) -> bool:
        """Whether gradients of a block leave its rank of this step, for the next rank or for the owner."""
        first, last = self.reach[block]
        return 0 < first <= step <= last

    def hops(self, rank: int) -> int:
        """The number of blocks of keys that a rank sends in one pass."""
        return sum(self.moves((rank - t) % self.world, t) for t in range(self.world))

    def pieces(self, rank: int, block: int) -> list[Piece]:
        """The calls of a rank on a block, as few as its runs allow."""
        if not self.sees[rank, block]:
            return []
        return pieces(self.heads, self.runs[rank], self.runs[block])

    def _spans(self, runs: tuple[Run, ...]) -> list[tuple[int, Places]]:
        return spans(runs, _needs_runs(self.heads))


def make_schedule(mask: Mask | None, B: int, Hq: int, T: int, runs: Runs) -> Schedule:
    """The schedule of a mask over T positions, cached with the mask. Raises ValueError as in `lower`."""
    key, schedule = _SCHEDULES.get(mask, (B, Hq, T, runs))
    if schedule is None:
        schedule = Schedule(lower(mask, B, Hq, T, T), runs)
        _SCHEDULES.put(mask, key, schedule)
    return schedule


def pieces(heads: LoweredHeads, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...]) -> list[Piece]:
    """The calls that cover all allowed pairs of rows at q_runs and keys at k_runs, each cut to its allowed pairs."""
    single = _needs_runs(heads)
    try:
        return _pieces(heads, q_runs, k_runs, single)
    except TooManyBands:
        if single:
            raise
        return _pieces(heads, q_runs, k_runs, True)


def _pieces(heads: LoweredHeads, q_runs: tuple[Run, ...], k_runs: tuple[Run, ...], single: bool) -> list[Piece]:
    result: list[Piece] = []
    for q_at, q in spans(q_runs, single):
        for k_at, k in spans(k_runs, single):
            local, hull = excerpt(heads, q, k)
            if hull is None:
                continue
            if hull[:4] != (0, q.n, 0, k.n):
                local, _ = excerpt(heads, q.cut(*hull[:2]), k.cut(*hull[2:4]))
            rows, keys = slice(q_at + hull[0], q_at + hull[1]), slice(k_at + hull[2], k_at + hull[3])
            result.append(Piece(rows, keys, local))
    return result


def _hull(heads: LoweredHeads, q: Places, k: Places) -> Hull | None:
    try:
        return excerpt(heads, q, k)[1]
    except TooManyBands:
        # the exact hull would need cutting into runs; this one contains it
        return Hull(0, q.n, 0, k.n, q.n * k.n)


def spans(runs: tuple[Run, ...], single: bool) -> list[tuple[int, Places]]:
    """(index of the first, places) of stretches of ascending positions; single: of every run separately."""
    result: list[tuple[int, Places]] = []
    at = 0
    for group in _ascending(runs, single):
        places = Places(positions(group), group[0].step if len(group) == 1 else 0)
        result.append((at, places))
        at += places.n
    return result


def _ascending(runs: tuple[Run, ...], single: bool) -> list[list[Run]]:
    groups: list[list[Run]] = []
    end = 0
    for run in runs:
        if groups and not single and run.start >= end:
            groups[-1].append(run)
        else:
            groups.append([run])
        end = run.start + run.step * (run.length - 1) + 1
    return groups


def _needs_runs(heads: LoweredHeads) -> bool:
    # strides and blocks need evenly spaced places
    return any(m.grids or (np.abs(m.bands[..., STRIDE]) != 1).any() for m in heads.masks)
