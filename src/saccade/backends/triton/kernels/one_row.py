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
    """Constants of a product: n numbers of a row, PIECE at a time, of which a program holds those of HELD numbers; ROWS
    of a program, one for each of its warps, which then need not wait for one another; OVERLAP as above.
    """

    n: Any
    PIECE: Any
    HELD: Any
    ROWS: Any
    OVERLAP: Any


class Heads(NamedTuple):
    """Constants of a projection: heads of queries and of keys, D numbers each."""

    Hq: Any
    Hk: Any
    D: Any


@triton.jit
def _pieces(p, step, ok, at: tl.constexpr, sizes: tl.constexpr):
    # the numbers at to at + HELD of rows that are `step` apart, PIECE at a time
    END: tl.constexpr = min(at + sizes.HELD, sizes.n)
    PIECE: tl.constexpr = sizes.PIECE
    pieces = ()
    for k0 in tl.static_range(at, END, PIECE):
        k = k0 + tl.arange(0, PIECE)
        there = ok[:, None]
        if k0 + PIECE > sizes.n:
            there = there & (k < sizes.n)[None, :]
        pieces = pieces + (tl.load(p + step[:, None] + k[None, :], mask=there, other=0.0),)
    return pieces


@triton.jit
def _finished(y, squares, row, bias, at, ok, sizes: tl.constexpr):
    # the sums of a product, divided by the root of the mean square, plus the bias
    y = tl.sum(y, 1)
    if row.norm is not None:
        y *= tl.rsqrt(tl.sum(squares, 1) / sizes.n + row.eps)
    if bias is not None:
        y += tl.load(bias + at, mask=ok, other=0.0).to(tl.float32)
    return y


@triton.jit
def _products(row, a, b, ok, TWO: tl.constexpr, sizes: tl.constexpr):
    # the row times rows of a weight and, if TWO, of another; a and b: its pointer, its bias, the numbers of the rows
    n: tl.constexpr = sizes.n
    HELD: tl.constexpr = sizes.HELD
    PIECE: tl.constexpr = sizes.PIECE
    ROWS: tl.constexpr = sizes.ROWS
    y = tl.zeros([ROWS, PIECE], tl.float32)
    z, squares = y, y
    from_a, from_b, same = a[2].to(tl.int64) * n, b[2].to(tl.int64) * n, 0 * a[2]
    for at in tl.static_range(0, n, HELD):
        first = _pieces(a[0], from_a, ok, at, sizes)
        second = first
        if TWO:
            second = _pieces(b[0], from_b, ok, at, sizes)
        weights = first
        if row.norm is not None:
            weights = _pieces(row.norm, same, ok, at, sizes)
        if at == 0:
            wait(sizes.OVERLAP)
        # each warp has the whole row
        numbers = _pieces(row.p, same, ok, at, sizes)
        for i in tl.static_range((min(HELD, n - at) + PIECE - 1) // PIECE):
            x = numbers[i].to(tl.float32)
            if row.norm is not None:
                squares += x * x
                x *= weights[i].to(tl.float32)
            y += first[i].to(tl.float32) * x
            if TWO:
                z += second[i].to(tl.float32) * x
    y = _finished(y, squares, row, a[1], a[2], ok, sizes)
    if TWO:
        z = _finished(z, squares, row, b[1], b[2], ok, sizes)
        return y, z
    else:
        return y, y


@triton.jit
def product(row, weight, added, out, m, sizes: tl.constexpr):
    """out [m] = weight row, plus `added` [m] unless it is None. Grid: blocks of ROWS rows of the weight."""
    start(sizes.OVERLAP)
    at = tl.program_id(0) * sizes.ROWS + tl.arange(0, sizes.ROWS)
    ok = at < m
    rows = weight.p, weight.bias, at
    y, _ = _products(row, rows, rows, ok, False, sizes)
    if added is not None:
        y += tl.load(added + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def gated(row, gate, up, out, m, sizes: tl.constexpr):
    """out [m] = silu(gate row) · (up row). Grid: blocks of ROWS rows of both weights."""
    start(sizes.OVERLAP)
    at = tl.program_id(0) * sizes.ROWS + tl.arange(0, sizes.ROWS)
    ok = at < m
    g, u = _products(row, (gate.p, gate.bias, at), (up.p, up.bias, at), ok, True, sizes)
    tl.store(out + at, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _pairs(row, weight, h, pair, ok, sizes: tl.constexpr, D: tl.constexpr):
    # the products of head h with both halves of these pairs, which are D / 2 apart
    at = h * D + pair
    return _products(row, (weight.p, weight.bias, at), (weight.p, weight.bias, at + D // 2), ok, True, sizes)


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
