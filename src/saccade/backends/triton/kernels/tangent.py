"""Tangents of o and lse: a program owns BM queries of one head and recomputes the weights of their keys from lse.

P = e^(S - lse)   dS = scale (dQ Kᵀ + Q dKᵀ) + d(terms)   R = Σ P (dS - m)   A = P (dS - m) V + P dV   W = Σ P + sink
r = m + (R + sink (dsink - m)) / W   dO = (A - (r - m) P V) / W   dlse = r

m is the mean of dS by the weights seen so far. It moves with each tile, and then A += (m_old - m) P V. Without it, what
all dS of a row have in common would be the difference of two large numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .backward import in_class
from .common import (
    Attention,
    Drop,
    Pairs,
    dscore,
    inner,
    keep_mask,
    only,
    plain_end,
    power,
    product,
    row_tile,
    score,
    visible,
)
from .masks import list_of, place_of, segment
from .rows import load_rows, rows_of, store_rows


class Moved(NamedTuple):
    """The tangents of q, k and v as Array, whose pointers are None for zero, and of the terms of scores as Scores.

    sums: where the tangents of the results go.
    """

    q: Any
    k: Any
    v: Any
    scores: Any
    sums: Any


class Sums(NamedTuple):
    """Where results go: do as Array and dlse float32 [B, Tq, Hq].

    With several parts: the sums of weights and values as Array and (m, W, R) as float32 [3, B, Tq, Hq], for the next.
    """

    do: Any
    dlse: Any
    weighted: Any = None
    rows: Any = None


class Queries(NamedTuple):
    """Rows of q and dq, their lse [BM, 1], and the fields of `forward.Queries`."""

    rows: Any
    moved: Any
    lse: Any
    b: Any
    h: Any
    t: Any
    hk: Any
    start: Any
    record: Any


@triton.jit
def weights_of(queries, attention, moved, j, ok, MASKED: tl.constexpr):
    """(P, dS) of the keys j [BN] that are ok, zero for pairs that are not visible."""
    config: tl.constexpr = attention.config
    at = queries.b, queries.hk, j
    key = rows_of(attention.arrays.k, at, ok, config.D, config.BLOCK_D, MASKED)
    x = inner(queries.rows, key, config.D, config.BLOCK_D, config.EXACT)
    ds = tl.zeros_like(x)
    if moved.q.p is not None:
        ds = inner(queries.moved, key, config.D, config.BLOCK_D, config.EXACT)
    if moved.k.p is not None:
        key = rows_of(moved.k, at, ok, config.D, config.BLOCK_D, MASKED)
        ds += inner(queries.rows, key, config.D, config.BLOCK_D, config.EXACT)
    pairs = Pairs(queries.b, queries.h, queries.t[:, None], j[None, :], queries.record)
    s = score(x, attention.scores, attention.place, pairs)
    p = power(s, queries.lse, config.EXACT)
    ds = score(dscore(ds, x, attention.scores), moved.scores, attention.place, pairs)
    if MASKED:
        p = tl.where(visible(s, attention, pairs, ok[None, :]), p, 0.0)
        ds = tl.where(p == 0.0, 0.0, ds)
    return p, ds, pairs


@triton.jit
def fold(state, queries, attention, moved, k0, end, MASKED: tl.constexpr):
    """Add the class keys k0 <= a < min(k0 + BN, end) to A and P V [BM, BLOCK_DV], and to m, W and R [BM]."""
    config: tl.constexpr = attention.config
    acc, values, m, weight, r = state
    j, ok = in_class(attention.place, queries.start, k0, end, config.BN)
    p, ds, pairs = weights_of(queries, attention, moved, j, ok, MASKED)
    total = weight + tl.sum(p, 1)
    shift = -tl.sum(p * (ds - m[:, None]), 1) / tl.where(total == 0.0, 1.0, total)
    m -= shift
    raw = p * (ds - m[:, None])
    r += shift * weight + tl.sum(raw, 1)
    acc += shift[:, None] * values
    if attention.drop.below is not None:
        keep = keep_mask(attention.drop, attention.place, pairs)
        p = tl.where(keep, p * attention.scores.keep, 0.0)
        raw = tl.where(keep, raw * attention.scores.keep, 0.0)
    at = queries.b, queries.hk, j
    b_v = rows_of(attention.arrays.v, at, ok, config.DV, config.BLOCK_DV, MASKED).tile
    if MASKED:
        b_v = only(b_v, tl.max(p, 0) > 0.0)
    acc = product(raw.to(b_v.dtype), b_v, acc, config.EXACT)
    values = product(p.to(b_v.dtype), b_v, values, config.EXACT)
    if moved.v.p is not None:
        b_v = rows_of(moved.v, at, ok, config.DV, config.BLOCK_DV, MASKED).tile
        if MASKED:
            b_v = only(b_v, tl.max(p, 0) > 0.0)
        acc = product(p.to(b_v.dtype), b_v, acc, config.EXACT)
    return acc, values, m, total, r


@triton.jit(do_not_specialize=["below", "seed_low", "seed_high"])
def tangent(arrays, moved, scores, below, seed_low, seed_high, config: tl.constexpr):
    """The tangents of the rows of one part; with ADD from the sums of the part before. Grid: as `forward`."""
    drop = Drop(below, seed_low, seed_high)
    _tangent(moved, Attention(arrays, scores, drop, place_of(arrays.words), config))


@triton.jit
def _tangent(moved, attention):
    config: tl.constexpr = attention.config
    sums = moved.sums
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    place = attention.place
    cls, tile_n, b, h, hk, tile = row_tile(place, BM)
    t, ok = tile.at, tile.ok
    first, last, record = list_of(place, cls, b, h, tile_n)
    rows = rows_of(attention.arrays.q, (b, h, t), ok, config.D, config.BLOCK_D, True)
    of_rows = rows
    if moved.q.p is not None:
        of_rows = rows_of(moved.q, (b, h, t), ok, config.D, config.BLOCK_D, True)
    at = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    lse = tl.load(attention.arrays.lse + at, mask=ok, other=float("-inf"))
    # all weights of a row that sees no key are 0
    top = tl.where(lse == float("-inf"), float("inf"), lse)
    queries = Queries(rows, of_rows, top[:, None], b, h, t, hk, tile.start, record)
    acc, values = tl.zeros([BM, BLOCK_DV], tl.float32), tl.zeros([BM, BLOCK_DV], tl.float32)
    m, weight, r = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    size = tl.cast(place.B, tl.int64) * place.Tq * place.Hq
    if config.ADD:
        acc = load_rows(sums.do, (b, h, t), ok, config.DV, BLOCK_DV)
        values = load_rows(sums.weighted, (b, h, t), ok, config.DV, BLOCK_DV)
        m = tl.load(sums.rows + at, mask=ok, other=0.0)
        weight = tl.load(sums.rows + size + at, mask=ok, other=0.0)
        r = tl.load(sums.rows + 2 * size + at, mask=ok, other=0.0)
    for n in range(first, last):
        begin, end, kind = segment(place, n)
        edge = plain_end(begin, end, kind, attention.scores, BN)
        for k0 in range(begin, edge, BN):
            acc, values, m, weight, r = fold((acc, values, m, weight, r), queries, attention, moved, k0, end, False)
        # an empty loop would still fill its pipeline
        if edge < end:
            for k0 in range(edge, end, BN):
                acc, values, m, weight, r = fold((acc, values, m, weight, r), queries, attention, moved, k0, end, True)
    if config.LAST:
        if attention.scores.sinks is not None:
            sink = tl.where(lse == float("-inf"), 0.0, tl.exp(tl.load(attention.scores.sinks + h) - lse))
            above = -m
            if moved.scores.sinks is not None:
                above += tl.load(moved.scores.sinks + h)
            r, weight = r + sink * above, weight + sink
        share = 1.0 / tl.where(weight == 0.0, 1.0, weight)
        r *= share
        acc = (acc - r[:, None] * values) * share[:, None]
        tl.store(sums.dlse + at, m + r, mask=ok)
    else:
        store_rows(sums.weighted, (b, h, t), ok, values, config.DV, BLOCK_DV)
        tl.store(sums.rows + at, m, mask=ok)
        tl.store(sums.rows + size + at, weight, mask=ok)
        tl.store(sums.rows + 2 * size + at, r, mask=ok)
    store_rows(sums.do, (b, h, t), ok, acc, config.DV, BLOCK_DV)
