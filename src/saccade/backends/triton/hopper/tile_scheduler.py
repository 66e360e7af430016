"""Which tiles a program computes next: pieces of work in the forward, key tiles and their row tiles in the backward.

`schedule.py` makes the lists on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class TileScheduler(NamedTuple):
    """The pieces of work of a forward, which are tiles of rows of every query head, and the keys that they visit.

    counter: int32 [1], the number of pieces drawn so far. lists: a `schedule.TileLists`. n_work = n_tiles · BH pieces;
    the first `long` tiles of all heads come before the others. BH = B · Hq; G query heads per key head; `section` heads
    are computed together; Bm: 1 or B.
    """

    counter: Any
    lists: Any
    n_work: Any
    n_tiles: Any
    long: Any
    BH: Any
    Hq: Any
    G: Any
    section: Any
    Bm: Any


@gluon.jit
def piece_of(w, scheduler):
    """(batch entry, head, batch entry of the mask, row tile) of piece w.

    The long tiles of all heads come first, then sections of heads whose keys share the L2 cache. Each section starts
    with its longest tiles.
    """
    section = scheduler.section
    start = 0
    if w < scheduler.long * scheduler.BH:
        section = scheduler.BH
    else:
        start = scheduler.long
        w -= scheduler.long * scheduler.BH
    per = section * (scheduler.n_tiles - start)
    first = (w // per) * section
    inside = gl.minimum(section, scheduler.BH - first)
    rest = w % per
    bh = first + rest % inside
    b = bh // scheduler.Hq
    mask_b = gl.where(scheduler.Bm > 1, b, 0)
    tile = gl.load(scheduler.lists.order + mask_b * scheduler.n_tiles + start + rest // inside)
    return b, bh % scheduler.Hq, mask_b, tile


class BackwardSizes(NamedTuple):
    """B batch entries, Hk key heads, Tk keys of a head; M row tiles and N key tiles of a head; `section` heads of
    neighbouring tickets."""

    B: Any
    Hk: Any
    Tk: Any
    M: Any
    N: Any
    section: Any


class KeyBlock(NamedTuple):
    """The keys of a ticket: key tile n of key head hk of batch entry b.

    place: of the key tile among those of its head. cell: of its list in a schedule. long: 1 for a long list, which has
    ranks and sums of its own, else 0.
    """

    b: Any
    hk: Any
    n: Any
    place: Any
    cell: Any
    long: Any


class Queue(NamedTuple):
    """How the key tile at a place takes its turn in adding to sums of dQ.

    rank_ptr, ranks: of a schedule, for the key tile's batch entry and kind. counts: how many key tiles have added to
    each row tile. start: the first row tile of this kind in the sums.
    """

    rank_ptr: Any
    ranks: Any
    counts: Any
    start: Any
    place: Any


@gluon.jit
def block_of(ticket, schedule, sizes, CONFIG: gl.constexpr):
    """The keys of a ticket: sections of heads; in a section key tiles in their order, and for each tile all heads."""
    of = ticket // (sizes.N * sizes.section)
    width = gl.minimum(sizes.section, sizes.B * sizes.Hk - of * sizes.section)
    inner = ticket - of * (sizes.N * sizes.section)
    place = inner // width
    bh = of * sizes.section + inner % width
    b = bh // sizes.Hk
    cell = place
    if CONFIG.LISTS_B:
        cell += b * sizes.N
    n = place
    long = 0
    if schedule.order is not None:
        n = gl.load(schedule.order + cell)
        n, long = n & ((1 << 30) - 1), n >> 30
    return KeyBlock(b, bh % sizes.Hk, n, place, cell, long)


@gluon.jit
def queue_of(block, schedule, counts, sizes, CONFIG: gl.constexpr):
    """The queue of a key tile; counts begins with the number of tickets drawn."""
    KINDS: gl.constexpr = 1 if schedule.order is None else 2
    at = block.long
    if CONFIG.LISTS_B:
        at += block.b * KINDS
    start = block.long * (sizes.B * sizes.Hk * CONFIG.G * sizes.M)
    return Queue(schedule.rank_ptr + at * sizes.M, schedule.ranks, counts + 1 + start, start, block.place)


class RowTile(NamedTuple):
    """The row tile of a step.

    Segment s of [first, last) in seg; row tile m of the segment, its final row tile, its kind; query head g of G.
    """

    seg: Any
    first: Any
    last: Any
    s: Any
    m: Any
    final: Any
    kind: Any
    g: Any


@gluon.jit
def _first_segment(first, last, UP: gl.constexpr):
    # a key tile without segments reads one and does not use it
    final = gl.maximum(last - 1, 0)
    return gl.minimum(first, final) if UP else final


@gluon.jit
def _segment(seg, s, UP: gl.constexpr):
    # the first and the final row tile of segment s, and its kind
    low, high, kind = gl.load(seg + 3 * s), gl.load(seg + 3 * s + 1), gl.load(seg + 3 * s + 2)
    if UP:
        return low, high - 1, kind
    else:
        return high - 1, low, kind


@gluon.jit
def first_tile(block, schedule, G: gl.constexpr, UP: gl.constexpr, WARPS: gl.constexpr):
    """The first row tile that a key tile visits, and the number of steps; UP: row tiles follow in ascending order."""
    seg = schedule.seg
    first, last = gl.load(schedule.ptr + block.cell), gl.load(schedule.ptr + block.cell + 1)
    # a mask of blocks has dozens of segments: the lanes of a warp count their tiles, in every warp
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    tiles = 0
    for s in range(first, last, 32):
        at, inside = seg + 3 * (s + lane), s + lane < last
        tiles += gl.sum(gl.load(at + 1, inside, 0) - gl.load(at, inside, 0), 0)
    s = _first_segment(first, last, UP)
    m, end, kind = _segment(seg, s, UP)
    g = 0
    return RowTile(seg, first, last, s, m, end, kind, g), tiles * G


@gluon.jit
def next_tile(tile, UP: gl.constexpr):
    """The next row tile of the segment, else the first one of the next segment, else that of the next query head."""
    seg, first, last, s, m, end, kind, g = tile
    STEP: gl.constexpr = 1 if UP else -1
    if m == end:
        s += STEP
        if (s < first) | (s >= last):
            s = _first_segment(first, last, UP)
            g += 1
        m, end, kind = _segment(seg, s, UP)
    else:
        m += STEP
    return RowTile(seg, first, last, s, m, end, kind, g)


@gluon.jit
def rank_of(queue, m):
    """The number of earlier key tiles that add to row tile m. A run is (first place, offset), a rank place + offset."""
    low, high = gl.load(queue.rank_ptr + m), gl.load(queue.rank_ptr + m + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(queue.ranks + 2 * middle) <= queue.place:
            low = middle
        else:
            high = middle
    return queue.place + gl.load(queue.ranks + 2 * low + 1)


@gluon.jit
def row_tile_of(block, tile, sizes, G: gl.constexpr):
    """The number of a row tile, counted over all query heads and batch entries."""
    return ((block.b * sizes.Hk + block.hk) * G + tile.g) * sizes.M + tile.m
