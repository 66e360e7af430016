"""The delta rule chunk by chunk: the values that the state takes up, e = v - Sᵀ k, solve a triangular system.

Let M = (k kᵀ) ⊙ e^(b_r - b_s) for s < r and X = (I + M diag(beta))⁻¹. A chunk has e = X (v - e^b k S) for the state S
before it. The state becomes e^(b_C) S + (e^(b_C - b) k)ᵀ beta e: the rest is the recurrence with values e. In the
backward the transposed system gives de = Xᵀ beta (Pᵀ do + e^(b_C - b) k D), and (e^b k)ᵀ de is subtracted from D. If
keys have length 1 and beta is at most 1, no number of X is above 1, because X consists of products of the projections
I - beta k kᵀ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .recurrent import (
    BF16,
    Chunk,
    between,
    chunk_owner,
    features,
    ramps,
    raw,
    row_at,
    side,
    square_at,
    times,
    wide,
)
from .recurrent_states import read_state, state_at, state_owner, write_slot


class Decayed(NamedTuple):
    """With decays per channel: keys and queries [B, T, H, K] decayed from their chunk's start, keys decayed to its end,
    and the decays of whole chunks [slots, H, K]. queries may be None.
    """

    keys: Any
    queries: Any
    leaving: Any
    whole: Any


class System(NamedTuple):
    """X and scale P of each chunk, [B, T, H, C], and the solution e or its gradient de [B, T, H, V]; None if unused.

    With decays per channel P is without the scale, and rows are `Decayed`.
    """

    inverse: Any
    pairs: Any
    solution: Any
    decayed: Any = None


@triton.jit
def _diagonal(a, H: tl.constexpr):
    # the blocks [C / H, H, H] on the diagonal of a [C, C]
    N: tl.constexpr = a.shape[0] // H
    n = tl.arange(0, N)
    same = n[:, None, None, None] == n[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(a, [N, H, N, H]), 0.0), 2)


@triton.jit
def _lower_left(x):
    # the lower left quarters [N, H, H] of matrices x [N, 2 H, 2 H]
    N: tl.constexpr = x.shape[0]
    H: tl.constexpr = x.shape[1] // 2
    i = tl.arange(0, 2)
    here = i[None, :, None, None, None] > i[None, None, None, :, None]
    return tl.sum(tl.sum(tl.where(here, tl.reshape(x, [N, 2, H, 2, H]), 0.0), 3), 1)


@triton.jit
def _beside(x, y):
    # two matrices [N, H, W] next to each other, [N, H, 2 W]
    z = tl.permute(tl.join(x, y), [0, 1, 3, 2])
    return tl.reshape(z, [x.shape[0], x.shape[1], 2 * x.shape[2]])


@triton.jit
def _products(a, b):
    # a b of matrices [N, H, H] in float32
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def inverse(a, C: tl.constexpr):
    """(I + a)⁻¹ of a strictly lower triangular a [C, C]: inverses of diagonal blocks of h give those of 2 h."""
    x = _of_16(_diagonal(a, 16))
    if C > 16:
        x = _twice(x, _diagonal(a, 32))
    if C > 32:
        x = _twice(x, _diagonal(a, 64))
    return tl.reshape(x, [C, C])


@triton.jit
def _of_16(a):
    # (I + a)⁻¹ of strictly lower triangular matrices a [N, 16, 16]
    i = tl.arange(0, 16)
    parted = i[None, :, None] ^ i[None, None, :]
    x = tl.where(parted == 0, 1.0, tl.where(parted == 1, -a, 0.0))
    for level in tl.static_range(1, 4):
        corner = tl.where(parted >> level == 1, a, 0.0)
        x -= _products(_products(x, corner), x)
    return x


@triton.jit
def _twice(x, a):
    # (I + a)⁻¹ of strictly lower triangular matrices a [N, 2 H, 2 H], from x [2 N, H, H], that of their diagonal blocks
    N: tl.constexpr = a.shape[0]
    H: tl.constexpr = a.shape[1] // 2
    pairs = tl.permute(tl.reshape(x, [N, 2, H, H]), [0, 2, 3, 1])
    first, second = tl.split(pairs)
    corner = _products(_products(second, _lower_left(a)), first)
    rows = tl.join(_beside(first, tl.zeros_like(first)), _beside(-corner, second))
    return tl.reshape(tl.permute(rows, [0, 3, 1, 2]), [N, 2 * H, 2 * H])


@triton.jit
def solve(arrays, sides, system, size, scale, config: tl.constexpr):
    """X, and scale P if `system.pairs` is given. A program owns a chunk."""
    C: tl.constexpr = config.C
    _, chunk = chunk_owner(sides.cu, size, 1, C)
    i, ok = tl.arange(0, C), chunk.ok
    m = tl.zeros([C, C], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    for f0 in range(0, config.K, config.BK):
        f = f0 + tl.arange(0, config.BK)
        keys = tl.trans(features(arrays.k, chunk, f, size, config))
        m = times(tl.trans(keys), keys, m, config.HOW)
        if system.pairs is not None:
            p = times(features(arrays.q, chunk, f, size, config), keys, p, config.HOW)
    decayed = between(sides, chunk, size, C)
    if system.pairs is not None:
        tl.store(square_at(system.pairs, chunk, size, C), p * decayed * scale, mask=ok[:, None])
    m = m * decayed * side(sides.beta, chunk, size)[None, :]
    m = tl.where(i[:, None] > i[None, :], m, 0.0)
    tl.store(square_at(system.inverse, chunk, size, C), inverse(m, C), mask=ok[:, None])


@triton.jit
def states(arrays, sides, system, slots, ends, size, config: tl.constexpr):
    """Write e, the state before each chunk to `slots` (States), and the last state to `ends`.

    A program owns all K rows and BV columns of a state. With NARROW, products round the state and the values to
    bfloat16. Their sums, and the state from chunk to chunk, are float32, but the last state is less precise.
    """
    V: tl.constexpr = config.V
    BV: tl.constexpr = config.BV
    C: tl.constexpr = config.C
    n, block, b, first, stop, slot = state_owner(sides.cu, size, config)
    there, s = read_state(ends.start, n, block, size, config)
    for c in range(0, tl.cdiv(stop - first, C)):
        write_slot(slots, slot + c, block, (s, 0.0, there), size, config)
        t = first + c * C + tl.arange(0, C)
        chunk = Chunk(slot + c, n, b, block.h, t, t < stop)
        ok = chunk.ok
        if sides.pairs is None:
            keys = features(arrays.k, chunk, block.f, size, config)
            reading = keys
        else:
            keys = _load_rows(system.decayed.leaving, chunk, block.f, size, config.K)
            reading = _load_rows(system.decayed.keys, chunk, block.f, size, config.K)
        x = tl.load(square_at(system.inverse, chunk, size, C), mask=ok[:, None], other=0.0)
        if config.NARROW:
            past = times(reading, s, tl.zeros([C, BV], tl.float32), BF16)
        else:
            past = wide(reading, s, tl.zeros([C, BV], tl.float32), config.HOW)
        if (sides.g is not None) and (sides.pairs is None):
            start, tail, whole = ramps(sides, chunk, size, C)
            past = past * start[:, None]
        if config.NARROW:
            u = times(x, raw(arrays.v, chunk, block.w, V).to(tl.float32) - past, tl.zeros([C, BV], tl.float32), BF16)
        else:
            u = wide(
                x, raw(arrays.v, chunk, block.w, V).to(tl.float32) - past, tl.zeros([C, BV], tl.float32), config.HOW
            )
        _store_rows(system.solution, chunk, block.w, u, size, V)
        u = u * side(sides.beta, chunk, size)[:, None]
        if sides.pairs is not None:
            s = s * _whole(system.decayed, chunk, block, size, config.K)[:, None]
        elif sides.g is not None:
            u = u * tail[:, None]
            s = s * whole
        if config.NARROW:
            s = times(tl.trans(keys), u, s, BF16)
        else:
            s = wide(tl.trans(keys), u, s, config.HOW)
    tl.store(state_at(ends.end, n, block, size, config.K, V), s.to(ends.end.dtype.element_ty), mask=there)


@triton.jit
def dstates(arrays, sides, system, dslots, ends, size, config: tl.constexpr):
    """Write de, the gradient of the state after each chunk to `dslots` (States), of the initial state to `ends`."""
    V: tl.constexpr = config.V
    BV: tl.constexpr = config.BV
    C: tl.constexpr = config.C
    n, block, b, first, stop, slot = state_owner(sides.cu, size, config)
    there, d = read_state(ends.start, n, block, size, config)
    count = tl.cdiv(stop - first, C)
    for i in range(0, count):
        c = count - 1 - i
        write_slot(dslots, slot + c, block, (d, 0.0, there), size, config)
        t = first + c * C + tl.arange(0, C)
        chunk = Chunk(slot + c, n, b, block.h, t, t < stop)
        ok = chunk.ok
        if sides.pairs is None:
            keys = features(arrays.k, chunk, block.f, size, config)
        else:
            keys = _load_rows(system.decayed.leaving, chunk, block.f, size, config.K)
        y = raw(arrays.do.rows, chunk, block.w, V)
        p = tl.load(square_at(system.pairs, chunk, size, C), mask=ok[:, None], other=0.0)
        x = tl.load(square_at(system.inverse, chunk, size, C), mask=ok[:, None], other=0.0)
        if sides.pairs is not None:
            p = p * arrays.do.scale
        du = wide(keys, d, tl.zeros([C, BV], tl.float32), config.HOW)
        if (sides.g is not None) and (sides.pairs is None):
            start, tail, whole = ramps(sides, chunk, size, C)
            du = du * tail[:, None]
        du = wide(tl.trans(p), y, du, config.HOW) * side(sides.beta, chunk, size)[:, None]
        lost = wide(tl.trans(x), du, tl.zeros([C, BV], tl.float32), config.HOW)
        _store_rows(system.solution, chunk, block.w, lost, size, V)
        if sides.pairs is not None:
            # the scale multiplies the operand that is not an unmodified 16-bit array
            queries = _load_rows(system.decayed.queries, chunk, block.f, size, config.K) * arrays.do.scale
            d = d * _whole(system.decayed, chunk, block, size, config.K)[:, None]
            d = wide(tl.trans(queries), y, d, config.HOW)
            d = wide(tl.trans(_load_rows(system.decayed.keys, chunk, block.f, size, config.K)), -lost, d, config.HOW)
        else:
            y = y.to(tl.float32) * arrays.do.scale
            if sides.g is not None:
                y, lost = y * start[:, None], lost * start[:, None]
                d = d * whole
            d = wide(tl.trans(features(arrays.q, chunk, block.f, size, config)), y, d, config.HOW)
            d = wide(tl.trans(keys), -lost, d, config.HOW)
    tl.store(state_at(ends.end, n, block, size, config.K, V), d, mask=there)


@triton.jit
def _load_rows(p, chunk, f, size, K: tl.constexpr):
    # numbers f of tokens of an array [B, T, H, K]
    at = p + row_at(chunk, size)[:, None] * K + f[None, :]
    return tl.load(at, mask=chunk.ok[:, None] & (f < K)[None, :], other=0.0)


@triton.jit
def _whole(decayed, chunk, block, size, K: tl.constexpr):
    # the decays of a chunk's channels [BK]
    at = decayed.whole + (chunk.slot.to(tl.int64) * size.H + chunk.h) * K + block.f
    return tl.load(at, mask=block.f < K, other=0.0)


@triton.jit
def _store_rows(p, chunk, w, x, size, V: tl.constexpr):
    # columns w of tokens of an array [B, T, H, V]
    to = p + row_at(chunk, size)[:, None] * V + w[None, :]
    tl.store(to, x.to(p.dtype.element_ty), mask=chunk.ok[:, None] & (w < V)[None, :])
