"""What a plan visits, counted: tiles by state, pairs visited and pairs allowed, and what these cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import cost

if TYPE_CHECKING:
    from .plan import Part, Plan
    from .problem import Problem

FULL = 2
# partial segments are counted element by element up to this many elements, and as visited beyond
ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Count:
    """Tiles and pairs of all batch entries and query heads. `exact`: `allowed` is no mere upper bound."""

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
        """Share of the pairs that nobody visits."""
        return 1 - self.visited / self.pairs if self.pairs else 0.0


def count(plan: Plan, B: int, Tq: int, Tk: int) -> Count:
    """Count a plan's ranges; `keys_read` sums over heads and query tiles the keys that each loads.

    `keys_seen` counts each key of a batch entry once.
    """
    budget, seen = [ELEMENTS], np.zeros((B, Tk), bool)
    full = partial = visited = allowed = keys = total = 0
    for part in plan.parts:
        heads = np.bincount(np.asarray(part.head), minlength=len(part.masks))
        n_keys = -(-part.nk // plan.tile_k)
        total += B * int(heads.sum()) * int((-(-part.nq // plan.tile_q) * n_keys).sum())
        repeat = B // max(part.Bm, 1)
        for c, m, b, tile, rows, segments in _tiles(part, plan.tile_q):
            weight = int(heads[m]) * repeat
            begin, end, kind = segments[:, 0], segments[:, 1], segments[:, 2]
            widths = end - begin
            whole, touched = _tile_states(begin, end, kind, plan.tile_k)
            full, partial = full + weight * whole, partial + weight * (touched - whole)
            pairs = rows * int(widths.sum())
            for first, last, _ in segments:
                origin = int(part.k_start[c])
                local = slice(origin + part.step * int(first), origin + part.step * int(last), part.step)
                seen[b if part.Bm > 1 else slice(None), local] = True
            visited, keys = visited + weight * pairs, keys + weight * int(widths.sum())
            sure = rows * int(widths[kind == FULL].sum())
            unsure = segments[kind != FULL]
            allowed += weight * (sure + _test(part, (c, m, b), tile * plan.tile_q, rows, unsure, budget))
    if budget[0] < 0:
        allowed = min(allowed, plan.allowed_upper)
    return Count(B * plan.Hq * Tq * Tk, total, full, partial, visited, allowed, int(seen.sum()), keys, budget[0] >= 0)


def _tiles(part: Part, tile_q: int) -> Any:
    # (class, mask, batch, tile, rows of the tile, its segments) of every tile that has any
    ptr, seg = np.asarray(part.ranges.ptr), np.asarray(part.ranges.seg).reshape(-1, 3)
    shape = (len(part.nq), len(part.masks), max(part.Bm, 1), part.n_tiles)
    for flat in np.flatnonzero(np.diff(ptr)):
        c, m, b, tile = (int(x) for x in np.unravel_index(flat, shape))
        rows = min(tile_q, int(part.nq[c]) - tile * tile_q)
        if rows > 0:
            yield c, m, b, tile, rows, seg[ptr[flat] : ptr[flat + 1]]


def _tile_states(begin: Any, end: Any, kind: Any, tile_k: int) -> tuple[int, int]:
    # (full, touched) tiles of tile_k keys under one query tile's sorted, disjoint segments
    first, last = begin // tile_k, -(-end // tile_k)
    before = np.concatenate([[0], last[:-1]])
    touched = int((last - np.maximum(first, before)).clip(0).sum())
    inner = (end // tile_k - -(-begin // tile_k)).clip(0)
    return int(inner[kind == FULL].sum()), touched


def _test(part: Part, which: tuple[int, int, int], start: int, rows: int, segments: Any, budget: list[int]) -> int:
    # allowed pairs of the partial segments; once the budget is spent, all of their pairs
    c, m, b = which
    size = rows * int((segments[:, 1] - segments[:, 0]).sum())
    if budget[0] < 0 or size > budget[0]:
        budget[0] = -1
        return size
    budget[0] -= size
    t = int(part.q_start[c]) + part.step * (start + np.arange(rows))
    keys = [int(part.k_start[c]) + part.step * np.arange(s[0], s[1]) for s in segments]
    return sum(int(np.count_nonzero(part.masks[m].test(t[:, None], j, b))) for j in keys)


def costs(problem: Problem, counted: Count) -> list[cost.Work]:
    """Prefill or decode, and backward, over the allowed pairs."""
    p = problem
    shape = cost.Shape(p.B, p.Tq, p.Tk, p.Hq, p.Hk, p.D, p.Dv, p.dtype, counted.allowed, counted.keys_seen)
    forward = cost.decode(shape) if p.Tq < p.Tk and p.Tq <= 16 else cost.prefill(shape)
    return [forward] if forward.kind == "decode" else [forward, cost.backward(shape)]
