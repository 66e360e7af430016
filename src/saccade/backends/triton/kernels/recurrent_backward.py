"""Gradients of recurrences over matrix states: first D, the gradient of a state, from the last chunk to the first,
then the rest.

D before a chunk is e^(its sum of g) D + scale (e^b q)ᵀ do. Within the chunk du = Pᵀ do + e^(b_C - b) k D. With
G = scale (do uᵀ) ⊙ e^(b_r - b_s), dq = G k + scale e^b do Sᵀ and dk = Gᵀ q + e^(b_C - b) u Dᵀ. The gradient of g_t is
the sum of all terms from tokens before t, or the state, to t and later tokens; nothing is subtracted. A program owns a
block of its results, and the host sums over blocks, so nothing is added atomically.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .recurrent import (
    Chunk,
    between,
    chunk_owner,
    entered,
    features,
    left,
    ramps,
    raw,
    raw_features,
    row_at,
    side,
    spans,
    stored_pairs,
    through,
    times,
    unmapped,
    wide,
)
from .recurrent_states import (
    Block,
    inside,
    read_state,
    read_sums,
    state_at,
    state_owner,
    sums_at,
    write_slot,
    write_state,
)


class Gradients(NamedTuple):
    """dq, dk [B, T, H, K]; dg, dbeta: partial sums [blocks of K, B, T, H]; dg of channels [B, T, H, K]; or None."""

    q: Any
    k: Any
    g: Any
    beta: Any


@triton.jit
def cotangent(do, chunk, w, size, V: tl.constexpr):
    """The gradient of a sum of values, a tile [C, BV]."""
    x = raw(do.rows, chunk, w, V)
    if do.inverse is not None:
        x = x.to(tl.float32) * side(do.inverse, chunk, size)[:, None]
    return x


@triton.jit
def dstates(arrays, sides, dslots, ends, size, config: tl.constexpr):
    """Write the gradients of states to `dslots` (States): after each chunk, or if not CAUSAL only of the last one.

    ends: the gradient of the caller's last state, which is read, and of the initial state, which is written.
    """
    C: tl.constexpr = config.C
    do_scale = arrays.do.scale
    n, block, b, first, stop, slot = state_owner(sides.cu, size, config)
    there, d = read_state(ends.start, n, block, size, config)
    z = read_sums(ends.start, n, block, size, config)
    count = tl.cdiv(stop - first, C)
    for i in range(0, count):
        c = count - 1 - i
        if config.CAUSAL:
            write_slot(dslots, slot + c, block, (d, z, there), size, config)
        t = first + c * C + tl.arange(0, C)
        chunk = Chunk(slot + c, n, b, block.h, t, t < stop)
        x = raw(arrays.do.rows, chunk, block.w, config.V)
        queries = entered(arrays.q, sides, chunk, block.f, size, config)
        # the factor per token multiplies the operand that is not an unmodified 16-bit array
        if arrays.do.inverse is not None:
            queries = queries.to(tl.float32)
            z += tl.sum(queries * side(arrays.do.sums, chunk, size)[:, None], 0)
            queries = queries * side(arrays.do.inverse, chunk, size)[:, None]
        elif (sides.pairs is not None) or config.MAP != "":
            queries = queries.to(tl.float32) * do_scale
            if sides.pairs is not None:
                d = d * through(sides, chunk, block.f, size, config.K)[:, None]
        elif sides.g is not None:
            start, _tail, whole = ramps(sides, chunk, size, C)
            x = x.to(tl.float32) * (start * do_scale)[:, None]
            d = d * whole
        else:
            x = x.to(tl.float32) * do_scale
        d = wide(tl.trans(queries), x, d, config.HOW)
    if not config.CAUSAL:
        write_slot(dslots, n, block, (d, z, there), size, config)
    write_state(ends.end, n, block, (d, z, there), size, config)


@triton.jit
def _through_decays(weights, entering, leaving, passing, exact: tl.constexpr, C: tl.constexpr):
    # The gradient of the logarithm of each decay [C]. weights [C, C]: of pairs; entering, leaving: terms from the state
    # and into it; passing: terms that pass all tokens.
    i = tl.arange(0, C)
    earlier = i[:, None] > i[None, :]
    # [t, s]: sums over r >= t, used for s < t
    after = spans(i[:, None] <= i[None, :], tl.where(earlier, weights, 0.0), exact)
    # not the difference of a sum and its last term: as a fused multiply-add it is a rounding error, not 0
    before = tl.sum(tl.where(earlier, after + leaving[None, :], 0.0), 1)
    return before + tl.cumsum(entering, 0, reverse=True) + passing


@triton.jit
def meetings(arrays, sides, states, chunk, f, size, config: tl.constexpr):
    """Sums over columns: (do Sᵀ [C, BK], v Dᵀ [C, BK], do vᵀ [C, C] of a chunk with s <= r, S ⊙ D [BK]).

    v is without beta, do with the scale. states: (S, D) as States.
    """
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    C: tl.constexpr = config.C
    ok, do_scale = chunk.ok, arrays.do.scale
    slots, dslots = states
    at = chunk.slot if config.CAUSAL else chunk.n
    from_state = tl.zeros([C, f.shape[0]], tl.float32)
    to_state = tl.zeros([C, f.shape[0]], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    past = tl.zeros([f.shape[0]], tl.float32)
    for w0 in range(0, V, config.BV):
        block = Block(chunk.h, f, w0 + tl.arange(0, config.BV))
        there = inside(block, K, V)
        s = tl.load(state_at(slots.p, at, block, size, K, V), mask=there, other=0.0)
        d = tl.load(state_at(dslots.p, at, block, size, K, V), mask=there, other=0.0)
        x = cotangent(arrays.do, chunk, block.w, size, V)
        u = raw(arrays.v, chunk, block.w, V)
        from_state = times(x, tl.trans(s), from_state, config.HOW)
        to_state = times(u, tl.trans(d), to_state, config.HOW)
        if config.CAUSAL:
            pairs = times(x, tl.trans(u), pairs, config.HOW)
        if sides.g is not None:
            past += tl.sum(s.to(tl.float32) * d.to(tl.float32), 1)
    if config.W > V:
        block = Block(chunk.h, f, f)
        of_sum = side(arrays.do.sums, chunk, size)[:, None]
        z = tl.load(sums_at(slots.sums, at, block, size, K, 1), mask=f < K, other=0.0)
        dz = tl.load(sums_at(dslots.sums, at, block, size, K, 1), mask=f < K, other=0.0)
        from_state += of_sum * z[None, :]
        to_state += tl.where(ok[:, None], dz[None, :], 0.0)
        pairs += tl.where(ok[None, :], of_sum, 0.0)
    return from_state * do_scale, to_state, pairs * do_scale, past


@triton.jit
def dqdk(arrays, sides, states, grads, size, config: tl.constexpr):
    """dq, dk and partial sums of dg, dbeta. A program owns a chunk and BK features. states: as in `meetings`.

    Under the delta rule v are the values that the state takes up: values minus what the state returns for their keys;
    de are their gradients. Keys therefore also act as queries of -de, which do not see their own token.
    """
    K: tl.constexpr = config.K
    BK: tl.constexpr = config.BK
    C: tl.constexpr = config.C
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, chunk = chunk_owner(sides.cu, size, tiles, C)
    ok, f = chunk.ok, tile * BK + tl.arange(0, BK)
    from_state, to_state, pairs, past = meetings(arrays, sides, states, chunk, f, size, config)
    queries = features(arrays.q, chunk, f, size, config)
    keys = features(arrays.k, chunk, f, size, config)
    out = row_at(chunk, size)
    if config.CAUSAL:
        decayed = between(sides, chunk, size, C)
        pairs = pairs * decayed
        if sides.g is not None:
            start, tail, whole = ramps(sides, chunk, size, C)
            from_state = from_state * start[:, None]
            to_state = to_state * tail[:, None]
        if (sides.g is not None) or (sides.beta is not None):
            weights = pairs * times(queries, tl.trans(keys), tl.zeros([C, C], tl.float32), config.HOW)
            entering = tl.sum(from_state * queries.to(tl.float32), 1)
            leaving = tl.sum(to_state * keys.to(tl.float32), 1)
        if arrays.do.de is not None:
            for_keys, met = forgotten(arrays, states[0], chunk, f, size, config)
            met = met * decayed
            if sides.g is not None:
                for_keys = for_keys * start[:, None]
            weights += met * times(keys, tl.trans(keys), tl.zeros([C, C], tl.float32), config.HOW)
            entering += tl.sum(for_keys * keys.to(tl.float32), 1)
        if sides.beta is not None:
            beta = side(sides.beta, chunk, size)
            to = grads.beta + tile.to(tl.int64) * size.rows + out
            tl.store(to, tl.sum(weights, 0) + leaving, mask=ok)
            weights, pairs = weights * beta[None, :], pairs * beta[None, :]
            leaving, to_state = leaving * beta, to_state * beta[:, None]
        if sides.g is not None:
            dg = _through_decays(weights, entering, leaving, whole * tl.sum(past, 0), sides.exact, C)
            tl.store(grads.g + tile.to(tl.int64) * size.rows + out, dg, mask=ok)
        from_state = times(pairs, keys, from_state, config.HOW)
        to_state = times(tl.trans(pairs), queries, to_state, config.HOW)
        if arrays.do.de is not None:
            met = met * beta[None, :]
            to_state = times(met + tl.trans(met), keys, to_state + for_keys, config.HOW)
    there = ok[:, None] & (f < K)[None, :]
    MAP: tl.constexpr = config.MAP
    if MAP != "":
        from_state = unmapped(raw_features(arrays.q, chunk, f, size, K), from_state, MAP)
        to_state = unmapped(raw_features(arrays.k, chunk, f, size, K), to_state, MAP)
    tl.store(grads.q + out[:, None] * K + f[None, :], from_state.to(grads.q.dtype.element_ty), mask=there)
    tl.store(grads.k + out[:, None] * K + f[None, :], to_state.to(grads.k.dtype.element_ty), mask=there)


@triton.jit
def forgotten(arrays, slots, chunk, f, size, config: tl.constexpr):
    """Keys as queries of -de: (-de Sᵀ [C, BK], -de eᵀ [C, C] with s < r)."""
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    C: tl.constexpr = config.C
    i, ok = tl.arange(0, C), chunk.ok
    from_state = tl.zeros([C, f.shape[0]], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    at = row_at(chunk, size)[:, None] * V
    for w0 in range(0, V, config.BV):
        block = Block(chunk.h, f, w0 + tl.arange(0, config.BV))
        s = tl.load(state_at(slots.p, chunk.slot, block, size, K, V), mask=inside(block, K, V), other=0.0)
        there = ok[:, None] & (block.w < V)[None, :]
        x = -tl.load(arrays.do.de + at + block.w[None, :], mask=there, other=0.0).to(tl.float32)
        from_state = times(x, tl.trans(s), from_state, config.HOW)
        pairs = times(x, tl.trans(raw(arrays.v, chunk, block.w, V)), pairs, config.HOW)
    return from_state, tl.where(i[:, None] > i[None, :], pairs, 0.0)


@triton.jit
def dvalues(arrays, sides, dslots, dv, size, config: tl.constexpr):
    """dv [B, T, H, V]. A program owns a chunk and BV columns."""
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    BV: tl.constexpr = config.BV
    C: tl.constexpr = config.C
    columns: tl.constexpr = (V + BV - 1) // BV
    column, chunk = chunk_owner(sides.cu, size, columns, C)
    w = column * BV + tl.arange(0, BV)
    at = chunk.slot if config.CAUSAL else chunk.n
    du = tl.zeros([C, BV], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    for f0 in range(0, K, config.BK):
        block = Block(chunk.h, f0 + tl.arange(0, config.BK), w)
        there = inside(block, K, V)
        keys = left(arrays.k, sides, chunk, block.f, size, config)
        d = tl.load(state_at(dslots.p, at, block, size, K, V), mask=there, other=0.0)
        du = times(keys, d, du, config.HOW)
        if config.CAUSAL and sides.pairs is None:
            p = times(features(arrays.q, chunk, block.f, size, config), tl.trans(keys), p, config.HOW)
    if config.CAUSAL:
        if sides.pairs is not None:
            p = stored_pairs(sides, chunk, size, C)
        else:
            if sides.g is not None:
                _, tail, _ = ramps(sides, chunk, size, C)
                du = du * tail[:, None]
            p = p * between(sides, chunk, size, C)
        du = times(tl.trans(p * arrays.do.scale), cotangent(arrays.do, chunk, w, size, V), du, config.HOW)
    if sides.beta is not None:
        du = du * side(sides.beta, chunk, size)[:, None]
    to = dv + row_at(chunk, size)[:, None] * V + w[None, :]
    tl.store(to, du.to(dv.dtype.element_ty), mask=chunk.ok[:, None] & (w < V)[None, :])
