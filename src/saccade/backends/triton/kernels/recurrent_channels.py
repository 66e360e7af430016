"""Decays of channels within a chunk: weights e^(b_r - b_s) of pairs of tokens that differ from channel to channel.

For each pair s < r there is one aligned block of 2 h tokens, h a power of two, with s in its left half and r in its
right. Keys decayed to the end of the left half and queries decayed from the start of the right half meet in one
product: no exponent is above 0, and the sums of logarithms are products too, with a matrix of 0 and 1.
"""

from __future__ import annotations

import triton.language as tl

import triton

from .recurrent import BF16, FLOAT32, chunk_owner, faded, features, logarithms, row_at, side, spans, square_at, times
from .recurrent_backward import forgotten, meetings
from .recurrent_delta import inverse


@triton.jit
def _decayed(level, logs, exact: tl.constexpr):
    # decays of each token's channels [C, BK]: from the start of a right half of 2^level, or to the end of a left one
    i = tl.arange(0, logs.shape[0])
    earlier = i[None, :] <= i[:, None]
    right = ((i >> level) & 1)[:, None] != 0
    alike = (i[:, None] ^ i[None, :]) >> level == 0
    return faded(spans(alike & (earlier == right), logs, exact), exact)


@triton.jit
def pairs(arrays, sides, out, size, config: tl.constexpr):
    """Pairs of tokens into out [B, T, H, C], as in `Sides`. A program owns a chunk."""
    C: tl.constexpr = config.C
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    _, chunk = chunk_owner(sides.cu, size, 1, C)
    i = tl.arange(0, C)
    parted = i[:, None] ^ i[None, :]
    p = tl.zeros([C, C], tl.float32)
    for f0 in range(0, config.K, config.BK):
        f = f0 + tl.arange(0, config.BK)
        queries = features(arrays.q, chunk, f, size, config)
        keys = features(arrays.k, chunk, f, size, config)
        logs = logarithms(sides.g, chunk, f, size, config.K)
        p += tl.where(parted == 0, tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)[:, None], 0.0)
        for level in range(0, LEVELS):
            right = ((i >> level) & 1)[:, None] != 0
            x = tl.where(right, queries, keys).to(tl.float32) * _decayed(level, logs, sides.exact)
            met = times(x, tl.trans(x), tl.zeros([C, C], tl.float32), config.HOW)
            p += tl.where(right & (parted >> level == 1), met, 0.0)
    at = row_at(chunk, size)[:, None] * C + i[None, :]
    tl.store(out + at, p, mask=chunk.ok[:, None])


@triton.jit
def decay(arrays, sides, decayed, size, config: tl.constexpr):
    """Fill `Decayed`. A program owns a chunk and BK features."""
    K: tl.constexpr = config.K
    tile, chunk = chunk_owner(sides.cu, size, (K + config.BK - 1) // config.BK, config.C)
    f, i = tile * config.BK + tl.arange(0, config.BK), tl.arange(0, config.C)
    logs = logarithms(sides.g, chunk, f, size, K)
    past = faded(spans(i[None, :] <= i[:, None], logs, sides.exact), sides.exact)
    later = faded(spans(i[None, :] > i[:, None], logs, sides.exact), sides.exact)
    keys = features(arrays.k, chunk, f, size, config).to(tl.float32)
    at = row_at(chunk, size)[:, None] * K + f[None, :]
    there = chunk.ok[:, None] & (f < K)[None, :]
    tl.store(decayed.keys + at, (keys * past).to(decayed.keys.dtype.element_ty), mask=there)
    tl.store(decayed.leaving + at, (keys * later).to(decayed.leaving.dtype.element_ty), mask=there)
    if decayed.queries is not None:
        queries = features(arrays.q, chunk, f, size, config).to(tl.float32)
        tl.store(decayed.queries + at, queries * past, mask=there)
    whole = decayed.whole + (chunk.slot.to(tl.int64) * size.H + chunk.h) * K + f
    tl.store(whole, faded(tl.sum(logs, 0), sides.exact), mask=f < K)


@triton.jit
def solve(arrays, sides, system, size, config: tl.constexpr):
    """System's X, and `pairs` as above. A program owns a chunk. With NARROW, products for X are in bfloat16."""
    C: tl.constexpr = config.C
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    _, chunk = chunk_owner(sides.cu, size, 1, C)
    i = tl.arange(0, C)
    parted = i[:, None] ^ i[None, :]
    p = tl.zeros([C, C], tl.float32)
    m = tl.zeros([C, C], tl.float32)
    for f0 in range(0, config.K, config.BK):
        f = f0 + tl.arange(0, config.BK)
        queries = features(arrays.q, chunk, f, size, config).to(tl.float32)
        keys = features(arrays.k, chunk, f, size, config).to(tl.float32)
        logs = logarithms(sides.g, chunk, f, size, config.K)
        p += tl.where(parted == 0, tl.sum(queries * keys, 1)[:, None], 0.0)
        for level in range(0, LEVELS):
            below = (((i >> level) & 1)[:, None] != 0) & (parted >> level == 1)
            decay = _decayed(level, logs, sides.exact)
            x = keys * decay
            met = times(queries * decay, tl.trans(x), tl.zeros([C, C], tl.float32), config.HOW)
            p += tl.where(below, met, 0.0)
            met = times(x, tl.trans(x), tl.zeros([C, C], tl.float32), BF16 if config.NARROW else FLOAT32)
            m += tl.where(below, met, 0.0)
    tl.store(square_at(system.pairs, chunk, size, C), p, mask=chunk.ok[:, None])
    m = m * side(sides.beta, chunk, size)[None, :]
    tl.store(square_at(system.inverse, chunk, size, C), inverse(m, C), mask=chunk.ok[:, None])


@triton.jit
def _asked(arrays, sides, slots, rows, chunk, size, config: tl.constexpr):
    # Keys as queries of -de: what keys receive as written, added to `taken`; what they receive as queries; the terms of
    # decays. rows: (features f [BK], taken, keys, logs), the last three tiles [C, BK].
    C: tl.constexpr = config.C
    BK: tl.constexpr = config.BK
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    f, taken, keys, logs = rows
    i = tl.arange(0, C)
    parted, earlier = i[:, None] ^ i[None, :], i[None, :] < i[:, None]
    asking, pairs = forgotten(arrays, slots, chunk, f, size, config)
    asking *= faded(spans(i[None, :] <= i[:, None], logs, sides.exact), sides.exact)
    written = keys * side(sides.beta, chunk, size)[:, None]
    passed = spans(i[None, :] >= i[:, None], keys * asking, sides.exact)
    pairs += tl.trans(pairs)
    for level in range(0, LEVELS):
        right = ((i >> level) & 1)[:, None] != 0
        mine = tl.where(right, keys, written)
        decay = _decayed(level, logs, sides.exact)
        met = tl.where(parted >> level == 1, pairs, 0.0)
        d = decay * times(met, mine * decay, tl.zeros([C, BK], tl.float32), config.HOW)
        asking += tl.where(right, d, 0.0)
        taken += tl.where(right, 0.0, d)
        passed += spans((parted >> level == 0) & (earlier != right), mine * d, sides.exact)
    return taken, asking, passed


@triton.jit
def dqdk(arrays, sides, states, grads, size, config: tl.constexpr):
    """dq, dk, dg [B, T, H, K] and partial sums of dbeta. A program owns a chunk and BK features.

    states: as in `meetings`. Under the delta rule keys also act as queries, as in `recurrent_backward.dqdk`.
    """
    K: tl.constexpr = config.K
    BK: tl.constexpr = config.BK
    C: tl.constexpr = config.C
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, chunk = chunk_owner(sides.cu, size, tiles, C)
    f = tile * BK + tl.arange(0, BK)
    from_state, to_state, pairs, past = meetings(arrays, sides, states, chunk, f, size, config)
    i = tl.arange(0, C)
    parted = i[:, None] ^ i[None, :]
    queries = features(arrays.q, chunk, f, size, config).to(tl.float32)
    keys = features(arrays.k, chunk, f, size, config).to(tl.float32)
    logs = logarithms(sides.g, chunk, f, size, K)
    earlier = i[None, :] < i[:, None]
    queried = from_state * faded(spans(i[None, :] <= i[:, None], logs, sides.exact), sides.exact)
    taken = to_state * faded(spans(i[None, :] > i[:, None], logs, sides.exact), sides.exact)
    written = keys
    if config.DELTA:
        written = keys * side(sides.beta, chunk, size)[:, None]
    between = (past * faded(tl.sum(logs, 0), sides.exact))[None, :]
    between += spans(i[None, :] >= i[:, None], queries * queried, sides.exact)
    between += spans(earlier, written * taken, sides.exact)
    own = tl.sum(tl.where(parted == 0, pairs, 0.0), 1)[:, None]
    queried += own * written
    taken += own * queries
    pairs = tl.where(earlier, pairs, 0.0)
    pairs += tl.trans(pairs)
    for level in range(0, LEVELS):
        right = ((i >> level) & 1)[:, None] != 0
        mine = tl.where(right, queries, written)
        decay = _decayed(level, logs, sides.exact)
        met = tl.where(parted >> level == 1, pairs, 0.0)
        d = decay * times(met, mine * decay, tl.zeros([C, BK], tl.float32), config.HOW)
        queried += tl.where(right, d, 0.0)
        taken += tl.where(right, 0.0, d)
        # the decays of a pair are those after its left token, up to and including its right token
        between += spans((parted >> level == 0) & (earlier != right), mine * d, sides.exact)
    inside = chunk.ok[:, None] & (f < K)[None, :]
    at = row_at(chunk, size)[:, None] * K + f[None, :]
    tl.store(grads.q + at, queried.to(grads.q.dtype.element_ty), mask=inside)
    if config.DELTA:
        taken, asking, passed = _asked(arrays, sides, states[0], (f, taken, keys, logs), chunk, size, config)
        to = grads.beta + tile.to(tl.int64) * size.rows + row_at(chunk, size)
        tl.store(to, tl.sum(taken * keys, 1), mask=chunk.ok)
        taken = taken * side(sides.beta, chunk, size)[:, None] + asking
        between += passed
    tl.store(grads.k + at, taken.to(grads.k.dtype.element_ty), mask=inside)
    tl.store(grads.g + at, between, mask=inside)
