"""Kernels that run before and after the others: interleaved lse and delta, dQ from sums to rows, transposed values."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

import triton


class SumTile(NamedTuple):
    """A tile of the sums of dQ: rows, columns, the number of sums per tile, and the columns taken at a time.

    STORED: the numbers of a row of dQ; further columns are zeros. ADDED: every term is added to the sums, which begin
    at zero; otherwise the first term is stored.
    """

    BM: int
    D: int
    KINDS: int
    COLUMNS: int
    STORED: int
    ADDED: bool


@triton.jit
def prepare(lse, delta, stat, sums, counts, sizes, TILE: tl.constexpr):
    """Write lse in base 2 and delta of one row tile of one head next to each other, and zero its counts.

    It zeroes the number of tickets drawn too, and its sums of dQ if ADDED.

    lse, delta: `launch.Array` [B, Tq, Hq]; stat [B, Hq, M, 2, BM]; sizes: Hq and Tq. Rows without an allowed key
    (lse = -inf) and rows past the end get lse = inf, so that P = 0.
    """
    BM: tl.constexpr = TILE.BM
    D: tl.constexpr = TILE.D
    KINDS: tl.constexpr = TILE.KINDS
    Hq, Tq = sizes
    m, h, b, M = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    tile = (b * Hq + h) * M + m
    t = m * BM + tl.arange(0, BM)
    low = tl.load(lse.p + b.to(tl.int64) * lse.b + t.to(tl.int64) * lse.t + h, t < Tq, float("-inf"))
    less = tl.load(delta.p + b.to(tl.int64) * delta.b + t.to(tl.int64) * delta.t + h, t < Tq, 0.0)
    empty = low == float("-inf")
    at = stat + tile.to(tl.int64) * (2 * BM) + tl.arange(0, BM)
    tl.store(at, tl.where(empty, float("inf"), low * 1.4426950408889634))
    tl.store(at + BM, tl.where(empty, 0.0, less))
    COLUMNS: tl.constexpr = TILE.COLUMNS
    for kind in tl.static_range(KINDS):
        of = tile + kind * (tl.num_programs(0) * Hq * tl.num_programs(2))
        if TILE.ADDED:
            for n in tl.static_range(0, BM * D, BM * COLUMNS):
                here = n + tl.arange(0, BM * COLUMNS)
                tl.store(sums + of.to(tl.int64) * (BM * D) + here, tl.zeros([BM * COLUMNS], tl.float32))
        tl.store(counts + 1 + of, 0)
    if tile == 0:
        tl.store(counts, 0)


@triton.jit
def convert(sums, counts, dq, scale, sizes, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Write one tile of dQ, a `launch.Array`, scaled and rounded.

    sums: in rows if ROWS, which takes all columns at a time, otherwise in the order of `backward_by_columns`. Unless
    ADDED, they are undefined where `counts` says that no key tile has stored a term.
    """
    BM: tl.constexpr = TILE.BM
    D: tl.constexpr = TILE.D
    KINDS: tl.constexpr = TILE.KINDS
    Hq, Tq = sizes
    m, h, b, M = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(0)
    tile = ((b * Hq + h) * M + m).to(tl.int64)
    COLUMNS: tl.constexpr = TILE.COLUMNS
    for first in tl.static_range(0, D, COLUMNS):
        here = first * BM + tl.arange(0, BM * COLUMNS)
        at = sums + tile * (BM * D) + here
        if TILE.ADDED:
            x = tl.load(at)
        else:
            x = tl.load(at, tl.load(counts + 1 + tile) > 0, 0.0)
        for kind in tl.static_range(1, KINDS):
            x += tl.load(sums + (tile + kind * (M * Hq * tl.num_programs(2))) * (BM * D) + here)
        if ROWS:
            x = tl.reshape(x, (BM, D))
        else:
            # 64 rows, 8 columns | warp, 8 rows, 4 column pairs | row of a pair, column of a pair
            x = tl.reshape(x, (BM // 64, COLUMNS // 8, 4, 8, 4, 2, 2))
            x = tl.reshape(tl.permute(x, (0, 2, 5, 3, 1, 4, 6)), (BM, COLUMNS))
        t, d = m * BM + tl.arange(0, BM), first + tl.arange(0, COLUMNS)
        at = dq.p + b.to(tl.int64) * dq.b + t.to(tl.int64)[:, None] * dq.t + h.to(tl.int64) * dq.h + d[None, :]
        stored = t[:, None] < Tq
        if D > TILE.STORED:
            stored &= d[None, :] < TILE.STORED
        tl.store(at, (x * scale).to(dq.p.dtype.element_ty), stored)


@triton.jit
def transpose(v, out, Hk, Tk, D: tl.constexpr, BN: tl.constexpr):
    """Transpose v, a `launch.Array` [B, Tk, Hk, D], to out [B, Hk, D, n BN], with zeros beyond Tk.

    Grid: n tiles of keys, heads, batch entries. Each 16 keys are two groups of 8, and each of four threads has two
    neighbours of both groups; the four keys of a thread become contiguous.
    """
    n, hk, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, d = n * BN + tl.arange(0, BN), tl.arange(0, D)
    at = v.p + b.to(tl.int64) * v.b + t.to(tl.int64)[:, None] * v.t + hk.to(tl.int64) * v.h + d[None, :]
    x = tl.load(at, t[:, None] < Tk, 0)
    x = tl.reshape(tl.permute(tl.reshape(x, (BN // 16, 2, 4, 2, D)), (0, 2, 1, 3, 4)), (BN, D))
    row = ((b * Hk + hk) * D + d).to(tl.int64) * (tl.num_programs(0) * BN)
    tl.store(out + row[:, None] + t[None, :], tl.trans(x))
