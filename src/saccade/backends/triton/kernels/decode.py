"""Split decode (Flash-Decoding; Dao et al., 2023): few queries, keys in ranges. The heads of a group share a tile.

Each range gives a partial o and its lse; `combine` merges them in the order of the keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import START, Attention, Drop, entropy_of, entropy_share, log_add, power
from .forward import Queries, fold, fold_keys
from .masks import FULL, list_of, place_of, seen_by_all, segment
from .overlap import start, wait
from .rows import rows_of, store_rows
from .selected import in_blocks, keys_at, list_at, plain_at, plain_keys, rows_of_groups


class Ranges(NamedTuple):
    """left, right: how many keys a row sees before and after its position, for sequences with lengths. keys: keys per
    range; a program computes one. n: number of ranges."""

    left: Any
    right: Any
    keys: Any
    n: Any


@triton.jit
def bounds_of(stop, ranges, t, place):
    """[lo, hi) of the keys that row t sees in a sequence of length `stop`, whose last query is row Tq - 1."""
    i = t + stop - place.Tq
    return tl.maximum(i - ranges.left, 0), tl.minimum(i + ranges.right + 1, stop)


@triton.jit
def segment_of(lo, hi, tail_lo, tail_hi, n):
    """Segment n of 3 between the bounds of the first and the last row: keys seen by some rows, by all, by some."""
    full_lo = tl.minimum(tail_lo, tail_hi)
    full_hi = tl.maximum(tl.minimum(hi, tail_hi), full_lo)
    begin = tl.where(n == 0, lo, tl.where(n == 1, full_lo, full_hi))
    end = tl.where(n == 0, full_lo, tl.where(n == 1, full_hi, tail_hi))
    return begin, end, tl.where(n == 1, FULL, 1)


@triton.jit(do_not_specialize=["below", "seed_low", "seed_high", "left", "right", "split_keys", "num_splits"])
def decode(
    arrays, results, scores, below, seed_low, seed_high, left, right, split_keys, num_splits, config: tl.constexpr
):
    """o and lse, or parts [B, Tq, Hq, n, DV] of n ranges, followed by their m and l [B, Tq, Hq, n, 2], and
    with ENTROPY by u [B, Tq, Hq, n].

    With lengths each sequence has that many keys; without them the lists say which keys are visited. Grid: Hk x B x
    ranges x blocks of BM rows, the first one fastest; row r is query r // G of head hk G + r mod G. With selected keys
    the blocks are those of every group of rows, ranges count the keys of its list, and the order is reversed.
    """
    start(config.OVERLAP and not config.LATE)
    wait(config.OVERLAP)
    drop, ranges = Drop(below, seed_low, seed_high), Ranges(left, right, split_keys, num_splits)
    _decode(results, ranges, Attention(arrays, scores, drop, place_of(arrays.words), config))


@triton.jit
def _decode(results, ranges, attention):
    config: tl.constexpr = attention.config
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    DV: tl.constexpr = config.DV
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    place = attention.place
    i = tl.program_id(0)
    Hk = place.Hq // place.G
    lists = attention.arrays.lists
    if lists is None:
        hk, i = i % Hk, i // Hk
        b, i = i % place.B, i // place.B
        split, block = i % ranges.n, i // ranges.n
        r = block * BM + tl.arange(0, BM)
        t, h, ok = r // place.G, hk * place.G + r % place.G, r < place.Tq * place.G
    else:
        # one key head after another: the L2 cache holds the keys that their groups read
        block, i = in_blocks(place, lists, i, BM)
        split, i = i % ranges.n, i // ranges.n
        b, hk = i % place.B, i // place.B
        group, t, h, ok = rows_of_groups(place, lists, hk, block, BM)
    rows = rows_of(attention.arrays.q, (b, h, t), ok, config.D, config.BLOCK_D, True)
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    m = tl.full([BM], START, tl.float32)
    l, u = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    if attention.arrays.lengths is None:
        first, last, record = list_of(place, 0, b, hk * place.G, 0)
    else:
        first, last = 0, 3
        stop = tl.load(attention.arrays.lengths + b)
        lo, hi = bounds_of(stop, ranges, 0, place)
        tail_lo, tail_hi = bounds_of(stop, ranges, place.Tq - 1, place)
        record = bounds_of(stop, ranges, t[:, None], place)
    queries = Queries(rows, b, h[:, None], t, hk, 0, record)
    if lists is not None:
        # no segments: only the list
        last = first
        entries, count = list_at(lists, b, hk, group)
        plain = plain_keys(attention, entries, count, seen_by_all(place, record, b, t, config.MASK))
        begin = split * ranges.keys
        end = tl.minimum(begin + ranges.keys, count)
        edge = tl.maximum(begin, tl.minimum(plain, begin + ranges.keys))
        for k0 in range(begin, edge, BN):
            j = plain_at(lists, entries, k0, BN)
            acc, m, l, u = fold_keys((acc, m, l, u), queries, attention, j, j >= 0, None, False)
        for k0 in range(edge, end, BN):
            j, inside = keys_at(place, lists, entries, k0, end, BN)
            acc, m, l, u = fold_keys((acc, m, l, u), queries, attention, j, inside, None, True)
    for n in range(first, last):
        if attention.arrays.lengths is None:
            begin, end, kind = segment(place, n)
        else:
            begin, end, kind = segment_of(lo, hi, tail_lo, tail_hi, n)
        begin, end = tl.maximum(begin, split * ranges.keys), tl.minimum(end, (split + 1) * ranges.keys)
        # as `plain_end`, but a range may leave a segment empty
        edge = begin
        if attention.scores.bias is None and attention.scores.distances is None:
            edge = tl.where(kind == FULL, begin + tl.maximum(end - begin, 0) // BN * BN, begin)
        # an empty loop would still fill its pipeline: hundreds of instructions in five of six loops of a long sequence
        if begin < edge:
            for k0 in range(begin, edge, BN):
                acc, m, l, u = fold((acc, m, l, u), queries, attention, k0, end, False)
        if edge < end:
            for k0 in range(edge, end, BN):
                acc, m, l, u = fold((acc, m, l, u), queries, attention, k0, end, True)
    start(config.LATE)
    none = l == 0.0
    row = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    factor = 1.0 / tl.where(none, 1.0, l)
    if results.parts is not None:
        d = tl.arange(0, BLOCK_DV)
        row = row * ranges.n + split
        size = place.B.to(tl.int64) * place.Tq * place.Hq * ranges.n
        sums = results.parts + size * DV + 2 * row
        tl.store(sums, m, mask=ok)
        tl.store(sums + 1, l, mask=ok)
        if config.ENTROPY:
            tl.store(results.parts + size * (DV + 2) + row, u, mask=ok)
        there = ok[:, None] & (d < DV)[None, :]
        tl.store(results.parts + row[:, None] * DV + d[None, :], acc * factor[:, None], mask=there)
    else:
        mine = tl.where(none, float("-inf"), m + tl.log(tl.where(none, 1.0, l)))
        total = mine
        if attention.scores.sinks is not None:
            sink = tl.load(attention.scores.sinks + h, mask=ok, other=0.0)
            total = log_add(mine, sink)
            factor = factor * tl.where(none, 0.0, tl.exp(mine - total))
        tl.store(results.lse + row, total, mask=ok)
        if results.max is not None:
            tl.store(results.max + row, tl.where(l == l, tl.where(none, float("-inf"), m), l), mask=ok)
        if results.entropy is not None:
            entropy = entropy_share(mine, entropy_of(l, u), total)
            if attention.scores.sinks is not None:
                entropy += entropy_share(sink, 0.0, total)
            tl.store(results.entropy + row, entropy, mask=ok)
        store_rows(results.o, (b, h, t), ok, acc * factor[:, None], DV, BLOCK_DV)


@triton.jit(do_not_specialize=["rows", "num_splits", "Hq"])
def combine(results, sinks, rows, num_splits, Hq, blocks: tl.constexpr, OVERLAP: tl.constexpr):
    """o [B, Tq, Hq, DV] contiguous and lse [B, Tq, Hq] from the num_splits parts of each row. Grid: rows.

    blocks: numbers of a row of o, the same padded, and num_splits padded. sinks: [Hq] or None.
    """
    start(OVERLAP)
    wait(OVERLAP)
    DV: tl.constexpr = blocks.n
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, blocks.ROWS)
    sums = results.parts + rows.to(tl.int64) * num_splits * DV + 2 * (row * num_splits + n)
    m = tl.load(sums, mask=n < num_splits, other=START)
    # tl.max ignores NaN; it reaches the result through the sum
    top = tl.max(m, 0)
    l = tl.load(sums + 1, mask=n < num_splits, other=0.0)
    weight = power(m, top, True) * l
    whole = tl.sum(weight, 0)
    none = whole == 0.0
    whole = tl.where(none, 1.0, whole)
    total = tl.where(none, float("-inf"), top + tl.log(whole))
    before = total
    if results.max is not None:
        tl.store(results.max + row, tl.where(whole == whole, tl.where(none, float("-inf"), top), whole))
    if results.entropy is not None:
        of_parts = results.parts + rows.to(tl.int64) * num_splits * (DV + 2) + row * num_splits
        u = tl.load(of_parts + n, mask=n < num_splits, other=0.0)
        rise = tl.where(l == 0.0, 0.0, l * (m - top))
        u = tl.sum(power(m, top, True) * (u + rise), 0)
    weight = weight / whole
    if sinks is not None:
        total = log_add(total, tl.load(sinks + (row % Hq)))
        weight = tl.where(none, 0.0, weight * tl.exp(before - total))
    if results.entropy is not None:
        entropy = entropy_share(before, entropy_of(whole, u), total)
        if sinks is not None:
            entropy += entropy_share(tl.load(sinks + (row % Hq)), 0.0, total)
        tl.store(results.entropy + row, entropy)
    d = tl.arange(0, blocks.BLOCK)
    at = results.parts + (row * num_splits + n)[:, None] * DV + d[None, :]
    part = tl.load(at, mask=(n < num_splits)[:, None] & (d < DV)[None, :], other=0.0)
    tl.store(results.lse + row, total)
    at = results.o + row * DV + d
    tl.store(at, tl.sum(part * weight[:, None], 0).to(results.o.dtype.element_ty), mask=d < DV)
