"""Causal convolution of each channel with K weights, in parallel over tiles of tokens and channels.

A tile of C tokens has a slot, like a chunk in `recurrent`. The backward first computes the gradient before the
activation and each tile's partial gradients of weights and bias. Then it computes the gradient of x from the K tokens
that read it.
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


class Config(NamedTuple):
    """The constants that a kernel is compiled with: weights per channel, whether SiLU follows, tokens and channels of a
    tile, K - 1 padded."""

    K: Any
    SILU: Any
    C: Any
    BD: Any
    BK: Any


class Sequence(NamedTuple):
    """The number of a sequence, its batch entry, its first token and its end."""

    n: Any
    b: Any
    first: Any
    stop: Any


class Gradients(NamedTuple):
    """dp float32 [B, T, D], and each tile's partial sums: weight [slots, D, K], bias [slots, D] or None."""

    p: Any
    weight: Any
    bias: Any


@triton.jit
def _tile(c, size, config: tl.constexpr):
    # (slot, Sequence, tokens [C], channels [BD])
    C: tl.constexpr = config.C
    program = tl.program_id(0)
    blocks = tl.cdiv(size.D, config.BD)
    slot = program // blocks
    d = program % blocks * config.BD + tl.arange(0, config.BD)
    s = sequence_of(c.cu, slot, size, C)
    b, first, stop = extent(c.cu, s, size)
    t = first + (slot - first_slot(c.cu, s, size, C)) * C + tl.arange(0, C)
    return slot, Sequence(s, b, first, stop), t, d


@triton.jit
def _sequence(c, size, config: tl.constexpr):
    # (Sequence, channels [BD]) of a program
    program = tl.program_id(0)
    blocks = tl.cdiv(size.D, config.BD)
    s = program // blocks
    d = program % blocks * config.BD + tl.arange(0, config.BD)
    b, first, stop = extent(c.cu, s, size)
    return Sequence(s, b, first, stop), d


@triton.jit
def _inputs(c, sequence, t, d, size, K: tl.constexpr):
    # x at tokens t [C]; tokens before the sequence are those of the initial state
    s, b, first, stop = sequence
    inside = (d < size.D)[None, :] & (t < stop)[:, None]
    at = c.x.p + b.to(tl.int64) * c.x.b + t.to(tl.int64)[:, None] * c.x.t + d[None, :]
    x = tl.load(at, mask=inside & (t >= first)[:, None], other=0.0).to(tl.float32)
    if c.initial is not None:
        at = c.initial + (s.to(tl.int64) * size.D + d)[None, :] * (K - 1) + (t - first + K - 1)[:, None]
        x += tl.load(at, mask=inside & (t < first)[:, None], other=0.0).to(tl.float32)
    return x


@triton.jit
def _sums(c, sequence, t, d, size, K: tl.constexpr):
    # the convolution before the activation
    p = tl.zeros([t.shape[0], d.shape[0]], tl.float32)
    for j in tl.static_range(K):
        w = tl.load(c.weight + d * K + j, mask=d < size.D, other=0.0)
        p += w[None, :] * _inputs(c, sequence, t - (K - 1) + j, d, size, K)
    if c.bias is not None:
        p += tl.load(c.bias + d, mask=d < size.D, other=0.0)[None, :]
    return p


@triton.jit
def convolve(c, y, size, config: tl.constexpr):
    """y [B, T, D]."""
    _, sequence, t, d = _tile(c, size, config)
    p = _sums(c, sequence, t, d, size, config.K)
    if config.SILU:
        p = p * sigmoid(p)
    at = y + (sequence.b.to(tl.int64) * size.T + t)[:, None] * size.D + d[None, :]
    tl.store(at, p.to(y.dtype.element_ty), mask=(t < sequence.stop)[:, None] & (d < size.D)[None, :])


@triton.jit
def last_inputs(c, final, size, config: tl.constexpr):
    """The final state [S, D, K - 1]."""
    K: tl.constexpr = config.K
    sequence, d = _sequence(c, size, config)
    j = tl.arange(0, config.BK)
    x = _inputs(c, sequence, sequence.stop - (K - 1) + j, d, size, K)
    at = final + (sequence.n.to(tl.int64) * size.D + d)[None, :] * (K - 1) + j[:, None]
    tl.store(at, x.to(final.dtype.element_ty), mask=(d < size.D)[None, :] & (j < K - 1)[:, None])


@triton.jit
def through_activation(c, dy, out, size, config: tl.constexpr):
    """Fill Gradients."""
    K: tl.constexpr = config.K
    slot, sequence, t, d = _tile(c, size, config)
    inside = (t < sequence.stop)[:, None] & (d < size.D)[None, :]
    at = (sequence.b.to(tl.int64) * size.T + t)[:, None] * size.D + d[None, :]
    d_sum = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if config.SILU:
        p = _sums(c, sequence, t, d, size, K)
        part, rest = sigmoids(p)
        d_sum = tl.where(inside, d_sum * part * (1.0 + p * rest), 0.0)
    tl.store(out.p + at, d_sum, mask=inside)
    own = slot.to(tl.int64) * size.D + d
    for j in tl.static_range(K):
        x = _inputs(c, sequence, t - (K - 1) + j, d, size, K)
        tl.store(out.weight + own * K + j, tl.sum(d_sum * x, 0), mask=d < size.D)
    if out.bias is not None:
        tl.store(out.bias + own, tl.sum(d_sum, 0), mask=d < size.D)


@triton.jit
def _reads(weight, dp, sequence, t, d, size, K: tl.constexpr):
    # the gradient of the input at tokens t [C], which may precede the sequence
    _s, b, first, stop = sequence
    dx = tl.zeros([t.shape[0], d.shape[0]], tl.float32)
    for j in tl.static_range(K):
        later = t + (K - 1) - j
        inside = (d < size.D)[None, :] & ((later >= first) & (later < stop))[:, None]
        at = dp + (b.to(tl.int64) * size.T + later)[:, None] * size.D + d[None, :]
        w = tl.load(weight + d * K + j, mask=d < size.D, other=0.0)
        dx += w[None, :] * tl.load(at, mask=inside, other=0.0)
    return dx


@triton.jit
def _final_inputs(dfinal, sequence, t, d, size, K: tl.constexpr):
    # the gradient of the inputs at t through the final state
    j = t - sequence.stop + K - 1
    at = dfinal + (sequence.n.to(tl.int64) * size.D + d)[None, :] * (K - 1) + j[:, None]
    inside = (d < size.D)[None, :] & ((j >= 0) & (j < K - 1))[:, None]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def of_inputs(c, dp, dfinal, dx, size, config: tl.constexpr):
    """dx [B, T, D]."""
    _, sequence, t, d = _tile(c, size, config)
    x = _reads(c.weight, dp, sequence, t, d, size, config.K)
    if dfinal is not None:
        x += _final_inputs(dfinal, sequence, t, d, size, config.K)
    at = dx + (sequence.b.to(tl.int64) * size.T + t)[:, None] * size.D + d[None, :]
    tl.store(at, x.to(dx.dtype.element_ty), mask=(t < sequence.stop)[:, None] & (d < size.D)[None, :])


@triton.jit
def of_initial(c, dp, dfinal, dinitial, size, config: tl.constexpr):
    """The gradient of the initial state [S, D, K - 1]."""
    K: tl.constexpr = config.K
    sequence, d = _sequence(c, size, config)
    j = tl.arange(0, config.BK)
    t = sequence.first - (K - 1) + j
    x = _reads(c.weight, dp, sequence, t, d, size, K)
    if dfinal is not None:
        x += _final_inputs(dfinal, sequence, t, d, size, K)
    at = dinitial + (sequence.n.to(tl.int64) * size.D + d)[None, :] * (K - 1) + j[:, None]
    tl.store(at, x, mask=(d < size.D)[None, :] & (j < K - 1)[:, None])
