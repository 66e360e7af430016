"""Row tiles that start where documents start, so that no tile visits the keys of two documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ....mask.forms import Lowered
from ....mask.tiling import FULL, PARTIAL
from ....plan import Ranges

if TYPE_CHECKING:
    from .tiles import Tiles

Ints = Any
# 8-bit values are stored in an order that repeats every 16 keys
KEYS = 16


def of_documents(low: Lowered, Bm: int, Tq: int, Tk: int, tiles: Tiles) -> tuple[Ints, Ranges] | None:
    """Tiles of a mask of one band with an interval of keys per row, cut where the intervals' starts change.

    rows: int32 [Bm * n, 2], first and end of each tile, equal for tiles that only fill up a batch entry; and the keys
    that each visits. None for other masks.
    """
    if low.nb != 1 or len(low.rows) != 1 or low.rows[0].axis != "q" or low.grids:
        return None
    both = low.keys_of(0, np.arange(Tq))
    lo, hi = (np.broadcast_to(x, (Bm, Tq)) for x in both)
    cuts = [_cuts(low.rows[0].lo[min(b, low.rows[0].batch - 1)], tiles.BM) for b in range(Bm)]
    n = max(map(len, cuts))
    rows, counts, segs = np.full((Bm, n, 2), Tq), np.zeros((Bm, n), np.int64), []
    for b, starts in enumerate(cuts):
        rows[b, : len(starts)] = np.stack([starts, np.append(starts[1:], Tq)], 1)
        counts[b, : len(starts)], seg = _keys(starts, lo[b], np.minimum(hi[b], Tk), tiles.BN)
        segs.append(seg)
    ptr = np.concatenate([[0], np.cumsum(counts)])
    return rows.reshape(-1, 2), Ranges(ptr.astype(np.int32), np.concatenate(segs).astype(np.int32))


def visited(ranges: Ranges, BN: int) -> int:
    """The number of key tiles that all row tiles visit, each segment counted from its start."""
    return int((-(-(ranges.seg[:, 1] - ranges.seg[:, 0]) // BN)).sum())


def _cuts(start: Ints, BM: int) -> Ints:
    # the first row of every tile: documents are runs of rows whose intervals have one start
    first = np.flatnonzero(np.concatenate([[True], start[1:] != start[:-1]]))
    lengths = np.diff(np.append(first, len(start)))
    tiles = -(-lengths // BM)
    inside = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return np.repeat(first, tiles) + BM * inside


def _keys(starts: Ints, lo: Ints, hi: Ints, BN: int) -> tuple[Ints, Ints]:
    # number of segments of each tile, and all segments: PARTIAL, FULL, PARTIAL, without empty ones
    begin, end = np.minimum.reduceat(lo, starts) // KEYS * KEYS, np.maximum.reduceat(hi, starts)
    full = -(-(np.maximum.reduceat(lo, starts) - begin) // BN) * BN + begin
    stop = np.maximum((np.minimum.reduceat(hi, starts) - begin) // BN * BN + begin, full)
    # without a FULL tile there is one segment
    full, stop = (np.where(full < stop, x, end) for x in (full, stop))
    edges = np.stack([begin, full, stop, end], 1)
    kinds = np.broadcast_to([PARTIAL, FULL, PARTIAL], (len(starts), 3))
    seg = np.stack([edges[:, :-1], edges[:, 1:], kinds], 2)
    some = seg[..., 0] < seg[..., 1]
    return some.sum(1), seg[some]
