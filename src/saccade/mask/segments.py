"""Combine the reaches of all bands into sorted, disjoint segments of keys per tile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .forms import Grid, Lowered, Rows
from .tiling import FULL, PARTIAL, Reach, View, reaches

Ints = NDArray[Any]
_KINDS = np.array([PARTIAL, FULL, PARTIAL], np.int32)
# columns with at most this many runs are cut at the runs, others every `chunk` keys
_FEW = 64
# (tile, chunk) states that are computed at once
_STATES = 1 << 22
# grids with narrower blocks are not cut at the blocks
_NARROW = 16


def segments(lowered: Lowered, view: View, batch: int, chunk: int, quantum: int = 1) -> tuple[Ints, Ints]:
    """(counts, seg): segments per tile, int64 [C * batch * n_tiles], and their (begin, end, kind), int32 [n, 3].

    Tiles are ordered by class, batch entry and tile. chunk: keys with a common state if a mask has no closed form.
    """
    cells = len(view.nq) * batch * view.n_tiles
    if not cells or not lowered.nb:
        return np.zeros(cells, np.int64), np.zeros((0, 3), np.int32)
    bands = reaches(lowered, view, quantum)
    shape = (len(view.nq), batch, view.n_tiles)
    if any(reach.maps for reach in bands):
        return _by_chunks(bands, view, shape, max(chunk // quantum, 1) * quantum)
    if len(bands) == 1 and not bands[0].holes:
        return _three(bands[0], shape)
    return _sweep(bands, shape)


def _three(reach: Reach, shape: tuple[int, int, int]) -> tuple[Ints, Ints]:
    # one band: segments partial, full, partial
    if reach.full_lo is reach.any_lo and reach.full_hi is reach.any_hi:
        return _one(reach, shape, FULL)
    if reach.full_lo is reach.full_hi:
        return _one(reach, shape, PARTIAL)
    edges = np.empty((4, *shape), np.int32)
    edges[0], edges[3] = reach.any_lo, reach.any_hi
    some = np.less(reach.full_lo, reach.full_hi)
    edges[1] = np.where(some, reach.full_lo, edges[3])
    edges[2] = np.where(some, reach.full_hi, edges[3])
    edges = edges.reshape(4, -1)
    table = np.empty((edges.shape[1], 3, 3), np.int32)
    table[:, :, 0], table[:, :, 1], table[:, :, 2] = edges[:3].T, edges[1:].T, _KINDS
    nonempty = edges[:3] < edges[1:]
    # compress is much faster here than a boolean index
    return np.add.reduce(nonempty, axis=0, dtype=np.int64), table.reshape(-1, 3).compress(nonempty.T.reshape(-1), 0)


def _one(reach: Reach, shape: tuple[int, int, int], kind: int) -> tuple[Ints, Ints]:
    # at most one segment per tile
    table = np.empty((*shape, 3), np.int32)
    table[..., 0], table[..., 1], table[..., 2] = reach.any_lo, reach.any_hi, kind
    table = table.reshape(-1, 3)
    nonempty = table[:, 0] < table[:, 1]
    return nonempty, table.compress(nonempty, 0)


def _sweep(bands: list[Reach], shape: tuple[int, int, int]) -> tuple[Ints, Ints]:
    # sort all end points of a tile; between two of them the state is constant
    cells = shape[0] * shape[1] * shape[2]

    def column(value: Any) -> Ints:
        return np.ascontiguousarray(np.broadcast_to(value, shape)).reshape(cells, 1)

    terms: list[tuple[list[Ints], list[list[Ints]]]] = []
    points: list[Ints] = []
    for reach in bands:
        own = [column(v) for v in (reach.any_lo, reach.any_hi, reach.full_lo, reach.full_hi)]
        holes = [[column(v) for v in hole] for hole in reach.holes]
        terms.append((own, holes))
        points += own + [v for hole in holes for v in hole]
    edges = np.sort(np.concatenate(points, axis=1), axis=1)
    begin, end = edges[:, :-1], edges[:, 1:]
    state = np.zeros(begin.shape, np.int8)
    for (any_lo, any_hi, full_lo, full_hi), holes in terms:
        some = (any_lo <= begin) & (begin < any_hi)
        full = some & (full_lo <= begin) & (begin < full_hi)
        for none_lo, none_hi, part_lo, part_hi in holes:
            some &= (begin < none_lo) | (begin >= none_hi)
            full &= (begin < part_lo) | (begin >= part_hi)
        full &= some
        state = np.maximum(state, some.astype(np.int8) + full)
    state[begin >= end] = 0
    return _joined(begin, end, state, cells)


def _joined(begin: Ints, end: Ints, state: Ints, cells: int) -> tuple[Ints, Ints]:
    cell, place = np.nonzero(state)
    return joined(cell, begin[cell, place], end[cell, place], state[cell, place], cells)


def joined(cell: Ints, lo: Ints, hi: Ints, kind: Ints, cells: int) -> tuple[Ints, Ints]:
    """(counts, seg) as in `segments` from sorted pieces [n]; adjacent pieces of one kind in one cell are joined."""
    fresh = np.ones(len(cell), np.bool_)
    fresh[1:] = (cell[1:] != cell[:-1]) | (lo[1:] != hi[:-1]) | (kind[1:] != kind[:-1])
    starts = np.flatnonzero(fresh)
    seg = np.empty((len(starts), 3), np.int32)
    seg[:, 0], seg[:, 2] = lo[starts], kind[starts]
    if len(starts):
        seg[:-1, 1], seg[-1, 1] = hi[starts[1:] - 1], hi[-1]
    return np.bincount(cell[starts], minlength=cells), seg


def _by_chunks(bands: list[Reach], view: View, shape: tuple[int, int, int], chunk: int) -> tuple[Ints, Ints]:
    # a state for every tile and every chunk of keys
    counts: list[Ints] = []
    segs: list[Ints] = []
    maps = {id(part): part for reach in bands for part, _ in reach.maps}
    for c in range(shape[0]):
        edges = _edges(list(maps.values()), view, c, chunk)
        begin, end = edges[None, :-1], edges[None, 1:]
        step = max(1, _STATES // max(1, len(edges)))
        for b in range(shape[1]):
            # some tiles at a time, so that the states do not need more memory than the segments
            for first in range(0, shape[2] if len(edges) > 1 else 0, step):
                tiles = slice(first, min(first + step, shape[2]))
                state = np.zeros((tiles.stop - first, len(edges) - 1), np.int8)
                known = {key: _map_state(part, view, c, b, edges, tiles) for key, part in maps.items()}
                for reach in bands:
                    np.maximum(state, _chunk_state(reach, shape, (c, b, tiles), (begin, end), known), out=state)
                state[view.first[tiles] >= view.nq[c]] = 0
                bounds = np.broadcast_to(begin, state.shape), np.broadcast_to(end, state.shape)
                count, seg = _joined(*bounds, state, len(state))
                counts.append(count)
                segs.append(seg)
            if len(edges) < 2:
                counts.append(np.zeros(shape[2], np.int64))
    return np.concatenate(counts), np.concatenate([np.zeros((0, 3), np.int32), *segs])


def _chunk_state(
    reach: Reach, shape: Any, tiles: tuple[int, int, slice], chunks: tuple[Ints, Ints], known: dict[int, Any]
) -> Ints:
    begin, end = chunks

    def column(value: Any) -> Ints:
        return np.broadcast_to(value, shape)[tiles][:, None]

    some = (column(reach.any_lo) < end) & (column(reach.any_hi) > begin)
    some &= column(reach.any_lo) < column(reach.any_hi)
    full = (column(reach.full_lo) <= begin) & (column(reach.full_hi) >= end)
    for hole in reach.holes:
        none_lo, none_hi, part_lo, part_hi = (column(v) for v in hole)
        some &= (begin < none_lo) | (end > none_hi)
        full &= (end <= part_lo) | (begin >= part_hi) | (part_lo >= part_hi)
    for part, inside in reach.maps:
        map_some, map_full = known[id(part)]
        some &= map_some if inside else ~map_full
        full &= map_full if inside else ~map_some
    return some.astype(np.int8) + (full & some)


def _edges(maps: list[Any], view: View, c: int, chunk: int) -> Ints:
    nk = int(view.nk[c])
    cuts = [np.arange(0, nk, chunk)]
    for part in maps:
        if isinstance(part, Grid):
            if view.step == 1 and part.block_k >= _NARROW:
                cuts.append(np.arange(0, nk, part.block_k))
            continue
        mine = slice(int(view.k_start[c]), None, view.step)
        lo, hi = part.lo[:, mine], part.hi[:, mine]
        changes = np.flatnonzero(((lo[:, 1:] != lo[:, :-1]) | (hi[:, 1:] != hi[:, :-1])).any(0)) + 1
        if len(changes) <= _FEW:
            cuts.append(changes)
    cuts.append(np.array([nk]))
    return np.unique(np.concatenate(cuts)) if nk else np.zeros(1, np.int64)


def _map_state(part: Any, view: View, c: int, b: int, edges: Ints, tiles: slice) -> tuple[Ints, Ints]:
    # (some, full), bool [tiles, chunks], of a factor without closed form
    first, last = view.first[tiles], view.last[c, 0][tiles]
    starts = edges[:-1]
    if isinstance(part, Rows):
        e = b if part.batch > 1 else 0
        mine = slice(int(view.k_start[c]), None, view.step)
        lo, hi = view.row(part.lo[e, mine], c), view.row(part.hi[e, mine], c)
        some = (np.minimum.reduceat(lo, starts) <= last[:, None]) & (np.maximum.reduceat(hi, starts) > first[:, None])
        full = (np.maximum.reduceat(lo, starts) <= first[:, None]) & (np.minimum.reduceat(hi, starts) > last[:, None])
        return some, full
    keys = int(view.k_start[c]) + view.step * np.stack([starts, edges[1:] - 1], 1)
    rows = int(view.q_start[c]) + view.step * np.stack([first, np.maximum(last, first)], 1)
    rows = np.minimum(rows // part.block_q, part.n_q - 1)
    # no tile has rows of blocks before or after these
    before, behind = int(rows.min()), int(rows.max()) + 1
    states, rows, keys = part.columns(b, before, behind), rows - before, keys // part.block_k
    some = _pairs(np.logical_or, _pairs(np.logical_or, states, keys, 0), rows, 1)
    full = _pairs(np.logical_and, _pairs(np.logical_and, states, keys, 0), rows, 1)
    return some.T, full.T


def _pairs(function: Any, states: Ints, ends: Ints, axis: int) -> Ints:
    # `states` reduced over inclusive ranges [n, 2] of an axis. reduceat accepts no index after the last element,
    # so that element is added afterwards to the ranges that end there
    behind = states.shape[axis] - 1
    at = np.minimum(ends + np.array([0, 1]), behind).reshape(-1)
    picked = function.reduceat(states, at, axis=axis)
    picked = picked[::2] if axis == 0 else picked[:, ::2]
    reaching = ends[:, 1] == behind
    where: Any = reaching if axis == 0 else (slice(None), reaching)
    picked[where] = function(picked[where], states.take([behind], axis))
    return picked
