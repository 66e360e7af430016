"""The delta rule chunk by chunk: what the state takes up, e = v - Sᵀ k, solves a triangular system.

With M = (k kᵀ) ⊙ e^(b_r - b_s) for s < r and X = (I + M diag(beta))⁻¹ a chunk has e = X (v - e^b k S) for the state S
before it, which becomes e^(b_C) S + (e^(b_C - b) k)ᵀ beta e: the rest is the recurrence of the values e. Backwards the
same system turned gives de = Xᵀ beta (Pᵀ do + e^(b_C - b) k D), and D loses (e^b k)ᵀ de. Where keys are of length 1 and
beta is at most 1, no number of X is above 1: they are products of the projections I - beta k kᵀ.
"""

from __future__ import annotations

import triton.language as tl

import triton

from .recurrent import (
    between,
    chunk_owner,
    features,
    given_state,
    keep,
    ramps,
    raw,
    side,
    square_at,
    state_at,
    state_owner,
    times,
    wide,
)


@triton.jit
def _inverse(a, C: tl.constexpr):
    # (I + a)⁻¹ of a [C, C] below the diagonal: blocks of h on it are inverted, and give those of 2 h
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    i = tl.arange(0, C)
    parted = i[:, None] ^ i[None, :]
    x = tl.where(parted == 0, 1.0, tl.where(parted == 1, -a, 0.0))
    for level in range(1, LEVELS):
        corner = tl.where(parted >> level == 1, a, 0.0)
        zeros = tl.zeros([C, C], tl.float32)
        x -= wide(x, wide(corner, x, zeros), zeros)
    return x


@triton.jit
def solve(
    q, k, sides, inverse, pairs, size, scale, K: tl.constexpr, HOW: tl.constexpr, BK: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """X into inverse [B, T, H, C], and scale P into pairs [B, T, H, C] where wanted. A program owns a chunk."""
    _, h, slot, _n, b, t, ok = chunk_owner(sides.cu, size, 1, C)
    i = tl.arange(0, C)
    m = tl.zeros([C, C], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    for f0 in range(0, K, BK):
        f = f0 + tl.arange(0, BK)
        keys = tl.trans(features(k, b, t, ok, h // size.G, f, K, ""))
        m = times(tl.trans(keys), keys, m, HOW)
        if pairs is not None:
            p = times(features(q, b, t, ok, h // size.G, f, K, ""), keys, p, HOW)
    decayed = between(sides, slot, h, size, C)
    if pairs is not None:
        tl.store(square_at(pairs, b, t, h, size, C), p * decayed * scale, mask=ok[:, None])
    m = m * decayed * side(sides.beta, b, t, ok, h, size)[None, :]
    x = _inverse(tl.where(i[:, None] > i[None, :], m, 0.0), C)
    tl.store(square_at(inverse, b, t, h, size, C), x, mask=ok[:, None])


@triton.jit
def states(
    k, v, sides, initial, inverse, e, kept, final, size, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """e [B, T, H, V], the state before each chunk into `kept` and the last one into `final`.

    A program owns all K rows and BV columns of a state.
    """
    n, h, f, w, b, first, stop, slot = state_owner(sides.cu, size, K, V, BK, BV, C)
    there, s = given_state(initial, n, h, size, f, w, K, V, V)
    for c in range(0, tl.cdiv(stop - first, C)):
        keep(kept, slot + c, h, size, f, w, s, 0.0, there, K, V)
        t = first + c * C + tl.arange(0, C)
        ok = t < stop
        keys = features(k, b, t, ok, h // size.G, f, K, "")
        x = tl.load(square_at(inverse, b, t, h, size, C), mask=ok[:, None], other=0.0)
        held = wide(keys, s, tl.zeros([C, BV], tl.float32))
        if sides.g is not None:
            start, tail, whole = ramps(sides, slot + c, h, size, C)
            held = held * start[:, None]
        u = wide(x, raw(v, b, t, ok, h, w, V).to(tl.float32) - held, tl.zeros([C, BV], tl.float32))
        tl.store(_rows_at(e, b, t, h, w, size, V), u.to(e.dtype.element_ty), mask=ok[:, None] & (w < V)[None, :])
        u = u * side(sides.beta, b, t, ok, h, size)[:, None]
        if sides.g is not None:
            u = u * tail[:, None]
            s = s * whole
        s = wide(tl.trans(keys), u, s)
    tl.store(state_at(final, n, h, size, f, w, K, V), s, mask=there)


@triton.jit
def dstates(
    q, k, do, sides, dfinal, inverse, pairs, de, dkept, dinitial, size, scale, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """de [B, T, H, V], the gradient of the state after each chunk into `dkept`, of the first into `dinitial`."""
    n, h, f, w, b, first, stop, slot = state_owner(sides.cu, size, K, V, BK, BV, C)
    there, d = given_state(dfinal, n, h, size, f, w, K, V, V)
    count = tl.cdiv(stop - first, C)
    for i in range(0, count):
        c = count - 1 - i
        keep(dkept, slot + c, h, size, f, w, d, 0.0, there, K, V)
        t = first + c * C + tl.arange(0, C)
        ok = t < stop
        keys = features(k, b, t, ok, h // size.G, f, K, "")
        y = raw(do, b, t, ok, h, w, V)
        p = tl.load(square_at(pairs, b, t, h, size, C), mask=ok[:, None], other=0.0)
        x = tl.load(square_at(inverse, b, t, h, size, C), mask=ok[:, None], other=0.0)
        du = wide(keys, d, tl.zeros([C, BV], tl.float32))
        if sides.g is not None:
            start, tail, whole = ramps(sides, slot + c, h, size, C)
            du = du * tail[:, None]
        du = wide(tl.trans(p), y, du) * side(sides.beta, b, t, ok, h, size)[:, None]
        lost = wide(tl.trans(x), du, tl.zeros([C, BV], tl.float32))
        tl.store(_rows_at(de, b, t, h, w, size, V), lost.to(de.dtype.element_ty), mask=ok[:, None] & (w < V)[None, :])
        y = y.to(tl.float32) * scale
        if sides.g is not None:
            y, lost = y * start[:, None], lost * start[:, None]
            d = d * whole
        d = wide(tl.trans(features(q, b, t, ok, h // size.G, f, K, "")), y, d)
        d = wide(tl.trans(keys), -lost, d)
    tl.store(state_at(dinitial, n, h, size, f, w, K, V), d, mask=there)


@triton.jit
def _rows_at(p, b, t, h, w, size, V: tl.constexpr):
    # pointers of columns w of tokens t of an array [B, T, H, V]
    return p + ((b.to(tl.int64) * size.T + t) * size.H + h)[:, None] * V + w[None, :]
