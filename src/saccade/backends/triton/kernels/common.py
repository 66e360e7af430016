"""Shared by all portable kernels: arguments, products, scores and their derivative, visible pairs of a tile.

A kernel takes its arguments in a few named tuples. A None inside a tuple is known at compile time, so the kernel of a
call without a bias has no code for one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .masks import FULL, allowed, class_of, tile_of
from .rows import load_codes, scaled

LOG2E = tl.constexpr(1.4426950408889634)
# the running maximum before the first key, and the lowest score of a finite bias; also finite in log2 units
START = tl.constexpr(-2.3e38)


class Bias(NamedTuple):
    """An array that broadcasts to [B, Hq, Tq, Tk]; strides are 0 along axes of length 1."""

    p: Any
    b: Any
    h: Any
    t: Any
    j: Any


class Distances(NamedTuple):
    """Biases [1 | B, Hq, n] by distance: a pointer to distance 0 of the first head, and the strides of B and Hq."""

    p: Any
    b: Any
    h: Any


class Scores(NamedTuple):
    """The parameters between the products and the softmax; None for options that the call lacks.

    slopes: float32 [1 | B, Hq] with their stride over B. offset: int32 [1 | B], position of row 0, with its stride.
    sinks: [Hq], a logit per head that has no value. keep: the factor of weights that dropout keeps. gates: float32
    [2, B, Hq, Tk] contiguous, running sums of log forget gates in two parts.
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
    """Dropout: drops weights whose Philox word is less than `below`, none if it is None. Words are int32.

    Kernels take the three numbers as separate arguments: in a tuple Triton 3.6 would compile a kernel per value.
    """

    below: Any
    seed_low: Any
    seed_high: Any


class Arrays(NamedTuple):
    """The arrays that a kernel reads: q, k, v and do as Array; None for those it does not need.

    words: int32, the lists of `masks.Place`. lengths: int32 [B], keys of each sequence. lists: `decode.Lists`, of
    selected keys. lse, share, delta, dlse, dentropy: float32 [B, Tq, Hq]; `refine` writes share.
    """

    q: Any
    k: Any
    v: Any
    words: Any
    lengths: Any = None
    lists: Any = None
    do: Any = None
    lse: Any = None
    share: Any = None
    delta: Any = None
    dlse: Any = None
    dentropy: Any = None


class Config(NamedTuple):
    """The integers that a kernel is compiled with.

    D, DV: head sizes. BLOCK_D, BLOCK_DV: the same, padded. BM, BN: queries and keys of a tile. MASK: the kind of
    element test. Rows of q and k have a second part if D is larger than BLOCK_D. SHARED: whether v is the first DV
    numbers of k. EXACT: 0 for 16-bit products, 1 for float32, 2 for float32 to the last bit. ADD: results contain the
    sums of earlier parts. LAST: the last part. BY_ROW: a bias gradient has a row for each query. ENTROPY: whether a
    forward computes it. OVERLAP: whether a decode starts early (`overlap.py`). LATE: whether the kernel after it starts
    at its end.
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
    SHARED: Any = False
    ENTROPY: Any = False
    OVERLAP: Any = False
    LATE: Any = False


class Attention(NamedTuple):
    """What all programs of a launch share: Arrays, Scores, Drop, Place and Config.

    Kernels create one as an argument of a call: in an assignment Triton 3.6 turns a tuple's constants into tensors.
    """

    arrays: Any
    scores: Any
    drop: Any
    place: Any
    config: Any


class Pairs(NamedTuple):
    """The pairs of a tile: batch entry, head, rows and keys, broadcastable to the tile; the record of their mask."""

    b: Any
    h: Any
    t: Any
    j: Any
    record: Any


class Tile(NamedTuple):
    """The rows or keys of a tile, [BM | BN]: their indices in the sequence, and which of them exist.

    start, meets: the first key or row of the other side of the class, and the number of them.
    """

    at: Any
    ok: Any
    start: Any
    meets: Any


@triton.jit
def row_tile(place, BM: tl.constexpr):
    """(class, tile number in it, batch entry, head, head of its keys, Tile) of the BM rows that a program owns.

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
    """Where the whole blocks of a segment end that need no test: none if it is PARTIAL or a bias may exclude pairs."""
    edge = begin
    if scores.bias is None and scores.distances is None:
        edge = tl.where(kind == FULL, begin + (end - begin) // BLOCK * BLOCK, begin)
    return edge


@triton.jit
def _parts(x):
    # x = high + low of 11 bits each, except for a last bit that no product keeps; infinities have no low part
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, tl.where(tl.abs(high) == float("inf"), 0.0, x - high)


@triton.jit
def _product(a, b, EXACT: tl.constexpr):
    # float32 as three products of tf32. The outer addition, and max_num_imprecise_acc, keep the accumulation out of the
    # matrix unit, which truncates sums instead of rounding them, and out of one long sum of plain products.
    if EXACT == 2:
        return tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        a_high, a_low = _parts(a)
        b_high, b_low = _parts(b)
        x = tl.dot(a_high, b_low, tl.dot(a_low, b_high, input_precision="tf32"), input_precision="tf32")
        return x + tl.dot(a_high, b_high, input_precision="tf32", max_num_imprecise_acc=1)


@triton.jit
def product(a, b, acc, EXACT: tl.constexpr):
    """acc + a b. EXACT: 1 for float32, 2 for float32 to the last bit."""
    if EXACT:
        return acc + _product(a, b, EXACT)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def inner(a, b, n: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """The products of all Rows a with all Rows b, over n components; with EXACT over 32 at a time, for float32."""
    if EXACT:
        PIECE: tl.constexpr = min(BLOCK, 32)
        x = tl.zeros([a.p.shape[0], b.p.shape[0]], tl.float32)
        for d0 in range(0, max(n, BLOCK), PIECE):
            d = d0 + tl.arange(0, PIECE)
            left = tl.load(a.p[:, None] + d[None, :], mask=a.ok[:, None] & (d < n)[None, :], other=0.0)
            right = tl.load(b.p[None, :] + d[:, None], mask=b.ok[None, :] & (d < n)[:, None], other=0.0)
            x += _product(left, right, EXACT)
    else:
        x = tl.dot(a.tile, tl.trans(b.tile))
        if n > BLOCK:
            x = tl.dot(a.tail, tl.trans(b.tail), x)
    return x


@triton.jit
def inner_codes(a, b, of, n: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """`inner` where b are CodedRows of the array `of`."""
    if EXACT:
        PIECE: tl.constexpr = min(BLOCK, 32)
        x = tl.zeros([a.p.shape[0], b.p.shape[0]], tl.float32)
        for d0 in range(0, max(n, BLOCK), PIECE):
            d = d0 + tl.arange(0, PIECE)
            left = tl.load(a.p[:, None] + d[None, :], mask=a.ok[:, None] & (d < n)[None, :], other=0.0)
            x += _product(left, tl.trans(load_codes(of, b.p, b.scale, d, b.ok, n).to(tl.float32)), EXACT)
    else:
        x = tl.dot(a.tile, tl.trans(b.tile.to(a.tile.dtype)))
        if n > BLOCK:
            x = tl.dot(a.tail, tl.trans(b.tail.to(a.tail.dtype)), x)
    return scaled(x, b, of)


@triton.jit
def exact_exp2(x):
    """2^x for -126 <= x <= 127.4, within half a unit in the last place."""
    # rounds half up; to even would be as good
    n = tl.floor(x + 0.5)
    return power_of_two(n, x - n)


@triton.jit
def power_of_two(n, f):
    """2^(n + f) for whole n from -126 to 127 and -0.5 <= f <= 0.5."""
    p = 0.00015345811916183706 * f + 0.0013399931218953942
    p = p * f + 0.009618488957449392
    p = p * f + 0.0555032877696621
    p = p * f + 0.24022646890630905
    p = p * f + 0.6931472057372672
    p = p * f + 1.0
    return p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def power(s, m, EXACT: tl.constexpr):
    """e^(s - m) for s <= m. EXACT: within half a unit in the last place for small s - m; exp2 may lose three."""
    if EXACT:
        x = (s - m) * LOG2E
        y = tl.where(x < -126.0, 0.0, exact_exp2(tl.maximum(x, -126.0)))
        return tl.where(x == x, y, x)
    else:
        return tl.exp2(s * LOG2E - m * LOG2E)


@triton.jit
def fade(m, m_new, EXACT: tl.constexpr):
    """e^(m - m_new) for running maxima.

    It is not computed as m LOG2E - m_new LOG2E. With a fused multiply-add that is not 0 for equal maxima, but the
    rounding error of a product, which is infinite at START and has the same sign at every step.
    """
    if EXACT:
        return power(m, m_new, True)
    else:
        return tl.exp2((m - m_new) * LOG2E)


@triton.jit
def _tanh(x):
    # within one or two units in the last place: an odd polynomial near 0 (Cephes), elsewhere by the exponential
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
        # a bias of -inf excludes a pair even if its product is NaN
        s = tl.maximum(s + bias, START, propagate_nan=tl.PropagateNan.ALL)
        s = tl.where(bias == float("-inf"), float("-inf"), s)
    if scores.slopes is not None:
        s = s - tl.load(scores.slopes + b * scores.slopes_b + h) * distance(scores, pairs)
    if scores.distances is not None:
        bias = _by_distance(scores, place, pairs)
        excluded = bias == float("-inf")
        if scores.bias is not None:
            excluded = excluded | (s == float("-inf"))
        s = tl.maximum(s + bias, START, propagate_nan=tl.PropagateNan.ALL)
        s = tl.where(excluded, float("-inf"), s)
    if scores.gates is not None:
        s = s + _forgotten(s, scores, place, pairs)
    return s


@triton.jit
def _position(scores, pairs):
    # the position of each row among the keys
    return pairs.t + tl.load(scores.offset + pairs.b * scores.offset_b)


@triton.jit
def _by_distance(scores, place, pairs):
    at = scores.distances.p + pairs.b.to(tl.int64) * scores.distances.b + pairs.h.to(tl.int64) * scores.distances.h
    # rows and keys beyond the last ones are clamped, so that they stay inside the array
    return tl.load(at + (tl.minimum(_position(scores, pairs), place.Tk - 1) - tl.minimum(pairs.j, place.Tk - 1)))


@triton.jit
def _forgotten(s, scores, place, pairs):
    # The sums may be large; each is two floats, and the high parts nearly cancel. Adding a zero computed from s keeps
    # the tile in the layout of s; Triton would spread rows and keys in another layout and convert it through shared
    # memory.
    high = scores.gates + (pairs.b.to(tl.int64) * place.Hq + pairs.h) * place.Tk
    low = high + tl.cast(place.B, tl.int64) * place.Hq * place.Tk
    row = tl.minimum(tl.maximum(_position(scores, pairs), 0), place.Tk - 1)
    key = tl.minimum(pairs.j, place.Tk - 1)
    zero = tl.minimum(tl.abs(s), 0.0)
    return ((zero + tl.load(high + row)) - tl.load(high + key)) + ((zero + tl.load(low + row)) - tl.load(low + key))


@triton.jit
def visible(s, attention, pairs, inside):
    """The pairs of a tile, among those `inside`, that neither the mask nor a bias of -inf excludes; s: their scores."""
    seen = allowed(attention.place, pairs.record, pairs.b, pairs.t, pairs.j, attention.config.MASK) & inside
    if attention.scores.bias is not None or attention.scores.distances is not None:
        seen = seen & (s != float("-inf"))
    return seen


@triton.jit
def only(x, some):
    """Rows of x that some pair needs, and 0 for others: those may contain NaN, and 0 times NaN is NaN."""
    return tl.where(some[:, None], x, 0.0)


@triton.jit
def dscore(ds, x, scores):
    """The derivative by x * scale, from the derivative by the scores: applies the softcap's factor."""
    if scores.softcap is not None:
        # 4e / (1 + e)^2 with e = e^-2|x|; 1 - tanh^2 would lose its digits where tanh is near 1
        e = tl.exp2(tl.abs(x * scores.scale / scores.softcap) * (-2.0 * LOG2E))
        ds = ds * (4.0 * e / ((1.0 + e) * (1.0 + e)))
    return ds


@triton.jit
def distance(scores, pairs):
    """The distance between a row's position and a key, for ALiBi."""
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


@triton.jit
def entropy_share(lse, entropy, total):
    """What keys, or a sink, of this lse and entropy add to the entropy of a row whose lse is `total`."""
    return tl.where(lse == float("-inf"), 0.0, tl.exp(lse - total) * (entropy + (total - lse)))


@triton.jit
def entropy_of(l, u):
    """The entropy of weights whose sum is l relative to their maximum; u: Σ P (S - m)."""
    # not u / l, for which the LLVM of Triton 3.9 aborts where products are in float32 to the last bit
    return tl.log(l) - u * (1.0 / l)
