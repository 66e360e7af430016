"""dK and dV with selected keys. A program owns a tile of keys and a chunk of the groups of rows that selected them.

Lists differ in length: all rows may select the first block. Chunks have the same size, and `add_chunks` adds their
float32 sums in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .backward import Keys, dkdv_step
from .common import Attention, Drop
from .masks import ANY, ROWS, keys_of_rows, list_of, place_of
from .rows import rows_of, store_rows


class Chunks(NamedTuple):
    """`Lists` transposed. A cell is a range of `keys` keys of a key head: one or more blocks next to each other.

    An entry is a group of rows that selects a block of a cell. groups int32: of all entries, in the order of cells.
    bits int64: which blocks of its cell an entry selects, or None if a cell is one block. ptr, first: the first entry
    and the first chunk of each cell, and the ends, [cells + 1]. cell [n]: of each chunk; n is an upper bound, and
    chunks that do not exist have no entries. size: entries of a chunk. cells: of all lists. per_head: cells of a key
    head. tiles: of BN keys in a cell. rows, heads: of an entry the rows of all heads, and those heads, constants of the
    kernel, because a division by a number takes twenty instructions per row. parts: float32 [1 | B, n, tiles, BN, D +
    DV], the sums of each chunk; B if all batch entries share the lists.
    """

    groups: Any
    bits: Any
    ptr: Any
    first: Any
    cell: Any
    n: Any
    size: Any
    cells: Any
    per_head: Any
    keys: Any
    tiles: Any
    rows: Any
    heads: Any
    parts: Any


@triton.jit
def _head(place, chunks, cell, batch):
    """(batch entry, key head, first key) of a cell; batch: of the program, or 0 if each has its own lists."""
    Hk = place.Hq // place.G
    head = (cell // chunks.per_head).to(tl.int32)
    return batch + head // Hk, head % Hk, ((cell % chunks.per_head) * chunks.keys).to(tl.int32)


@triton.jit
def _plain_rows(attention, chunks, keys, ok, here, rows):
    """[first, last): whole tiles of rows of a chunk that see all keys of a tile, and for which no pair is tested.

    ok: which keys of the tile are in the cell. here: the chunk's first entry. rows: those of its groups, of all heads.
    """
    BM: tl.constexpr = attention.config.BM
    MASK: tl.constexpr = attention.config.MASK
    G: tl.constexpr = chunks.heads
    place = attention.place
    lists = attention.arrays.lists
    end = rows // G
    first, last = end, end
    # a bias may exclude pairs, and so may the lists of cells of several blocks
    tests = chunks.bits is not None or attention.scores.bias is not None or attention.scores.distances is not None
    if MASK <= ROWS and not tests:
        low, high = tl.min(keys.j, 0), tl.max(tl.where(ok, keys.j, ANY), 0)
        each: tl.constexpr = chunks.rows // G
        for a0 in range(0, end, 512):
            a = a0 + tl.arange(0, 512)
            group = tl.load(chunks.groups + here + a // each, mask=a < end, other=0)
            lo, hi = keys_of_rows(place, keys.record, keys.b, group * lists.rows + a % each, MASK)
            plain = (a < end) & (lo <= low) & (high < hi)
            first = tl.minimum(first, tl.min(tl.where(plain, a, end), 0))
            last = tl.minimum(last, tl.min(tl.where(plain | (a < first), end, a), 0))
    first = (first * G + BM - 1) // BM * BM
    return first, tl.maximum(first, last * G // BM * BM)


@triton.jit(do_not_specialize=["below", "seed_low", "seed_high"])
def dkdv_of_chunks(arrays, chunks, scores, below, seed_low, seed_high, config: tl.constexpr):
    """The sums of a chunk for a tile of keys. Grid: tiles of a cell x chunks x batches."""
    drop = Drop(below, seed_low, seed_high)
    _dkdv_of_chunks(chunks, Attention(arrays, scores, drop, place_of(arrays.words), config))


@triton.jit
def _dkdv_of_chunks(chunks, attention):
    config: tl.constexpr = attention.config
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    D: tl.constexpr = config.D
    DV: tl.constexpr = config.DV
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    place = attention.place
    lists = attention.arrays.lists
    i = tl.program_id(0)
    part, i = i.to(tl.int64), i // chunks.tiles
    cell = tl.load(chunks.cell + i % chunks.n)
    here = tl.load(chunks.ptr + cell) + (i % chunks.n - tl.load(chunks.first + cell)) * chunks.size
    entries = tl.minimum(tl.load(chunks.ptr + cell + 1) - here, chunks.size).to(tl.int32)
    b, hk, key = _head(place, chunks, cell, i // chunks.n)
    c = tl.program_id(0) % chunks.tiles * BN + tl.arange(0, BN)
    j, ok = key + c, (c < chunks.keys) & (key + c < place.Tk)
    b_k = rows_of(attention.arrays.k, (b, hk, j), ok, D, BLOCK_D, True)
    b_v = rows_of(attention.arrays.v, (b, hk, j), ok, DV, BLOCK_DV, True)
    acc_k = tl.zeros([BN, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BN, BLOCK_DV], tl.float32)
    sums = tl.zeros([BN], tl.float32)
    R: tl.constexpr = chunks.rows
    G: tl.constexpr = chunks.heads
    rows = entries * R
    record = list_of(place, 0, b, hk * G, 0)[2]
    first, last = _plain_rows(attention, chunks, Keys(b_k, b_v, j, b, hk, record), ok, here, rows)
    for a0 in range(first, last, BM):
        a = a0 + tl.arange(0, BM)
        group, r = tl.load(chunks.groups + here + a // R), a % R
        t, h = group * lists.rows + r // G, hk * G + r % G
        keys = Keys(b_k, b_v, j, b, h, record)
        acc_k, acc_v, sums = dkdv_step((acc_k, acc_v, sums), keys, attention, t, t >= 0, None, False)
    # the rows before those, and the rows after them
    for a0 in range(0, rows - last + first, BM):
        a = tl.where(a0 < first, a0, a0 - first + last) + tl.arange(0, BM)
        there, r = a < rows, a % R
        group = tl.load(chunks.groups + here + a // R, mask=there, other=0)
        t, h = group * lists.rows + r // G, hk * G + r % G
        there = there & (t < place.Tq)
        inside = there[None, :] & ok[:, None]
        if chunks.bits is not None:
            bits = tl.load(chunks.bits + here + a // R, mask=there, other=0)
            inside = inside & (((bits[None, :] >> tl.minimum(c // lists.block, 63)[:, None]) & 1) != 0)
        keys = Keys(b_k, b_v, j, b, h, record)
        acc_k, acc_v, sums = dkdv_step((acc_k, acc_v, sums), keys, attention, t, there, inside, False)
    at = chunks.parts + (part * BN + tl.arange(0, BN))[:, None] * (D + DV)
    d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    tl.store(at + d, acc_k * attention.scores.scale, mask=ok[:, None] & (d < D))
    tl.store(at + D + dv, acc_v, mask=ok[:, None] & (dv < DV))


@triton.jit
def add_chunks(words, chunks, grads, config: tl.constexpr):
    """dk and dv of a tile of keys from the sums of its chunks, in order. Grid: tiles of a cell x cells x 1 | B."""
    BN: tl.constexpr = config.BN
    D: tl.constexpr = config.D
    DV: tl.constexpr = config.DV
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    place = place_of(words)
    i = tl.program_id(0)
    tile, i = i % chunks.tiles, i // chunks.tiles
    cell, batch = (i % chunks.cells).to(tl.int64), i // chunks.cells
    b, hk, key = _head(place, chunks, cell, batch)
    c = tile * BN + tl.arange(0, BN)
    j, ok = key + c, (c < chunks.keys) & (key + c < place.Tk)
    d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    acc_k = tl.zeros([BN, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BN, BLOCK_DV], tl.float32)
    for chunk in range(tl.load(chunks.first + cell), tl.load(chunks.first + cell + 1)):
        part = (batch.to(tl.int64) * chunks.n + chunk) * chunks.tiles + tile
        at = chunks.parts + (part * BN + tl.arange(0, BN))[:, None] * (D + DV)
        acc_k += tl.load(at + d, mask=ok[:, None] & (d < D), other=0.0)
        acc_v += tl.load(at + D + dv, mask=ok[:, None] & (dv < DV), other=0.0)
    store_rows(grads.dk, (b, hk, j), ok, acc_k, D, BLOCK_D)
    store_rows(grads.dv, (b, hk, j), ok, acc_v, DV, BLOCK_DV)
