"""The place of a plan's lists in one buffer, and the mask's element test of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

# Kinds of element test. BAND: one band of six integers. ROWS: a band and one interval of keys per row. GENERAL: any
# mask. BOUNDS: the bounds of each row are given. UNION + 8 (n - 1): n bands; + 1 if each may have an interval of keys
# per row, + 2 an interval of rows per key, + 4 a grid.
BAND, ROWS, GENERAL, BOUNDS, UNION = (tl.constexpr(n) for n in range(5))
FULL = tl.constexpr(2)
ANY = tl.constexpr(1 << 30)


class Place(NamedTuple):
    """The lists of one part of a plan in one int32 buffer, `words`, which starts with these numbers (plan_encoding.py).

    The numbers are in memory rather than among the arguments, so that no kernel is compiled for their values, and a
    captured graph uses new ones when they change. An o_ is the word at which a table starts. o_ptr, o_seg: the segments
    of every tile. o_classes: [n_classes, 4] of first row, first key, rows, keys. o_heads: [Hq], the mask of a head.
    o_masks: [n_masks], the record of a mask. o_order: the tiles of every class, mask and batch entry in the order in
    which programs take them, longest first.
    """

    words: Any
    B: Any
    Tq: Any
    Tk: Any
    Hq: Any
    G: Any
    o_ptr: Any
    o_seg: Any
    o_classes: Any
    o_heads: Any
    o_masks: Any
    o_order: Any
    n_classes: Any
    n_masks: Any
    n_tiles: Any
    mask_batches: Any
    step: Any


@triton.jit
def place_of(words):
    """Read the numbers at the head of the buffer."""
    w = words
    sizes = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3), tl.load(w + 4)
    segments = tl.load(w + 5), tl.load(w + 6)
    tables = tl.load(w + 7), tl.load(w + 8), tl.load(w + 9), tl.load(w + 10)
    counts = tl.load(w + 11), tl.load(w + 12), tl.load(w + 13), tl.load(w + 14), tl.load(w + 15)
    return Place(w, *sizes, *segments, *tables, *counts)


@triton.jit
def class_of(place, cls):
    """(first row, first key, rows, keys) of a residue class."""
    p = place.words + place.o_classes + 4 * cls
    return tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)


@triton.jit
def _at(place, cls, b, m, n):
    return ((cls * place.n_masks + m) * place.mask_batches + tl.minimum(b, place.mask_batches - 1)) * place.n_tiles + n


@triton.jit
def tile_of(place, cls, b, h, n):
    """The tile of head h that the nth program takes."""
    m = tl.load(place.words + place.o_heads + h)
    return tl.load(place.words + place.o_order + _at(place, cls, b, m, n))


@triton.jit
def list_of(place, cls, b, h, tile):
    """(first segment, end, the mask's record) of a tile of head h."""
    m = tl.load(place.words + place.o_heads + h)
    p = place.words + place.o_ptr + _at(place, cls, b, m, tile)
    return tl.load(p), tl.load(p + 1), tl.load(place.words + place.o_masks + m)


@triton.jit
def segment(place, n):
    """(begin, end, kind) of segment n."""
    p = place.words + place.o_seg + 3 * n
    return tl.load(p), tl.load(p + 1), tl.load(p + 2)


@triton.jit
def _keys_of(p, t, place):
    # [lo, hi) of the keys that the band at p, without its stride, lets rows t see, in the shape of t
    lo = tl.maximum(tl.load(p + 2), t - tl.load(p + 1))
    hi = tl.minimum(tl.minimum(tl.load(p + 3), place.Tk), t - tl.load(p) + 1)
    there = (t >= tl.load(p + 4)) & (t < tl.minimum(tl.load(p + 5), place.Tq))
    return lo, tl.where(there, hi, 0)


@triton.jit
def _interval(words, p, b, at):
    # the intervals of rows or keys `at`, in their shape; p: the starts of lows and highs, and the batch stride
    at = words + b * tl.load(p + 2) + at
    return tl.load(at + tl.load(p)), tl.load(at + tl.load(p + 1))


@triton.jit
def _optional(words, at, b, where):
    # the intervals of rows or keys `where` in the record at `at`; unbounded where `at` is 0
    p = words + at
    here = (where >= 0) & (at != 0)
    where = words + b * tl.load(p + 2) + where
    return tl.load(where + tl.load(p), mask=here, other=0), tl.load(where + tl.load(p + 1), mask=here, other=ANY)


@triton.jit
def _over(x, p):
    # x // n for 0 <= x < 2^30, by the factor and the shift at p, because a division takes twenty instructions
    factor = tl.load(p).to(tl.uint32, bitcast=True) + tl.zeros_like(x).to(tl.uint32)
    return (tl.umulhi((2 * x).to(tl.uint32), factor) >> tl.load(p + 1).to(tl.uint32)).to(tl.int32)


@triton.jit
def _in_grid(words, p, b, t, j):
    # p: start of the bytes, divisors by the queries and keys of a block, blocks per row, bytes per batch entry
    states = (words + tl.load(p)).to(tl.pointer_type(tl.uint8)) + b.to(tl.int64) * tl.load(p + 6)
    # block numbers are computed along one axis each and meet only in the address
    states += _over(j, p + 3).to(tl.int64) * tl.load(p + 5)
    return tl.load(states + _over(t, p + 1)) != 0


@triton.jit
def _in_blocks(words, p, b, t, j):
    # `_in_grid` for bits. p: their start, the same divisors, words per row of blocks and per batch entry. The keys of a
    # tile are in at most 32 blocks, so one word per row has all of them, and no load has the shape of the tile.
    block = _over(j, p + 3)
    start = tl.min(tl.min(block, 1), 0)
    row = words + tl.load(p) + b * tl.load(p + 6) + _over(t, p + 1).to(tl.int64) * tl.load(p + 5) + start // 32
    low = tl.load(row).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(row + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    bits = ((low | (high << 32)) >> (start % 32).to(tl.uint64)).to(tl.uint32)
    return (bits & (1 << (block - start).to(tl.uint32))) != 0


@triton.jit
def _in_union(place, record, b, t, j, MASK: tl.constexpr):
    # An OR over NB bands without a branch. A band is an interval of keys per row, with ROWS narrowed by another one,
    # AND with KEYS an interval of rows per key, AND with GRIDS a grid.
    NB: tl.constexpr = (MASK - UNION) // 8 + 1
    ROWS: tl.constexpr = (MASK - UNION) % 2
    KEYS: tl.constexpr = (MASK - UNION) // 2 % 2
    GRIDS: tl.constexpr = (MASK - UNION) // 4 % 2
    words = place.words
    bands = words + tl.load(record + 4) + b * tl.load(record + 1) * NB * 8
    factors = words + tl.load(record + 5)
    at_t, at_j = tl.minimum(t, place.Tq - 1), tl.minimum(j, place.Tk - 1)
    for n in tl.static_range(NB):
        lo, hi = _keys_of(bands + 8 * n, t, place)
        if ROWS:
            row_lo, row_hi = _optional(words, tl.load(factors + 3 * n), b, at_t)
            lo, hi = tl.maximum(lo, row_lo), tl.minimum(hi, row_hi)
        ok = (j >= lo) & (j < hi)
        if KEYS:
            first, stop = _optional(words, tl.load(factors + 3 * n + 1), b, at_j)
            ok = ok & (t >= first) & (t < stop)
        if GRIDS:
            ok = ok & _in_blocks(words, words + tl.load(factors + 3 * n + 2), b, at_t, at_j)
        if n == 0:
            inside = ok
        else:
            inside = inside | ok
    return inside


@triton.jit
def _in_general(place, record, b, t, j):
    # record: as plan_encoding.put_masks writes it, 6 words, then 4 for each interval and 9 for each grid
    words = place.words
    nb, n_rows, n_grids = tl.load(record), tl.load(record + 2), tl.load(record + 3)
    bands = words + tl.load(record + 4) + b * tl.load(record + 1) * nb * 8
    uses = words + tl.load(record + 5)
    at_t, at_j = tl.minimum(t, place.Tq - 1), tl.minimum(j, place.Tk - 1)
    inside = (t + j) < 0
    for n in range(nb):
        lo, hi = _keys_of(bands + 8 * n, t, place)
        ok = (j >= lo) & (j < hi)
        stride, phase = tl.load(bands + 8 * n + 6), tl.load(bands + 8 * n + 7)
        if stride != 1:
            # each residue is computed along its own axis
            s = tl.abs(stride)
            met = t % s == (j + phase) % s
            ok = ok & (met == (stride > 0))
        rows_in, rows_out = tl.load(uses + 4 * n), tl.load(uses + 4 * n + 1)
        for r in range(n_rows):
            p = record + 6 + 4 * r
            if (((rows_in | rows_out) >> r) & 1) != 0:
                if tl.load(p + 3) == 0:
                    lo, hi = _interval(words, p, b, at_t)
                    here = (j >= lo) & (j < hi)
                else:
                    first, stop = _interval(words, p, b, at_j)
                    here = (t >= first) & (t < stop)
                ok = ok & (here | (((rows_in >> r) & 1) == 0)) & ((~here) | (((rows_out >> r) & 1) == 0))
        grids_in, grids_out = tl.load(uses + 4 * n + 2), tl.load(uses + 4 * n + 3)
        for g in range(n_grids):
            if (((grids_in | grids_out) >> g) & 1) != 0:
                here = _in_grid(words, record + 6 + 4 * n_rows + 9 * g, b, at_t, at_j)
                ok = ok & (here | (((grids_in >> g) & 1) == 0)) & ((~here) | (((grids_out >> g) & 1) == 0))
        inside = inside | ok
    return inside


@triton.jit
def keys_of_rows(place, record, b, t, MASK: tl.constexpr):
    """[lo, hi) of the keys that each of the rows t sees, for a mask of one band; with ROWS also of one interval."""
    b, p = tl.minimum(b, place.mask_batches - 1), place.words + record
    lo, hi = _keys_of(place.words + tl.load(p + 4) + b * tl.load(p + 1) * 8, t, place)
    if MASK == ROWS:
        row_lo, row_hi = _interval(place.words, p + 6, b, tl.minimum(t, place.Tq - 1))
        lo, hi = tl.maximum(lo, row_lo), tl.minimum(hi, row_hi)
    return lo, hi


@triton.jit
def allowed(place, record, b, t, j, MASK: tl.constexpr):
    """Whether row t sees key j. Both broadcast to the tile and may lie beyond the problem, where no pair is visible."""
    if MASK == BOUNDS:
        ok = (j >= record[0]) & (j < record[1])
    else:
        b = tl.minimum(b, place.mask_batches - 1)
        p = place.words + record
        if MASK >= UNION:
            ok = _in_union(place, p, b, t, j, MASK)
        elif MASK == GENERAL:
            ok = _in_general(place, p, b, t, j)
        else:
            lo, hi = keys_of_rows(place, record, b, t, MASK)
            ok = (j >= lo) & (j < hi)
    return ok


@triton.jit
def seen_by_all(place, record, b, t, MASK: tl.constexpr):
    """[lo, hi) of keys that all rows t [BM] see; none for a mask that has not one interval of keys for each row."""
    if MASK <= ROWS:  # or BAND
        lo, hi = keys_of_rows(place, record, b, t, MASK)
        lo, hi = tl.max(lo, 0), tl.min(hi, 0)
    else:
        lo, hi = 0, 0
    return lo, hi
