"""Recurrences over matrix states one token at a time, for calls with a single token: decoding.

A program owns all K rows and BV columns of one head's state. It needs no other columns: decays of channels and the
delta rule's e = v - Sᵀ k are sums within its columns.
"""

from __future__ import annotations

import triton.language as tl

import triton

from .recurrent import faded, rows
from .recurrent_states import inside, state_at, state_owner


@triton.jit
def _vector(x, b, t, h, i, n: tl.constexpr):
    # numbers i of a token and head, as float32
    return tl.load(rows(x, b, t, h) + i, mask=i < n, other=0.0).to(tl.float32)


@triton.jit
def _decay(g, row, f, K: tl.constexpr, CHANNELS: tl.constexpr):
    # [K] per channel, or one number for all
    if CHANNELS:
        x = tl.load(g + row * K + f, mask=f < K, other=0.0).to(tl.float32)
    else:
        x = tl.load(g + row + 0 * f).to(tl.float32)
    return faded(x, True)


@triton.jit
def step(arrays, sides, ends, o, size, scale, config: tl.constexpr):
    """o [B, 1, H, V] and the final state [N, H, K, V]; of packed sequences only one has the token."""
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    BK: tl.constexpr = config.BK
    BV: tl.constexpr = config.BV
    n, block, b, first, stop, _slot = state_owner(sides.cu, size, config)
    h, f, w = block
    there = inside(block, K, V)
    s = tl.zeros([BK, BV], tl.float32)
    if ends.start is not None:
        s = tl.load(state_at(ends.start, n, block, size, K, V), mask=there, other=0.0).to(tl.float32)
    for r in range(0, stop - first):
        t = first + r
        row = (b.to(tl.int64) * size.T + t) * size.H + h
        keys = _vector(arrays.k, b, t, h // size.G, f, K)
        u = _vector(arrays.v, b, t, h, w, V)
        if sides.g is not None:
            s = s * _decay(sides.g, row, f, K, config.CHANNELS)[:, None]
        if config.DELTA:
            u = u - tl.sum(s * keys[:, None], 0)
        if sides.beta is not None:
            u = u * tl.load(sides.beta + row)
        s += keys[:, None] * u[None, :]
        out = scale * tl.sum(s * _vector(arrays.q, b, t, h // size.G, f, K)[:, None], 0)
        tl.store(o + row * V + w, out.to(o.dtype.element_ty), mask=w < V)
    tl.store(state_at(ends.end, n, block, size, K, V), s.to(ends.end.dtype.element_ty), mask=there)
