"""The gradient of a bias: dS, summed over the pairs that share an element."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .backward import sums_of, weights, wide
from .common import Attention, Drop, Pairs, inner, key_tile, score, visible
from .masks import list_of, place_of, segment
from .rows import rows_of


class BiasGradient(NamedTuple):
    """The gradient of a bias, float32, contiguous: its pointer, and its numbers of batches, heads and rows.

    Its rows may be a slice of the query rows, from `start` on, which is a multiple of BM in each class.
    """

    p: Any
    b: Any
    h: Any
    t: Any
    start: Any


@triton.jit(do_not_specialize=["below", "seed_low", "seed_high"])
def dbias(arrays, grad, scores, below, seed_low, seed_high, config: tl.constexpr):
    """Add dS of one part to the bias gradient [batches, heads, rows, Tk]; BY_ROW: its rows are query rows.

    Each element has one owner, which adds the batch entries, heads and rows that share it, in order.
    Grid: key tiles x classes x blocks of BM class rows (1 unless BY_ROW) x its batches x its heads.
    """
    drop = Drop(below, seed_low, seed_high)
    _dbias(grad, Attention(arrays, scores, drop, place_of(arrays.words), config))


@triton.jit
def _dbias(grad, attention):
    config: tl.constexpr = attention.config
    D: tl.constexpr = config.D
    DV: tl.constexpr = config.DV
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    place = attention.place
    i = tl.program_id(0)
    n_tiles = place.n_tiles
    n, i = i % n_tiles, i // n_tiles
    cls, i = i % place.n_classes, i // place.n_classes
    hb, i = i % grad.h, i // grad.h
    bb, block = i % grad.b, grad.start // (BM * place.step) + i // grad.b
    tile = key_tile(place, cls, n, BN)
    j, keys = tile.at, tile.ok
    acc = tl.zeros([BN, BM], tl.float32)
    # compensated summation: the part of acc lost by rounding
    lost = tl.zeros([BN, BM], tl.float32)
    for i_b in range(bb, tl.where(grad.b > 1, bb + 1, place.B)):
        b = i_b + 0 * n
        for i_h in range(hb, tl.where(grad.h > 1, hb + 1, place.Hq)):
            h = i_h + 0 * n
            b_k = rows_of(attention.arrays.k, (b, h // place.G, j), keys, D, config.BLOCK_D, True)
            b_v = rows_of(attention.arrays.v, (b, h // place.G, j), keys, DV, config.BLOCK_DV, True)
            first, last, record = list_of(place, cls, b, h, n)
            for m in range(first, last):
                begin, end, _kind = segment(place, m)
                if config.BY_ROW:
                    # every segment starts at the block's first row, so that a row keeps its place in acc
                    lo, hi = tl.maximum(begin, block * BM), tl.minimum(end, block * BM + BM)
                    begin, end = tl.where(lo < hi, block * BM, 0), tl.where(lo < hi, hi, 0)
                else:
                    lo = begin
                for q0 in range(begin, end, BM):
                    a = q0 + tl.arange(0, BM)
                    rows = (a < end) & (a >= lo)
                    t = tile.start + place.step * a
                    sums = wide(sums_of(attention.arrays, place, b, h, t, rows))
                    b_q = rows_of(attention.arrays.q, (b, h, t), rows, D, config.BLOCK_D, True)
                    x = inner(b_k, b_q, D, config.BLOCK_D, config.EXACT)
                    b_do = rows_of(attention.arrays.do, (b, h, t), rows, DV, config.BLOCK_DV, True)
                    dp = inner(b_v, b_do, DV, config.BLOCK_DV, config.EXACT)
                    t, there = t[None, :], rows[None, :] & keys[:, None]
                    pairs = Pairs(b, h, t, j[:, None], record)
                    s = score(x, attention.scores, place, pairs)
                    seen = visible(s, attention, pairs, there)
                    _p, _used, raw, _ds = weights(s, x, dp, sums, seen, pairs, attention)
                    more = raw - lost
                    total = acc + more
                    lost = (total - acc) - more
                    acc = total
    at = grad.p + (bb * grad.h + hb).to(tl.int64) * grad.t * place.Tk
    if config.BY_ROW:
        a = block * BM + tl.arange(0, BM)
        t = tile.start + place.step * a - grad.start
        p = at + t.to(tl.int64)[None, :] * place.Tk + j[:, None]
        inside = keys[:, None] & (a < tile.meets)[None, :]
        tl.store(p, tl.load(p, mask=inside, other=0.0) + acc, mask=inside)
    else:
        p = at + j
        tl.store(p, tl.load(p, mask=keys, other=0.0) + tl.sum(acc, 1), mask=keys)
