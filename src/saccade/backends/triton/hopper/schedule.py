"""Which tiles each program visits: key tiles of a row tile in the forward, row tiles of a key tile in the backward.

For the backward it also fixes the order in which key tiles add to the sums of a row tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ....mask.forms import Rows
from ....mask.segments import joined
from ....mask.tiling import FULL, PARTIAL
from ....plan_parts import Ranges
from ..chip import on
from ..kernels import lists as kernels
from ..launches import PLAIN
from ..on_device import Intervals, segments

if TYPE_CHECKING:
    from .tiles import Tiles

Ints = Any
# a list is long if it is longer than this many times the mean
LONG = 4
LONG_BIT = 1 << 30


class TileLists(NamedTuple):
    """The arrays of a plan that the forward kernel reads, int32 on the device.

    order: [Bm * n_tiles], row tiles, longest first. ptr, seg: [Bm * n_tiles + 1] and [n, 3], the segments of keys
    (begin, end, kind) of each row tile. bands: [1 | B, NB, 8]; row_lo, row_hi: [1 | B, Tq], or None.
    """

    order: Any
    ptr: Any
    seg: Any
    bands: Any
    row_lo: Any
    row_hi: Any


class ForwardSchedule(NamedTuple):
    """A plan on the device for the forward: its tiles, and the lists of n_tiles row tiles for each of Bm batch entries.

    Bm is 1 or B. long: the first `long` tiles of `order` start before all others, in all heads. blocks: whether the
    mask has tile grids.
    """

    tiles: Tiles
    lists: TileLists
    n_tiles: int
    Bm: int
    long: int = 0
    blocks: bool = False


class BackwardSchedule(NamedTuple):
    """The row tiles that every key tile visits, and the ranks at which key tiles add to a row tile.

    ptr, seg: int32 [Bm * N + 1] and [n, 3]. The key tile at place n of b visits seg[ptr[c]:ptr[c + 1]], c = b * N + n:
    row tiles (begin, end, kind), sorted and disjoint. rank_ptr, ranks: int32 [Bm * M + 1] and [n, 2], the runs of
    places that visit row tile (b, m), as (first place, offset); place n of a run has rank n + offset. order: int32
    [Bm * N], key tiles in the order in which they start, plus LONG_BIT for tiles with long lists; None if there are no
    long lists, and key tile n has place n. key_lo, key_hi: int32 [1 | B, Tk], the rows [lo, hi) that the mask's row
    intervals restrict each key to, or None. With an order, rank_ptr is [2 Bm * M + 1] of (b, long, m): tiles with long
    lists add to sums of their own, because all others would wait for them. seg and ranks have at least one row. The
    arrays are NumPy's, or copies of them on a device.
    """

    ptr: Ints
    seg: Ints
    rank_ptr: Ints
    ranks: Ints
    order: Ints | None = None
    key_lo: Ints | None = None
    key_hi: Ints | None = None


def long_ones(counts: Ints) -> Ints:
    """Which tiles visit so many more tiles than the mean that they start before the others."""
    return counts > LONG * counts.mean()


def schedule_of_ranges(ranges: Ranges, batch: int, rows: int, tile_q: int) -> BackwardSchedule:
    """The schedule from the segments of rows of each key tile, [batch * N] lists, in whole tiles of `tile_q` rows.

    Visited rows are rounded outward, FULL ones inward. The ranks follow from the rounded lists, so every counted key
    tile does add. Key tiles that far more rows see than others start first.
    """
    n_cells, M = len(ranges.ptr) - 1, -(-rows // tile_q)
    N = n_cells // batch
    cell = np.repeat(np.arange(n_cells), np.diff(ranges.ptr))
    begin, end, kind = (column.astype(np.int64) for column in ranges.seg.T)
    lo, hi = begin // tile_q, -(-end // tile_q)
    steps = np.bincount(cell, hi - lo, n_cells).reshape(batch, N)
    long = long_ones(steps)
    order, kinds = np.argsort(~long, axis=1, kind="stable"), 1 + bool(long.any())
    places = np.argsort(order, axis=1) + N * np.arange(batch)[:, None]
    queue = cell // N * kinds + long.reshape(-1)[cell]
    cell = places.reshape(-1)[cell]
    full_lo, full_hi = -(-begin // tile_q), np.where(end >= rows, M, end // tile_q)
    full = (kind == FULL) & (full_lo < full_hi)
    at, where, (some, every) = _sweep([(cell, lo, hi), (cell[full], full_lo[full], full_hi[full])])
    state = np.where(some > 0, np.where(every > 0, FULL, PARTIAL), 0)
    inside = (state[:-1] > 0) & (at[:-1] < at[1:])
    counts, seg = joined(where[:-1][inside], at[:-1][inside], at[1:][inside], state[:-1][inside], n_cells)
    ptr = np.concatenate([[0], np.cumsum(counts)])
    # the intervals of this and of the next key tile: a cell that only one of them covers starts or ends a run
    own = queue * (N + 1) + cell % N
    before = own + 1
    at, where, (now, then) = _sweep([(own, lo, hi), (before, lo, hi)])
    row0, begins = _cells(at, where, (now > 0) & (then == 0), N, M)
    _, stops = _cells(at, where, (now == 0) & (then > 0), N, M)
    length = stops - begins
    earlier = np.cumsum(length) - length
    group = np.ones(len(row0), np.bool_)
    group[1:] = row0[1:] != row0[:-1]
    earlier -= np.maximum.accumulate(np.where(group, earlier, 0))
    ranks = np.stack([begins, earlier - begins], 1)
    rank_ptr = np.concatenate([[0], np.cumsum(np.bincount(row0, minlength=batch * kinds * M))])
    ptr, seg, rank_ptr, ranks = (_int32(a) for a in (ptr, seg, rank_ptr, ranks))
    order = order + LONG_BIT * np.take_along_axis(long, order, 1)
    return BackwardSchedule(ptr, seg, rank_ptr, ranks, _int32(order.reshape(-1)) if kinds > 1 else None)


def rows_of_keys(rows: Rows, keys: int) -> tuple[Ints, Ints]:
    """The rows [lo, hi) that see each of `keys` keys, int32 [1 | B, keys], by the monotone intervals of rows."""
    lo, hi = (np.stack([np.searchsorted(ends, np.arange(keys), "right") for ends in x]) for x in (rows.hi, rows.lo))
    return _int32(lo), _int32(hi)


def schedule_of_intervals(part: Intervals, tile_k: int, tile_q: int) -> BackwardSchedule:
    """The schedule from intervals on the device that leave out no key; their ends never decrease: one run per tile."""
    ptr, seg, stops = segments(part, tile_k, tile_q, of_keys=True)
    # key tiles visit row tile m from the first that ends after its start to the last that starts before its end
    (Bm, N), M = stops.shape, -(-part.lo.shape[1] // tile_q)
    ranks = stops.new_empty((Bm * M, 2))
    with on(stops):
        PLAIN.run(kernels.turns, (-(-M // 256) * Bm,), stops, ranks, N, M, BLOCK=256)
    return BackwardSchedule(ptr, seg, _counted(Bm * M + 1, stops.device), ranks, None, *part.rows_of_keys)


@lru_cache(maxsize=64)
def _counted(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32, device=device)


def _int32(a: Ints) -> Ints:
    a = a.astype(np.int32)
    return a if len(a) else np.zeros((1, *a.shape[1:]), np.int32)


def _sweep(intervals: list[tuple[Ints, Ints, Ints]]) -> tuple[Ints, Ints, list[Ints]]:
    # end points of all intervals sorted by (cell, place), and how many intervals of each set cover the part after each
    where = np.concatenate([c for c, _, _ in intervals for _ in range(2)])
    at = np.concatenate([ends for _, lo, hi in intervals for ends in (lo, hi)])
    order = np.lexsort((at, where))
    covers = []
    for mine in range(len(intervals)):
        step = [np.repeat([1, -1], len(lo)) * (n == mine) for n, (_, lo, _) in enumerate(intervals)]
        covers.append(np.cumsum(np.concatenate(step)[order]))
    return at[order], where[order], covers


def _cells(at: Ints, where: Ints, wanted: Ints, N: int, M: int) -> tuple[Ints, Ints]:
    # sorted (row tile, key tile) of every place in the wanted intervals; row tiles are numbered over the batch
    n = np.flatnonzero(wanted[:-1] & (at[:-1] < at[1:]))
    count = at[n + 1] - at[n]
    place = np.repeat(at[n] - (np.cumsum(count) - count), count) + np.arange(count.sum())
    batch, tile = np.divmod(np.repeat(where[n], count), N + 1)
    row = batch * M + place
    order = np.lexsort((tile, row))
    return row[order], tile[order]
