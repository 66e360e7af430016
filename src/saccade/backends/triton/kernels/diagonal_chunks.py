"""Shared by recurrences over channels: chunks of a sequence, scans of a tile in a lane's registers, carries of states.

A tile is [C tokens, BD channels] with a warp along channels, so that a scan over tokens is a chain of sums in a lane. A
chunk has a slot, as in `recurrent`. States of chunks are [slots, N, D]; the caller's are [S, D, N].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import LOG2E, exact_exp2
from .recurrent import extent, first_slot, sequence_of


class ChunkSums(NamedTuple):
    """The effect of chunks on a state, float32: sums of the steps' logarithms [slots, D], and the terms [slots, N, D]
    that they add to the state and to its gradient, or None."""

    logs: Any
    ends: Any
    back: Any


class Carried(NamedTuple):
    """initial: the caller's states [S, D, N], or None for 0. states: those of chunks [slots, N, D]. final: [S, D, N] or
    None."""

    initial: Any
    states: Any
    final: Any


class Borders(NamedTuple):
    """States before tiles of C tokens, and gradients of the states after them, [tiles, N, D]."""

    before: Any
    after: Any


class CarryConfig(NamedTuple):
    """The constants of `carry`: numbers of a channel's state, whether it goes backwards, channels of a program, chunks
    of a tile, tokens of a chunk."""

    N: Any
    BACK: Any
    BD: Any
    C: Any
    SPAN: Any


@triton.jit
def chunk(cu, slot, size, SPAN: tl.constexpr):
    """(sequence, batch entry, the sequence's first token and end, the chunk's first token)."""
    s = sequence_of(cu, slot, size, SPAN)
    b, first, stop = extent(cu, s, size)
    return s, b, first, stop, first + (slot - first_slot(cu, s, size, SPAN)) * SPAN


@triton.jit
def lanes(begin, BD: tl.constexpr):
    """BD channels from `begin`, one per lane. If the alignment were known, a lane would load several channels."""
    return begin + tl.multiple_of(tl.arange(0, BD), 1)


@triton.jit
def rows(x, b, t, ok, d, C: tl.constexpr):
    """Channels d of C tokens from t of a strided array, as float32."""
    first = x.p + b.to(tl.int64) * x.b + t.to(tl.int64) * x.t + d
    step = tl.arange(0, C).to(tl.int64) * x.t
    return tl.load(first[None, :] + step[:, None], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def places(b, t, d, size, C: tl.constexpr):
    """Offsets of channels d of C tokens from t in a contiguous array [B, T, D]."""
    first = (b.to(tl.int64) * size.T + t) * size.D + d
    return first[None, :] + (tl.arange(0, C) * size.D)[:, None]


@triton.jit
def exp2(x, EXACT: tl.constexpr):
    """2^x; EXACT within half a unit in the last place. exp2 loses two digits, and slow decays accumulate that error."""
    if EXACT:
        y = exact_exp2(tl.where(x < -126.0, -126.0, tl.where(x > 127.4, 127.4, x)))
        return tl.where(x < -126.0, 0.0, tl.where(x > 127.4, float("inf"), y))
    else:
        return tl.exp2(x)


@triton.jit
def exp(x):
    """e^x for x <= 0 within two units in the last place; rounding x log2 e alone would cost more."""
    x = tl.maximum(x, -150.0, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(x * LOG2E + 0.5)
    # ln 2 in two parts, the first of ten bits
    f = (x - n * 0.693359375) + n * 2.1219444005469058e-4
    return tl.exp2(f * LOG2E) * tl.exp2(n)


@triton.jit
def sigmoids(x):
    """(1 / (1 + e^-x), 1 / (1 + e^x)): one minus the other would lose digits."""
    e = exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(x < 0, small, large), tl.where(x < 0, large, small)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return sigmoids(x)[0]


@triton.jit
def softplus(x):
    """log(1 + e^x), exact where e^x is small: 2 artanh(e / (2 + e)) as a series."""
    e = exp(-tl.abs(x))
    s = e / (2.0 + e)
    z = s * s
    p = 0.06666666667 * z + 0.07692307692
    p = p * z + 0.09090909091
    p = p * z + 0.1111111111
    p = p * z + 0.1428571429
    p = p * z + 0.2
    p = p * z + 0.3333333333
    return tl.where(x > 0, x, 0.0) + 2.0 * (s + s * (z * p))


@triton.jit
def _follow(a, h, decay, entry):
    return a * decay, decay * h + entry


@triton.jit
def scan(a, entry, before):
    """h_t = a_t h_(t-1) + entry_t over a tile; `before` [BD] is h_-1."""
    i = tl.arange(0, a.shape[0])[:, None]
    entry = tl.where(i == 0, a * before[None, :] + entry, entry)
    _, h = tl.associative_scan((a, entry), 0, _follow)
    return h


@triton.jit
def _follow_apart(a, h, entry, decay, later, next_entry):
    return a * decay, later + decay * (h + entry), next_entry


@triton.jit
def scan_apart(a, entry, before):
    """a_t h_(t-1) of `scan`; h_t - entry_t would lose digits."""
    i = tl.arange(0, a.shape[0])[:, None]
    # adding -0 leaves every number unchanged, also -0
    h = tl.where(i == 0, a * before[None, :], -0.0)
    _, h, _ = tl.associative_scan((a, h, entry), 0, _follow_apart)
    return h


@triton.jit
def _precede(a, product, h, decay, factor, entry):
    return decay, factor * a * product, entry + factor * (a * h)


@triton.jit
def scan_back(a, entry, after):
    """h_t = entry_t + a_(t+1) h_(t+1) over a tile; `after` [BD] is a h of the token after the tile."""
    i = tl.arange(0, a.shape[0])[:, None]
    entry = tl.where(i == a.shape[0] - 1, entry + after[None, :], entry)
    one = tl.full(a.shape, 1.0, tl.float32)
    # flipped, because Triton's reverse scan would move every number between lanes
    _, _, h = tl.associative_scan((tl.flip(a, 0), one, tl.flip(entry, 0)), 0, _precede)
    return tl.flip(h, 0)


@triton.jit
def at(x, i: tl.constexpr):
    """Row i of a tile."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0])[:, None] == i, x, 0.0), 0)


@triton.jit
def rates(rate, n, d, size, ok):
    """Rates [N, D] of channels d, made finite so that a step of 0 gives 0."""
    x = tl.load(rate + n * size.D + d, mask=ok, other=0.0)
    return tl.where(x < -3e38, -3e38, x)


@triton.jit
def carry(logs, rate, ends, carried, cu, size, config: tl.constexpr):
    """The state before each chunk; with BACK the state after each chunk, from the last chunk to the first.

    A chunk multiplies it by 2^(rate logs), logs [slots, D], rate [N, D] or None for 1, and adds ends [slots, N, D].
    """
    N: tl.constexpr = config.N
    BACK: tl.constexpr = config.BACK
    BD: tl.constexpr = config.BD
    C: tl.constexpr = config.C
    program = tl.program_id(0)
    blocks = tl.cdiv(size.D, BD)
    n = program // blocks % N
    s = program // (blocks * N)
    d = lanes(program % blocks * BD, BD)
    ok = d < size.D
    _, first, stop = extent(cu, s, size)
    count = tl.cdiv(stop - first, config.SPAN)
    slot = first_slot(cu, s, size, config.SPAN).to(tl.int64)
    public = (s.to(tl.int64) * size.D + d) * N + n
    h = tl.zeros([BD], tl.float32)
    if carried.initial is not None:
        h = tl.load(carried.initial + public, mask=ok, other=0.0)
    speed = tl.full([BD], 1.0, tl.float32)
    if rate is not None:
        speed = rates(rate, n, d, size, ok)
    own = slot + (tl.maximum(count - 1, 0) if BACK else 0)
    tl.store(carried.states + (own * N + n) * size.D + d, h, mask=ok)
    for r in range(0, count, C):
        i = r + tl.arange(0, C)
        there = (i < count)[:, None] & ok[None, :]
        row = (slot + (count - 1 - i if BACK else i))[:, None]
        log = tl.load(logs + row * size.D + d[None, :], mask=there, other=0.0)
        entry = tl.load(ends + (row * N + n) * size.D + d[None, :], mask=there, other=0.0)
        states = scan(exp2(log * speed[None, :], True), entry, h)
        following = (i + 1 < count)[:, None] & ok[None, :]
        to = carried.states + ((row + (-1 if BACK else 1)) * N + n) * size.D + d[None, :]
        tl.store(to, states, mask=following)
        h = at(states, C - 1)
    if carried.final is not None:
        tl.store(carried.final + public, h, mask=ok)
