"""Random mask expressions of small sizes, and what a plan must keep, checked pair by pair."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import mask as sm
from ..mask import Mask
from ..mask.forms import LoweredHeads
from ..plan import Part, Plan, Ranges

Bools = NDArray[np.bool_]


class MaskCase(NamedTuple):
    """A mask and the sizes it fits."""

    mask: Mask
    B: int
    Hq: int
    Tq: int
    Tk: int

    def allowed(self) -> Bools:
        """The predicate, bool [B, Hq, Tq, Tk]."""
        return np.broadcast_to(self.mask.evaluate(*self[1:]), self[1:])


def random_case(r: random.Random, depth: int = 3) -> MaskCase:
    """Any expression over at most 9 queries and 11 keys."""
    B, Tq = r.randint(1, 2), r.randint(0, 9)
    Tk = r.choice([Tq, r.randint(0, 11)])
    if r.random() >= 0.1:
        return MaskCase(expression(r, B, Tq, Tk, r.randint(0, depth)), B, 1, Tq, Tk)
    mask = sm.per_head([expression(r, B, Tq, Tk, 1) for _ in range(2)])
    if r.random() < 0.5:
        mask = mask & expression(r, B, Tq, Tk, 1)
    return MaskCase(mask, B, 2, Tq, Tk)


def expression(r: random.Random, B: int, Tq: int, Tk: int, depth: int) -> Mask:
    """A leaf, a complement, an intersection or a union, `depth` operators deep at most."""
    draw = r.random()
    if depth == 0 or draw < 0.2:
        return leaf(r, B, Tq, Tk)
    first = expression(r, B, Tq, Tk, depth - 1)
    if draw < 0.32:
        return ~first
    second = expression(r, B, Tq, Tk, depth - 1)
    return first & second if draw < 0.75 else first | second


def leaf(r: random.Random, B: int, Tq: int, Tk: int) -> Mask:
    """One constructor with arguments that fit."""
    offset = r.choice([None, None, r.randint(-3, 5)])
    step = r.randint(1, 4)

    def side() -> int | None:
        return r.choice([None, r.randint(0, 4)])

    def many(top: int) -> Any:
        return r.choice([r.randint(0, top), [r.randint(0, top) for _ in range(B)]])

    def ids(n: int) -> list[int]:
        return sorted(r.randint(0, 3) for _ in range(n))

    def cuts(n: int, parts: int) -> list[int]:
        return sorted(r.randint(0, n) for _ in range(parts))

    def packed(each: Mask | None) -> Mask:
        parts = r.randint(1, 4)
        if r.random() < 0.5:
            return sm.documents(cu_seqlens=cuts(Tk, parts), each=each)
        return sm.documents(cu_q=[cuts(Tq, parts) for _ in range(B)], cu_k=cuts(Tk, parts), each=each)

    def spans() -> Mask:
        start, stop = np.sort(np.array([r.randint(-1, Tq + 1) for _ in range(2 * B * Tk)], int).reshape(2, B, Tk), 0)
        return sm.columns(*r.choice(((start, stop), (start[0], None), (None, stop), (start.min(0), stop))))

    def blocks() -> Mask:
        bq, bk = r.randint(1, 3), r.randint(1, 3)
        shape = (B, -(-Tq // bq), -(-Tk // bk))
        return sm.tiles(np.array([r.random() < 0.5 for _ in range(int(np.prod(shape)))], bool).reshape(shape), (bq, bk))

    makers = (
        sm.full,
        lambda: sm.causal(offset),
        lambda: sm.window(side(), side(), offset),
        lambda: sm.documents(ids(Tk) if r.random() < 0.5 else [ids(Tk) for _ in range(B)]),
        lambda: sm.documents(ids(Tq), ids(Tk)),
        lambda: packed(None),
        lambda: packed(inner(r, 2)),
        lambda: sm.keys(many(Tk)),
        lambda: sm.keys(many(Tk // 2), many(Tk)),
        lambda: sm.prefix(many(Tk)),
        lambda: sm.global_tokens(r.randint(0, 3)),
        lambda: sm.global_tokens([r.randint(0, max(0, Tk - 1)) for _ in range(r.randint(1, 5))]),
        spans,
        lambda: sm.strided(step, r.randrange(step)),
        lambda: sm.dilated(r.randint(0, 3), step),
        lambda: sm.chunked(step),
        lambda: sm.dense(np.array([r.random() < 0.5 for _ in range(Tq * Tk)], bool).reshape(Tq, Tk)),
        blocks,
    )
    return r.choice(makers)()


def inner(r: random.Random, depth: int) -> Mask:
    """A mask that can stand inside each document."""
    draw = r.random()
    if depth == 0 or draw < 0.5:
        leaves = (
            sm.causal(), sm.causal(1), sm.window(1, 0), sm.window(2, 1), sm.prefix(1), sm.keys(2), sm.strided(2),
            sm.strided(3, 1), sm.dilated(1, 2), sm.chunked(2), sm.global_tokens(1), sm.full(),
        )  # fmt: skip
        return r.choice(leaves)
    first = inner(r, depth - 1)
    if draw < 0.6:
        return ~first
    second = inner(r, depth - 1)
    return first & second if draw < 0.85 else first | second


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
    held = np.zeros(Tq, np.int64)
    for c in range(len(part.nq)):
        held[part.q_start[c] :: part.step][: part.nq[c]] += 1
    assert (held == 1).all(), "the classes do not hold every row once"


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
