"""RG-LRU (Griffin; De et al., 2024): chunks of a sequence in parallel; `diagonal_chunks.carry` carries their states."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import LOG2E
from .diagonal_chunks import (
    at,
    chunk,
    exp,
    lanes,
    places,
    rows,
    scan,
    scan_apart,
    scan_back,
    sigmoid,
    sigmoids,
    softplus,
)


class Unit(NamedTuple):
    """Channels x, r, i; a_param float32 [D]; cu [S + 1] and initial [S, D], or None."""

    x: Any
    r: Any
    i: Any
    a_param: Any
    cu: Any
    initial: Any


@triton.jit
def _decay(x):
    # (e^x, 1 - e^2x) for x <= 0; near 0 from e^x - 1 as a series, because a difference would lose digits
    p = x * 2.4801587e-5 + 1.9841270e-4
    p = p * x + 1.3888889e-3
    p = p * x + 8.3333333e-3
    p = p * x + 4.1666667e-2
    p = p * x + 0.16666667
    p = p * x + 0.5
    e = exp(x)
    less = tl.where(x > -0.5, x + x * (x * p), e - 1.0)
    return tl.where(x > -0.5, 1.0 + less, e), -(less * (2.0 + less))


class Tile(NamedTuple):
    """C tokens from t of channels d of batch entry b; ok: which of them exist; first: the sequence's first token."""

    b: Any
    first: Any
    t: Any
    d: Any
    ok: Any


@triton.jit
def _gates(c, tile, slope, C: tl.constexpr):
    # (x, σ(r), σ(i), log a, a, 1 - a², its root) of a tile, each σ(v) with σ(-v). Without an initial state, a
    # is 0 at the first token of a sequence.
    b, first, t, d, ok = tile
    x = rows(c.x, b, t, ok, d, C)
    part, taken = sigmoids(rows(c.r, b, t, ok, d, C)), sigmoids(rows(c.i, b, t, ok, d, C))
    log_a = tl.where(ok, slope[None, :] * part[0], 0.0)
    a, unit = _decay(log_a)
    if c.initial is None:
        begins = (t + tl.arange(0, C) == first)[:, None]
        a = tl.where(begins, 0.0, a)
        unit = tl.where(begins, 1.0, unit)
    return x, part, taken, log_a, a, unit, tl.sqrt(unit)


@triton.jit
def _owner(c, size, BD: tl.constexpr, SPAN: tl.constexpr):
    # (slot, sequence, batch entry, first token and end of the sequence, first token of the chunk, channels,
    # d log a / d σ(r))
    program = tl.program_id(0)
    blocks = tl.cdiv(size.D, BD)
    slot = program // blocks
    s, b, first, stop, begin = chunk(c.cu, slot, size, SPAN)
    d = lanes(program % blocks * BD, BD)
    slope = -8.0 * softplus(tl.load(c.a_param + d, mask=d < size.D, other=0.0))
    return slot, s, b, first, stop, begin, d, slope


@triton.jit
def unit_sums(c, dy, sums, size, BD: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr):
    """Fill ChunkSums with N = 1; with dy [B, T, D] also the sums of the gradient, and then SPAN is C."""
    slot, _s, b, first, stop, begin, d, slope = _owner(c, size, BD, SPAN)
    h = tl.zeros([BD], tl.float32)
    log = tl.zeros([BD], tl.float32)
    # a forward does not need the sums of a sequence's last chunk
    wanted = tl.minimum(begin + SPAN, stop)
    if dy is None:
        wanted = tl.where(begin + SPAN >= stop, begin, wanted)
    own = slot.to(tl.int64) * size.D + d
    for i in range(0, wanted - begin, C):
        r = begin + i
        ok = (r + tl.arange(0, C) < stop)[:, None] & (d < size.D)[None, :]
        x, _, taken, log_a, a, _, root = _gates(c, Tile(b, first, r, d, ok), slope, C)
        if dy is not None:
            token = places(b, r, d, size, C)
            do = tl.load(dy + token, mask=ok, other=0.0).to(tl.float32)
            tl.store(sums.back + own, at(a * scan_back(a, do, h), 0), mask=d < size.D)
        h = at(scan(a, root * taken[0] * x, h), C - 1)
        log += tl.sum(log_a, 0)
    tl.store(sums.ends + own, h, mask=d < size.D)
    tl.store(sums.logs + own, log * LOG2E, mask=d < size.D)


class Results(NamedTuple):
    """y [B, T, D] and the final state [S, D]."""

    y: Any
    final: Any


@triton.jit
def unit(c, states, results, size, BD: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr):
    """Fill Results. states: those of `carry`, or None where a sequence is one chunk."""
    slot, s, b, first, stop, begin, d, slope = _owner(c, size, BD, SPAN)
    h = tl.zeros([BD], tl.float32)
    if states is not None:
        h = tl.load(states + slot.to(tl.int64) * size.D + d, mask=d < size.D, other=0.0)
    elif c.initial is not None:
        h = tl.load(c.initial + s.to(tl.int64) * size.D + d, mask=d < size.D, other=0.0)
    end = tl.minimum(begin + SPAN, stop)
    for i in range(0, end - begin, C):
        r = begin + i
        ok = (r + tl.arange(0, C) < stop)[:, None] & (d < size.D)[None, :]
        x, _, taken, _, a, _, root = _gates(c, Tile(b, first, r, d, ok), slope, C)
        following = scan(a, root * taken[0] * x, h)
        token = places(b, r, d, size, C)
        tl.store(results.y + token, following.to(results.y.dtype.element_ty), mask=ok)
        h = at(following, C - 1)
    # true for a sequence without tokens too
    last = (end == stop) & ((begin < stop) | (begin == first))
    tl.store(results.final + s.to(tl.int64) * size.D + d, h, mask=(d < size.D) & last)


class Gradients(NamedTuple):
    """Where gradients go: x, r, i [B, T, D], a_param [slots, D], initial [S, D]."""

    x: Any
    r: Any
    i: Any
    a_param: Any
    initial: Any


@triton.jit
def unit_backward(c, dy, out, borders, size, BD: tl.constexpr, C: tl.constexpr):
    """All gradients except that of `initial`. borders: of chunks of C tokens."""
    slot, _s, b, first, stop, begin, d, slope = _owner(c, size, BD, C)
    own = slot.to(tl.int64) * size.D + d
    ok = (begin + tl.arange(0, C) < stop)[:, None] & (d < size.D)[None, :]
    inside = (d < size.D) & (begin < stop)
    x, part, taken, _, a, unit, root = _gates(c, Tile(b, first, begin, d, ok), slope, C)
    token = places(b, begin, d, size, C)
    do = tl.load(dy + token, mask=ok, other=0.0).to(tl.float32)
    before = scan_apart(a, root * taken[0] * x, tl.load(borders.before + own, mask=inside, other=0.0))
    dh = scan_back(a, do, tl.load(borders.after + own, mask=inside, other=0.0))
    # the derivative of the root is limited to 1000
    droot = dh * taken[0] * x / tl.sqrt(tl.where(4.0 * unit < 1e-6, 1e-6, 4.0 * unit))
    dlog = dh * before - 2.0 * a * a * droot
    share = tl.sum(tl.where(ok, dlog * part[0], 0.0), 0)
    entering = dh * root * taken[0]
    dr = dlog * slope[None, :] * part[0] * part[1]
    di = entering * x * taken[1]
    tl.store(out.x + token, entering.to(out.x.dtype.element_ty), mask=ok)
    tl.store(out.r + token, dr.to(out.r.dtype.element_ty), mask=ok)
    tl.store(out.i + token, di.to(out.i.dtype.element_ty), mask=ok)
    rate = tl.load(c.a_param + d, mask=d < size.D, other=0.0)
    tl.store(out.a_param + own, share * -8.0 * sigmoid(rate), mask=d < size.D)
