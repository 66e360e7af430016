"""Counts of a plan: tiles by state, visited pairs, allowed pairs, and their cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from . import cost
from .mask.tiling import PARTIAL

if TYPE_CHECKING:
    from .plan import Part, Plan
    from .problem import Problem

# up to this many elements of partial segments are tested one by one; the rest count as allowed
ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Count:
    """Tiles and pairs of all batch entries and query heads. `exact`: `allowed` is exact, else an upper bound."""

    pairs: int
    tiles: int
    full: int
    partial: int
    visited: int
    allowed: int
    keys_seen: int
    keys_read: int
    exact: bool

    @property
    def skipped(self) -> float:
        """Share of the pairs that are not visited."""
        return 1 - self.visited / self.pairs if self.pairs else 0.0


def count(plan: Plan, B: int, Tq: int, Tk: int) -> Count:
    """Count a plan's ranges.

    `keys_read` sums the keys that each query tile of each head loads; `keys_seen` counts each key of a batch entry
    once.
    """
    budget, seen = [ELEMENTS], np.zeros((B, Tk), bool)
    full = keys = tiles = tested = 0
    for part in plan.parts:
        tiles += B * len(part.head) * int((-(-part.nq // plan.tile_q) * -(-part.nk // plan.tile_k)).sum())
        full += part.total(part.ranges.full_tiles(plan.tile_k), B)
        keys += part.total(part.ranges.keys(), B)
        tested += part.total(_tested(part, plan.tile_q, budget), B)
        _mark(part, seen)
    exact, allowed = budget[0] >= 0, plan.full_pairs + tested
    allowed = allowed if exact else min(allowed, plan.allowed_upper)
    pairs, partial = B * plan.Hq * Tq * Tk, plan.visited_tiles - full
    return Count(pairs, tiles, full, partial, plan.visited_pairs, allowed, int(seen.sum()), keys, exact)


def _tested(part: Part, tile_q: int, budget: list[int]) -> NDArray[np.int64]:
    # the number of allowed pairs in every tile's partial segments; once the budget is spent, all their pairs count
    ranges = part.ranges
    shape, partial = (len(part.nq), len(part.masks), part.Bm, part.n_tiles), ranges.keys(PARTIAL)
    allowed = np.zeros_like(partial)
    for at in np.flatnonzero(partial):
        c, m, b, tile = (int(x) for x in np.unravel_index(at, shape))
        rows = np.arange(tile * tile_q, min((tile + 1) * tile_q, int(part.nq[c])))
        size = len(rows) * int(partial[at])
        budget[0] = -1 if size > budget[0] else budget[0] - size
        if budget[0] < 0:
            allowed[at] = size
            continue
        t = int(part.q_start[c]) + part.step * rows[:, None]
        for begin, end, kind in ranges.seg[ranges.ptr[at] : ranges.ptr[at + 1]].tolist():
            if kind == PARTIAL:
                j = int(part.k_start[c]) + part.step * np.arange(begin, end)
                allowed[at] += np.count_nonzero(part.masks[m].test(t, j, b))
    return allowed


def _mark(part: Part, seen: NDArray[np.bool_]) -> None:
    # set `seen` for the keys of every batch entry that lie in some segment
    ptr, seg = part.ranges.ptr, part.ranges.seg
    change = np.zeros((len(part.nq), part.Bm, int(part.nk.max(initial=0)) + 1), np.int64)
    cell = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    c, _, b, _ = np.unravel_index(cell, (len(part.nq), len(part.masks), part.Bm, max(part.n_tiles, 1)))
    np.add.at(change, (c, b, seg[:, 0]), 1)
    np.subtract.at(change, (c, b, seg[:, 1]), 1)
    for start, n, one in zip(part.k_start, part.nk, np.cumsum(change, 2) > 0, strict=True):
        seen[:, start : start + part.step * n : part.step] |= one[:, :n]


def costs(problem: Problem, counted: Count) -> list[cost.Work]:
    """The work over the allowed pairs: [decode] for few queries, else [prefill, backward]."""
    p = problem
    shape = cost.Shape(p.B, p.Tq, p.Tk, p.Hq, p.Hk, p.D, p.Dv, p.dtype, counted.allowed, counted.keys_seen)
    forward = cost.decode(shape) if p.Tq < p.Tk and p.Tq <= 16 else cost.prefill(shape)
    return [forward] if forward.kind == "decode" else [forward, cost.backward(shape)]
