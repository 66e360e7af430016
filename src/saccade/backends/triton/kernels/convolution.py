"""Causal convolution of each channel with K weights: tiles of tokens and channels, all at once.

A tile of C tokens has a slot, as a chunk of `recurrent` has. The backward makes the gradient of what stands before the
activation and shares of the weights' sums, then that of x from the K tokens that read it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .diagonal_chunks import sigmoid, sigmoids
from .recurrent import extent, first_slot, sequence_of


class Convolved(NamedTuple):
    """x as Channels; float32 weight [D, K], bias [D] or None; cu [S + 1] and initial [S, D, K - 1], or None."""

    x: Any
    weight: Any
    bias: Any
    cu: Any
    initial: Any


@triton.jit
def _tile(c, size, C: tl.constexpr, BD: tl.constexpr):
    # (slot, sequence, batch entry, its first token and end, tokens [C], channels [BD])
    program = tl.program_id(0)
    blocks = tl.cdiv(size.D, BD)
    slot = program // blocks
    d = program % blocks * BD + tl.arange(0, BD)
    s = sequence_of(c.cu, slot, size, C)
    b, first, stop = extent(c.cu, s, size)
    t = first + (slot - first_slot(c.cu, s, size, C)) * C + tl.arange(0, C)
    return slot, s, b, first, stop, t, d


@triton.jit
def _inputs(c, s, b, first, stop, t, d, size, K: tl.constexpr):
    # x at tokens t [C], and before the first one what the initial state holds
    inside = (d < size.D)[None, :] & (t < stop)[:, None]
    at = c.x.p + b.to(tl.int64) * c.x.b + t.to(tl.int64)[:, None] * c.x.t + d[None, :]
    x = tl.load(at, mask=inside & (t >= first)[:, None], other=0.0).to(tl.float32)
    if c.initial is not None:
        held = c.initial + (s.to(tl.int64) * size.D + d)[None, :] * (K - 1) + (t - first + K - 1)[:, None]
        x += tl.load(held, mask=inside & (t < first)[:, None], other=0.0).to(tl.float32)
    return x


@triton.jit
def _sums(c, s, b, first, stop, t, d, size, K: tl.constexpr):
    # what stands before the activation
    p = tl.zeros([t.shape[0], d.shape[0]], tl.float32)
    for j in tl.static_range(K):
        w = tl.load(c.weight + d * K + j, mask=d < size.D, other=0.0)
        p += w[None, :] * _inputs(c, s, b, first, stop, t - (K - 1) + j, d, size, K)
    if c.bias is not None:
        p += tl.load(c.bias + d, mask=d < size.D, other=0.0)[None, :]
    return p


@triton.jit
def convolve(c, y, size, K: tl.constexpr, SILU: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """y [B, T, D]."""
    _, s, b, first, stop, t, d = _tile(c, size, C, BD)
    p = _sums(c, s, b, first, stop, t, d, size, K)
    if SILU:
        p = p * sigmoid(p)
    at = y + (b.to(tl.int64) * size.T + t)[:, None] * size.D + d[None, :]
    tl.store(at, p.to(y.dtype.element_ty), mask=(t < stop)[:, None] & (d < size.D)[None, :])


@triton.jit
def last_inputs(c, final, size, K: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """The final state [S, D, K - 1]."""
    program = tl.program_id(0)
    blocks = tl.cdiv(size.D, BD)
    s = program // blocks
    d = program % blocks * BD + tl.arange(0, BD)
    b, first, stop = extent(c.cu, s, size)
    j = tl.arange(0, BK)
    x = _inputs(c, s, b, first, stop, stop - (K - 1) + j, d, size, K)
    at = final + (s.to(tl.int64) * size.D + d)[None, :] * (K - 1) + j[:, None]
    tl.store(at, x.to(final.dtype.element_ty), mask=(d < size.D)[None, :] & (j < K - 1)[:, None])


@triton.jit
def through_activation(
    c, dy, dp, dweight, dbias, size, K: tl.constexpr, SILU: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """dp float32 [B, T, D] and each tile's share of the sums, dweight [slots, D, K] and dbias [slots, D]."""
    slot, s, b, first, stop, t, d = _tile(c, size, C, BD)
    inside = (t < stop)[:, None] & (d < size.D)[None, :]
    at = (b.to(tl.int64) * size.T + t)[:, None] * size.D + d[None, :]
    d_sum = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        p = _sums(c, s, b, first, stop, t, d, size, K)
        part, rest = sigmoids(p)
        d_sum = tl.where(inside, d_sum * part * (1.0 + p * rest), 0.0)
    tl.store(dp + at, d_sum, mask=inside)
    own = slot.to(tl.int64) * size.D + d
    for j in tl.static_range(K):
        x = _inputs(c, s, b, first, stop, t - (K - 1) + j, d, size, K)
        tl.store(dweight + own * K + j, tl.sum(d_sum * x, 0), mask=d < size.D)
    if dbias is not None:
        tl.store(dbias + own, tl.sum(d_sum, 0), mask=d < size.D)


@triton.jit
def _reads(weight, dp, b, first, stop, t, d, size, K: tl.constexpr):
    # the gradient of the input at tokens t [C], which may lie before the first
    found = tl.zeros([t.shape[0], d.shape[0]], tl.float32)
    for j in tl.static_range(K):
        later = t + (K - 1) - j
        inside = (d < size.D)[None, :] & ((later >= first) & (later < stop))[:, None]
        at = dp + (b.to(tl.int64) * size.T + later)[:, None] * size.D + d[None, :]
        w = tl.load(weight + d * K + j, mask=d < size.D, other=0.0)
        found += w[None, :] * tl.load(at, mask=inside, other=0.0)
    return found


@triton.jit
def _kept(dfinal, s, stop, t, d, size, K: tl.constexpr):
    # what the final state holds of the inputs at t
    j = t - stop + K - 1
    at = dfinal + (s.to(tl.int64) * size.D + d)[None, :] * (K - 1) + j[:, None]
    inside = (d < size.D)[None, :] & ((j >= 0) & (j < K - 1))[:, None]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def of_inputs(c, dp, dfinal, dx, size, K: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """dx [B, T, D]."""
    _, s, b, first, stop, t, d = _tile(c, size, C, BD)
    found = _reads(c.weight, dp, b, first, stop, t, d, size, K)
    if dfinal is not None:
        found += _kept(dfinal, s, stop, t, d, size, K)
    at = dx + (b.to(tl.int64) * size.T + t)[:, None] * size.D + d[None, :]
    tl.store(at, found.to(dx.dtype.element_ty), mask=(t < stop)[:, None] & (d < size.D)[None, :])


@triton.jit
def of_initial(c, dp, dfinal, dinitial, size, K: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr):
    """The gradient of the initial state [S, D, K - 1]."""
    program = tl.program_id(0)
    blocks = tl.cdiv(size.D, BD)
    s = program // blocks
    d = program % blocks * BD + tl.arange(0, BD)
    b, first, stop = extent(c.cu, s, size)
    j = tl.arange(0, BK)
    t = first - (K - 1) + j
    found = _reads(c.weight, dp, b, first, stop, t, d, size, K)
    if dfinal is not None:
        found += _kept(dfinal, s, stop, t, d, size, K)
    at = dinitial + (s.to(tl.int64) * size.D + d)[None, :] * (K - 1) + j[:, None]
    tl.store(at, found, mask=(d < size.D)[None, :] & (j < K - 1)[:, None])
