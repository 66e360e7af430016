"""What a plan must keep, checked pair by pair."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from saccade.mask.forms import LoweredHeads
from saccade.plan import Part, Plan
from saccade.plan_parts import Ranges

Bools = NDArray[np.bool_]


def lowered_dense(heads: LoweredHeads, B: int, Tq: int, Tk: int) -> Bools:
    """What the lowered masks allow, bool [B, Hq, Tq, Tk]."""
    b, t, j = np.ogrid[:B, :Tq, :Tk]
    return np.stack([m.test(t, j, b) for m in heads.masks], 1)[:, heads.head]


def check_plan(plan: Plan, allowed: Bools, transposed: int = 0) -> None:
    """Raises AssertionError unless the plan's parts are disjoint, cover `allowed` [B, Hq, Tq, Tk] and never err.

    EMPTY and FULL are never claimed wrongly, segments are sorted and disjoint. `transposed`: check the ranges of key
    tiles of this size instead of those of query tiles.
    """
    if plan.order is not None:
        allowed = allowed[..., plan.order]
    seen = np.zeros(allowed.shape, np.int64)
    for part in plan.parts:
        _check_rows(part, plan.Tq)
        ranges = part.transposed(transposed, plan.tile_q) if transposed else part.ranges
        visited, full = _paint(part, ranges, allowed.shape, transposed or plan.tile_q, bool(transposed))
        own = _own(part, allowed.shape)
        assert not (own & ~visited).any(), "an allowed pair is in no segment"
        assert not (full & ~own).any(), "a FULL segment holds a pair that is not allowed"
        seen += own
    assert seen.max(initial=0) <= 1, "parts overlap"
    assert np.array_equal(seen > 0, allowed), "the parts allow something else than the mask"


def _check_rows(part: Part, Tq: int) -> None:
    counts = np.zeros(Tq, np.int64)
    for c in range(len(part.nq)):
        counts[part.q_start[c] :: part.step][: part.nq[c]] += 1
    assert (counts == 1).all(), "the classes do not hold every row once"


def _own(part: Part, shape: tuple[int, ...]) -> Bools:
    # pairs of the part: in one class and allowed by its mask
    B, Hq, Tq, Tk = shape
    b, t, j = np.ogrid[:B, :Tq, :Tk]
    classes = np.zeros((Tq, Tk), np.bool_)
    for c in range(len(part.nq)):
        classes[part.q_start[c] :: part.step, part.k_start[c] :: part.step] = True
    return np.stack([part.masks[part.head[h]].test(t, j, b) & classes for h in range(Hq)], 1)


def _paint(part: Part, ranges: Ranges, shape: tuple[int, ...], tile: int, transposed: bool) -> tuple[Bools, Bools]:
    # (visited, full) as dense arrays
    C, M = len(part.nq), len(part.masks)
    n_tiles = (len(ranges.ptr) - 1) // (C * M * part.Bm)
    assert len(ranges.ptr) == C * M * part.Bm * n_tiles + 1
    assert ranges.ptr.dtype == ranges.seg.dtype == np.int32
    assert ranges.ptr[0] == 0
    assert ranges.ptr[-1] == len(ranges.seg)
    visited, full = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    starts = (part.q_start, part.k_start)
    sizes = (part.nk, part.nq) if transposed else (part.nq, part.nk)
    for c, b, n in np.ndindex(C, shape[0], n_tiles):
        for h in range(shape[1]):
            cell = ((c * M + part.head[h]) * part.Bm + min(b, part.Bm - 1)) * n_tiles + n
            end = 0
            for begin, stop, kind in ranges.seg[ranges.ptr[cell] : ranges.ptr[cell + 1]].tolist():
                assert end <= begin < stop <= sizes[1][c], "segments are not sorted and disjoint"
                assert kind in (1, 2)
                end = stop
                mine = np.arange(n * tile, min((n + 1) * tile, int(sizes[0][c])))
                assert len(mine), "a tile beyond the class has segments"
                other = np.arange(begin, stop)
                rows, keys = (other, mine) if transposed else (mine, other)
                where = np.ix_(starts[0][c] + part.step * rows, starts[1][c] + part.step * keys)
                visited[b, h][where] = True
                if kind == 2:
                    full[b, h][where] = True
    return visited, full
