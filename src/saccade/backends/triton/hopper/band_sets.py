"""Which bands of a mask touch each tile that needs a test, and whether every query and every key has a partner.

The kind of a PARTIAL segment becomes PARTIAL | set << 2, where bit n of the set stands for band n. The backward has one
set for each 64 keys of a tile, the second 4 bits higher. Tiles lie inside blocks, so a band touches a tile if one of
its blocks does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....mask.forms import Lowered
from ....mask.segments import joined
from ....mask.tiling import FULL, PARTIAL
from ....plan_parts import Part, Ranges
from .schedule import LONG_BIT, BackwardSchedule

MAX_BANDS = 4
# number of keys that have a set of their own in the backward
HALF = 64
Ints = Any


def forward_sets(part: Part, tile_q: int, tile_k: int, from_first: bool) -> tuple[Ints, Ints]:
    """(ptr, seg) of the part's tiles, with sets where the mask has several bands.

    from_first: key tiles of a mask of one band without blocks may start at the first key that a row tile sees.
    """
    low = part.masks[0]
    if from_first and low.nb == 1 and not low.grids:
        return _from_first(part, tile_q, tile_k)
    ptr, seg = (whole := part.tiled(tile_q, tile_k, tile_k)).ptr, whole.seg
    if low.nb == 1:
        return ptr, seg
    cells = np.arange(len(ptr) - 1)
    return _with_sets(ptr, seg, tile_k, [[(cells, one.tiled(tile_q, tile_k, tile_k)) for one in _by_band(part)]])


def _from_first(part: Part, tile_q: int, tile_k: int) -> tuple[Ints, Ints]:
    # up to three segments per tile. The ends of what a row sees never decrease, so those of its first and last row are
    # the extremes of a tile
    Tq, Tk = int(part.nq[0]), int(part.nk[0])
    rows = np.arange(0, Tq, tile_q)
    (begin, stop), (full, end) = (
        [np.broadcast_to(x.clip(0, Tk), (part.Bm, len(rows))) for x in part.masks[0].keys_of(0, t)]
        for t in (rows, np.minimum(rows + tile_q, Tq) - 1)
    )
    end = np.maximum(begin, end)
    full = begin - (begin - full) // tile_k * tile_k
    stop = full + (stop - full) // tile_k * tile_k
    inside = full < stop
    full, stop = np.where(inside, full, end), np.where(inside, stop, end)
    seg = np.stack([begin, full, full, stop, stop, end], -1).reshape(-1, 3, 2)
    some = seg[..., 0] < seg[..., 1]
    kinds = np.broadcast_to([PARTIAL, FULL, PARTIAL], some.shape)
    ptr = np.concatenate([[0], np.cumsum(some.sum(1))])
    return ptr, np.concatenate([seg[some], kinds[some][:, None]], 1)


def backward_sets(part: Part, schedule: BackwardSchedule, tile_q: int, tile_k: int) -> BackwardSchedule:
    """The schedule of the part's tiles, with sets where the mask has several bands or blocks."""
    low, Tk = part.masks[0], int(part.nk[0])
    if low.nb == 1 and not low.grids:
        return schedule
    N, halves = -(-Tk // tile_k), -(-Tk // HALF)
    batch, n = np.divmod(np.arange(len(schedule.ptr) - 1), N)
    n = n if schedule.order is None else schedule.order % LONG_BIT
    bands = [one.transposed(HALF, tile_q) for one in _by_band(part)]
    touching = []
    for half in range(tile_k // HALF):
        at = n * (tile_k // HALF) + half
        touching.append([(np.where(at < halves, batch * halves + at, -1), ranges) for ranges in bands])
    in_rows = np.array([tile_q, tile_q, 1])
    ptr, seg = _with_sets(schedule.ptr, schedule.seg * in_rows, tile_q, touching)
    return schedule._replace(ptr=ptr, seg=seg // in_rows if len(seg) else schedule.seg)


def _by_band(part: Part) -> list[Part]:
    low = part.masks[0]
    return [
        replace(part, masks=(Lowered(low.bands[:, n : n + 1], low.uses[n : n + 1], low.rows, low.grids),))
        for n in range(low.nb)
    ]


def _with_sets(ptr: Ints, seg: Ints, unit: int, touching: Sequence[Sequence[tuple[Ints, Ranges]]]) -> tuple[Ints, Ints]:
    # Adds the sets of bands to the kinds of PARTIAL segments, which are cut every `unit`. touching[half][n]: for each
    # cell here the corresponding cell of band n's ranges, or -1 if there is none, and those ranges.
    cell, seg = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)), seg[: ptr[-1]].astype(np.int64)
    pieces = np.where(seg[:, 2] == PARTIAL, -(-(seg[:, 1] - seg[:, 0]) // unit), 1)
    at = np.repeat(np.arange(len(seg)), pieces)
    before = np.arange(len(at)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cell, (begin, end, kind) = cell[at], seg[at].T.copy()
    begin += before * unit
    end = np.where(kind == PARTIAL, np.minimum(begin + unit, end), end)
    cut = kind == PARTIAL
    for half, bands in enumerate(touching):
        for n, (cells, ranges) in enumerate(bands):
            met = _meets(ranges, cells[cell[cut]], begin[cut], end[cut])
            kind[cut] |= met.astype(np.int64) << 2 + MAX_BANDS * half + n
    counts, seg = joined(cell, begin, end, kind, len(ptr) - 1)
    return np.concatenate([[0], np.cumsum(counts)]), seg


def _meets(ranges: Ranges, cell: Ints, begin: Ints, end: Ints) -> Ints:
    # whether some segment of a cell overlaps [begin, end)
    if not len(ranges.seg):
        return np.zeros(len(cell), np.bool_)
    own = np.repeat(np.arange(len(ranges.ptr) - 1), np.diff(ranges.ptr))
    last = np.searchsorted((own << 32) + ranges.seg[:, 0], (cell << 32) + end) - 1
    return (last >= 0) & (own[last] == cell) & (ranges.seg[last, 1] > begin)


def all_seen(part: Part, tile_q: int, tile_k: int, Tq: int, Tk: int) -> bool:
    """Whether every row sees a key and every key is seen; only then may excluded pairs be computed with weight 0."""
    low = part.masks[0]
    if low.nb == 1 and not low.rows and not low.grids:
        # the bounds of what a row sees are linear in the row, so its length is least at the first or last row
        ends = (low, np.array([0, Tq - 1])), (low.transpose(), np.array([0, Tk - 1]))
        return all(bool((lo < hi).all()) for one, at in ends for lo, hi in [one.keys_of(0, at)])
    some = np.zeros((part.Bm, -(-Tq // tile_q) * tile_q), np.bool_)
    change = np.zeros((part.Bm, Tk + 1), np.int64)

    def count(b: Ints, begin: Ints, end: Ints) -> None:
        np.add.at(change, (b, begin), 1)
        np.subtract.at(change, (b, end), 1)

    for n, one in enumerate(_by_band(part)):
        ranges = one.tiled(tile_q, tile_k, tile_k)
        cell, (begin, end, kind) = np.repeat(np.arange(len(ranges.ptr) - 1), np.diff(ranges.ptr)), ranges.seg.T
        batch, tile = np.divmod(cell, -(-Tq // tile_q))
        # all rows of a tile see its FULL segments; each row sees its own part of a PARTIAL segment
        whole = kind == FULL
        some.reshape(part.Bm, -1, tile_q)[batch[whole], tile[whole]] = True
        count(batch[whole], begin[whole], end[whole])
        b, tile, begin, end = (np.repeat(x[~whole], tile_q) for x in (batch, tile, begin, end))
        t = tile * tile_q + np.arange(len(tile)) % tile_q
        lo, hi = (np.broadcast_to(a, (part.Bm, Tq))[b, np.minimum(t, Tq - 1)] for a in low.keys_of(n, np.arange(Tq)))
        lo, hi = np.maximum(lo, begin), np.minimum(hi, end)
        here = (lo < hi) & (t < Tq)
        some[b[here], t[here]] = True
        count(b[here], lo[here], hi[here])
    return bool(some[:, :Tq].all() and (np.cumsum(change, 1)[:, :Tk] > 0).all())
