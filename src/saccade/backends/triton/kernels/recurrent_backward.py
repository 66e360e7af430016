"""Gradients of recurrences over matrix states, chunk by chunk: D, that of a state, in reverse sequence, then the rest.

D before a chunk is e^(g of it) D + scale (e^b q)ᵀ do. Within the chunk du = Pᵀ do + e^(b_C - b) k D, and with
G = scale (do uᵀ) ⊙ e^(b_r - b_s) the others are dq = G k + scale e^b do Sᵀ and dk = Gᵀ q + e^(b_C - b) u Dᵀ. That of
g_t sums what passes from tokens before t, or the state, to t and after: nothing is subtracted. A program owns a block
of what it writes, and a sum over blocks is left to the host, so nothing is added atomically.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .recurrent import (
    FLOAT32,
    between,
    extent,
    features,
    features_turned,
    first_slot,
    ramps,
    rows,
    sequence_of,
    side,
    state_at,
    times,
    unmapped,
    values,
)  # fmt: skip


class Cotangent(NamedTuple):
    """do [B, T, H, V] as Tokens; of normalised rows what it is multiplied with, and the last column, [B, T, H]."""

    rows: Any
    inverse: Any
    sums: Any


@triton.jit
def cotangent(do, b, t, ok, h, w, size, V: tl.constexpr):
    """The gradient of sums of values, a tile [C, BV]."""
    there = ok[:, None] & (w < V)[None, :]
    x = tl.load(rows(do.rows, b, t, h)[:, None] + w[None, :], mask=there, other=0.0)
    if do.inverse is not None:
        x = x.to(tl.float32) * side(do.inverse, b, t, ok, h, size)[:, None]
        x = tl.where((w == V)[None, :], side(do.sums, b, t, ok, h, size)[:, None], x)
    return x


@triton.jit
def dstates(
    q, do, sides, dfinal, kept, dinitial, size, scale, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    MAP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after each chunk into `kept` [slots, H, K, W], of the first into `dinitial`."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    columns: tl.constexpr = (W + BV - 1) // BV
    program = tl.program_id(0)
    w = (program % columns) * BV + tl.arange(0, BV)
    f = (program // columns % tiles) * BK + tl.arange(0, BK)
    h = program // (columns * tiles) % size.H
    n = program // (columns * tiles * size.H)
    b, first, stop = extent(sides.cu, n, size)
    slot = first_slot(sides.cu, n, size, C)
    there = (f < K)[:, None] & (w < W)[None, :]
    d = tl.zeros([BK, BV], tl.float32)
    if dfinal is not None:
        d = tl.load(state_at(dfinal, n, h, size, f, w, K, W), mask=there, other=0.0)
    count = tl.cdiv(stop - first, C)
    for i in range(0, count):
        c = count - 1 - i
        if kept is not None:
            tl.store(state_at(kept, slot + c, h, size, f, w, K, W), d, mask=there)
        t = first + c * C + tl.arange(0, C)
        ok = t < stop
        queries = features_turned(q, b, t, ok, h // size.G, f, K, MAP)
        x = cotangent(do, b, t, ok, h, w, size, V).to(tl.float32) * scale
        if sides.g is not None:
            start, _tail, whole = ramps(sides, b, t, ok, h, size, C)
            x = x * start[:, None]
            d = d * whole
        d = times(queries, x, d, FLOAT32)
    tl.store(state_at(dinitial, n, h, size, f, w, K, W), d, mask=there)


@triton.jit
def _through_decays(weights, entering, leaving, passing, C: tl.constexpr):
    # of the logarithm of each decay [C]: weights [C, C] of pairs, what comes from the state and goes into it, and past
    i = tl.arange(0, C)
    earlier = i[:, None] > i[None, :]
    # [t, s]: sums over r >= t; of these s < t
    after = tl.cumsum(tl.where(earlier, weights, 0.0), 0, reverse=True)
    pairs = tl.sum(tl.where(earlier, after, 0.0), 1)
    return pairs + tl.cumsum(entering, 0, reverse=True) + (tl.cumsum(leaving, 0) - leaving) + passing


@triton.jit
def dqdk(
    q, k, v, do, sides, kept, dkept, dq, dk, dg, size, scale, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, HOW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, H, K] and shares of dg [blocks of K, B, T, H]. A program owns a chunk and BK of the features."""
    tiles: tl.constexpr = (K + BK - 1) // BK
    program = tl.program_id(0)
    tile = program % tiles
    h = program // tiles % size.H
    slot = program // (tiles * size.H)
    n = sequence_of(sides.cu, slot, size, C)
    b, first, stop = extent(sides.cu, n, size)
    t = first + (slot - first_slot(sides.cu, n, size, C)) * C + tl.arange(0, C)
    ok = t < stop
    f = tile * BK + tl.arange(0, BK)
    at = slot if CAUSAL else n
    from_state = tl.zeros([C, BK], tl.float32)
    to_state = tl.zeros([C, BK], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    past = tl.zeros([BK], tl.float32)
    for w0 in range(0, W, BV):
        w = w0 + tl.arange(0, BV)
        there = (f < K)[:, None] & (w < W)[None, :]
        s = tl.load(state_at(kept, at, h, size, f, w, K, W), mask=there, other=0.0)
        d = tl.load(state_at(dkept, at, h, size, f, w, K, W), mask=there, other=0.0)
        x = cotangent(do, b, t, ok, h, w, size, V)
        u = values(v, sides, b, t, ok, h, w, size, V, W)
        from_state = times(x, tl.trans(s), from_state, HOW)
        to_state = times(u, tl.trans(d), to_state, HOW)
        if CAUSAL:
            pairs = times(x, tl.trans(u), pairs, HOW)
        past += tl.sum(s * d, 1)
    from_state = from_state * scale
    queries = features(q, b, t, ok, h // size.G, f, K, MAP)
    keys = features(k, b, t, ok, h // size.G, f, K, MAP)
    out = (b.to(tl.int64) * size.T + t) * size.H + h
    if CAUSAL:
        pairs = pairs * scale * between(sides, b, t, ok, h, size, C)
        if sides.g is not None:
            start, tail, whole = ramps(sides, b, t, ok, h, size, C)
            from_state = from_state * start[:, None]
            to_state = to_state * tail[:, None]
            weights = pairs * times(queries, tl.trans(keys), tl.zeros([C, C], tl.float32), HOW)
            entering = tl.sum(from_state * queries.to(tl.float32), 1)
            leaving = tl.sum(to_state * keys.to(tl.float32), 1)
            found = _through_decays(weights, entering, leaving, whole * tl.sum(past, 0), C)
            tl.store(dg + tile.to(tl.int64) * size.rows + out, found, mask=ok)
        from_state = times(pairs, keys, from_state, HOW)
        to_state = times(tl.trans(pairs), queries, to_state, HOW)
    inside = ok[:, None] & (f < K)[None, :]
    if MAP != "":
        from_state = unmapped(features(q, b, t, ok, h // size.G, f, K, ""), from_state, MAP)
        to_state = unmapped(features(k, b, t, ok, h // size.G, f, K, ""), to_state, MAP)
    tl.store(dq + out[:, None] * K + f[None, :], from_state.to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + out[:, None] * K + f[None, :], to_state.to(dk.dtype.element_ty), mask=inside)


@triton.jit
def dvalues(
    q, k, v, do, sides, dkept, dv, dbeta, size, scale, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, HOW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dv [B, T, H, V] and shares of dbeta [blocks of V, B, T, H]. A program owns a chunk and BV columns."""
    columns: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    column = program % columns
    h = program // columns % size.H
    slot = program // (columns * size.H)
    n = sequence_of(sides.cu, slot, size, C)
    b, first, stop = extent(sides.cu, n, size)
    t = first + (slot - first_slot(sides.cu, n, size, C)) * C + tl.arange(0, C)
    ok = t < stop
    w = column * BV + tl.arange(0, BV)
    at = slot if CAUSAL else n
    du = tl.zeros([C, BV], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    for f0 in range(0, K, BK):
        f = f0 + tl.arange(0, BK)
        there = (f < K)[:, None] & (w < V)[None, :]
        keys = features(k, b, t, ok, h // size.G, f, K, MAP)
        d = tl.load(state_at(dkept, at, h, size, f, w, K, W), mask=there, other=0.0)
        du = times(keys, d, du, HOW)
        if CAUSAL:
            p = times(features(q, b, t, ok, h // size.G, f, K, MAP), tl.trans(keys), p, HOW)
    if CAUSAL:
        if sides.g is not None:
            _, tail, _ = ramps(sides, b, t, ok, h, size, C)
            du = du * tail[:, None]
        p = p * scale * between(sides, b, t, ok, h, size, C)
        x = tl.where((w < V)[None, :], cotangent(do, b, t, ok, h, w, size, V), 0.0)
        du = times(tl.trans(p), x, du, HOW)
    out = (b.to(tl.int64) * size.T + t) * size.H + h
    inside = ok[:, None] & (w < V)[None, :]
    if sides.beta is not None:
        raw = tl.load(rows(v, b, t, h)[:, None] + w[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(dbeta + column.to(tl.int64) * size.rows + out, tl.sum(du * raw, 1), mask=ok)
        du = du * side(sides.beta, b, t, ok, h, size)[:, None]
    tl.store(dv + out[:, None] * V + w[None, :], du.to(dv.dtype.element_ty), mask=inside)
