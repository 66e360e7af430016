"""Products of one row, with the norm before them and what is done with the result: the steps of a model for one token.

Such a product reads each weight once, in little more time than a kernel needs to start. So each kernel does much, warps
do not wait for one another, and where OVERLAP, a kernel starts while the one before it still runs, reads its weights,
and only then waits for the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .overlap import start, wait


class Weight(NamedTuple):
    """A contiguous matrix [m, n] and a bias [m] or None."""

    p: Any
    bias: Any = None


class Projections(NamedTuple):
    """The weights of q, k and v, and the cosines and sines [positions, D / 2] by which q and k are rotated."""

    q: Any
    k: Any
    v: Any
    cos: Any
    sin: Any


class Row(NamedTuple):
    """A vector [n], and the weight [n] and epsilon of an RMS norm that it passes first; None for no norm."""

    p: Any
    norm: Any = None
    eps: Any = 0.0


class Cache(NamedTuple):
    """Arrays [1, capacity, Hk, D] of keys and values with the strides of slots and heads, and int32 [1], the length."""

    k: Any
    k_t: Any
    k_h: Any
    v: Any
    v_t: Any
    v_h: Any
    length: Any
    capacity: Any


class Sizes(NamedTuple):
    """Constants of a product: n numbers of a row, PIECE at a time; FIRST pieces before a program waits for the row, and
    LATER pieces at a time after that; RAGGED, whether the last ones end beyond the row; ROWS of a program, one for each
    of its warps, which then need not wait for one another; OVERLAP as above.
    """

    n: Any
    PIECE: Any
    FIRST: Any
    LATER: Any
    RAGGED: Any
    ROWS: Any
    OVERLAP: Any


class Heads(NamedTuple):
    """Constants of a projection: heads of queries and of keys, D numbers each."""

    Hq: Any
    Hk: Any
    D: Any


@triton.jit
def _pieces(p, step, ok, at, MANY: tl.constexpr, sizes: tl.constexpr):
    # MANY pieces, from number `at` on, of rows that are `step` apart
    PIECE: tl.constexpr = sizes.PIECE
    pieces = ()
    for i in tl.static_range(MANY):
        k = at + i * PIECE + tl.arange(0, PIECE)
        there = ok[:, None]
        if sizes.RAGGED:
            there = there & (k < sizes.n)[None, :]
        pieces = pieces + (tl.load(p + step[:, None] + k[None, :], mask=there, other=0.0),)
    return pieces


@triton.jit
def _added(row, weights, sums, squares, at, EARLY: tl.constexpr, sizes: tl.constexpr):
    # the sums of products and of squares, with more pieces from number `at` on; EARLY: those that do not wait
    MANY: tl.constexpr = sizes.FIRST if EARLY else sizes.LATER
    COUNT: tl.constexpr = len(sums)
    tiles = ()
    for j in tl.static_range(COUNT):
        tiles = tiles + (_pieces(weights[j][0], weights[j][1].to(tl.int64) * sizes.n, weights[j][2], at, MANY, sizes),)
    # each warp has the whole row, in the layout of the weights
    ROWS: tl.constexpr = sizes.ROWS
    same = (0 * tl.arange(0, ROWS)).to(tl.int64)
    norm = ()
    if row.norm is not None:
        norm = _pieces(row.norm, same, same == 0, at, MANY, sizes)
    if EARLY:
        wait(sizes.OVERLAP)
    numbers = _pieces(row.p, same, same == 0, at, MANY, sizes)
    for i in tl.static_range(MANY):
        x = numbers[i].to(tl.float32)
        if row.norm is not None:
            squares += x * x
            x *= norm[i].to(tl.float32)
        more = ()
        for j in tl.static_range(COUNT):
            more = more + (sums[j] + tiles[j][i].to(tl.float32) * x,)
        sums = more
    return sums, squares


@triton.jit
def _products(row, weights, COUNT: tl.constexpr, sizes: tl.constexpr):
    # the row times rows of COUNT weights, each of which is a pointer, numbers of rows, and which of them there are
    FIRST: tl.constexpr = sizes.FIRST
    LATER: tl.constexpr = sizes.LATER
    PIECE: tl.constexpr = sizes.PIECE
    ROWS: tl.constexpr = sizes.ROWS
    squares = tl.zeros([ROWS, PIECE], tl.float32)
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (squares,)
    sums, squares = _added(row, weights, sums, squares, 0, True, sizes)
    if sizes.n > FIRST * PIECE:
        # not unrolled: registers would not suffice for long rows
        for at in range(FIRST * PIECE, sizes.n, LATER * PIECE):
            sums, squares = _added(row, weights, sums, squares, at, False, sizes)
    scale = 1.0
    if row.norm is not None:
        scale = tl.rsqrt(tl.sum(squares, 1) / sizes.n + row.eps)
    results = ()
    for j in tl.static_range(COUNT):
        results = results + (tl.sum(sums[j], 1) * scale,)
    return results


@triton.jit
def _with_bias(y, weight, at, ok):
    if weight.bias is not None:
        y += tl.load(weight.bias + at, mask=ok, other=0.0).to(tl.float32)
    return y


@triton.jit
def product(row, weight, added, out, m, sizes: tl.constexpr):
    """out [m] = weight row, plus `added` [m] unless it is None. Grid: blocks of ROWS rows of the weight."""
    start(sizes.OVERLAP)
    at = tl.program_id(0) * sizes.ROWS + tl.arange(0, sizes.ROWS)
    ok = at < m
    y = _with_bias(_products(row, ((weight.p, at, ok),), 1, sizes)[0], weight, at, ok)
    if added is not None:
        y += tl.load(added + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def gated(row, gate, up, out, m, sizes: tl.constexpr):
    """out [m] = silu(gate row) · (up row). Grid: blocks of 2 ROWS rows of both weights."""
    start(sizes.OVERLAP)
    ROWS: tl.constexpr = sizes.ROWS
    first = tl.program_id(0) * (2 * ROWS) + tl.arange(0, ROWS)
    last = first + ROWS
    # two rows of both for each warp, which reads the row once for them
    one, two = first < m, last < m
    weights = ((gate.p, first, one), (up.p, first, one), (gate.p, last, two), (up.p, last, two))
    sums = _products(row, weights, 4, sizes)
    _store_gated(out, sums[0], sums[1], gate, up, first, one)
    _store_gated(out, sums[2], sums[3], gate, up, last, two)


@triton.jit
def _store_gated(out, g, u, gate, up, at, ok):
    g, u = _with_bias(g, gate, at, ok), _with_bias(u, up, at, ok)
    tl.store(out + at, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _pairs(row, weight, h, pair, ok, sizes: tl.constexpr, D: tl.constexpr):
    # the products of head h with both halves of these pairs, which are D / 2 apart
    at = h * D + pair
    y, z = _products(row, ((weight.p, at, ok), (weight.p, at + D // 2, ok)), 2, sizes)
    return _with_bias(y, weight, at, ok), _with_bias(z, weight, at + D // 2, ok)


@triton.jit
def project(row, to, cache, out, sizes: tl.constexpr, heads: tl.constexpr):
    """Write the rotated queries [Hq, D] to out, and each head's rotated key and its value to the cache's last slot.

    to: Projections. Grid: heads of q, k and v, times blocks of ROWS pairs.
    """
    start(sizes.OVERLAP)
    D: tl.constexpr = heads.D
    HALF: tl.constexpr = heads.D // 2
    BLOCKS: tl.constexpr = (HALF + sizes.ROWS - 1) // sizes.ROWS
    h = tl.program_id(0) // BLOCKS
    pair = tl.program_id(0) % BLOCKS * sizes.ROWS + tl.arange(0, sizes.ROWS)
    ok = pair < HALF
    slot = tl.load(cache.length).to(tl.int64) - 1
    fits = ok & (slot >= 0) & (slot < cache.capacity)
    angle = slot * HALF + pair
    cos, sin = tl.load(to.cos + angle, mask=fits, other=0.0), tl.load(to.sin + angle, mask=fits, other=0.0)
    if h < heads.Hq:
        y, z = _pairs(row, to.q, h, pair, ok, sizes, D)
        at = out + h * D + pair
        tl.store(at, (y * cos - z * sin).to(out.dtype.element_ty), mask=ok)
        tl.store(at + HALF, (y * sin + z * cos).to(out.dtype.element_ty), mask=ok)
    elif h < heads.Hq + heads.Hk:
        y, z = _pairs(row, to.k, h - heads.Hq, pair, ok, sizes, D)
        at = cache.k + slot * cache.k_t + (h - heads.Hq) * cache.k_h + pair
        tl.store(at, (y * cos - z * sin).to(cache.k.dtype.element_ty), mask=fits)
        tl.store(at + HALF, (y * sin + z * cos).to(cache.k.dtype.element_ty), mask=fits)
    else:
        h -= heads.Hq + heads.Hk
        y, z = _pairs(row, to.v, h, pair, ok, sizes, D)
        at = cache.v + slot * cache.v_t + h * cache.v_h + pair
        tl.store(at, y.to(cache.v.dtype.element_ty), mask=fits)
        tl.store(at + HALF, z.to(cache.v.dtype.element_ty), mask=fits)
