"""What every portable kernel shares: its arguments, products, scores and their derivative, the pairs that a tile keeps.

A kernel takes its arguments in a few named tuples. None inside one is known when the kernel is compiled, so a call
without a bias has no trace of one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .masks import FULL, allowed, class_of, tile_of
from .rows import load_codes, scaled

LOG2E = tl.constexpr(1.4426950408889634)
# the running maximum before the first key, and the lowest score of a finite bias: finite in units of log 2 as well
START = tl.constexpr(-2.3e38)


class Bias(NamedTuple):
    """An array that broadcasts to [B, Hq, Tq, Tk]: strides are 0 where it has one entry."""

    p: Any
    b: Any
    h: Any
    t: Any
    j: Any


class Distances(NamedTuple):
    """Biases [1 | B, Hq, n] by distance: where the one of distance 0 of the first head lies, strides of B and Hq."""

    p: Any
    b: Any
    h: Any


class Scores(NamedTuple):
    """What stands between the products and the softmax; None for what the call lacks.

    slopes: float32 [1 | B, Hq] with their stride over B; offset: int32 [1 | B] position of row 0, with its stride;
    sinks: [Hq] a logit of each head, without a value; keep: what weights that dropout keeps are multiplied with;
    gates: float32 [2, B, Hq, Tk] contiguous, running sums of the logarithms of forget gates in two parts.
    """

    scale: Any
    softcap: Any = None
    bias: Any = None
    slopes: Any = None
    slopes_b: Any = None
    distances: Any = None
    gates: Any = None
    offset: Any = None
    offset_b: Any = None
    sinks: Any = None
    keep: Any = 1.0


class Drop(NamedTuple):
    """Dropout: weights whose Philox word is below are dropped; below None for none. Words as int32.

    Kernels take the three as arguments of their own: in a tuple Triton 3.6 would compile a kernel for their values.
    """

    below: Any
    seed_low: Any
    seed_high: Any


class Arrays(NamedTuple):
    """What a kernel reads: q, k, v and do as Array, the others None where a kernel does without them.

    words: int32, the lists of `masks.Place`; lengths: int32 [B] keys of each sequence; lse, share, delta, dlse: float32
    [B, Tq, Hq], share as `refine` writes it.
    """

    q: Any
    k: Any
    v: Any
    words: Any
    lengths: Any = None
    do: Any = None
    lse: Any = None
    share: Any = None
    delta: Any = None
    dlse: Any = None


class Config(NamedTuple):
    """The integers that a kernel is compiled for.

    D, DV: head sizes; BLOCK_D, BLOCK_DV: the same, padded; BM, BN: queries and keys of a tile; MASK: the kind of
    element test; EXACT: products of 32-bit floats, by 2 to their last bit; ADD: results hold the sums of earlier parts;
    LAST: it is the last part; BY_ROW: a bias gradient has a row for each query.
    """

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BM: Any
    BN: Any
    MASK: Any
    EXACT: Any
    ADD: Any = False
    LAST: Any = True
    BY_ROW: Any = False


class Attention(NamedTuple):
    """What all programs of a launch share: Arrays, Scores, Drop, Place and Config.

    Kernels build one in the call of a function: in an assignment Triton 3.6 turns a tuple's constants into tensors.
    """

    arrays: Any
    scores: Any
    drop: Any
    place: Any
    config: Any


class Pairs(NamedTuple):
    """The pairs of a tile: batch entry, head, rows and keys, which broadcast to the tile; record: of their mask."""

    b: Any
    h: Any
    t: Any
    j: Any
    record: Any


class Tile(NamedTuple):
    """The rows or keys of a tile, [BM | BN]: where they stand in their sequence, and whether they are there.

    start, meets: the first key or row of the class that they meet, and how many there are.
    """

    at: Any
    ok: Any
    start: Any
    meets: Any


@triton.jit
def row_tile(place, BM: tl.constexpr):
    """(class, number in it, batch entry, head, head of its keys, Tile) of the BM rows that a program owns.

    Grid: tiles x classes x B x Hq.
    """
    i = tl.program_id(0)
    h, i = i % place.Hq, i // place.Hq
    b, i = i % place.B, i // place.B
    cls = i % place.n_classes
    n = tile_of(place, cls, b, h, i // place.n_classes)
    q_start, k_start, nq, nk = class_of(place, cls)
    hk = h // place.G
    a = n * BM + tl.arange(0, BM)
    ok = a < nq
    return cls, n, b, h, hk, Tile(q_start + place.step * a, ok, k_start, nk)


@triton.jit
def key_tile(place, cls, n, BN: tl.constexpr):
    """The nth Tile of BN keys of a class."""
    q_start, k_start, nq, nk = class_of(place, cls)
    c = n * BN + tl.arange(0, BN)
    ok = c < nk
    return Tile(k_start + place.step * c, ok, q_start, nq)


@triton.jit
def plain_end(begin, end, kind, scores, BLOCK: tl.constexpr):
    """Where the blocks of a segment that need no mask end: its last whole one if it is full and no bias excludes."""
    edge = begin
    if scores.bias is None and scores.distances is None:
        edge = tl.where(kind == FULL, begin + (end - begin) // BLOCK * BLOCK, begin)
    return edge


@triton.jit
def _parts(x):
    # x = high + low, each of 11 bits but for a last one that no product keeps; infinities have no low part
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, tl.where(tl.abs(high) == float("inf"), 0.0, x - high)


@triton.jit
def _product(a, b, EXACT: tl.constexpr):
    # of 32-bit floats as three products of tf32; the last number keeps what is added to them out of the matrix unit,
    # which cuts sums off where others round
    if EXACT == 2:
        return tl.dot(a, b, input_precision="ieee")
    else:
        a_high, a_low = _parts(a)
        b_high, b_low = _parts(b)
        x = tl.dot(a_high, b_low, tl.dot(a_low, b_high, input_precision="tf32"), input_precision="tf32")
        return x + tl.dot(a_high, b_high, input_precision="tf32", max_num_imprecise_acc=1)


@triton.jit
def product(a, b, acc, EXACT: tl.constexpr):
    """acc + a b. EXACT: of 32-bit floats, by 2 to their last bit."""
    if EXACT:
        return acc + _product(a, b, EXACT)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def inner(a, b, n: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """The products of each of the Rows a with each of b, over n components. EXACT: of 32-bit floats, 32 at a time."""
    if EXACT:
        PIECE: tl.constexpr = min(BLOCK, 32)
        x = tl.zeros([a.p.shape[0], b.p.shape[0]], tl.float32)
        for d0 in range(0, BLOCK, PIECE):
            d = d0 + tl.arange(0, PIECE)
            left = tl.load(a.p[:, None] + d[None, :], mask=a.ok[:, None] & (d < n)[None, :], other=0.0)
            right = tl.load(b.p[None, :] + d[:, None], mask=b.ok[None, :] & (d < n)[:, None], other=0.0)
            x += _product(left, right, EXACT)
    else:
        x = tl.dot(a.tile, tl.trans(b.tile))
    return x


@triton.jit
def inner_codes(a, b, of, n: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """The same where b are CodedRows of the array `of`."""
    if EXACT:
        PIECE: tl.constexpr = min(BLOCK, 32)
        x = tl.zeros([a.p.shape[0], b.p.shape[0]], tl.float32)
        for d0 in range(0, BLOCK, PIECE):
            d = d0 + tl.arange(0, PIECE)
            left = tl.load(a.p[:, None] + d[None, :], mask=a.ok[:, None] & (d < n)[None, :], other=0.0)
            x += _product(left, tl.trans(load_codes(of, b.p, b.scale, d, b.ok, n).to(tl.float32)), EXACT)
    else:
        x = tl.dot(a.tile, tl.trans(b.tile.to(a.tile.dtype)))
    return scaled(x, b, of)


@triton.jit
def exact_exp2(x):
    """2^x of -126 <= x <= 127.4 to half the last digit."""
    # rounds half up, as well as to even would
    n = tl.floor(x + 0.5)
    f = x - n
    p = 0.00015345811916183706 * f + 0.0013399931218953942
    p = p * f + 0.009618488957449392
    p = p * f + 0.0555032877696621
    p = p * f + 0.24022646890630905
    p = p * f + 0.6931472057372672
    p = p * f + 1.0
    return p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def power(s, m, EXACT: tl.constexpr):
    """e^(s - m) for s <= m; EXACT to half the last digit of a small s - m, the device's own may lose three."""
    if EXACT:
        x = (s - m) * LOG2E
        y = tl.where(x < -126.0, 0.0, exact_exp2(tl.maximum(x, -126.0)))
        return tl.where(x == x, y, x)
    else:
        return tl.exp2(s * LOG2E - m * LOG2E)


@triton.jit
def fade(m, m_new, EXACT: tl.constexpr):
    """e^(m - m_new) for running maxima. Never m LOG2E - m_new LOG2E, which fused is not 0 for equal ones.

    It is off by half the last digit of the product: infinitely much at START, and at every step in the same direction.
    """
    if EXACT:
        return power(m, m_new, True)
    else:
        return tl.exp2((m - m_new) * LOG2E)


@triton.jit
def _tanh(x):
    # within an ulp or two: an odd polynomial near 0 (Cephes), else by the exponential
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    near = p * z * x + x
    far = 1.0 - 2.0 / (tl.exp2(tl.minimum(tl.abs(x), 15.0) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def score(x, scores, place, pairs):
    """Scores of the products x = q . k."""
    b, h, t, j, _record = pairs
    s = x * scores.scale
    if scores.softcap is not None:
        s = _tanh(s / scores.softcap) * scores.softcap
    if scores.bias is not None:
        at = scores.bias.p + b.to(tl.int64) * scores.bias.b + h.to(tl.int64) * scores.bias.h
        row, key = tl.minimum(t, place.Tq - 1).to(tl.int64), tl.minimum(j, place.Tk - 1).to(tl.int64)
        bias = tl.load(at + row * scores.bias.t + key * scores.bias.j)
        # -inf excludes, also where the product is no number
        s = tl.maximum(s + bias, START, propagate_nan=tl.PropagateNan.ALL)
        s = tl.where(bias == float("-inf"), float("-inf"), s)
    if scores.slopes is not None:
        s = s - tl.load(scores.slopes + b * scores.slopes_b + h) * distance(scores, pairs)
    if scores.distances is not None:
        bias = _by_distance(scores, place, pairs)
        s = tl.maximum(s + bias, START, propagate_nan=tl.PropagateNan.ALL)
        s = tl.where(bias == float("-inf"), float("-inf"), s)
    if scores.gates is not None:
        s = s + _forgotten(s, scores, place, pairs)
    return s


@triton.jit
def _position(scores, pairs):
    # of each row, among the keys
    return pairs.t + tl.load(scores.offset + pairs.b * scores.offset_b)


@triton.jit
def _by_distance(scores, place, pairs):
    at = scores.distances.p + pairs.b.to(tl.int64) * scores.distances.b + pairs.h.to(tl.int64) * scores.distances.h
    # rows and keys behind the last ones read what lies by distance too
    return tl.load(at + (tl.minimum(_position(scores, pairs), place.Tk - 1) - tl.minimum(pairs.j, place.Tk - 1)))


@triton.jit
def _forgotten(s, scores, place, pairs):
    # of the sums, far from 0, in two floats each, the high ones all but cancel; a zero made of s keeps the tile in the
    # layout of s, where rows and keys alone would be spread in another one and moved by shared memory
    high = scores.gates + (pairs.b.to(tl.int64) * place.Hq + pairs.h) * place.Tk
    low = high + tl.cast(place.B, tl.int64) * place.Hq * place.Tk
    row = tl.minimum(tl.maximum(_position(scores, pairs), 0), place.Tk - 1)
    key = tl.minimum(pairs.j, place.Tk - 1)
    zero = tl.minimum(tl.abs(s), 0.0)
    return ((zero + tl.load(high + row)) - tl.load(high + key)) + ((zero + tl.load(low + row)) - tl.load(low + key))


@triton.jit
def visible(s, attention, pairs, inside):
    """The pairs of a tile that the mask and a bias of -inf leave, where `inside`; s: their scores."""
    seen = allowed(attention.place, pairs.record, pairs.b, pairs.t, pairs.j, attention.config.MASK) & inside
    if attention.scores.bias is not None or attention.scores.distances is not None:
        seen = seen & (s != float("-inf"))
    return seen


@triton.jit
def only(x, some):
    """Rows of x that some pair needs; others may hold a NaN, which a weight of 0 would not silence."""
    return tl.where(some[:, None], x, 0.0)


@triton.jit
def dscore(ds, x, scores):
    """The derivative by x * scale from the one by the scores: the softcap's factor."""
    if scores.softcap is not None:
        # 4e / (1 + e)^2 with e = e^-2|x|: 1 - tanh^2 would lose its digits where the cap holds
        e = tl.exp2(tl.abs(x * scores.scale / scores.softcap) * (-2.0 * LOG2E))
        ds = ds * (4.0 * e / ((1.0 + e) * (1.0 + e)))
    return ds


@triton.jit
def distance(scores, pairs):
    """How far a row's position is from a key, for ALiBi."""
    return tl.abs((_position(scores, pairs) - pairs.j).to(tl.float32))


@triton.jit
def keep_mask(drop, place, pairs):
    """The weights that dropout keeps: Philox-4x32-10 of (t, j / 4, b * Hq + h, 0), word j mod 4."""
    b, h, t, j, _record = pairs
    zero = t * 0 + j * 0
    c0 = (t + zero).to(tl.uint32, bitcast=True)
    c1 = ((j >> 2) + zero).to(tl.uint32, bitcast=True)
    c2 = (b * place.Hq + h + zero).to(tl.uint32, bitcast=True)
    c3 = zero.to(tl.uint32, bitcast=True)
    low = (drop.seed_low + zero).to(tl.uint32, bitcast=True)
    high = (drop.seed_high + zero).to(tl.uint32, bitcast=True)
    r0, r1, r2, r3 = tl.philox_impl(c0, c1, c2, c3, low, high, 10)
    word = (j + zero) & 3
    r = tl.where(word == 0, r0, tl.where(word == 1, r1, tl.where(word == 2, r2, r3)))
    return r >= (drop.below + zero).to(tl.uint32, bitcast=True)


@triton.jit
def log_add(a, b):
    """log(e^a + e^b), where either may be -inf."""
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    low = tl.minimum(a, b)
    return tl.where(low == float("-inf"), top, top + tl.log(1.0 + tl.exp(low - top)))
