"""Selected keys: lists of blocks for groups of rows, and the same lists transposed for the owners of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton


class Lists(NamedTuple):
    """Lists p, int32 [1 | B, Hk, groups, n] of blocks, ascending and without repetitions, and how many entries of each
    count, [1 | B, Hk, groups]. b: lists per batch entry, or 0; block: keys per entry, a constant of the kernel, because
    a division by a number takes twenty instructions per key; rows: rows of a group."""

    p: Any
    counts: Any
    b: Any
    groups: Any
    n: Any
    block: Any
    rows: Any


@triton.jit
def rows_of_groups(place, lists, hk, i, BM: tl.constexpr):
    """(group, rows t, heads, which exist) of block i; row r of a group is query r // G of head hk G + r mod G."""
    blocks = (lists.rows * place.G + BM - 1) // BM
    group = i // blocks
    r = i % blocks * BM + tl.arange(0, BM)
    t = group * lists.rows + r // place.G
    ok = (r < lists.rows * place.G) & (t < place.Tq)
    # rows past the end see what the last one sees: a key that no row sees may be NaN
    t = tl.minimum(t, tl.minimum((group + 1) * lists.rows, place.Tq) - 1)
    return group, t, hk * place.G + r % place.G, ok


@triton.jit
def in_blocks(place, lists, i, BM: tl.constexpr):
    """(block, the rest of number i), where blocks of all groups of a key head are counted fastest."""
    blocks = lists.groups * ((lists.rows * place.G + BM - 1) // BM)
    return i % blocks, i // blocks


@triton.jit
def row_block(place, lists, BM: tl.constexpr):
    """(group, batch entry, heads, key head, rows t, which exist) of a program. Grid: blocks of groups x B x Hk."""
    block, i = in_blocks(place, lists, tl.program_id(0), BM)
    b, hk = i % place.B, i // place.B
    group, t, h, ok = rows_of_groups(place, lists, hk, block, BM)
    return group, b, h, hk, t, ok


@triton.jit
def list_at(lists, b, hk, group):
    """(entries, number of keys) of the list of a group."""
    at = b * lists.b + hk * lists.groups + group
    return lists.p + at.to(tl.int64) * lists.n, tl.load(lists.counts + at) * lists.block


@triton.jit
def plain_keys(attention, entries, end, seen):
    """How many keys of a list of `end` keys come first, in whole tiles, that all rows see and that need no test.

    seen: [lo, hi), the keys that all rows of a tile see.
    """
    BN: tl.constexpr = attention.config.BN
    block: tl.constexpr = attention.arrays.lists.block
    n = end * 0
    # a bias may exclude pairs
    if attention.scores.bias is None and attention.scores.distances is None:
        lo, hi = seen
        for e0 in range(0, end // block, 64):
            e = e0 + tl.arange(0, 64)
            first = tl.load(entries + e, mask=e < end // block, other=0) * block
            n += tl.sum(((e < end // block) & (first >= lo) & (first + block <= hi)).to(tl.int32), 0)
        # entries ascend, so these are the first ones, unless there is one before them
        if end > 0:
            n = tl.where(tl.load(entries) * block >= lo, n * block // BN * BN, 0)
    return n


@triton.jit
def plain_at(lists, entries, first, BN: tl.constexpr):
    """The keys first <= a < first + BN of a list, all of which exist."""
    if lists.block % BN == 0:
        # of one block, next to each other
        j = tl.load(entries + first // lists.block) * lists.block + first % lists.block + tl.arange(0, BN)
    else:
        a = first + tl.arange(0, BN)
        j = tl.load(entries + a // lists.block) * lists.block + a % lists.block
    return j


@triton.jit
def keys_at(place, lists, entries, first, end, BN: tl.constexpr):
    """The keys first <= a < min(first + BN, end) of a list, and which of them exist."""
    a = first + tl.arange(0, BN)
    j = tl.load(entries + a // lists.block, mask=a < end, other=0) * lists.block + a % lists.block
    return j, (a < end) & (j < place.Tk)
