"""The mask's test of one tile, applied to scores in the forward and to weights in the backward.

Tiles that blocks exclude are not visited, and a tile lies inside one block of queries, so only the bands are tested. A
PARTIAL tile comes with the set of bands that touch it (`band_sets.py`), mostly a single one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Mask(NamedTuple):
    """The element test of the forward.

    bands: int32 [1 | B, NB, 8], with NB from 1 to 4. row_lo, row_hi: int32 [1 | B, Tq], the keys that each row is
    restricted to, or None. bands_b, rows_b: 1 if batch entries differ, else 0. Tq, Tk: rows and keys of a head. RANGE:
    whether the keys that neighbouring rows see are one range, whose ends never decrease.
    """

    bands: Any
    bands_b: Any
    row_lo: Any
    row_hi: Any
    rows_b: Any
    Tq: Any
    Tk: Any
    NB: Any
    RANGE: Any


class MaskOfKeys(NamedTuple):
    """The element test of the backward, whose tiles are keys × queries.

    bands: int32 [1 | B, NB, 8]. key_lo, key_hi: int32 [1 | B, Tk], ascending: the rows [lo, hi) that each key is
    restricted to, or None. Tk: keys of a head.
    """

    bands: Any
    key_lo: Any
    key_hi: Any
    Tk: Any


class RowBlock(NamedTuple):
    """64 rows of head h of batch entry b: the first row, their entry of the mask, and what they see, or None."""

    b: Any
    h: Any
    first: Any
    mask_b: Any
    seen: Any


class Seen(NamedTuple):
    """What 64 rows see by a mask of one band: together the keys [begin, end), all of them the keys [low, high).

    lo, hi [64]: with documents, the keys of each row. Zeros for several bands.
    """

    begin: Any
    end: Any
    low: Any
    high: Any
    lo: Any
    hi: Any


class Visits(NamedTuple):
    """The key tiles that 64 rows visit of those of a row tile.

    before, behind: how many tiles come before and behind what the rows see. first: key of the first visited tile, and
    test: whether it is tested. begin, end: the keys of the other visited tiles, of which [low, high) need no test.
    """

    before: Any
    behind: Any
    first: Any
    test: Any
    begin: Any
    low: Any
    high: Any
    end: Any


class KeyTile(NamedTuple):
    """The keys of the forward from `first` on, the kind of their segment, and whether they are tested at all."""

    first: Any
    kind: Any
    test: Any


@gluon.jit
def _only_band(bands_of):
    # the only band of a set of at most 4, or -1 for an empty set or several bands
    one = (bands_of != 0) & ((bands_of & (bands_of - 1)) == 0)
    return gl.where(one, (bands_of > 1).to(gl.int32) + (bands_of > 2).to(gl.int32) + (bands_of > 4).to(gl.int32), -1)


@gluon.jit
def _interval(rows, n, mask_b, mask):
    # the keys [lo, hi) that band n lets each row see
    band = mask.bands + (mask.bands_b * mask_b * mask.NB + n) * 8
    lo = gl.maximum(rows - gl.load(band + 1), gl.load(band + 2))
    hi = gl.minimum(rows - gl.load(band) + 1, gl.minimum(gl.load(band + 3), mask.Tk))
    hi = gl.where((rows >= gl.load(band + 4)) & (rows < gl.load(band + 5)), hi, 0)
    if mask.row_lo is not None:
        at = mask.rows_b * mask_b * mask.Tq + rows
        lo = gl.maximum(lo, gl.load(mask.row_lo + at, mask=rows < mask.Tq, other=0))
        hi = gl.minimum(hi, gl.load(mask.row_hi + at, mask=rows < mask.Tq, other=0))
    return lo, hi


@gluon.jit
def _ends_inside(block, j, n, mask, BN: gl.constexpr):
    # whether band n starts, and whether it ends, inside the tile of these rows and BN keys from j on
    HAS_ROWS: gl.constexpr = mask.row_lo is not None
    band = mask.bands + (mask.bands_b * block.mask_b * mask.NB + n) * 8
    before = HAS_ROWS | (j < gl.maximum(block.first + 63 - gl.load(band + 1), gl.load(band + 2)))
    behind = gl.minimum(block.first - gl.load(band) + 1, gl.minimum(gl.load(band + 3), mask.Tk)) < j + BN
    outside = (block.first < gl.load(band + 4)) | (block.first + 64 > gl.load(band + 5))
    return before, HAS_ROWS | behind | outside


@gluon.jit
def seen_by(first, mask_b, mask, layout: gl.constexpr):
    """What the 64 rows from `first` on see. layout: of the intervals, whose ends never decrease."""
    begin = 0
    end = 0
    low = 0
    high = 0
    lo = 0
    hi = 0
    if mask.NB == 1:
        # those of the first and the last row are the extremes
        begin, high = _interval(gl.minimum(first, mask.Tq - 1), 0, mask_b, mask)
        low, end = _interval(gl.minimum(first + 63, mask.Tq - 1), 0, mask_b, mask)
        if mask.row_lo is not None:
            lo, hi = _interval(first + gl.arange(0, 64, layout), 0, mask_b, mask)
    return Seen(begin, end, low, high, lo, hi)


@gluon.jit
def visits_of(begin, end, seen, BN: gl.constexpr):
    """The visits of 64 rows to tiles of BN of the keys [begin, end); at least one, also of rows beyond the last."""
    n = gl.cdiv(end - begin, BN)
    before = gl.minimum(gl.maximum(seen.begin - begin, 0) // BN, n - 1)
    behind = n - gl.maximum(gl.cdiv(seen.end - begin, BN), before + 1)
    first = begin + before * BN
    stop = begin + (n - behind) * BN
    low = gl.minimum(begin + gl.cdiv(gl.maximum(seen.low - begin, 0), BN) * BN, stop)
    high = gl.maximum(begin + gl.maximum(seen.high - begin, 0) // BN * BN, low)
    high = gl.minimum(high, stop)
    test = (first < low) | (first >= high)
    second = first + BN
    return Visits(before, behind, first, test, second, gl.maximum(low, second), gl.maximum(high, second), stop)


@gluon.jit
def masked_scores(s, keys, block, mask):
    """s [64, BN] of a key tile, with -inf where no band of the tile's set lets a row see a key."""
    mask_b, j = block.mask_b, keys.first
    BN: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    rows = gl.expand_dims(block.first + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    # a column is the lane's part (bits 1 and 2) plus a constant, which comparisons encode as an immediate
    column = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
    lane = j + (column & 6)
    column = column & ~6
    if mask.NB == 1:
        if mask.row_lo is not None:
            lo, hi = gl.expand_dims(block.seen.lo, 1), gl.expand_dims(block.seen.hi, 1)
        else:
            lo, hi = _interval(rows, 0, mask_b, mask)
        # few tiles are cut on both sides: a bound that does not cut this tile costs nothing
        if j < block.seen.low:
            s = gl.where(column >= lo - lane, s, float("-inf"))
        if block.seen.high < j + BN:
            s = gl.where(column < hi - lane, s, float("-inf"))
    else:
        bands_of = keys.kind >> 2
        only = _only_band(bands_of)
        if only >= 0:
            lo, hi = _interval(rows, only, mask_b, mask)
            before, behind = _ends_inside(block, j, only, mask, BN)
            if before:
                s = gl.where(column >= lo - lane, s, float("-inf"))
            if behind:
                s = gl.where(column < hi - lane, s, float("-inf"))
        else:
            bands_of = gl.where(bands_of == 0, (1 << mask.NB) - 1, bands_of)
            allowed = column < 0
            for n in gl.static_range(mask.NB):
                lo, hi = _interval(rows, n, mask_b, mask)
                hi = gl.where((bands_of >> n & 1) != 0, hi, 0)
                allowed = allowed | ((column >= lo - lane) & (column < hi - lane))
            s = gl.where(allowed, s, float("-inf"))
    return s


@gluon.jit
def _in_bands(p, t, j, bands_of, mask, NB: gl.constexpr):
    # p where any band in the sets [BN, 1] of the keys lets queries t (columns) see keys j (rows); else 0
    d = t - j
    allowed = d > (1 << 30)
    for n in gl.static_range(NB):
        at = mask.bands + n * 8
        inside = (d >= gl.load(at)) & (d <= gl.load(at + 1)) & ((bands_of >> n & 1) != 0)
        inside &= (j >= gl.load(at + 2)) & (j < gl.minimum(gl.load(at + 3), mask.Tk))
        inside &= (t >= gl.load(at + 4)) & (t < gl.load(at + 5))
        allowed |= inside
    return gl.where(allowed, p, 0.0)


@gluon.jit
def _between(p, low, high, t, bounds):
    # p where queries t on are in [low, high) of each key [BN, 1]; a bound that does not cut the tile costs nothing.
    # bounds: of the last key's low and of the first key's high, which are the extremes
    BM: gl.constexpr = p.shape[1]
    # a column is the lane's part (bits 1 and 2) plus a constant, which comparisons encode as an immediate
    column = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, p.type.layout)), 0)
    lane = t + (column & 6)
    column = column & ~6
    most, least = bounds
    if t < most:
        p = gl.where(column >= low - lane, p, 0.0)
    if least < t + BM:
        p = gl.where(column < high - lane, p, 0.0)
    return p


@gluon.jit
def _in_band(p, band, keys, t, j, mask):
    # p where one band and the rows of each key let queries from t on see keys from j on
    BN: gl.constexpr = p.shape[0]
    # queries keys + before to keys + after see the keys, within queries [first, last) and keys [start, stop)
    before, after, first, last = gl.load(band), gl.load(band + 1), gl.load(band + 4), gl.load(band + 5)
    start, stop = gl.load(band + 2), gl.minimum(gl.load(band + 3), mask.Tk)
    low, high = gl.maximum(keys + before, first), gl.minimum(keys + after + 1, last)
    most, least = gl.maximum(j + BN - 1 + before, first), gl.minimum(j + after + 1, last)
    if mask.key_lo is not None:
        at, end = gl.minimum(keys, mask.Tk - 1), gl.minimum(j + BN, mask.Tk) - 1
        low, most = gl.maximum(low, gl.load(mask.key_lo + at)), gl.maximum(most, gl.load(mask.key_lo + end))
        begin = gl.minimum(j, mask.Tk - 1)
        high, least = gl.minimum(high, gl.load(mask.key_hi + at)), gl.minimum(least, gl.load(mask.key_hi + begin))
    p = _between(p, low, high, t, (most, least))
    if (j < start) | (stop < j + BN):
        p = gl.where((keys >= start) & (keys < stop), p, 0.0)
    return p


@gluon.jit
def masked_weights(p, t, j, kind, b, mask, CONFIG: gl.constexpr):
    """p [BN, BM] of keys from j and queries from t of batch entry b on, with 0 for excluded pairs.

    Every 64 keys have a set of bands.
    """
    bands, key_lo, key_hi, Tk = mask
    if CONFIG.BANDS_B:
        bands += b * CONFIG.NB * 8
    if CONFIG.ROWS_B:
        key_lo += b.to(gl.int64) * Tk
        key_hi += b.to(gl.int64) * Tk
    mask = MaskOfKeys(bands, key_lo, key_hi, Tk)
    BN: gl.constexpr = p.shape[0]
    BM: gl.constexpr = p.shape[1]
    layout: gl.constexpr = p.type.layout
    keys = gl.expand_dims(j + gl.arange(0, BN, gl.SliceLayout(1, layout)), 1)
    one, two = kind >> 2 & 15, kind >> 6 & 15
    if CONFIG.NB == 1:
        p = _in_band(p, mask.bands, keys, t, j, mask)
    else:
        only = _only_band(one | two)
        if only >= 0:
            p = _in_band(p, mask.bands + only * 8, keys, t, j, mask)
        else:
            queries = gl.expand_dims(t + gl.arange(0, BM, gl.SliceLayout(0, layout)), 0)
            every = gl.where((one | two) == 0, 15, 0)
            p = _in_bands(p, queries, keys, every | gl.where(keys - j < 64, one, two), mask, CONFIG.NB)
            if mask.key_lo is not None:
                at = gl.minimum(keys, mask.Tk - 1)
                low, high = gl.load(mask.key_lo + at), gl.load(mask.key_hi + at)
                p = gl.where((queries >= low) & (queries < high), p, 0.0)
    if CONFIG.BLOCKS and ((one | two != 0) & ((one == 0) | (two == 0))):
        p = gl.where(gl.where(keys - j < 64, one, two) != 0, p, 0.0)
    return p
