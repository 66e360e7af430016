"""The mask's test of one tile, of scores in the forward and of weights in the backward.

Tiles that blocks leave out are not visited, and a tile lies inside one block of queries: what is left to test are the
bands. A PARTIAL tile comes with the set of bands that touch it (`cuts.py`), mostly one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _alone(bands_of):
    # the one band of a set, or -1 for none and for several; at most 4 bands
    one = (bands_of != 0) & ((bands_of & (bands_of - 1)) == 0)
    return gl.where(one, (bands_of > 1).to(gl.int32) + (bands_of > 2).to(gl.int32) + (bands_of > 4).to(gl.int32), -1)


@gluon.jit
def _interval(rows, n, mask_b, mask, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # the keys [lo, hi) that band n lets each of rows [64, 1] see
    bands_ptr, bands_b, row_lo_ptr, row_hi_ptr, rows_b, Tq, Tk = mask
    band = bands_ptr + (bands_b * mask_b * NB + n) * 8
    lo = gl.maximum(rows - gl.load(band + 1), gl.load(band + 2))
    hi = gl.minimum(rows - gl.load(band) + 1, gl.minimum(gl.load(band + 3), Tk))
    hi = gl.where((rows >= gl.load(band + 4)) & (rows < gl.load(band + 5)), hi, 0)
    if HAS_ROWS:
        at = rows_b * mask_b * Tq + rows
        lo = gl.maximum(lo, gl.load(row_lo_ptr + at, mask=rows < Tq, other=0))
        hi = gl.minimum(hi, gl.load(row_hi_ptr + at, mask=rows < Tq, other=0))
    return lo, hi


@gluon.jit
def _cuts(first_row, j, BN: gl.constexpr, n, mask_b, mask, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # whether band n ends inside the tile of 64 rows and BN keys, before its keys and behind them
    bands_ptr, bands_b, _, _, _, _, Tk = mask
    band = bands_ptr + (bands_b * mask_b * NB + n) * 8
    before = HAS_ROWS | (j < gl.maximum(first_row + 63 - gl.load(band + 1), gl.load(band + 2)))
    behind = gl.minimum(first_row - gl.load(band) + 1, gl.minimum(gl.load(band + 3), Tk)) < j + BN
    outside = (first_row < gl.load(band + 4)) | (first_row + 64 > gl.load(band + 5))
    return before, HAS_ROWS | behind | outside


@gluon.jit
def place_of(first_row, mask_b, mask, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # of 64 rows: the first, their entry of the mask, and the first and the end of the keys that all of them see
    low = 0
    high = 0
    if NB == 1:
        # every warp holds all 64
        rows = first_row + gl.arange(0, 64, gl.BlockedLayout([2], [32], [4], [0]))
        lo, hi = _interval(rows, 0, mask_b, mask, NB, HAS_ROWS)
        real = rows < mask[5]
        low = gl.max(gl.where(real, lo, 0), 0)
        high = gl.min(gl.where(real, hi, mask[6]), 0)
    return first_row, mask_b, low, high


@gluon.jit
def masked_scores(s, j, kind, place, mask, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # s [64, BN] of the keys from j on, with -inf where no band of the tile's set lets a row see a key
    first_row, mask_b, low, high = place
    BN: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    rows = gl.expand_dims(first_row + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    # a thread's columns are its lane's (bits 1 and 2) and constants, which comparisons hold in themselves
    column = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
    lane = j + (column & 6)
    column = column & ~6
    if NB == 1:
        lo, hi = _interval(rows, 0, mask_b, mask, NB, HAS_ROWS)
        # few tiles are cut on both sides: an end that all rows have passed costs nothing
        if j < low:
            s = gl.where(column >= lo - lane, s, float("-inf"))
        if high < j + BN:
            s = gl.where(column < hi - lane, s, float("-inf"))
    else:
        bands_of = kind >> 2
        alone = _alone(bands_of)
        if alone >= 0:
            lo, hi = _interval(rows, alone, mask_b, mask, NB, HAS_ROWS)
            before, behind = _cuts(first_row, j, BN, alone, mask_b, mask, NB, HAS_ROWS)
            if before:
                s = gl.where(column >= lo - lane, s, float("-inf"))
            if behind:
                s = gl.where(column < hi - lane, s, float("-inf"))
        else:
            bands_of = gl.where(bands_of == 0, (1 << NB) - 1, bands_of)
            allowed = column < 0
            for n in gl.static_range(NB):
                lo, hi = _interval(rows, n, mask_b, mask, NB, HAS_ROWS)
                hi = gl.where((bands_of >> n & 1) != 0, hi, 0)
                allowed = allowed | ((column >= lo - lane) & (column < hi - lane))
            s = gl.where(allowed, s, float("-inf"))
    return s


@gluon.jit
def _in_bands(p, bands, t, j, bands_of, Tk, NB: gl.constexpr):
    # p where any band of its keys' sets [BN, 1] lets queries t, in columns, see keys j, in rows; else 0
    d = t - j
    found = d > (1 << 30)
    for n in gl.static_range(NB):
        at = bands + n * 8
        inside = (d >= gl.load(at)) & (d <= gl.load(at + 1)) & ((bands_of >> n & 1) != 0)
        inside &= (j >= gl.load(at + 2)) & (j < gl.minimum(gl.load(at + 3), Tk))
        inside &= (t >= gl.load(at + 4)) & (t < gl.load(at + 5))
        found |= inside
    return gl.where(found, p, 0.0)


@gluon.jit
def _in_band(p, band, keys, t, j, Tk):
    # p where one band lets queries from t on see keys from j on; a side behind which the whole tile lies costs nothing
    BN: gl.constexpr = p.shape[0]
    BM: gl.constexpr = p.shape[1]
    # the queries from keys + before to keys + after see them, of queries [first, last) and keys [start, stop)
    before, after, first, last = gl.load(band), gl.load(band + 1), gl.load(band + 4), gl.load(band + 5)
    start, stop = gl.load(band + 2), gl.minimum(gl.load(band + 3), Tk)
    # a thread's columns are its lane's (bits 1 and 2) and constants, which comparisons hold in themselves
    column = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, p.type.layout)), 0)
    lane = t + (column & 6)
    column = column & ~6
    if t < gl.maximum(j + BN - 1 + before, first):
        p = gl.where(column >= gl.maximum(keys + before, first) - lane, p, 0.0)
    if gl.minimum(j + after + 1, last) < t + BM:
        p = gl.where(column < gl.minimum(keys + after + 1, last) - lane, p, 0.0)
    if (j < start) | (stop < j + BN):
        p = gl.where((keys >= start) & (keys < stop), p, 0.0)
    return p


@gluon.jit
def masked_weights(
    p, bands, row_lo, row_hi, t, j, kind, Tq, Tk, NB: gl.constexpr, HAS_ROWS: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    # p [BN, BM] of keys from j and queries from t on, with 0 where the mask says so; every 64 keys have a set of bands
    BN: gl.constexpr = p.shape[0]
    BM: gl.constexpr = p.shape[1]
    layout: gl.constexpr = p.type.layout
    keys = gl.expand_dims(j + gl.arange(0, BN, gl.SliceLayout(1, layout)), 1)
    one, two = kind >> 2 & 15, kind >> 6 & 15
    if NB == 1:
        p = _in_band(p, bands, keys, t, j, Tk)
    else:
        alone = _alone(one | two)
        if alone >= 0:
            p = _in_band(p, bands + alone * 8, keys, t, j, Tk)
        else:
            queries = gl.expand_dims(t + gl.arange(0, BM, gl.SliceLayout(0, layout)), 0)
            every = gl.where((one | two) == 0, 15, 0)
            p = _in_bands(p, bands, queries, keys, every | gl.where(keys - j < 64, one, two), Tk, NB)
    if BLOCKS and ((one | two != 0) & ((one == 0) | (two == 0))):
        p = gl.where(gl.where(keys - j < 64, one, two) != 0, p, 0.0)
    if HAS_ROWS:
        queries = gl.expand_dims(t + gl.arange(0, BM, gl.SliceLayout(0, layout)), 0)
        # every warp holds all queries
        every = t + gl.arange(0, BM, gl.BlockedLayout([BM // 32], [32], [8], [0]))
        if j < gl.max(gl.load(row_lo + every, every < Tq, 0), 0):
            p = gl.where(keys >= gl.load(row_lo + queries, queries < Tq, 0), p, 0.0)
        if gl.min(gl.load(row_hi + every, every < Tq, Tk), 0) < j + BN:
            p = gl.where(keys < gl.load(row_hi + queries, queries < Tq, 0), p, 0.0)
    return p
