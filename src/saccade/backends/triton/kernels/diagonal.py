"""Selective scan (Mamba; Gu and Dao, 2023): chunks of a sequence in parallel, slot after slot of the state.

`diagonal_chunks.carry` first passes states from chunk to chunk. A program owns a chunk and BD channels of one group.
Its backward sums over slots. The gradients of B and C, which are sums over channels, repeat the same scans in
`diagonal_shared` with slots along a warp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .diagonal_chunks import (
    at,
    chunk,
    exp2,
    lanes,
    places,
    rates,
    rows,
    scan,
    scan_apart,
    scan_back,
    sigmoid,
    sigmoids,
    softplus,
)
from .recurrent import first_slot

LN2 = tl.constexpr(0.6931471805599453)


class Channels(NamedTuple):
    """An array [B, T, D]: its pointer and the strides of its first two axes; the last one is contiguous."""

    p: Any
    b: Any
    t: Any


class Shared(NamedTuple):
    """B or C: its pointer and strides of batch, token, group and channel; 0 along axes that it lacks.

    far: as in `recurrent.Tokens`, for groups.
    """

    p: Any
    b: Any
    t: Any
    g: Any
    d: Any
    far: Any = None


class Scan(NamedTuple):
    """The arrays of a scan; None for those that the call lacks.

    rate [N, D]: A log2(e). D, bias [D]. All are float32. cu [S + 1], initial [S, D, N]. turned_B, turned_C: written by
    `turn`, None where B, C are fixed in time. dy: the cotangent [B, T, D] of a backward.
    """

    u: Any
    delta: Any
    z: Any
    rate: Any
    B: Any
    C: Any
    turned_B: Any
    turned_C: Any
    D: Any
    bias: Any
    cu: Any
    initial: Any
    dy: Any = None


class Config(NamedTuple):
    """The constants that a scan is compiled with.

    N: numbers of a channel's state. SOFTPLUS: applied to steps. FIXED_B, FIXED_C: fixed in time. EXACT: powers to the
    last digit. C, BD: tokens and channels of a tile. SPAN: tokens of a chunk. CARRIED: states come from `carry`. BX,
    BN: channels and numbers of state of a tile in `diagonal_shared`.
    """

    N: Any
    SOFTPLUS: Any
    FIXED_B: Any
    FIXED_C: Any
    EXACT: Any
    C: Any
    BD: Any = 0
    SPAN: Any = 0
    CARRIED: Any = False
    BX: Any = 0
    BN: Any = 0


class Tile(NamedTuple):
    """C tokens from t of channels d of batch entry b; which of them exist: ok [C, BD] and inside [BD]."""

    b: Any
    t: Any
    ok: Any
    d: Any
    inside: Any


class Sizes(NamedTuple):
    """Sequences, tokens, channels, groups, chunks per sequence if not packed, blocks of a group, B T."""

    N: Any
    T: Any
    D: Any
    G: Any
    chunks: Any
    blocks: Any
    rows: Any


@triton.jit
def group_at(x, g):
    """The offset of group g of B or C."""
    if x.far is not None:
        g = g.to(tl.int64)
    return g * x.g


@triton.jit
def turn(x, to, cu, size, N: tl.constexpr, BN: tl.constexpr, C: tl.constexpr):
    """Write B or C with tokens last, [tiles, G, N, C] float32, 0 beyond the end: whole, aligned rows for `shared`."""
    program = tl.program_id(0)
    slot, g = program // size.G, program % size.G
    _, b, _, stop, begin = chunk(cu, slot, size, C)
    i, n = tl.arange(0, C), tl.arange(0, BN)
    at = x.p + b.to(tl.int64) * x.b + (begin + i).to(tl.int64)[:, None] * x.t + group_at(x, g) + n[None, :]
    value = tl.load(at, mask=(begin + i < stop)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    row = (slot.to(tl.int64) * size.G + g) * N + n
    tl.store(to + row[None, :] * C + i[:, None], value, mask=(n < N)[None, :])


@triton.jit
def tile_of(cu, s, first, t, size, C: tl.constexpr):
    """The slot of the tile of C tokens from t of a sequence."""
    if cu is None:
        return (s * tl.cdiv(size.T, C) + t // C).to(tl.int64)
    else:
        return (first_slot(cu, s, size, C) + (t - first) // C).to(tl.int64)


@triton.jit
def shared(x, turned, tile, d, n, ok, C: tl.constexpr):
    """Slot n of B or C for a tile's tokens, [C, 1]; [1, BD] where it is fixed in time."""
    if turned is None:
        return tl.load(x.p + d * x.d + n, mask=ok, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.load(turned + tile + n * C + tl.arange(0, C))[:, None]


@triton.jit
def _owner(x, size, BD: tl.constexpr, SPAN: tl.constexpr):
    # (slot, sequence, batch entry, first token and end of the sequence, first token of the chunk, group, channels,
    # which of them exist)
    program = tl.program_id(0)
    slot = program // (size.blocks * size.G)
    g = program // size.blocks % size.G
    s, b, first, stop, begin = chunk(x.cu, slot, size, SPAN)
    wide = size.D // size.G
    within = lanes(program % size.blocks * BD, BD)
    return slot, s, b, first, stop, begin, g, g * wide + within, within < wide


@triton.jit
def steps(x, tile, SOFTPLUS: tl.constexpr, C: tl.constexpr):
    """(u, delta + bias, step) of a tile's tokens; the step is 0 for tokens that do not exist."""
    b, t, ok, d, inside = tile
    raw = rows(x.delta, b, t, ok, d, C)
    if x.bias is not None:
        raw += tl.load(x.bias + d, mask=inside, other=0.0)[None, :]
    u = rows(x.u, b, t, ok, d, C)
    if SOFTPLUS:
        return u, raw, tl.where(ok, softplus(raw), 0.0)
    else:
        return u, raw, tl.where(ok, raw, 0.0)


@triton.jit
def incoming(x, tile, size, C: tl.constexpr):
    """The gradient before the gate."""
    b, t, ok, d, _inside = tile
    dp = tl.load(x.dy + places(b, t, d, size, C), mask=ok, other=0.0).to(tl.float32)
    if x.z is not None:
        gate = rows(x.z, b, t, ok, d, C)
        dp = dp * (gate * sigmoid(gate))
    return dp


@triton.jit
def scan_sums(x, sums, size, config: tl.constexpr):
    """Fill ChunkSums; with dy also the sums of the gradient, and then SPAN is C."""
    N: tl.constexpr = config.N
    C: tl.constexpr = config.C
    BD: tl.constexpr = config.BD
    SPAN: tl.constexpr = config.SPAN
    slot, s, b, first, stop, begin, g, d, inside = _owner(x, size, BD, SPAN)
    # a forward does not need the sums of a sequence's last chunk
    wanted = tl.minimum(begin + SPAN, stop)
    if x.dy is None:
        wanted = tl.where(begin + SPAN >= stop, begin, wanted)
    own = slot.to(tl.int64) * N * size.D + d
    log = tl.zeros([BD], tl.float32)
    for i in range(0, wanted - begin, C):
        r = begin + i
        tile = Tile(b, r, (r + tl.arange(0, C) < stop)[:, None] & inside[None, :], d, inside)
        place = (tile_of(x.cu, s, first, r, size, C) * size.G + g) * N * C
        u, _raw, step = steps(x, tile, config.SOFTPLUS, C)
        log += tl.sum(step, 0)
        entering = step * u
        dp = entering
        if x.dy is not None:
            dp = incoming(x, tile, size, C)
        for n in range(N):
            a = exp2(step * rates(x.rate, n, d, size, inside)[None, :], config.EXACT)
            entry = entering * shared(x.B, x.turned_B, place, d, n, inside, C)
            h = tl.load(sums.ends + own + n * size.D, mask=inside & (r > begin), other=0.0)
            tl.store(sums.ends + own + n * size.D, at(scan(a, entry, h), C - 1), mask=inside)
            if x.dy is not None:
                dout = dp * shared(x.C, x.turned_C, place, d, n, inside, C)
                back = at(a * scan_back(a, dout, tl.zeros([BD], tl.float32)), 0)
                tl.store(sums.back + own + n * size.D, back, mask=inside)
    tl.store(sums.logs + slot.to(tl.int64) * size.D + d, log, mask=inside)


@triton.jit
def scan_tokens(x, states, y, final, size, config: tl.constexpr):
    """y [B, T, D] and the final state [S, D, N].

    states [slots, N, D]: each lane stores its states there from tile to tile; if CARRIED, `carry` has written the
    first.
    """
    N: tl.constexpr = config.N
    C: tl.constexpr = config.C
    BD: tl.constexpr = config.BD
    slot, s, b, first, stop, begin, g, d, inside = _owner(x, size, BD, config.SPAN)
    end = tl.minimum(begin + config.SPAN, stop)
    own = slot.to(tl.int64) * N * size.D + d
    public = (s.to(tl.int64) * size.D + d) * N
    for i in range(0, end - begin, C):
        r = begin + i
        ok = (r + tl.arange(0, C) < stop)[:, None] & inside[None, :]
        tile = (tile_of(x.cu, s, first, r, size, C) * size.G + g) * N * C
        u, _raw, step = steps(x, Tile(b, r, ok, d, inside), config.SOFTPLUS, C)
        entering = step * u
        out = tl.zeros([C, BD], tl.float32)
        for n in range(N):
            a = exp2(step * rates(x.rate, n, d, size, inside)[None, :], config.EXACT)
            entry = entering * shared(x.B, x.turned_B, tile, d, n, inside, C)
            if config.CARRIED:
                h = tl.load(states + own + n * size.D, mask=inside, other=0.0)
            else:
                h = tl.load(states + own + n * size.D, mask=inside & (r > begin), other=0.0)
                if x.initial is not None:
                    h += tl.load(x.initial + public + n, mask=inside & (r == begin), other=0.0)
            following = scan(a, entry, h)
            out += following * shared(x.C, x.turned_C, tile, d, n, inside, C)
            last = at(following, C - 1)
            tl.store(states + own + n * size.D, last, mask=inside & (r + C < end))
            tl.store(final + public + n, last, mask=inside & (r + C >= stop))
        if x.D is not None:
            out += tl.load(x.D + d, mask=inside, other=0.0)[None, :] * u
        if x.z is not None:
            gate = rows(x.z, b, r, ok, d, C)
            out = out * (gate * sigmoid(gate))
        tl.store(y + places(b, r, d, size, C), out.to(y.dtype.element_ty), mask=ok)


class Gradients(NamedTuple):
    """Where gradients go, None for none: of tokens [B, T, D]; A [slots, N, D]; D, bias [slots, D]; initial [S, D, N].

    B, C: [slots, N, D] where they are fixed in time.
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
def _add(p, value, r, inside):
    # adds to a lane's own sum over the tiles of its chunk; the first tile overwrites
    before = tl.load(p, mask=inside & (r > 0), other=0.0)
    tl.store(p, before + value, mask=inside)


@triton.jit
def _finish(x, out, tile, share, sums, size, config: tl.constexpr):
    # Gradients of a tile's tokens from its sums over slots. Arrays are read again one by one, because registers are
    # scarce. share: the tile's first token in its chunk, and the place of the chunk's own sums.
    C: tl.constexpr = config.C
    b, t, ok, d, inside = tile
    r, own = share
    dp, p, through, dstep = sums
    token = places(b, t, d, size, C)
    u = rows(x.u, b, t, ok, d, C)
    if x.D is not None:
        skip = tl.load(x.D + d, mask=inside, other=0.0)[None, :]
        p += skip * u
        _add(out.D + own, tl.sum(dp * u, 0), r, inside)
    if x.z is not None:
        gate = rows(x.z, b, t, ok, d, C)
        part = sigmoids(gate)
        dz = tl.load(x.dy + token, mask=ok, other=0.0).to(tl.float32) * p * part[0] * (1.0 + gate * part[1])
        tl.store(out.z + token, dz.to(out.z.dtype.element_ty), mask=ok)
        tl.debug_barrier()
    u, raw, step = steps(x, tile, config.SOFTPLUS, C)
    du, dstep = step * through, u * through + dstep
    if x.D is not None:
        du += skip * dp
    tl.store(out.u + token, du.to(out.u.dtype.element_ty), mask=ok)
    tl.debug_barrier()
    if config.SOFTPLUS:
        dstep = dstep * sigmoid(raw)
    dstep = tl.where(ok, dstep, 0.0)
    if x.bias is not None:
        _add(out.bias + own, tl.sum(dstep, 0), r, inside)
    tl.store(out.delta + token, dstep.to(out.delta.dtype.element_ty), mask=ok)


@triton.jit
def scan_backward(x, out, borders, size, config: tl.constexpr):
    """Gradients per channel."""
    N: tl.constexpr = config.N
    C: tl.constexpr = config.C
    BD: tl.constexpr = config.BD
    SPAN: tl.constexpr = config.SPAN
    slot, s, b, first, stop, begin, g, d, inside = _owner(x, size, BD, SPAN)
    mine = slot.to(tl.int64) * N * size.D + d
    # a slot without tokens also has a partial sum: 0
    for r in range(0, tl.maximum(tl.minimum(SPAN, stop - begin), 1), C):
        t = begin + r
        ok = (t + tl.arange(0, C) < stop)[:, None] & inside[None, :]
        real = inside & (t < stop)
        place = tl.where(t < stop, tile_of(x.cu, s, first, t, size, C), 0)
        tile = (place * size.G + g) * N * C
        own = place * N * size.D + d
        channels = Tile(b, t, ok, d, inside)
        u, _raw, step = steps(x, channels, config.SOFTPLUS, C)
        entering = step * u
        dp = incoming(x, channels, size, C)
        p = tl.zeros([C, BD], tl.float32)
        through = tl.zeros([C, BD], tl.float32)
        dstep = tl.zeros([C, BD], tl.float32)
        for n in range(N):
            rate = rates(x.rate, n, d, size, inside)[None, :]
            a = exp2(step * rate, config.EXACT)
            bs = shared(x.B, x.turned_B, tile, d, n, inside, C)
            cs = shared(x.C, x.turned_C, tile, d, n, inside, C)
            entry = entering * bs
            before = scan_apart(a, entry, tl.load(borders.before + own + n * size.D, mask=real, other=0.0))
            dh = scan_back(a, dp * cs, tl.load(borders.after + own + n * size.D, mask=real, other=0.0))
            if x.z is not None:
                p += (before + entry) * cs
            dx = dh * before
            through += dh * bs
            dstep += dx * (rate * LN2)
            _add(out.A + mine + n * size.D, tl.sum(dx * step, 0), r, inside)
            if config.FIXED_B:
                _add(out.B + mine + n * size.D, tl.sum(dh * entering, 0), r, inside)
            if config.FIXED_C:
                _add(out.C + mine + n * size.D, tl.sum((before + entry) * dp, 0), r, inside)
        share = r, slot.to(tl.int64) * size.D + d
        _finish(x, out, channels, share, (dp, p, through, dstep), size, config)
