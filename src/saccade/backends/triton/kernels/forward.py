"""Tiled forward: a program owns BM queries of one head and walks the segments of keys that they see.

S = Q Kᵀ   m' = max(m, S)   P = e^(S - m')   l = l e^(m - m') + Σ P   O = O e^(m - m') + P V   o = O / l
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import (
    START,
    Attention,
    Drop,
    Pairs,
    entropy_of,
    entropy_share,
    fade,
    inner,
    inner_codes,
    keep_mask,
    log_add,
    only,
    plain_end,
    power,
    product,
    row_tile,
    score,
    visible,
)
from .masks import list_of, place_of, segment
from .rows import load_rows, rows_of, scaled, store_rows


class Results(NamedTuple):
    """o as Array; lse, max and entropy float32 [B, Tq, Hq], the last two None if they are not wanted.

    parts: where `decode` writes the results of its ranges, or None.
    """

    o: Any
    lse: Any
    parts: Any = None
    max: Any = None
    entropy: Any = None


class Queries(NamedTuple):
    """Rows of queries and their indices.

    b: batch entry. h: heads, [BM, 1] or one number. t: rows [BM]. hk: the head of their keys. start: the first key of
    their class. record: of their mask.
    """

    rows: Any
    b: Any
    h: Any
    t: Any
    hk: Any
    start: Any
    record: Any


@triton.jit
def fold(state, queries, attention, k0, end, MASKED: tl.constexpr):
    """`fold_keys` for the class keys k0 <= a < min(k0 + BN, end); all of them exist unless MASKED."""
    a = k0 + tl.arange(0, attention.config.BN)
    j = queries.start + attention.place.step * a
    return fold_keys(state, queries, attention, j, a < end, queries.start + k0, MASKED)


@triton.jit
def fold_keys(state, queries, attention, j, ok, start, MASKED: tl.constexpr):
    """One step of online softmax over the keys j [BN] that are ok; start: the first, if they are consecutive, or None.

    state: acc [BM, BLOCK_DV], m, l, u [BM]; u, Σ P (S - m), is 0 without ENTROPY.
    """
    config: tl.constexpr = attention.config
    acc, m, l, u = state
    t = queries.t[:, None]
    at = queries.b, queries.hk, j
    key = rows_of(attention.arrays.k, at, ok, config.D, config.BLOCK_D, MASKED, start)
    if attention.arrays.k.scale is None:
        x = inner(queries.rows, key, config.D, config.BLOCK_D, config.EXACT)
    else:
        x = inner_codes(queries.rows, key, attention.arrays.k, config.D, config.BLOCK_D, config.EXACT)
    pairs = Pairs(queries.b, queries.h, t, j[None, :], queries.record)
    s = score(x, attention.scores, attention.place, pairs)
    if config.SHARED:
        value = key
    else:
        value = rows_of(attention.arrays.v, at, ok, config.DV, config.BLOCK_DV, MASKED, start)
    b_v = value.tile.to(queries.rows.tile.dtype)
    if MASKED:
        s = tl.where(visible(s, attention, pairs, ok[None, :]), s, float("-inf"))
        # derived from the scores, so that the mask is evaluated only in their layout
        b_v = only(b_v, tl.max(s, 0) > float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = power(s, m_new[:, None], config.EXACT)
    fix = fade(m, m_new, config.EXACT)
    if config.ENTROPY:
        rise = tl.where(l == 0.0, 0.0, l * (m - m_new))
        u = (u + rise) * fix + tl.sum(tl.where(p == 0.0, 0.0, p * (s - m_new[:, None])), 1)
    l = l * fix + tl.sum(p, 1)
    if attention.drop.below is not None:
        p = tl.where(keep_mask(attention.drop, attention.place, pairs), p * attention.scores.keep, 0.0)
    weight = scaled(p, value, attention.arrays.v)
    if MASKED and attention.arrays.v.scale is not None:
        # the scale of an unused slot may be NaN
        weight = tl.where(p == 0.0, 0.0, weight)
    if attention.arrays.v.scale is not None and attention.arrays.v.group is None and b_v.dtype == tl.float16:
        # weights times scales may be subnormal in float16: the largest one of each row becomes 1
        top = tl.max(tl.abs(weight), 1)[:, None]
        top = tl.where((top > 0.0) & (top < float("inf")), top, 1.0)
        acc = acc * fix[:, None] + tl.dot((weight / top).to(b_v.dtype), b_v) * top
    else:
        acc = product(weight.to(b_v.dtype), b_v, acc * fix[:, None], config.EXACT)
    return acc, m_new, l, u


@triton.jit(do_not_specialize=["below", "seed_low", "seed_high"])
def forward(arrays, results, scores, below, seed_low, seed_high, config: tl.constexpr):
    """o and lse of one part; with ADD merged with the stored ones.

    Grid: tiles x classes x B x Hq.
    """
    drop = Drop(below, seed_low, seed_high)
    _forward(results, Attention(arrays, scores, drop, place_of(arrays.words), config))


@triton.jit
def _forward(results, attention):
    config: tl.constexpr = attention.config
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    place = attention.place
    cls, tile_n, b, h, hk, tile = row_tile(place, BM)
    t, ok = tile.at, tile.ok
    first, last, record = list_of(place, cls, b, h, tile_n)
    rows = rows_of(attention.arrays.q, (b, h, t), ok, config.D, config.BLOCK_D, True)
    queries = Queries(rows, b, h, t, hk, tile.start, record)
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    m = tl.full([BM], START, tl.float32)
    l, u = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for n in range(first, last):
        begin, end, kind = segment(place, n)
        edge = plain_end(begin, end, kind, attention.scores, BN)
        for k0 in range(begin, edge, BN):
            acc, m, l, u = fold((acc, m, l, u), queries, attention, k0, end, False)
        # an empty loop would still fill its pipeline
        if edge < end:
            for k0 in range(edge, end, BN):
                acc, m, l, u = fold((acc, m, l, u), queries, attention, k0, end, True)
    at = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    none = l == 0.0
    l = tl.where(none, 1.0, l)
    mine = tl.where(none, float("-inf"), m + tl.log(l))
    total = mine
    factor = 1.0 / l
    if config.ADD:
        old = tl.load(results.lse + at, mask=ok, other=float("-inf"))
        total = log_add(total, old)
    if attention.scores.sinks is not None:
        total = log_add(total, tl.load(attention.scores.sinks + h))
    if config.ADD or attention.scores.sinks is not None:
        factor = factor * tl.where(none, 0.0, tl.exp(mine - total))
    if results.max is not None:
        top = tl.where(none, float("-inf"), m)
        if config.ADD:
            top = tl.maximum(top, tl.load(results.max + at, mask=ok, other=0.0), propagate_nan=tl.PropagateNan.ALL)
        tl.store(results.max + at, tl.where(l == l, top, l), mask=ok)
    if results.entropy is not None:
        entropy = entropy_share(mine, entropy_of(l, u), total)
        if config.ADD:
            entropy += entropy_share(old, tl.load(results.entropy + at, mask=ok, other=0.0), total)
        if attention.scores.sinks is not None:
            entropy += entropy_share(tl.load(attention.scores.sinks + h), 0.0, total)
        tl.store(results.entropy + at, entropy, mask=ok)
    acc = acc * factor[:, None]
    if config.ADD:
        share = tl.where(old == float("-inf"), 0.0, tl.exp(old - total))
        before = load_rows(results.o, (b, h, t), ok, config.DV, config.BLOCK_DV).to(tl.float32)
        acc += tl.where((share == 0.0)[:, None], 0.0, before * share[:, None])
    tl.store(results.lse + at, total, mask=ok)
    store_rows(results.o, (b, h, t), ok, acc, config.DV, config.BLOCK_DV)
