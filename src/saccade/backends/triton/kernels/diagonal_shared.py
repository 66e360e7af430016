"""Gradients of B and C, which the channels of a scan share: slots along a warp, one channel after another."""

from __future__ import annotations

import triton.language as tl

import triton

from .diagonal import Tile, group_at, incoming, steps
from .diagonal_chunks import chunk, exp2, scan, scan_back


@triton.jit
def _own(x, b, t, g, n, ok, C: tl.constexpr):
    # slots n of B or C for C tokens from t, [C, BN]; ok: which tokens and which slots exist
    first = x.p + b.to(tl.int64) * x.b + t.to(tl.int64) * x.t + group_at(x, g) + n
    step = tl.arange(0, C).to(tl.int64) * x.t
    ok = ok[0][:, None] & ok[1][None, :]
    return tl.load(first[None, :] + step[:, None], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _wide(x, BN: tl.constexpr):
    # a tile [C, BX] of channels, repeated for every slot: [C, BX BN]
    all = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], BN])
    return tl.reshape(all, [x.shape[0], x.shape[1] * BN])


@triton.jit
def _repeated(x, BX: tl.constexpr):
    # a tile [C, BN] of slots, repeated for every channel: [C, BX BN]
    all = tl.broadcast_to(x[:, None, :], [x.shape[0], BX, x.shape[1]])
    return tl.reshape(all, [x.shape[0], BX * x.shape[1]])


@triton.jit
def _fixed(x, d, n, ok):
    # B or C [D, N] or [N] as a row [1, BX BN]
    return tl.load(x.p + d * x.d + n, mask=ok, other=0.0).to(tl.float32)[None, :]


@triton.jit
def scan_shared(x, dB, dC, borders, size, config: tl.constexpr):
    """Partial sums dB, dC [blocks, B, T, G, N] over blocks of a group's channels."""
    N: tl.constexpr = config.N
    C: tl.constexpr = config.C
    BX: tl.constexpr = config.BX
    BN: tl.constexpr = config.BN
    program = tl.program_id(0)
    parts: tl.constexpr = (N + BN - 1) // BN
    part = program % parts
    block = program // parts % size.blocks
    g = program // (parts * size.blocks) % size.G
    slot = program // (parts * size.blocks * size.G)
    _, b, _, stop, begin = chunk(x.cu, slot, size, C)
    there = begin + tl.arange(0, C) < stop
    wide = size.D // size.G
    width = tl.cdiv(tl.cdiv(wide, size.blocks), BX) * BX
    j = tl.arange(0, BX * BN)
    n = part * BN + j % BN
    single = part * BN + tl.arange(0, BN)
    if not config.FIXED_B:
        bs = _repeated(_own(x.B, b, begin, g, single, (there, single < N), C), BX)
    if not config.FIXED_C:
        cs = _repeated(_own(x.C, b, begin, g, single, (there, single < N), C), BX)
    sum_B = tl.zeros([C, BX * BN], tl.float32)
    sum_C = tl.zeros([C, BX * BN], tl.float32)
    own = slot.to(tl.int64) * N * size.D
    for k in range(block * width, tl.minimum((block + 1) * width, wide), BX):
        within = k + tl.arange(0, BX)
        d = g * wide + within
        ok = there[:, None] & (within < wide)[None, :]
        column = g * wide + k + j // BN
        real = (k + j // BN < wide) & (n < N) & (begin < stop)
        rate = tl.load(x.rate + n * size.D + column, mask=real, other=0.0)
        before = tl.load(borders.before + own + n * size.D + column, mask=real, other=0.0)
        behind = tl.load(borders.after + own + n * size.D + column, mask=real, other=0.0)
        tile = Tile(b, begin, ok, d, within < wide)
        u, _raw, step = steps(x, tile, config.SOFTPLUS, C)
        # the same number, but from two arrays: from one, Triton widens the array first and computes softplus per slot
        step = tl.where(u != u, step, step + 0.0)
        dp = _wide(incoming(x, tile, size, C), BN)
        entering = _wide(step * u, BN)
        a = exp2(_wide(step, BN) * tl.where(rate < -3e38, -3e38, rate)[None, :], config.EXACT)
        if config.FIXED_B:
            bs = _fixed(x.B, column, n, real)
        if config.FIXED_C:
            cs = _fixed(x.C, column, n, real)
        if not config.FIXED_C:
            sum_C += scan(a, entering * bs, before) * dp
        if not config.FIXED_B:
            sum_B += scan_back(a, dp * cs, behind) * entering
    row = block.to(tl.int64) * size.rows + b.to(tl.int64) * size.T + begin + tl.arange(0, C)
    to = ((row * size.G + g) * N)[:, None] + single[None, :]
    there = there[:, None] & (single < N)[None, :]
    if not config.FIXED_B:
        tl.store(dB + to, tl.sum(tl.reshape(sum_B, [C, BX, BN]), 1), mask=there)
    if not config.FIXED_C:
        tl.store(dC + to, tl.sum(tl.reshape(sum_C, [C, BX, BN]), 1), mask=there)
