"""Tiled forward (rows S2 to S4): a program owns BM queries of one head and walks the segments of keys they see.

S = Q Kᵀ   m' = max(m, S)   P = e^(S - m')   l = l e^(m - m') + Σ P   O = O e^(m - m') + P V   o = O / l
"""

from __future__ import annotations

import triton.language as tl

import triton

from .common import START, Drop, fade, inner, inner_codes, kept, log_add, only, pairs, power, product, score
from .masks import FULL, class_of, list_of, place_of, segment, tile_of
from .rows import load_rows, rows_of, scaled, store_rows


@triton.jit
def fold(
    acc, m, l, q, k, v, scores, place, drop, record, b, h, hk, t, k0, end, k_start,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One step of online softmax over the class keys k0 <= a < min(k0 + BN, end), all of them there unless MASKED.

    acc [BM, BLOCK_DV], m, l [BM]; q are the Rows t [BM, 1] of query heads h ([BM, 1], or one number).
    """
    a = k0 + tl.arange(0, BN)
    j = k_start + place.step * a
    ok = a < end
    key = rows_of(k, b, hk, j, ok, D, BLOCK_D, MASKED, k_start + k0)
    if k.scale is None:
        x = inner(q, key, D, BLOCK_D, EXACT)
    else:
        x = inner_codes(q, key, k, D, BLOCK_D, EXACT)
    s = score(x, scores, place, b, h, t, j[None, :])
    value = rows_of(v, b, hk, j, ok, DV, BLOCK_DV, MASKED, k_start + k0)
    b_v = value.tile.to(q.tile.dtype)
    if MASKED:
        seen = pairs(s, place, record, scores, b, t, j[None, :], ok[None, :], MASK)
        s = tl.where(seen, s, float("-inf"))
        # from the scores: the mask is then evaluated in their layout alone
        b_v = only(b_v, tl.max(s, 0) > float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = power(s, m_new[:, None], EXACT)
    fix = fade(m, m_new, EXACT)
    l = l * fix + tl.sum(p, 1)
    if drop.below is not None:
        p = tl.where(kept(drop, place, b, h, t, j[None, :]), p * drop.scale, 0.0)
    acc = product(scaled(p, value, v).to(b_v.dtype), b_v, acc * fix[:, None], EXACT)
    return acc, m_new, l


@triton.jit(do_not_specialize=["drop_below", "seed_low", "seed_high"])
def forward(
    q, k, v, o, lse, sinks, scores, words, drop_below, seed_low, seed_high, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """o and lse [B, Tq, Hq] of one part; with MERGE folded into what they hold. sinks [Hq] or None.

    Grid: tiles x classes x B x Hq.
    """
    place = place_of(words)
    drop = Drop(drop_below, seed_low, seed_high, keep_scale)
    i = tl.program_id(0)
    h, i = i % place.Hq, i // place.Hq
    b, i = i % place.B, i // place.B
    cls = i % place.n_classes
    tile = tile_of(place, cls, b, h, i // place.n_classes)
    q_start, k_start, nq, _ = class_of(place, cls)
    hk = h // place.G
    a = tile * BM + tl.arange(0, BM)
    rows = a < nq
    t = q_start + place.step * a
    first, last, record = list_of(place, cls, b, h, tile)
    b_q = rows_of(q, b, h, t, rows, D, BLOCK_D, True)
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    m = tl.full([BM], START, tl.float32)
    l = tl.zeros([BM], tl.float32)
    for n in range(first, last):
        begin, end, kind = segment(place, n)
        edge = begin
        if scores.bias is None:
            edge = tl.where(kind == FULL, begin + (end - begin) // BN * BN, begin)
        for k0 in range(begin, edge, BN):
            acc, m, l = fold(
                acc, m, l, b_q, k, v, scores, place, drop, record, b, h, hk, t[:, None], k0, end, k_start,
                D, DV, BLOCK_D, BLOCK_DV, BN, False, MASK, EXACT,
            )  # fmt: skip
        # its pipeline would be filled for no key, too
        if edge < end:
            for k0 in range(edge, end, BN):
                acc, m, l = fold(
                    acc, m, l, b_q, k, v, scores, place, drop, record, b, h, hk, t[:, None], k0, end, k_start,
                    D, DV, BLOCK_D, BLOCK_DV, BN, True, MASK, EXACT,
                )  # fmt: skip
    at = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    none = l == 0.0
    l = tl.where(none, 1.0, l)
    mine = tl.where(none, float("-inf"), m + tl.log(l))
    total = mine
    factor = 1.0 / l
    if MERGE:
        old = tl.load(lse + at, mask=rows, other=float("-inf"))
        total = log_add(total, old)
    if sinks is not None:
        total = log_add(total, tl.load(sinks + h))
    if MERGE or sinks is not None:
        factor = factor * tl.where(none, 0.0, tl.exp(mine - total))
    acc = acc * factor[:, None]
    if MERGE:
        share = tl.where(old == float("-inf"), 0.0, tl.exp(old - total))
        before = load_rows(o, b, h, t, rows, DV, BLOCK_DV).to(tl.float32)
        acc += tl.where((share == 0.0)[:, None], 0.0, before * share[:, None])
    tl.store(lse + at, total, mask=rows)
    store_rows(o, b, h, t, rows, acc, DV, BLOCK_DV)
