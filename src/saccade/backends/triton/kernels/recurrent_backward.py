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
    between,
    chunk_owner,
    entered,
    features,
    give_state,
    given_state,
    given_sums,
    keep,
    kept_pairs,
    left,
    ramps,
    raw,
    side,
    spans,
    state_at,
    state_owner,
    sums_at,
    through,
    times,
    unmapped,
    wide,
)  # fmt: skip


class Cotangent(NamedTuple):
    """do [B, T, H, V] as Tokens; of normalised rows what it is multiplied with, and that of the divisor, [B, T, H]."""

    rows: Any
    inverse: Any
    sums: Any


@triton.jit
def cotangent(do, b, t, ok, h, w, size, V: tl.constexpr):
    """The gradient of sums of values, a tile [C, BV]."""
    x = raw(do.rows, b, t, ok, h, w, V)
    if do.inverse is not None:
        x = x.to(tl.float32) * side(do.inverse, b, t, ok, h, size)[:, None]
    return x


@triton.jit
def dstates(
    q, do, sides, dfinal, kept, dinitial, size, scale, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after each chunk, or where not CAUSAL of the last one, into `kept`, of the first into
    `dinitial` [N, H, K, W]."""
    n, h, f, w, b, first, stop, slot = state_owner(sides.cu, size, K, V, BK, BV, C)
    there, d = given_state(dfinal, n, h, size, f, w, K, V, W)
    z = given_sums(dfinal, n, h, size, f, K, V, W)
    count = tl.cdiv(stop - first, C)
    for i in range(0, count):
        c = count - 1 - i
        if CAUSAL:
            keep(kept, slot + c, h, size, f, w, d, z, there, K, V)
        t = first + c * C + tl.arange(0, C)
        ok = t < stop
        x = raw(do.rows, b, t, ok, h, w, V)
        queries = entered(q, sides, b, t, ok, h, f, size, K, MAP)
        # what is multiplied with one number a token is the one of both that is no array of 16 bits as it is
        if do.inverse is not None:
            queries = queries.to(tl.float32)
            z += tl.sum(queries * side(do.sums, b, t, ok, h, size)[:, None], 0)
            queries = queries * side(do.inverse, b, t, ok, h, size)[:, None]
        elif (sides.pairs is not None) or MAP != "":
            queries = queries.to(tl.float32) * scale
            if sides.pairs is not None:
                d = d * through(sides, b, t, ok, h, f, size, K)[:, None]
        elif sides.g is not None:
            start, _tail, whole = ramps(sides, slot + c, h, size, C)
            x = x.to(tl.float32) * (start * scale)[:, None]
            d = d * whole
        else:
            x = x.to(tl.float32) * scale
        d = wide(tl.trans(queries), x, d)
    if not CAUSAL:
        keep(kept, n, h, size, f, w, d, z, there, K, V)
    give_state(dinitial, n, h, size, f, w, d, z, there, K, V, W)


@triton.jit
def _through_decays(weights, entering, leaving, passing, exact: tl.constexpr, C: tl.constexpr):
    # of the logarithm of each decay [C]: weights [C, C] of pairs, what comes from the state and goes into it, and past
    i = tl.arange(0, C)
    earlier = i[:, None] > i[None, :]
    # [t, s]: sums over r >= t; of these s < t
    after = spans(i[:, None] <= i[None, :], tl.where(earlier, weights, 0.0), exact)
    pairs = tl.sum(tl.where(earlier, after, 0.0), 1)
    return pairs + tl.cumsum(entering, 0, reverse=True) + (tl.cumsum(leaving, 0) - leaving) + passing


@triton.jit
def meetings(
    v, do, sides, kept, dkept, b, t, ok, n, h, slot, f, size, scale, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    CAUSAL: tl.constexpr, HOW: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Sums over the columns that values, cotangents and states have in common: (do Sᵀ [C, BK], v Dᵀ [C, BK], of a chunk
    do vᵀ [C, C] with s <= r, S ⊙ D [BK]); v without beta, do with the scale."""
    C: tl.constexpr = t.shape[0]
    at = slot if CAUSAL else n
    from_state = tl.zeros([C, f.shape[0]], tl.float32)
    to_state = tl.zeros([C, f.shape[0]], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    past = tl.zeros([f.shape[0]], tl.float32)
    for w0 in range(0, V, BV):
        w = w0 + tl.arange(0, BV)
        there = (f < K)[:, None] & (w < V)[None, :]
        s = tl.load(state_at(kept.p, at, h, size, f, w, K, V), mask=there, other=0.0)
        d = tl.load(state_at(dkept.p, at, h, size, f, w, K, V), mask=there, other=0.0)
        x = cotangent(do, b, t, ok, h, w, size, V)
        u = raw(v, b, t, ok, h, w, V)
        from_state = times(x, tl.trans(s), from_state, HOW)
        to_state = times(u, tl.trans(d), to_state, HOW)
        if CAUSAL:
            pairs = times(x, tl.trans(u), pairs, HOW)
        if sides.g is not None:
            past += tl.sum(s.to(tl.float32) * d.to(tl.float32), 1)
    if W > V:
        of_sum = side(do.sums, b, t, ok, h, size)[:, None]
        z = tl.load(sums_at(kept.sums, at, h, size, f, K, 1), mask=f < K, other=0.0)
        dz = tl.load(sums_at(dkept.sums, at, h, size, f, K, 1), mask=f < K, other=0.0)
        from_state += of_sum * z[None, :]
        to_state += tl.where(ok[:, None], dz[None, :], 0.0)
        pairs += tl.where(ok[None, :], of_sum, 0.0)
    return from_state * scale, to_state, pairs * scale, past


@triton.jit
def dqdk(
    q, k, v, do, de, sides, kept, dkept, dq, dk, dg, dbeta, size, scale, K: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, HOW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, H, K] and shares of dg, dbeta [blocks of K, B, T, H]. A program owns a chunk and BK features.

    Under the delta rule v are what the state takes up, and de [B, T, H, V] their gradients: values less what the state
    before held for their keys, so that keys are queries of -de as well, which do not see their own token.
    """
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, h, slot, n, b, t, ok = chunk_owner(sides.cu, size, tiles, C)
    f = tile * BK + tl.arange(0, BK)
    from_state, to_state, pairs, past = meetings(
        v, do, sides, kept, dkept, b, t, ok, n, h, slot, f, size, scale, K, V, W, CAUSAL, HOW, BV
    )
    queries = features(q, b, t, ok, h // size.G, f, K, MAP)
    keys = features(k, b, t, ok, h // size.G, f, K, MAP)
    out = (b.to(tl.int64) * size.T + t) * size.H + h
    if CAUSAL:
        decayed = between(sides, slot, h, size, C)
        pairs = pairs * decayed
        if sides.g is not None:
            start, tail, whole = ramps(sides, slot, h, size, C)
            from_state = from_state * start[:, None]
            to_state = to_state * tail[:, None]
        if (sides.g is not None) or (sides.beta is not None):
            weights = pairs * times(queries, tl.trans(keys), tl.zeros([C, C], tl.float32), HOW)
            entering = tl.sum(from_state * queries.to(tl.float32), 1)
            leaving = tl.sum(to_state * keys.to(tl.float32), 1)
        if de is not None:
            for_keys, met = _forgotten(v, de, kept, b, t, ok, h, slot, f, size, K, V, HOW, BV)
            met = met * decayed
            if sides.g is not None:
                for_keys = for_keys * start[:, None]
            weights += met * times(keys, tl.trans(keys), tl.zeros([C, C], tl.float32), HOW)
            entering += tl.sum(for_keys * keys.to(tl.float32), 1)
        if sides.beta is not None:
            beta = side(sides.beta, b, t, ok, h, size)
            tl.store(dbeta + tile.to(tl.int64) * size.rows + out, tl.sum(weights, 0) + leaving, mask=ok)
            weights, pairs = weights * beta[None, :], pairs * beta[None, :]
            leaving, to_state = leaving * beta, to_state * beta[:, None]
        if sides.g is not None:
            found = _through_decays(weights, entering, leaving, whole * tl.sum(past, 0), sides.exact, C)
            tl.store(dg + tile.to(tl.int64) * size.rows + out, found, mask=ok)
        from_state = times(pairs, keys, from_state, HOW)
        to_state = times(tl.trans(pairs), queries, to_state, HOW)
        if de is not None:
            met = met * beta[None, :]
            to_state = times(met + tl.trans(met), keys, to_state + for_keys, HOW)
    inside = ok[:, None] & (f < K)[None, :]
    if MAP != "":
        from_state = unmapped(features(q, b, t, ok, h // size.G, f, K, ""), from_state, MAP)
        to_state = unmapped(features(k, b, t, ok, h // size.G, f, K, ""), to_state, MAP)
    tl.store(dq + out[:, None] * K + f[None, :], from_state.to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + out[:, None] * K + f[None, :], to_state.to(dk.dtype.element_ty), mask=inside)


@triton.jit
def _forgotten(
    e, de, kept, b, t, ok, h, slot, f, size, K: tl.constexpr, V: tl.constexpr, HOW: tl.constexpr, BV: tl.constexpr
):
    # of keys as queries of -de: (-de Sᵀ [C, BK], -de eᵀ [C, C] with s < r)
    i = tl.arange(0, t.shape[0])
    from_state = tl.zeros([t.shape[0], f.shape[0]], tl.float32)
    pairs = tl.zeros([t.shape[0], t.shape[0]], tl.float32)
    at = ((b.to(tl.int64) * size.T + t) * size.H + h)[:, None] * V
    for w0 in range(0, V, BV):
        w = w0 + tl.arange(0, BV)
        s = tl.load(state_at(kept.p, slot, h, size, f, w, K, V), mask=(f < K)[:, None] & (w < V)[None, :], other=0.0)
        x = -tl.load(de + at + w[None, :], mask=ok[:, None] & (w < V)[None, :], other=0.0).to(tl.float32)
        from_state = times(x, tl.trans(s), from_state, HOW)
        pairs = times(x, tl.trans(raw(e, b, t, ok, h, w, V)), pairs, HOW)
    return from_state, tl.where(i[:, None] > i[None, :], pairs, 0.0)


@triton.jit
def dvalues(
    q, k, do, sides, dkept, dv, size, scale, K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr,
    CAUSAL: tl.constexpr, HOW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dv [B, T, H, V]. A program owns a chunk and BV columns."""
    columns: tl.constexpr = (V + BV - 1) // BV
    column, h, slot, n, b, t, ok = chunk_owner(sides.cu, size, columns, C)
    w = column * BV + tl.arange(0, BV)
    at = slot if CAUSAL else n
    du = tl.zeros([C, BV], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    for f0 in range(0, K, BK):
        f = f0 + tl.arange(0, BK)
        there = (f < K)[:, None] & (w < V)[None, :]
        keys = left(k, sides, b, t, ok, h, f, size, K, MAP)
        d = tl.load(state_at(dkept.p, at, h, size, f, w, K, V), mask=there, other=0.0)
        du = times(keys, d, du, HOW)
        if CAUSAL and sides.pairs is None:
            p = times(features(q, b, t, ok, h // size.G, f, K, MAP), tl.trans(keys), p, HOW)
    if CAUSAL:
        if sides.pairs is not None:
            p = kept_pairs(sides, b, t, ok, h, size, C)
        else:
            if sides.g is not None:
                _, tail, _ = ramps(sides, slot, h, size, C)
                du = du * tail[:, None]
            p = p * between(sides, slot, h, size, C)
        du = times(tl.trans(p * scale), cotangent(do, b, t, ok, h, w, size, V), du, HOW)
    out = (b.to(tl.int64) * size.T + t) * size.H + h
    inside = ok[:, None] & (w < V)[None, :]
    if sides.beta is not None:
        du = du * side(sides.beta, b, t, ok, h, size)[:, None]
    tl.store(dv + out[:, None] * V + w[None, :], du.to(dv.dtype.element_ty), mask=inside)
