"""Decays of channels within a chunk: weights e^(b_r - b_s) of pairs of tokens that differ from channel to channel.

Pairs are told by the largest block of 2 h tokens, h a power of two, whose halves part them: s in the left one, r in the
right. Keys that decay to the left half's end and queries decayed from the right one's begin then meet in one product:
what is exponentiated is never above 0, and sums of logarithms grow by halves, so that none is a difference.
"""

from __future__ import annotations

import triton.language as tl

import triton

from .common import power
from .recurrent import FLOAT32, TF32, chunk_owner, features, following, logarithms, times
from .recurrent_backward import meetings


@triton.jit
def _doubled(before, after, half, C: tl.constexpr):
    # sums of logarithms [C, BK] in blocks of `half` tokens, up to each and behind it, in blocks twice as large
    i = tl.arange(0, C)
    at = tl.broadcast_to(((i ^ half) | (half - 1))[:, None], before.shape)
    other = tl.gather(before, at, 0)
    right = ((i & half) != 0)[:, None]
    return tl.where(right, before + other, before), tl.where(right, after, after + other)


@triton.jit
def pairs(q, k, sides, out, size, K: tl.constexpr, HOW: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """Pairs of tokens into out [B, T, H, C], as `Sides` has them. A program owns a chunk."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    _, h, _slot, _n, b, t, ok = chunk_owner(sides.cu, size, 1, C)
    i = tl.arange(0, C)
    parted = i[:, None] ^ i[None, :]
    p = tl.zeros([C, C], tl.float32)
    for f0 in range(0, K, BK):
        f = f0 + tl.arange(0, BK)
        queries = features(q, b, t, ok, h // size.G, f, K, "").to(tl.float32)
        keys = features(k, b, t, ok, h // size.G, f, K, "").to(tl.float32)
        before = logarithms(sides.g, b, t, ok, h, f, size, K)
        after = tl.zeros([C, BK], tl.float32)
        p += tl.where(parted == 0, tl.sum(queries * keys, 1)[:, None], 0.0)
        for level in range(0, LEVELS):
            half = 1 << level
            right = ((i & half) != 0)[:, None]
            x = tl.where(right, queries, keys) * power(tl.where(right, before, after), 0.0, HOW == FLOAT32)
            met = times(x, tl.trans(x), tl.zeros([C, C], tl.float32), HOW)
            p += tl.where(right & (parted >> level == 1), met, 0.0)
            before, after = _doubled(before, after, half, C)
    at = ((b.to(tl.int64) * size.T + t) * size.H + h)[:, None] * C + i[None, :]
    tl.store(out + at, p, mask=ok[:, None])


@triton.jit
def dqdk(
    q, k, v, do, sides, kept, dkept, dq, dk, dg, size, scale, K: tl.constexpr, V: tl.constexpr, HOW: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg [B, T, H, K]. A program owns a chunk and BK of the features."""
    LEVELS: tl.constexpr = 4 + (C > 16) + (C > 32)
    SUMS: tl.constexpr = FLOAT32 if HOW == FLOAT32 else TF32
    tiles: tl.constexpr = (K + BK - 1) // BK
    tile, h, slot, n, b, t, ok = chunk_owner(sides.cu, size, tiles, C)
    f = tile * BK + tl.arange(0, BK)
    from_state, to_state, pairs, past = meetings(
        v, do, sides, kept, dkept, b, t, ok, n, h, slot, f, size, scale, K, V, V, True, HOW, BV
    )
    i = tl.arange(0, C)
    parted = i[:, None] ^ i[None, :]
    queries = features(q, b, t, ok, h // size.G, f, K, "").to(tl.float32)
    keys = features(k, b, t, ok, h // size.G, f, K, "").to(tl.float32)
    before = logarithms(sides.g, b, t, ok, h, f, size, K)
    after = logarithms(sides.g, b, t + 1, following(ok), h, f, size, K)
    past = past * power(tl.sum(before, 0), 0.0, True)
    queried = from_state * power(tl.cumsum(before, 0), 0.0, True)
    taken = to_state * power(tl.cumsum(after, 0, reverse=True), 0.0, True)
    between = tl.zeros([C, BK], tl.float32) + past[None, :]
    between = times(tl.where(i[None, :] >= i[:, None], 1.0, 0.0), queries * queried, between, SUMS)
    between = times(tl.where(i[None, :] < i[:, None], 1.0, 0.0), keys * taken, between, SUMS)
    own = tl.sum(tl.where(parted == 0, pairs, 0.0), 1)[:, None]
    queried += own * keys
    taken += own * queries
    pairs = tl.where(i[:, None] > i[None, :], pairs, 0.0)
    pairs += tl.trans(pairs)
    after = tl.zeros([C, BK], tl.float32)
    for level in range(0, LEVELS):
        half = 1 << level
        right = ((i & half) != 0)[:, None]
        mine = tl.where(right, queries, keys)
        decay = power(tl.where(right, before, after), 0.0, HOW == FLOAT32)
        met = tl.where(parted >> level == 1, pairs, 0.0)
        d = decay * times(met, mine * decay, tl.zeros([C, BK], tl.float32), HOW)
        queried += tl.where(right, d, 0.0)
        taken += tl.where(right, 0.0, d)
        # a pair's decay lies between its tokens: to the right half's token, or behind the left one's
        spanned = tl.where(right, i[None, :] >= i[:, None], i[None, :] < i[:, None]) & (parted >> level == 0)
        between = times(tl.where(spanned, 1.0, 0.0), mine * d, between, SUMS)
        before, after = _doubled(before, after, half, C)
    inside = ok[:, None] & (f < K)[None, :]
    at = ((b.to(tl.int64) * size.T + t) * size.H + h)[:, None] * K + f[None, :]
    tl.store(dq + at, queried.to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + at, taken.to(dk.dtype.element_ty), mask=inside)
    tl.store(dg + at, between, mask=inside)
