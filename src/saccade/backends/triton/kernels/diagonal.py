"""Selective scan: channels × N slots of state in registers, time in sequence; the same bits wherever a call is cut.

A program owns BD channels of one group in one sequence. The backward walks forward once more, keeping a state before
each chunk of C tokens, then goes through the chunks from the last: it writes a chunk's states into scratch of its own
and reads them backwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import power
from .recurrent import extent, first_slot


class Channels(NamedTuple):
    """An array [B, T, D]: its pointer and the strides of its first two axes; the last one is contiguous."""

    p: Any
    b: Any
    t: Any


class Shared(NamedTuple):
    """B or C: its pointer and strides of batch, token, group and channel, 0 where it has none."""

    p: Any
    b: Any
    t: Any
    g: Any
    d: Any


class Scan(NamedTuple):
    """The arrays of a scan; None for what the call lacks. A [D, N]; D, bias float32 [D]; cu [S + 1]."""

    u: Any
    delta: Any
    z: Any
    A: Any
    B: Any
    C: Any
    D: Any
    bias: Any
    cu: Any
    initial: Any


class Sizes(NamedTuple):
    """Sequences, tokens, channels, groups, chunks of a sequence where none are packed, blocks of a group, B T."""

    N: Any
    T: Any
    D: Any
    G: Any
    chunks: Any
    blocks: Any
    rows: Any


@triton.jit
def exp(x):
    """e^x to the last digit or two, of any x."""
    small = power(-tl.abs(x), 0.0, True)
    return tl.where(x > 0, tl.div_rn(1.0, small), small)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    e = power(-tl.abs(x), 0.0, True)
    return tl.div_rn(tl.where(x < 0, e, 1.0), 1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + e^x), with the digits of e^x where that is small: 2 artanh(e / (2 + e)) as a series."""
    e = power(-tl.abs(x), 0.0, True)
    s = tl.div_rn(e, 2.0 + e)
    z = s * s
    p = 0.06666666667 * z + 0.07692307692
    p = p * z + 0.09090909091
    p = p * z + 0.1111111111
    p = p * z + 0.1428571429
    p = p * z + 0.2
    p = p * z + 0.3333333333
    return tl.where(x > 0, x, 0.0) + 2.0 * (s + s * (z * p))


@triton.jit
def row(x, b, t, d, ok):
    """Channels d of token t of Channels, as float32."""
    at = x.p + b.to(tl.int64) * x.b + t.to(tl.int64) * x.t + d
    return tl.load(at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def slots(x, b, t, g, d, j, inside):
    """B or C of token t, [BD, BN]."""
    at = x.p + b.to(tl.int64) * x.b + t.to(tl.int64) * x.t + g * x.g
    return tl.load(at + d[:, None] * x.d + j[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _owner(size, BD: tl.constexpr):
    # (sequence, group, block of channels, channels, whether they are there)
    program = tl.program_id(0)
    i = program % size.blocks
    g = program // size.blocks % size.G
    s = program // (size.blocks * size.G)
    within = i * BD + tl.arange(0, BD)
    wide = size.D // size.G
    return s, g, i, g * wide + within, within < wide


@triton.jit
def _step(x, b, t, d, ok, SOFTPLUS: tl.constexpr):
    # (delta + bias, the step)
    raw = row(x.delta, b, t, d, ok)
    if x.bias is not None:
        raw += tl.load(x.bias + d, mask=ok, other=0.0)
    if SOFTPLUS:
        return raw, softplus(raw)
    else:
        return raw, raw


@triton.jit
def _begin(x, size, s, d, j, inside, N: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    # (rates A, the first state)
    rate = tl.load(x.A + d[:, None] * N + j[None, :], mask=inside, other=0.0).to(tl.float32)
    h = tl.zeros([BD, BN], tl.float32)
    if x.initial is not None:
        at = x.initial + (s.to(tl.int64) * size.D + d[:, None]) * N + j[None, :]
        h = tl.load(at, mask=inside, other=0.0)
    return rate, h


@triton.jit
def _next(h, x, b, t, g, d, j, ok, inside, rate, step):
    u = row(x.u, b, t, d, ok)
    return exp(step[:, None] * rate) * h + (step * u)[:, None] * slots(x.B, b, t, g, d, j, inside)


@triton.jit
def scan(
    x, y, final, size, N: tl.constexpr, SOFTPLUS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr
):
    """y [B, T, D] and the final state [S, D, N]. The loads of AHEAD tokens stand before their sums."""
    s, g, _, d, ok = _owner(size, BD)
    b, first, stop = extent(x.cu, s, size)
    j = tl.arange(0, BN)
    inside = ok[:, None] & (j < N)[None, :]
    rate, h = _begin(x, size, s, d, j, inside, N, BD, BN)
    for r in range(0, stop - first, AHEAD):
        for i in tl.static_range(AHEAD):
            t = first + r + i
            there = ok & (t < stop)
            filled = inside & (t < stop)
            _raw, step = _step(x, b, t, d, there, SOFTPLUS)
            moved = _next(h, x, b, t, g, d, j, there, filled, rate, step)
            h = tl.where(t < stop, moved, h)
            out = tl.sum(h * slots(x.C, b, t, g, d, j, filled), 1)
            if x.D is not None:
                out += tl.load(x.D + d, mask=ok, other=0.0) * row(x.u, b, t, d, there)
            if x.z is not None:
                gate = row(x.z, b, t, d, there)
                out = out * (gate * sigmoid(gate))
            at = y + (b.to(tl.int64) * size.T + t) * size.D + d
            tl.store(at, out.to(y.dtype.element_ty), mask=there)
    tl.store(final + (s.to(tl.int64) * size.D + d[:, None]) * N + j[None, :], h, mask=inside)


@triton.jit
def walk(x, kept, size, N: tl.constexpr, SOFTPLUS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr):
    """The state before each chunk into `kept` [slots, D, N]."""
    s, g, _, d, ok = _owner(size, BD)
    b, first, stop = extent(x.cu, s, size)
    slot = first_slot(x.cu, s, size, C)
    j = tl.arange(0, BN)
    inside = ok[:, None] & (j < N)[None, :]
    rate, h = _begin(x, size, s, d, j, inside, N, BD, BN)
    for r in range(0, stop - first):
        t = first + r
        if r % C == 0:
            at = kept + ((slot + r // C).to(tl.int64) * size.D + d[:, None]) * N + j[None, :]
            tl.store(at, h, mask=inside)
        _raw, step = _step(x, b, t, d, ok, SOFTPLUS)
        h = _next(h, x, b, t, g, d, j, ok, inside, rate, step)


class Gradients(NamedTuple):
    """Where gradients go, None for none: of tokens [B, T, D]; A [S, D, N]; D, bias [S, D]; initial [S, D, N].

    B, C: shares of blocks of channels [blocks, B, T, G, N], or [S, D, N] where they are the same at all times.
    """

    u: Any
    delta: Any
    z: Any
    A: Any
    B: Any
    C: Any
    D: Any
    bias: Any
    initial: Any


@triton.jit
def _store_slots(p, value, size, b, t, g, i, j, N: tl.constexpr):
    # the gradient of B or C at a token, summed over the program's channels
    at = (i.to(tl.int64) * size.rows + b.to(tl.int64) * size.T + t) * size.G + g
    tl.store(p + at * N + j, tl.sum(value, 0), mask=j < N)


@triton.jit
def scan_backward(
    x, dy, dfinal, out, kept, scratch, size, N: tl.constexpr, SOFTPLUS: tl.constexpr, FIXED_B: tl.constexpr,
    FIXED_C: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """All gradients. kept: of `walk`; scratch [S, C, D, N], of whose rows each program has its channels'."""
    s, g, i, d, ok = _owner(size, BD)
    b, first, stop = extent(x.cu, s, size)
    slot = first_slot(x.cu, s, size, C)
    j = tl.arange(0, BN)
    inside = ok[:, None] & (j < N)[None, :]
    state = (s.to(tl.int64) * size.D + d[:, None]) * N + j[None, :]
    rate, _ = _begin(x, size, s, d, j, inside, N, BD, BN)
    mine = scratch + (s.to(tl.int64) * C * size.D + d[:, None]) * N + j[None, :]
    dh = tl.load(dfinal + state, mask=inside, other=0.0)
    dA = tl.zeros([BD, BN], tl.float32)
    dB = tl.zeros([BD, BN], tl.float32)
    dC = tl.zeros([BD, BN], tl.float32)
    dD = tl.zeros([BD], tl.float32)
    dbias = tl.zeros([BD], tl.float32)
    chunks = tl.cdiv(stop - first, C)
    for back in range(0, chunks):
        c = chunks - 1 - back
        begin = first + c * C
        count = tl.minimum(C, stop - begin)
        at = kept + ((slot + c).to(tl.int64) * size.D + d[:, None]) * N + j[None, :]
        h = tl.load(at, mask=inside, other=0.0)
        tl.debug_barrier()
        for r in range(0, count):
            tl.store(mine + r * size.D * N, h, mask=inside)
            _raw, step = _step(x, b, begin + r, d, ok, SOFTPLUS)
            h = _next(h, x, b, begin + r, g, d, j, ok, inside, rate, step)
        tl.debug_barrier()
        # one sum of all tokens would lose digits of thousands
        share = tl.zeros([BD, BN], tl.float32)
        for k in range(0, count):
            r = count - 1 - k
            t = begin + r
            token = (b.to(tl.int64) * size.T + t) * size.D + d
            raw, step = _step(x, b, t, d, ok, SOFTPLUS)
            u = row(x.u, b, t, d, ok)
            dp = tl.load(dy + token, mask=ok, other=0.0).to(tl.float32)
            cs = slots(x.C, b, t, g, d, j, inside)
            bs = slots(x.B, b, t, g, d, j, inside)
            if x.z is not None:
                gate = row(x.z, b, t, d, ok)
                p = tl.sum(h * cs, 1)
                if x.D is not None:
                    p += tl.load(x.D + d, mask=ok, other=0.0) * u
                part = sigmoid(gate)
                tl.store(
                    out.z + token, (dp * p * part * (1.0 + gate * sigmoid(-gate))).to(out.z.dtype.element_ty), mask=ok
                )
                dp = dp * (gate * part)
            dc = h * dp[:, None]
            h = tl.load(mine + r * size.D * N, mask=inside, other=0.0)
            dh += cs * dp[:, None]
            decayed = exp(step[:, None] * rate) * dh
            through = tl.sum(dh * bs, 1)
            dx = decayed * h
            db = dh * (step * u)[:, None]
            du = step * through
            dstep = u * through + tl.sum(dx * rate, 1)
            share += dx * step[:, None]
            if SOFTPLUS:
                dstep = dstep * sigmoid(raw)
            if x.D is not None:
                du += tl.load(x.D + d, mask=ok, other=0.0) * dp
            dD += dp * u
            dbias += dstep
            dB += db
            dC += dc
            if not FIXED_B:
                _store_slots(out.B, db, size, b, t, g, i, j, N)
            if not FIXED_C:
                _store_slots(out.C, dc, size, b, t, g, i, j, N)
            tl.store(out.u + token, du.to(out.u.dtype.element_ty), mask=ok)
            tl.store(out.delta + token, dstep.to(out.delta.dtype.element_ty), mask=ok)
            dh = decayed
        dA += share
    tl.store(out.A + state, dA, mask=inside)
    tl.store(out.initial + state, dh, mask=inside)
    if FIXED_B:
        tl.store(out.B + state, dB, mask=inside)
    if FIXED_C:
        tl.store(out.C + state, dC, mask=inside)
    if x.D is not None:
        tl.store(out.D + s.to(tl.int64) * size.D + d, dD, mask=ok)
    if x.bias is not None:
        tl.store(out.bias + s.to(tl.int64) * size.D + d, dbias, mask=ok)
