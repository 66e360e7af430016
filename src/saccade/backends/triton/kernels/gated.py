"""RG-LRU: a channel a lane, time in sequence, forward and, from states kept before each chunk, backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import power
from .diagonal import row, sigmoid, softplus
from .recurrent import extent, first_slot


class Unit(NamedTuple):
    """Channels x, r, i; a_param float32 [D]; cu [S + 1] and initial [S, D], or None."""

    x: Any
    r: Any
    i: Any
    a_param: Any
    cu: Any
    initial: Any


@triton.jit
def _one_less(x):
    # 1 - e^x of x <= 0, near 0 as a series, for a difference would lose its digits
    e = power(x, 0.0, True)
    p = x * 2.7557319e-6 + 2.4801587e-5
    p = p * x + 1.9841270e-4
    p = p * x + 1.3888889e-3
    p = p * x + 8.3333333e-3
    p = p * x + 4.1666667e-2
    p = p * x + 0.16666667
    p = p * x + 0.5
    return tl.where(x > -0.5, -(x + x * (x * p)), 1.0 - e)


@triton.jit
def _gates(c, b, t, d, ok, slope, begins):
    # (x, σ(r), σ(i), a, 1 - a², its root) at a token; `begins` where nothing comes before
    x = row(c.x, b, t, d, ok)
    part = sigmoid(row(c.r, b, t, d, ok))
    taken = sigmoid(row(c.i, b, t, d, ok))
    log_a = slope * part
    a = tl.where(begins, 0.0, power(log_a, 0.0, True))
    unit = tl.where(begins, 1.0, _one_less(2.0 * log_a))
    return x, part, taken, a, unit, tl.sqrt_rn(unit)


@triton.jit
def _owner(c, size, BD: tl.constexpr):
    # (sequence, channels, whether they are there, log a of an open gate, the first state)
    program = tl.program_id(0)
    blocks = tl.cdiv(size.D, BD)
    s = program // blocks
    d = program % blocks * BD + tl.arange(0, BD)
    ok = d < size.D
    slope = -8.0 * softplus(tl.load(c.a_param + d, mask=ok, other=0.0))
    h = tl.zeros([BD], tl.float32)
    if c.initial is not None:
        h = tl.load(c.initial + s.to(tl.int64) * size.D + d, mask=ok, other=0.0)
    return s, d, ok, slope, h


@triton.jit
def unit(c, y, final, kept, size, BD: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr):
    """y [B, T, D] and the final state [S, D]; with `kept` [slots, D] the state before each chunk in place of both."""
    s, d, ok, slope, h = _owner(c, size, BD)
    b, first, stop = extent(c.cu, s, size)
    slot = first_slot(c.cu, s, size, C)
    for r in range(0, stop - first, AHEAD):
        # the first is known when the kernel is compiled
        if kept is not None:  # noqa: SIM102
            if r % C == 0:
                tl.store(kept + (slot + r // C).to(tl.int64) * size.D + d, h, mask=ok)
        for n in tl.static_range(AHEAD):
            t = first + r + n
            there = ok & (t < stop)
            begins = (t == first) & (c.initial is None)
            x, _part, taken, a, _unit, root = _gates(c, b, t, d, there, slope, begins)
            h = tl.where(t < stop, a * h + root * taken * x, h)
            if kept is None:
                tl.store(y + (b.to(tl.int64) * size.T + t) * size.D + d, h.to(y.dtype.element_ty), mask=there)
    if kept is None:
        tl.store(final + s.to(tl.int64) * size.D + d, h, mask=ok)


class Gradients(NamedTuple):
    """Where gradients go: x, r, i [B, T, D], a_param, initial [S, D]."""

    x: Any
    r: Any
    i: Any
    a_param: Any
    initial: Any


@triton.jit
def unit_backward(c, dy, dfinal, out, kept, scratch, size, BD: tl.constexpr, C: tl.constexpr):
    """All gradients. kept: of `unit`; scratch [S, C, D], of whose rows each program has its channels'."""
    s, d, ok, slope, _ = _owner(c, size, BD)
    b, first, stop = extent(c.cu, s, size)
    slot = first_slot(c.cu, s, size, C)
    mine = scratch + s.to(tl.int64) * C * size.D + d
    state = s.to(tl.int64) * size.D + d
    dh = tl.load(dfinal + state, mask=ok, other=0.0)
    dslope = tl.zeros([BD], tl.float32)
    chunks = tl.cdiv(stop - first, C)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        begin = first + chunk * C
        count = tl.minimum(C, stop - begin)
        h = tl.load(kept + (slot + chunk).to(tl.int64) * size.D + d, mask=ok, other=0.0)
        tl.debug_barrier()
        for n in range(0, count):
            tl.store(mine + n * size.D, h, mask=ok)
            begins = (begin + n == first) & (c.initial is None)
            x, _part, taken, a, _unit, root = _gates(c, b, begin + n, d, ok, slope, begins)
            h = a * h + root * taken * x
        tl.debug_barrier()
        share = tl.zeros([BD], tl.float32)
        for k in range(0, count):
            n = count - 1 - k
            t = begin + n
            token = (b.to(tl.int64) * size.T + t) * size.D + d
            begins = (t == first) & (c.initial is None)
            x, part, taken, a, unit, root = _gates(c, b, t, d, ok, slope, begins)
            before = tl.load(mine + n * size.D, mask=ok, other=0.0)
            dh += tl.load(dy + token, mask=ok, other=0.0).to(tl.float32)
            # the slope of the root is at most 1000
            droot = tl.div_rn(dh * taken * x, tl.sqrt_rn(tl.where(4.0 * unit < 1e-6, 1e-6, 4.0 * unit)))
            dlog = a * dh * before - 2.0 * a * a * droot
            share += dlog * part
            entering = dh * root * taken
            raw_r, raw_i = row(c.r, b, t, d, ok), row(c.i, b, t, d, ok)
            dr = dlog * slope * part * sigmoid(-raw_r)
            di = entering * x * sigmoid(-raw_i)
            tl.store(out.x + token, entering.to(out.x.dtype.element_ty), mask=ok)
            tl.store(out.r + token, dr.to(out.r.dtype.element_ty), mask=ok)
            tl.store(out.i + token, di.to(out.i.dtype.element_ty), mask=ok)
            dh = a * dh
        dslope += share
    rate = tl.load(c.a_param + d, mask=ok, other=0.0)
    tl.store(out.a_param + state, dslope * -8.0 * sigmoid(rate), mask=ok)
    tl.store(out.initial + state, dh, mask=ok)
