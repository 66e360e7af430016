"""Shared by recurrences over matrix states: tiles of a chunk's tokens, their decays, and products.

Each chunk has a slot. Packed sequence n starts at slot cu[n] // C + n, so that no launch has to wait for a count of
chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import LOG2E, power, power_of_two, product

# how products are computed: in bfloat16, in tf32 where float16 could overflow, in float32 as three products, and so but
# to the last bit for states (Triton 3.9 fails to compile every product so)
BF16, TF32, FLOAT32, LAST_BIT = (tl.constexpr(n) for n in range(4))


class Tokens(NamedTuple):
    """An array [B, T, H, n]: its pointer and the strides of its first three axes; the last one is contiguous.

    far: not None if heads are so far apart that 32 bits do not hold their offsets, which then take registers of 64.
    """

    p: Any
    b: Any
    t: Any
    h: Any
    far: Any = None


class Arrays(NamedTuple):
    """The arrays q, k and v that a kernel reads, as Tokens, and the cotangent; None for those it does not need."""

    q: Any
    k: Any
    v: Any
    do: Any = None


class Cotangent(NamedTuple):
    """do [B, T, H, V] as Tokens, and its factors; None for those that the call lacks.

    For normalised rows: inverse [B, T, H], one over the divisor, and sums [B, T, H], the divisor's gradient. Under the
    delta rule: de [B, T, H, V], the gradients of the values that the state takes up.
    """

    rows: Any
    scale: Any
    inverse: Any = None
    sums: Any = None
    de: Any = None


class Sides(NamedTuple):
    """Arrays per token; None for those that the call lacks.

    g [B, T, H] or [B, T, H, K], beta [B, T, H], float32. cu [N + 1]: borders of packed sequences. exact: whether decays
    are computed to their last digits. sums [slots, H, 2, C], for decays per head: written by `add_logarithms`. pairs
    [B, T, H, C], for decays per channel: (q_r ⊙ e^(b_r - b_s))ᵀ k_s of token r and token s of its chunk.
    """

    g: Any
    beta: Any
    cu: Any
    exact: Any
    sums: Any
    pairs: Any


class Sizes(NamedTuple):
    """Sequences, tokens, heads, heads of v per head of q and k, chunks per sequence if not packed, B T H."""

    N: Any
    T: Any
    H: Any
    G: Any
    chunks: Any
    rows: Any


class Config(NamedTuple):
    """The constants that a kernel is compiled with.

    K, V: rows and columns of a state; W: V plus a normaliser's column. MAP: the feature map. CAUSAL, DELTA, CHANNELS:
    whether the call is causal, follows the delta rule, decays per channel. HOW: how products are computed. BK, BV, C:
    features, columns and tokens of a tile. NARROW: whether the delta rule reads and updates states by
    bfloat16 products.
    """

    K: Any
    V: Any
    W: Any
    MAP: Any
    CAUSAL: Any
    DELTA: Any
    CHANNELS: Any
    HOW: Any
    BK: Any
    BV: Any
    C: Any
    NARROW: Any = False


class Chunk(NamedTuple):
    """Tokens of a chunk: its slot, its sequence, batch entry and head; tokens t [C], ok: which of them exist."""

    slot: Any
    n: Any
    b: Any
    h: Any
    t: Any
    ok: Any


@triton.jit
def faded(x, EXACT: tl.constexpr):
    """e^x for x <= 0. EXACT: to the last digits for any x, because a decay may be a factor of a whole array."""
    if EXACT:
        n = tl.floor(tl.maximum(x * LOG2E, -126.0) + 0.5)
        # n ln 2 in two parts: the first has so few bits that its product and difference are exact
        f = ((x - n * 0.693145751953125) - n * 1.42860682030941723212e-6) * LOG2E
        y = tl.where(x * LOG2E < -126.0, 0.0, power_of_two(n, f))
        return tl.where(x == x, y, x)
    else:
        return power(x, 0.0, False)


@triton.jit
def times(a, b, acc, HOW: tl.constexpr):
    """acc + a b."""
    if HOW == BF16:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif HOW == TF32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32")
    else:
        return product(a.to(tl.float32), b.to(tl.float32), acc, True)


@triton.jit
def _thirds(x):
    # x in float32 as an exact sum of three bfloat16 numbers; for an infinity only the first is not 0
    high = x.to(tl.bfloat16)
    x = tl.where(tl.abs(x) == float("inf"), 0.0, x - high.to(tl.float32))
    middle = x.to(tl.bfloat16)
    return high, middle, (x - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def wide(a, b, acc, HOW: tl.constexpr):
    """acc + a b in float32; if one of them is bfloat16, the other is split into three parts."""
    if a.dtype == tl.bfloat16 and b.dtype == tl.float32:
        high, middle, low = _thirds(b)
        x = tl.dot(a, middle, tl.dot(a, low))
        return acc + (x + tl.dot(a, high))
    elif a.dtype == tl.float32 and b.dtype == tl.bfloat16:
        high, middle, low = _thirds(a)
        x = tl.dot(middle, b, tl.dot(low, b))
        return acc + (x + tl.dot(high, b))
    else:
        return product(a.to(tl.float32), b.to(tl.float32), acc, 2 if HOW == LAST_BIT else 1)


@triton.jit
def extent(cu, n, size):
    """(batch entry, first token, end) of sequence n."""
    if cu is None:
        return n, 0 * n, 0 * n + size.T
    else:
        return 0 * n, tl.load(cu + n).to(tl.int32), tl.load(cu + n + 1).to(tl.int32)


@triton.jit
def first_slot(cu, n, size, C: tl.constexpr):
    """The slot of the first chunk of sequence n."""
    if cu is None:
        return n * size.chunks
    else:
        return tl.load(cu + n).to(tl.int32) // C + n


@triton.jit
def sequence_of(cu, slot, size, C: tl.constexpr):
    """The sequence that a slot belongs to."""
    if cu is None:
        return slot // size.chunks
    else:
        low, high = 0 * slot, 0 * slot + size.N
        while low + 1 < high:
            middle = (low + high) // 2
            below = first_slot(cu, middle, size, C) <= slot
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle)
        return low


@triton.jit
def rows(x, b, t, h):
    """Pointers to the rows of tokens t [C] of a head."""
    if x.far is not None:
        h = h.to(tl.int64)
    return x.p + b.to(tl.int64) * x.b + t.to(tl.int64) * x.t + h * x.h


@triton.jit
def row_at(chunk, size):
    """Offsets of tokens in an array [B, T, H]."""
    return (chunk.b.to(tl.int64) * size.T + chunk.t) * size.H + chunk.h


@triton.jit
def mapped(x, MAP: tl.constexpr):
    """The feature map."""
    EXACT: tl.constexpr = x.dtype == tl.float32
    if MAP == "elu+1":
        x = x.to(tl.float32)
        return tl.where(x > 0, x + 1.0, power(tl.where(x > 0, 0.0, x), 0.0, EXACT))
    elif MAP == "relu":
        x = x.to(tl.float32)
        return tl.where(x < 0, 0.0, x)
    elif MAP == "exp":
        return _exp(x.to(tl.float32), EXACT)
    else:
        return x


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    # `power` needs an argument of at most 0
    small = power(-tl.abs(x), 0.0, EXACT)
    return tl.where(x > 0, 1.0 / small, small)


@triton.jit
def unmapped(x, d, MAP: tl.constexpr):
    """The gradient of x from the gradient of its features."""
    EXACT: tl.constexpr = x.dtype == tl.float32
    if MAP == "elu+1":
        x = x.to(tl.float32)
        return d * power(tl.where(x > 0, 0.0, x), 0.0, EXACT)
    elif MAP == "relu":
        return tl.where(x > 0, d, 0.0)
    elif MAP == "exp":
        return d * _exp(x.to(tl.float32), EXACT)
    else:
        return d


@triton.jit
def raw_features(x, chunk, f, size, K: tl.constexpr):
    """Numbers f of rows of q or k as a tile [C, BK], 0 where there are none."""
    h = chunk.h // size.G
    there = chunk.ok[:, None] & (f < K)[None, :]
    return tl.load(rows(x, chunk.b, chunk.t, h)[:, None] + f[None, :], mask=there, other=0.0)


@triton.jit
def features(x, chunk, f, size, config: tl.constexpr):
    """`raw_features` after the feature map."""
    MAP: tl.constexpr = config.MAP
    raw = raw_features(x, chunk, f, size, config.K)
    there = chunk.ok[:, None] & (f < config.K)[None, :]
    if MAP == "":
        return raw
    else:
        return tl.where(there, mapped(raw, MAP), 0.0)


@triton.jit
def logarithms(g, chunk, f, size, K: tl.constexpr):
    """Logarithms of the decays of channels f of tokens as a tile [C, BK], at least -200, where e^x is 0."""
    at = row_at(chunk, size)
    x = tl.load(g + at[:, None] * K + f[None, :], mask=chunk.ok[:, None] & (f < K)[None, :], other=0.0)
    return tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def spans(named, x, exact: tl.constexpr):
    """Sums of the rows of x [C, n] that each row of `named` [C, C] selects: products with 0 and 1, no subtraction."""
    zeros = tl.zeros([named.shape[0], x.shape[1]], tl.float32)
    if exact:
        return product(tl.where(named, 1.0, 0.0), x, zeros, True)
    else:
        ones = tl.where(named, 1.0, 0.0).to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        return tl.dot(ones, high, tl.dot(ones, (x - high.to(tl.float32)).to(tl.bfloat16)))


@triton.jit
def entered(q, sides, chunk, f, size, config: tl.constexpr):
    """Features of queries as a tile [C, BK]; channels that decay are decayed from the chunk's start."""
    x = features(q, chunk, f, size, config)
    if sides.pairs is not None:
        i = tl.arange(0, config.C)
        past = spans(i[None, :] <= i[:, None], logarithms(sides.g, chunk, f, size, config.K), sides.exact)
        x = x.to(tl.float32) * faded(past, sides.exact)
    return x


@triton.jit
def left(k, sides, chunk, f, size, config: tl.constexpr):
    """Features of keys as a tile [C, BK]; channels that decay are decayed to the chunk's end."""
    x = features(k, chunk, f, size, config)
    if sides.pairs is not None:
        i = tl.arange(0, config.C)
        later = spans(i[None, :] > i[:, None], logarithms(sides.g, chunk, f, size, config.K), sides.exact)
        x = x.to(tl.float32) * faded(later, sides.exact)
    return x


@triton.jit
def through(sides, chunk, f, size, K: tl.constexpr):
    """The product of the decays of channels f [BK] over the whole chunk."""
    return faded(tl.sum(logarithms(sides.g, chunk, f, size, K), 0), sides.exact)


@triton.jit
def side(x, chunk, size):
    """Numbers [C] of tokens of an array [B, T, H]."""
    return tl.load(x + row_at(chunk, size), mask=chunk.ok, other=0.0).to(tl.float32)


@triton.jit
def raw(v, chunk, w, V: tl.constexpr):
    """v of tokens as a tile [C, BV]."""
    there = chunk.ok[:, None] & (w < V)[None, :]
    return tl.load(rows(v, chunk.b, chunk.t, chunk.h)[:, None] + w[None, :], mask=there, other=0.0)


@triton.jit
def values(v, sides, chunk, w, size, V: tl.constexpr):
    """beta v."""
    u = raw(v, chunk, w, V)
    if sides.beta is not None:
        u = u.to(tl.float32) * side(sides.beta, chunk, size)[:, None]
    return u


@triton.jit
def add_logarithms(g, cu, out, size, C: tl.constexpr):
    """Sums of the logarithms of a chunk's decays up to each token, into out [slots, H, 2, C], in two parts.

    The first parts are exact multiples of 2^-10, so that differences keep their digits. A program owns a chunk.
    """
    _, chunk = chunk_owner(cu, size, 1, C)
    x = tl.maximum(side(g, chunk, size), -200.0, propagate_nan=tl.PropagateNan.ALL)
    high = tl.floor(x * 1024.0 + 0.5) * 0.0009765625
    at = out + (chunk.slot.to(tl.int64) * size.H + chunk.h) * 2 * C + tl.arange(0, C)
    tl.store(at, tl.cumsum(high, 0))
    tl.store(at + C, tl.cumsum(x - high, 0))


@triton.jit
def ramps(sides, chunk, size, C: tl.constexpr):
    """(decays from the chunk's start to each token [C], from each token to the end [C], of the whole chunk)."""
    p = sides.sums + (chunk.slot.to(tl.int64) * size.H + chunk.h) * 2 * C
    high, low = tl.load(p + tl.arange(0, C)), tl.load(p + C + tl.arange(0, C))
    top, rest = tl.load(p + C - 1), tl.load(p + 2 * C - 1)
    later = (top - high) + (rest - low)
    return faded(high + low, sides.exact), faded(later, sides.exact), faded(top + rest, sides.exact)


@triton.jit
def between(sides, chunk, size, C: tl.constexpr):
    """e^(b_r - b_s) [C, C] for s <= r, 0 elsewhere."""
    i = tl.arange(0, C)
    seen = i[:, None] >= i[None, :]
    if sides.g is None:
        return tl.where(seen, 1.0, 0.0)
    else:
        p = sides.sums + (chunk.slot.to(tl.int64) * size.H + chunk.h) * 2 * C + i
        high, low = tl.load(p), tl.load(p + C)
        x = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        return tl.where(seen, faded(tl.where(seen, x, 0.0), sides.exact), 0.0)


@triton.jit
def square_at(p, chunk, size, C: tl.constexpr):
    """Pointers to rows [C, C] of tokens of an array [B, T, H, C]."""
    return p + row_at(chunk, size)[:, None] * C + tl.arange(0, C)[None, :]


@triton.jit
def stored_pairs(sides, chunk, size, C: tl.constexpr):
    """The chunk's `pairs` [C, C], for decays per channel."""
    return tl.load(square_at(sides.pairs, chunk, size, C), mask=chunk.ok[:, None], other=0.0)


@triton.jit
def chunk_owner(cu, size, blocks: tl.constexpr, C: tl.constexpr):
    """(block, Chunk) of a program that owns one of the blocks of a chunk's rows."""
    program = tl.program_id(0)
    h = program // blocks % size.H
    slot = program // (blocks * size.H)
    n = sequence_of(cu, slot, size, C)
    b, first, stop = extent(cu, n, size)
    t = first + (slot - first_slot(cu, n, size, C)) * C + tl.arange(0, C)
    return program % blocks, Chunk(slot, n, b, h, t, t < stop)
