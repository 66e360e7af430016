"""Split decode (Flash-Decoding; Dao et al., 2023): few queries, whose heads of a group share a tile; keys in ranges.

A range gives a part of o and its lse; `combine` folds them in the order of the keys.
"""

from __future__ import annotations

import triton.language as tl

import triton

from .common import START, Drop, log_add, power
from .forward import fold
from .masks import FULL, list_of, place_of, segment
from .rows import rows_of, store_rows


@triton.jit
def bounds_of(stop, left, right, t, place):
    """[lo, hi) of the keys that row t sees of a sequence of length `stop`, whose last query is row Tq - 1."""
    i = t + stop - place.Tq
    return tl.maximum(i - left, 0), tl.minimum(i + right + 1, stop)


@triton.jit
def segment_of(lo, hi, tail_lo, tail_hi, n):
    """Segment n of 3 between the bounds of the first row and of the last: seen by some, by all, by some."""
    full_lo = tl.minimum(tail_lo, tail_hi)
    full_hi = tl.maximum(tl.minimum(hi, tail_hi), full_lo)
    begin = tl.where(n == 0, lo, tl.where(n == 1, full_lo, full_hi))
    end = tl.where(n == 0, full_lo, tl.where(n == 1, full_hi, tail_hi))
    return begin, end, tl.where(n == 1, FULL, 1)


@triton.jit(do_not_specialize=["drop_below", "seed_low", "seed_high", "left", "right", "split_keys", "num_splits"])
def decode(
    q, k, v, o, lse, sinks, parts, lengths, left, right, scores, words, drop_below, seed_low, seed_high,
    keep_scale, split_keys, num_splits,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """SPLIT: parts [B, Tq, Hq, num_splits, DV] and behind them m and l [B, Tq, Hq, num_splits, 2], else o and lse.

    With lengths [B] a sequence has that many keys, and a row sees from `left` before its position to `right` after;
    without them the lists of words say. Grid: B x Hk x num_splits x blocks of BM rows; row r is query r // G of head
    hk G + r mod G.
    """
    place = place_of(words)
    drop = Drop(drop_below, seed_low, seed_high, keep_scale)
    i = tl.program_id(0)
    Hk = place.Hq // place.G
    hk, i = i % Hk, i // Hk
    b, i = i % place.B, i // place.B
    split, block = i % num_splits, i // num_splits
    r = block * BM + tl.arange(0, BM)
    rows = r < place.Tq * place.G
    t, h = r // place.G, hk * place.G + r % place.G
    b_q = rows_of(q, b, h, t, rows, D, BLOCK_D, True)
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    m = tl.full([BM], START, tl.float32)
    l = tl.zeros([BM], tl.float32)
    if lengths is None:
        first, last, record = list_of(place, 0, b, hk * place.G, 0)
    else:
        first, last = 0, 3
        stop = tl.load(lengths + b)
        lo, hi = bounds_of(stop, left, right, 0, place)
        tail_lo, tail_hi = bounds_of(stop, left, right, place.Tq - 1, place)
        record = bounds_of(stop, left, right, t[:, None], place)
    for n in range(first, last):
        if lengths is None:
            begin, end, kind = segment(place, n)
        else:
            begin, end, kind = segment_of(lo, hi, tail_lo, tail_hi, n)
        begin, end = tl.maximum(begin, split * split_keys), tl.minimum(end, (split + 1) * split_keys)
        edge = begin
        if scores.bias is None:
            edge = tl.where(kind == FULL, begin + tl.maximum(end - begin, 0) // BN * BN, begin)
        for k0 in range(begin, edge, BN):
            acc, m, l = fold(
                acc, m, l, b_q, k, v, scores, place, drop, record, b, h[:, None], hk, t[:, None], k0, end, 0,
                D, DV, BLOCK_D, BLOCK_DV, BN, False, MASK, EXACT,
            )  # fmt: skip
        for k0 in range(edge, end, BN):
            acc, m, l = fold(
                acc, m, l, b_q, k, v, scores, place, drop, record, b, h[:, None], hk, t[:, None], k0, end, 0,
                D, DV, BLOCK_D, BLOCK_DV, BN, True, MASK, EXACT,
            )  # fmt: skip
    none = l == 0.0
    row = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    factor = 1.0 / tl.where(none, 1.0, l)
    if SPLIT:
        d = tl.arange(0, BLOCK_DV)
        row = row * num_splits + split
        sums = parts + place.B.to(tl.int64) * place.Tq * place.Hq * num_splits * DV + 2 * row
        tl.store(sums, m, mask=rows)
        tl.store(sums + 1, l, mask=rows)
        tl.store(parts + row[:, None] * DV + d[None, :], acc * factor[:, None], mask=rows[:, None] & (d < DV)[None, :])
    else:
        mine = tl.where(none, float("-inf"), m + tl.log(tl.where(none, 1.0, l)))
        if sinks is not None:
            total = log_add(mine, tl.load(sinks + h, mask=rows, other=0.0))
            factor = factor * tl.where(none, 0.0, tl.exp(mine - total))
            mine = total
        tl.store(lse + row, mine, mask=rows)
        store_rows(o, b, h, t, rows, acc * factor[:, None], DV, BLOCK_DV)


@triton.jit(do_not_specialize=["rows", "num_splits", "Hq"])
def combine(
    o, lse, sinks, parts, rows, num_splits, Hq,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """o [B, Tq, Hq, DV] contiguous and lse [B, Tq, Hq] from num_splits <= BS parts of each of the rows. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BS)
    sums = parts + rows.to(tl.int64) * num_splits * DV + 2 * (row * num_splits + n)
    m = tl.load(sums, mask=n < num_splits, other=START)
    # NaN loses against numbers in a maximum, and reaches the sum
    top = tl.max(m, 0)
    weight = power(m, top, True) * tl.load(sums + 1, mask=n < num_splits, other=0.0)
    whole = tl.sum(weight, 0)
    none = whole == 0.0
    whole = tl.where(none, 1.0, whole)
    total = tl.where(none, float("-inf"), top + tl.log(whole))
    weight = weight / whole
    if sinks is not None:
        before = total
        total = log_add(total, tl.load(sinks + (row % Hq)))
        weight = tl.where(none, 0.0, weight * tl.exp(before - total))
    d = tl.arange(0, BLOCK_DV)
    at = parts + (row * num_splits + n)[:, None] * DV + d[None, :]
    part = tl.load(at, mask=(n < num_splits)[:, None] & (d < DV)[None, :], other=0.0)
    tl.store(lse + row, total)
    tl.store(o + row * DV + d, tl.sum(part * weight[:, None], 0).to(o.dtype.element_ty), mask=d < DV)
