"""Recurrences over matrix states token by token, for a single token and for what has no form in chunks yet.

A program owns all K rows and BV columns of one head's state, which never meet the other columns: decays of channels and
the delta rule's e = v - Sᵀ k are sums of its own. The backward keeps a state before each chunk of C tokens, writes a
chunk's states into scratch of its own and goes through them from the last; sums over columns are left to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import power
from .recurrent import extent, first_slot, state_at


class Walked(NamedTuple):
    """Where gradients go, None for none: v [B, T, H, V], initial [N, H, K, V], the others as shares.

    Of blocks of columns: q, k [blocks, B, T, H, K], g [blocks, B, T, H(, K)], beta [blocks, B, T, H].
    """

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    initial: Any


@triton.jit
def _vector(x, b, t, h, i, n: tl.constexpr):
    # numbers i of a token and head, as float32
    at = x.p + b.to(tl.int64) * x.b + t.to(tl.int64) * x.t + h * x.h
    return tl.load(at + i, mask=i < n, other=0.0).to(tl.float32)


@triton.jit
def _decay(g, row, f, K: tl.constexpr, CHANNELS: tl.constexpr):
    # [K] or one for all
    if CHANNELS:
        x = tl.load(g + row * K + f, mask=f < K, other=0.0).to(tl.float32)
    else:
        x = tl.load(g + row + 0 * f).to(tl.float32)
    return power(x, 0.0, True)


@triton.jit
def _move(
    s, k, v, sides, b, t, h, f, w, size, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr
):
    # (the state after a token, the decayed one before it, keys, e, u)
    row = (b.to(tl.int64) * size.T + t) * size.H + h
    keys = _vector(k, b, t, h // size.G, f, K)
    e = _vector(v, b, t, h, w, V)
    if sides.g is not None:
        s = s * _decay(sides.g, row, f, K, CHANNELS)[:, None]
    if DELTA:
        e = e - tl.sum(s * keys[:, None], 0)
    u = e
    if sides.beta is not None:
        u = e * tl.load(sides.beta + row)
    return s + keys[:, None] * u[None, :], s, keys, e, u


@triton.jit
def walk(
    q, k, v, sides, initial, o, final, kept, size, scale, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr,
    CHANNELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, V] and the final state [N, H, K, V]; with `kept` [slots, H, K, V] the state before each chunk."""
    columns: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    w = program % columns * BV + tl.arange(0, BV)
    h = program // columns % size.H
    n = program // (columns * size.H)
    f = tl.arange(0, BK)
    b, first, stop = extent(sides.cu, n, size)
    slot = first_slot(sides.cu, n, size, C)
    there = (f < K)[:, None] & (w < V)[None, :]
    s = tl.zeros([BK, BV], tl.float32)
    if initial is not None:
        s = tl.load(state_at(initial, n, h, size, f, w, K, V), mask=there, other=0.0)
    for r in range(0, stop - first):
        t = first + r
        # the first is known when the kernel is compiled
        if kept is not None:  # noqa: SIM102
            if r % C == 0:
                tl.store(state_at(kept, slot + r // C, h, size, f, w, K, V), s, mask=there)
        s, _before, _keys, _e, _u = _move(s, k, v, sides, b, t, h, f, w, size, K, V, DELTA, CHANNELS)
        if kept is None:
            out = scale * tl.sum(s * _vector(q, b, t, h // size.G, f, K)[:, None], 0)
            at = o + ((b.to(tl.int64) * size.T + t) * size.H + h) * V + w
            tl.store(at, out.to(o.dtype.element_ty), mask=w < V)
    if kept is None:
        tl.store(state_at(final, n, h, size, f, w, K, V), s, mask=there)


@triton.jit
def walk_backward(
    q, k, v, do, sides, dfinal, out, kept, scratch, size, scale, K: tl.constexpr, V: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """All gradients. kept: of `walk`; scratch [N C, H, K, V], of whose states each program has its columns."""
    columns: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    column = program % columns
    w = column * BV + tl.arange(0, BV)
    h = program // columns % size.H
    n = program // (columns * size.H)
    f = tl.arange(0, BK)
    b, first, stop = extent(sides.cu, n, size)
    slot = first_slot(sides.cu, n, size, C)
    there = (f < K)[:, None] & (w < V)[None, :]
    d = tl.zeros([BK, BV], tl.float32)
    if dfinal is not None:
        d = tl.load(state_at(dfinal, n, h, size, f, w, K, V), mask=there, other=0.0)
    chunks = tl.cdiv(stop - first, C)
    for back in range(0, chunks):
        c = chunks - 1 - back
        begin = first + c * C
        count = tl.minimum(C, stop - begin)
        s = tl.load(state_at(kept, slot + c, h, size, f, w, K, V), mask=there, other=0.0)
        tl.debug_barrier()
        for r in range(0, count):
            tl.store(state_at(scratch, n * C + r, h, size, f, w, K, V), s, mask=there)
            s, _before, _keys, _e, _u = _move(s, k, v, sides, b, begin + r, h, f, w, size, K, V, DELTA, CHANNELS)
        tl.debug_barrier()
        for i in range(0, count):
            r = count - 1 - i
            t = begin + r
            row = (b.to(tl.int64) * size.T + t) * size.H + h
            share = column.to(tl.int64) * size.rows + row
            s = tl.load(state_at(scratch, n * C + r, h, size, f, w, K, V), mask=there, other=0.0)
            after, before, keys, e, u = _move(s, k, v, sides, b, t, h, f, w, size, K, V, DELTA, CHANNELS)
            x = scale * _vector(do, b, t, h, w, V)
            d += _vector(q, b, t, h // size.G, f, K)[:, None] * x[None, :]
            du = tl.sum(d * keys[:, None], 0)
            dk = tl.sum(d * u[None, :], 1)
            dv = du
            if sides.beta is not None:
                dv = du * tl.load(sides.beta + row)
                tl.store(out.beta + share, tl.sum(du * e, 0))
            if DELTA:
                dk -= tl.sum(before * dv[None, :], 1)
                d -= keys[:, None] * dv[None, :]
            if sides.g is not None:
                dg = tl.sum(d * before, 1)
                if CHANNELS:
                    tl.store(out.g + share * K + f, dg, mask=f < K)
                else:
                    tl.store(out.g + share, tl.sum(dg, 0))
                d = d * _decay(sides.g, row, f, K, CHANNELS)[:, None]
            tl.store(out.q + share * K + f, tl.sum(after * x[None, :], 1), mask=f < K)
            tl.store(out.k + share * K + f, dk, mask=f < K)
            tl.store(out.v + row * V + w, dv.to(out.v.dtype.element_ty), mask=w < V)
    tl.store(state_at(out.initial, n, h, size, f, w, K, V), d, mask=there)
