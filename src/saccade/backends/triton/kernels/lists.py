"""The lists of tiles of a mask whose arrays are on the device. Small kernels do the work of the host's planner.

A row t of a batch entry sees keys lo[t] <= j < hi[t], and both ends never decrease. So the rows that see a key are an
interval, too, and binary search finds its ends. Tiles of rows give segments of keys for the forward, tiles of keys give
segments of rows for the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .masks import FULL

PARTIAL = tl.constexpr(1)


@triton.jit
def _place(blocks):
    """(block, batch entry) of a program of a grid blocks x batch entries, which has one axis: others end at 65535."""
    i = tl.program_id(0)
    return i % blocks, i // blocks


class Intervals(NamedTuple):
    """The keys lo <= j < hi that each row sees, or the rows that see each key; int32 [B, T] each."""

    lo: Any
    hi: Any


class Lists(NamedTuple):
    """Outputs of `segments`, int32: count [Bm, n_tiles]; seg [.., 3, 3]; extent [Bm, n_tiles]: for row tiles the number
    of keys that each visits, last tile first; for key tiles the end of each."""

    count: Any
    seg: Any
    extent: Any


class Config(NamedTuple):
    """The constants of `segments`: rows or keys of a tile, how many of them at a time, the multiples to which segments
    are rounded, whether these count from the first key of the tile, and whether tiles are of keys."""

    TILE: Any
    BLOCK: Any
    QUANTUM: Any
    FROM_FIRST: Any
    OF_KEYS: Any


@triton.jit
def _first_above(table, x, n, OR_EQUAL: tl.constexpr):
    """The first index of a sorted table [n] whose value is above x; OR_EQUAL: or equal to x."""
    low = x.to(tl.int32) * 0
    high = low + n
    size = n
    while size > 0:
        middle = (low + high) // 2
        value = tl.load(table + middle, mask=middle < n, other=0)
        if OR_EQUAL:
            above = value >= x
        else:
            above = value > x
        open_ = low < high
        high = tl.where(open_ & above, middle, high)
        low = tl.where(open_ & (above == 0), middle + 1, low)
        size = size // 2
    return low


@triton.jit(do_not_specialize=["T", "ids_b", "left", "right"])
def rows_of_ids(ids, ids_b, out, T, left, right, BLOCK: tl.constexpr):
    """Fill Intervals: the positions from t - left to t + right with the same id as t; ids [B, T] are sorted.

    Grid: blocks of T x B.
    """
    block, b = _place(tl.cdiv(T, BLOCK))
    t = block * BLOCK + tl.arange(0, BLOCK)
    ids += b.to(tl.int64) * ids_b
    at = b.to(tl.int64) * T + t
    x = tl.load(ids + t, mask=t < T, other=0)
    begin = tl.maximum(_first_above(ids, x, T, True), t - left)
    end = tl.minimum(_first_above(ids, x, T, False), t + right + 1)
    tl.store(out.lo + at, begin, mask=t < T)
    tl.store(out.hi + at, end, mask=t < T)


@triton.jit(do_not_specialize=["Tq", "Tk"])
def rows_of_keys(intervals, out, Tq, Tk, BLOCK: tl.constexpr):
    """Fill Intervals `out` of Tk keys: the rows that see each key, from the intervals of Tq rows.

    Grid: blocks of Tk x B.
    """
    block, b = _place(tl.cdiv(Tk, BLOCK))
    j, b = block * BLOCK + tl.arange(0, BLOCK), b.to(tl.int64)
    begin = _first_above(intervals.hi + b * Tq, j, Tq, False)
    end = _first_above(intervals.lo + b * Tq, j, Tq, False)
    tl.store(out.lo + b * Tk + j, begin, mask=j < Tk)
    tl.store(out.hi + b * Tk + j, end, mask=j < Tk)


@triton.jit(do_not_specialize=["rows", "n", "n_tiles"])
def segments(intervals, out, rows, n, n_tiles, config: tl.constexpr):
    """Fill Lists: up to three segments per tile, empty ones last.

    Visited intervals are rounded outward to multiples of QUANTUM, FULL ones inward, and both end at n. FROM_FIRST: the
    first segment starts at the first key that a row sees, the last one ends after the last such key, and the borders
    between them are multiples of QUANTUM from the start. Tiles of TILE rows, of `rows` rows with intervals, list keys,
    of n keys. With OF_KEYS, the same with keys and rows exchanged, and the listed rows are in units of QUANTUM.
    Grid: n_tiles x Bm.
    """
    TILE: tl.constexpr = config.TILE
    BLOCK: tl.constexpr = config.BLOCK
    QUANTUM: tl.constexpr = config.QUANTUM
    OF_KEYS: tl.constexpr = config.OF_KEYS
    tile, b = _place(n_tiles)
    lo = intervals.lo + b.to(tl.int64) * rows
    hi = intervals.hi + b.to(tl.int64) * rows
    begin, end, full, stop = n, 0, 0, n
    for at in range(0, TILE, BLOCK):
        r = at + tl.arange(0, BLOCK)
        here = (r < TILE) & (tile * TILE + r < rows)
        r = tile * TILE + r
        low = tl.load(lo + r, mask=here, other=0)
        high = tl.load(hi + r, mask=here, other=0)
        some = here & (low < high)
        begin = tl.minimum(begin, tl.min(tl.where(some, low, n), 0))
        end = tl.maximum(end, tl.max(tl.where(some, high, 0), 0))
        full = tl.maximum(full, tl.max(tl.where(here, low, 0), 0))
        stop = tl.minimum(stop, tl.min(tl.where(here, high, n), 0))
    if config.FROM_FIRST:
        full = begin + (full - begin + QUANTUM - 1) // QUANTUM * QUANTUM
        stop = full + (stop - full) // QUANTUM * QUANTUM
    else:
        begin = begin // QUANTUM * QUANTUM
        full = (full + QUANTUM - 1) // QUANTUM * QUANTUM
        end = tl.minimum((end + QUANTUM - 1) // QUANTUM * QUANTUM, n)
        stop = tl.where(stop >= n, n, stop // QUANTUM * QUANTUM)
    end = tl.maximum(begin, end)
    inside = full < stop
    full, stop = tl.where(inside, full, end), tl.where(inside, stop, end)
    if OF_KEYS:
        begin, full = (begin + QUANTUM - 1) // QUANTUM, (full + QUANTUM - 1) // QUANTUM
        stop, end = (stop + QUANTUM - 1) // QUANTUM, (end + QUANTUM - 1) // QUANTUM
    cell = b * n_tiles + tile
    second = (begin < full).to(tl.int32)
    third = second + (full < stop).to(tl.int32)
    tl.store(out.count + cell, third + (stop < end).to(tl.int32))
    if OF_KEYS:
        tl.store(out.extent + cell, end)
    else:
        tl.store(out.extent + b * n_tiles + n_tiles - 1 - tile, end - begin)
    seg = out.seg + 9 * cell
    if begin < full:
        tl.store(seg, begin)
        tl.store(seg + 1, full)
        tl.store(seg + 2, PARTIAL)
    if full < stop:
        tl.store(seg + 3 * second, full)
        tl.store(seg + 3 * second + 1, stop)
        tl.store(seg + 3 * second + 2, FULL)
    if stop < end:
        tl.store(seg + 3 * third, stop)
        tl.store(seg + 3 * third + 1, end)
        tl.store(seg + 3 * third + 2, PARTIAL)


@triton.jit(do_not_specialize=["cells"])
def pack(count, spread, ptr, seg, cells, BLOCK: tl.constexpr):
    """Pack the three places per cell that `segments` filled into ptr int32 [cells + 1] and seg [.., 3]. Grid: 1."""
    before = 0
    for at in range(0, cells, BLOCK):
        cell = at + tl.arange(0, BLOCK)
        here = cell < cells
        n = tl.load(count + cell, mask=here, other=0)
        ends = before + tl.cumsum(n, 0)
        tl.store(ptr + cell, ends - n, mask=here)
        for k in tl.static_range(3):
            for c in tl.static_range(3):
                x = tl.load(spread + 9 * cell + 3 * k + c, mask=here & (k < n), other=0)
                tl.store(seg + 3 * (ends - n + k) + c, x, mask=here & (k < n))
        before += tl.sum(n, 0)
    tl.store(ptr + cells, before)


@triton.jit(do_not_specialize=["n_keys", "n_rows"])
def turns(ends, turn, n_keys, n_rows, BLOCK: tl.constexpr):
    """Fill turn int32 [Bm, n_rows, 2]: the first key tile that visits a row tile, and its negative; ends: of key tiles.

    Grid: blocks of n_rows x Bm.
    """
    block, b = _place(tl.cdiv(n_rows, BLOCK))
    m = block * BLOCK + tl.arange(0, BLOCK)
    first = _first_above(ends + b * n_keys, m, n_keys, False)
    at = turn + 2 * (b * n_rows + m)
    tl.store(at, first, mask=m < n_rows)
    tl.store(at + 1, -first, mask=m < n_rows)
