"""Decode over latent rows on Hopper: up to 64 heads of one query, for which the same rows are keys and values.

A row of a latent cache is 512 numbers, which are also the value, and 64 more. A warp copies tiles of 64 rows in three
parts: left and right halves of the values, and the rest. Two warpgroups compute the scores and weights of tiles in
turn: of each pair of tiles, warpgroup 0 those of the first, warpgroup 1 those of the second. Both add all tiles:
warpgroup 0 the left half of the sums, warpgroup 1 the right half, because the registers of one cannot hold 64 x 512
sums. While one computes weights, the tensor cores multiply for the other. The weights of a tile take the place of its
rest, which its scores alone need, and are handed over with the running maximum. This follows the schedule of FlashMLA
(DeepSeek, 2025).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....mask.forms import INF
from ....problem import Problem
from ..chip import multiprocessors
from ..launch import AttentionLaunch, array
from ..launch_decode import combine, reach_of
from .gluon_names import async_load, barrier
from .masking import KeyTile
from .products import by_row, product_layout, rescaled
from .softmax import Scores, after_softmax, by_thread, row_layout, softmax
from .tiles import descriptor

# the numbers of a row, of its value, and of half a value; heads, and keys, of a tile
ROW, VALUE, HALF, SIDE = 576, 512, 256, 64
# the keys of a range are a multiple of a pair of tiles
QUANTUM = 2 * SIDE
LOG2E = math.log2(math.e)
# the portable kernel computes fewer scores than this, of one query of every sequence
LEAST = 1 << 15
# of more ranges, the kernel that merges them would spill
MOST_RANGES = 32
# microseconds on an H200: of a program, of each pair of its tiles, of merging; bytes per microsecond that are merged
START, PAIR, MERGE, MERGED = 5.0, 4.3, 3.0, 3e6


class LatentPipeline(NamedTuple):
    """Shared memory of a CTA. Tile n of a pair is in stage n.

    q, q_rest: two arrays [1, 1, 64, 256] and one [1, 1, 64, 64] of a tile of heads; q_full: their barrier. keys: four
    arrays [1, 1, 64, 256], the halves of both stages; rest: two [1, 1, 64, 64]. full, empty: [6], the barriers of left
    half, right half and rest of both stages. ready: [2], completes when the weights of a tile are in its rest. rows:
    float32 [6, 64]; the maximum and the factor of earlier sums of a tile of each stage, and at the end the sums of
    weights of each warpgroup. total: completes when those are there.
    """

    q: Any
    q_rest: Any
    q_full: Any
    keys: Any
    rest: Any
    full: Any
    empty: Any
    ready: Any
    rows: Any
    total: Any


class Span(NamedTuple):
    """What a CTA computes: heads from `h` on of query t of batch entry b, keys [begin, end), in `pairs` of
    tiles of 64. split: the number of its range."""

    b: Any
    t: Any
    h: Any
    split: Any
    begin: Any
    end: Any
    pairs: Any


class Out(NamedTuple):
    """o, a `launch.Array` [B, Tq, Hq, 512], and lse [B, Tq, Hq]; or the parts of all ranges as in `kernels.decode`, and
    None for o and lse."""

    o: Any
    lse: Any
    parts: Any


class Work(NamedTuple):
    """Queries per sequence, heads, keys after its position that a query sees, keys per range, ranges, scale in log2."""

    Tq: Any
    Hq: Any
    right: Any
    keys: Any
    n: Any
    scale: Any


class Cache(NamedTuple):
    """lengths: int32 [B]. table: int32 [B, columns] of pages of `page` rows, or None for contiguous rows."""

    lengths: Any
    table: Any
    columns: Any
    page: Any


@gluon.jit
def _copy(desc, at, column, tile, full):
    mbarrier.expect(full, desc.block_type.nbytes)
    async_load(desc, [at[0], 0, at[1], column], full, tile)


@gluon.jit
def _load(inputs, cache, span, pipeline):
    """One warp: copies the heads' queries once, and the key tiles."""
    q, q_rest, k, k_rest = inputs
    if span.pairs > 0:
        full = pipeline.q_full
        mbarrier.expect(full, 2 * q.block_type.nbytes + q_rest.block_type.nbytes)
        for half in gl.static_range(2):
            async_load(q, [span.b, span.t, span.h, half * 256], full, pipeline.q.index(half))
        async_load(q_rest, [span.b, span.t, span.h, 512], full, pipeline.q_rest.index(0))
    for pair in range(span.pairs):
        for STAGE in gl.static_range(2):
            entry = span.b
            row = span.begin + 128 * pair + 64 * STAGE
            if cache.table is not None:
                # of unused rows beyond the last one, any page
                place = gl.minimum(row // cache.page, cache.columns - 1)
                entry = gl.load(cache.table + span.b.to(gl.int64) * cache.columns + place)
                row = row % cache.page
            for n in gl.static_range(3):
                mbarrier.wait(pipeline.empty.index(3 * STAGE + n), (pair & 1) ^ 1)
                full = pipeline.full.index(3 * STAGE + n)
                if n < 2:
                    _copy(k, (entry, row), 256 * n, pipeline.keys.index(2 * STAGE + n), full)
                else:
                    _copy(k_rest, (entry, row), 512, pipeline.rest.index(STAGE), full)


@gluon.jit
def _clear(tile, n):
    # zeros in the rows from n on: a slot without a key may hold NaN
    COLUMNS: gl.constexpr = tile.shape[1]
    THREADS: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    x = tile.load(layout)
    tile.store(gl.where(rows < n, x, 0.0).to(x.dtype))


@gluon.jit
def _zero(pair):
    # 0, which the compiler does not know. It then computes the addresses of operands for every pair, in registers of
    # the warp, instead of keeping all of them in registers of the threads, which spill
    asm: gl.constexpr = "{ .reg .b32 z; shr.s32 z, $1, 31; shfl.sync.idx.b32 $0, z, 0, 31, -1; }"
    return gl.inline_asm_elementwise(asm, "=r,r", [pair], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _part(pipeline, n: gl.constexpr, STAGE: gl.constexpr, zero):
    # left half, right half or rest of a key tile
    if n < 2:
        return pipeline.keys.index(2 * STAGE + n + zero).reshape([64, 256])
    else:
        return pipeline.rest.index(STAGE + zero).reshape([64, 64])


@gluon.jit
def _wait(pipeline, n: gl.constexpr, STAGE: gl.constexpr, pair):
    mbarrier.wait(pipeline.full.index(3 * STAGE + n), pair & 1)


@gluon.jit
def _keys_left(span, STAGE: gl.constexpr, pair):
    # from the first key of a tile on
    return span.end - span.begin - 64 * STAGE - 128 * pair


@gluon.jit
def _scores(span, pipeline, STAGE: gl.constexpr, pair):
    """Issue q · k for a key tile."""
    n = _keys_left(span, STAGE, pair)
    if n < 64:
        for part in gl.static_range(3):
            _wait(pipeline, part, STAGE, pair)
            _clear(_part(pipeline, part, STAGE, 0), n)
        fence_async_shared()
        barrier()
    zero = _zero(pair)
    s = gl.zeros([64, 64], gl.float32, product_layout(pipeline.q.dtype, 64))
    for half in gl.static_range(2):
        _wait(pipeline, half, STAGE, pair)
        q = pipeline.q.index(half + zero).reshape([64, 256])
        s = warpgroup_mma(q, _part(pipeline, half, STAGE, zero).permute([1, 0]), s, use_acc=half > 0, is_async=True)
    _wait(pipeline, 2, STAGE, pair)
    q = pipeline.q_rest.index(zero).reshape([64, 64])
    return warpgroup_mma(q, _part(pipeline, 2, STAGE, zero).permute([1, 0]), s, is_async=True)


@gluon.jit
def _weigh(s, state, scores, span, pipeline, STAGE: gl.constexpr, pair):
    """Hand over the weights of a tile of scores s; returns the new state m and l, and the factor of earlier sums."""
    m, l = state
    n = _keys_left(span, STAGE, pair)
    if n < 64:
        columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, s.type.layout)), 0)
        s = gl.where(columns < n, s, float("-inf"))
    p, m, l, alpha = softmax(s, m, l, KeyTile(0, 0, False), None, None, scores)
    # all warps have read the rest of the tile
    barrier()
    _part(pipeline, 2, STAGE, 0).store(p.to(pipeline.q.dtype))
    pipeline.rows.index(2 * STAGE).store(m)
    pipeline.rows.index(2 * STAGE + 1).store(alpha)
    fence_async_shared()
    barrier()
    mbarrier.arrive(pipeline.ready.index(STAGE))
    return m, l, alpha


@gluon.jit
def _take(m, l, pipeline, STAGE: gl.constexpr, pair):
    """(m, l, factor of earlier sums) after the tile whose weights the other warpgroup hands over."""
    mbarrier.wait(pipeline.ready.index(STAGE), pair & 1)
    alpha = pipeline.rows.index(2 * STAGE + 1).load(m.type.layout)
    l = l * by_row(alpha, l)
    return pipeline.rows.index(2 * STAGE).load(m.type.layout), l, alpha


@gluon.jit
def _add(half: gl.constexpr, o, alpha, pipeline, STAGE: gl.constexpr, pair):
    """Issue o · alpha + p v for a half of the values of a key tile."""
    zero = _zero(pair)
    _wait(pipeline, half, STAGE, pair)
    o = rescaled(o, alpha, True)
    return warpgroup_mma(_part(pipeline, 2, STAGE, zero), _part(pipeline, half, STAGE, zero), o, is_async=True)


@gluon.jit
def _added(half: gl.constexpr, o, pipeline, STAGE: gl.constexpr, pending: gl.constexpr = 0):
    """o, once the products of a tile are added."""
    o = warpgroup_mma_wait(pending, deps=[o])
    mbarrier.arrive(pipeline.empty.index(3 * STAGE + half))
    mbarrier.arrive(pipeline.empty.index(3 * STAGE + 2))
    return o


@gluon.jit
def _even(sums, pair, span, scores, pipeline, MORE: gl.constexpr):
    # warpgroup 0: weighs the first tile of a pair, whose scores s are computed, and adds it and the second one
    s, o, m, l = sums
    m, l, alpha = _weigh(s, (m, l), scores, span, pipeline, 0, pair)
    o = _added(0, _add(0, o, alpha, pipeline, 0, pair), pipeline, 0)
    m, l, alpha = _take(m, l, pipeline, 1, pair)
    o = _add(0, o, alpha, pipeline, 1, pair)
    if MORE:
        s = _scores(span, pipeline, 0, pair + 1)
        o = _added(0, o, pipeline, 1, 1)
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        o = _added(0, o, pipeline, 1)
    return s, o, m, l


@gluon.jit
def _odd(sums, pair, span, scores, pipeline, MORE: gl.constexpr):
    # warpgroup 1: adds the first tile of a pair, and meanwhile weighs the second one, whose scores s are computed
    s, o, m, l = sums
    m, l, alpha = _take(m, l, pipeline, 0, pair)
    o = _add(1, o, alpha, pipeline, 0, pair)
    m, l, alpha = _weigh(s, (m, l), scores, span, pipeline, 1, pair)
    l = after_softmax(l)
    o = _added(1, o, pipeline, 0)
    o = _added(1, _add(1, o, alpha, pipeline, 1, pair), pipeline, 1)
    if MORE:
        s = _scores(span, pipeline, 1, pair + 1)
        s = warpgroup_mma_wait(0, deps=[s])
    return s, o, m, l


@gluon.jit
def _compute(which: gl.constexpr, span, work, out, pipeline):
    """A warpgroup: sums of columns [256 · which, 256 · which + 256)."""
    dtype: gl.constexpr = pipeline.q.dtype
    scores = Scores(work.scale)
    S: gl.constexpr = product_layout(dtype, 64)
    R: gl.constexpr = gl.SliceLayout(1, S)
    o = gl.zeros([64, 256], gl.float32, product_layout(dtype, 256))
    m = gl.full([64], float("-inf"), gl.float32, R)
    l = by_thread(gl.zeros([64, 64], gl.float32, S), False)
    if span.pairs > 0:
        mbarrier.wait(pipeline.q_full, 0)
        s = _scores(span, pipeline, which, 0)
        s = warpgroup_mma_wait(0, deps=[s])
        sums = s, o, m, l
        last = span.pairs - 1
        for pair in range(last):
            if which == 0:
                sums = _even(sums, pair, span, scores, pipeline, True)
            else:
                sums = _odd(sums, pair, span, scores, pipeline, True)
        if which == 0:
            sums = _even(sums, last, span, scores, pipeline, False)
        else:
            sums = _odd(sums, last, span, scores, pipeline, False)
        s, o, m, l = sums
    own = gl.convert_layout(gl.sum(l, 1), R)
    pipeline.rows.index(4 + which).store(own)
    barrier()
    mbarrier.arrive(pipeline.total)
    mbarrier.wait(pipeline.total, 0)
    _store(which, o, m, own + pipeline.rows.index(5 - which).load(R), span, work, out)


@gluon.jit
def _store(which: gl.constexpr, o, m, l, span, work, out):
    R: gl.constexpr = m.type.layout
    ROWS: gl.constexpr = row_layout(256)
    none = l == 0.0
    o = o * by_row(gl.where(none, 0.0, 1.0 / l), o)
    # the number of a row among all rows
    first = (span.b.to(gl.int64) * work.Tq + span.t) * work.Hq + span.h
    head, rows = gl.arange(0, 64, R), gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    own, exists = head < work.Hq - span.h, gl.expand_dims(rows < work.Hq - span.h, 1)
    columns = gl.expand_dims(which * 256 + gl.arange(0, 256, gl.SliceLayout(0, ROWS)), 0)
    if out.parts is not None:
        if which == 0:
            # after the sums of all rows
            count = (gl.num_programs(0) // gl.cdiv(work.Hq, 64)).to(gl.int64) * work.Hq
            at = out.parts + count * 512 + 2 * ((first + head) * work.n + span.split)
            gl.store(at, gl.where(none, -2.3e38, m * work.scale * 0.6931471805599453), own)
            gl.store(at + 1, l, own)
        at = out.parts + gl.expand_dims(((first + rows) * work.n + span.split) * 512, 1)
        gl.store(at + columns, gl.convert_layout(o, ROWS), exists)
    else:
        if which == 0:
            lse = gl.where(none, float("-inf"), (m * work.scale + gl.log2(l)) * 0.6931471805599453)
            gl.store(out.lse + first + head, lse, own)
        base = out.o.p + span.b.to(gl.int64) * out.o.b + span.t.to(gl.int64) * out.o.t
        at = base + gl.expand_dims((span.h + rows).to(gl.int64) * out.o.h, 1)
        gl.store(at + columns, gl.convert_layout(o.to(out.o.p.dtype.element_ty), ROWS), exists)


@gluon.jit
def _tiles(desc, n: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [n] + desc.block_shape, desc.layout)


@gluon.jit
def _barriers(n: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), ARRIVALS)
    return bars


@gluon.jit
def decode_latent(q, q_rest, k, k_rest, cache, out, work):
    """Grid: B x ranges x queries x blocks of 64 heads. q, k and their rests: descriptors of columns [0, 512) by 256,
    and of [512, 576)."""
    i = gl.program_id(0)
    blocks = gl.cdiv(work.Hq, 64)
    # programs that read the same keys are neighbours
    h, i = i % blocks * 64, i // blocks
    t, i = i % work.Tq, i // work.Tq
    split, b = i % work.n, i // work.n
    stop = gl.load(cache.lengths + b)
    begin = split * work.keys
    end = gl.minimum(gl.minimum(t + stop - work.Tq + work.right + 1, stop), begin + work.keys)
    span = Span(b, t, h, split, begin, end, gl.maximum(gl.cdiv(end - begin, 128), 0))
    heads, rest = _tiles(q, 2), _tiles(q_rest, 1)
    keys, keys_rest = _tiles(k, 4), _tiles(k_rest, 2)
    rows = gl.allocate_shared_memory(gl.float32, [6, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, total, ready, full = _barriers(1, 1), _barriers(1, 2), _barriers(2, 1), _barriers(6, 1)
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(6):
        # both warpgroups read the rest
        mbarrier.init(empty.index(n), 2 if n % 3 == 2 else 1)
    fence_async_shared()
    pipeline = LatentPipeline(heads, rest, q_full.index(0), keys, keys_rest, full, empty, ready, rows, total.index(0))
    gl.warp_specialize(
        [
            (_compute, (0, span, work, out, pipeline)),
            (_compute, (1, span, work, out, pipeline)),
            (_load, ((q, q_rest, k, k_rest), cache, span, pipeline)),
        ],
        [4, 1],
        [240, 24],
    )


def computes(p: Problem) -> bool:
    """Whether this kernel decodes a problem, if values are a view of keys: 16-bit floats, and no options."""
    if (p.D, p.Dv, p.Hk) != (ROW, VALUE, 1) or p.quantised or p.uses - {"source"}:
        return False
    # a query sees all keys up to its position or, without a mask, all
    reach = reach_of(p.mask)
    if p.dtype not in ("bfloat16", "float16") or p.scores.scale <= 0 or reach is None or reach[0] != INF:
        return False
    # few keys are decoded faster without copies by descriptors, many queries of few heads in one tile
    return p.B * p.Tk * p.Hq >= LEAST and (p.Tq <= 2 or p.Hq >= SIDE // 2)


def takes(call: AttentionLaunch) -> bool:
    """Whether the arrays of a problem that it `computes` are a latent cache, in pages of whole tiles or none."""
    shared, page = call.columns.SHARED and call.arrays.lengths is not None, call.arrays.k.page or 0
    return shared and not page % SIDE


@lru_cache(256)
def ranges_of(programs: int, rows: int, tokens: int, chips: int) -> tuple[int, int]:
    """(number of ranges, keys per range), which take the least time as far as it is known.

    programs: of one range. rows: queries of all heads. chips: multiprocessors.
    """

    def microseconds(n: int) -> float:
        rounds, pairs = -(-programs * n // chips), -(-tokens // (n * QUANTUM))
        merging = MERGE + n * rows * VALUE * 8 / MERGED if n > 1 else 0
        return rounds * (START + PAIR * pairs) + merging

    n = min(range(1, max(1, min(MOST_RANGES, tokens // QUANTUM)) + 1), key=microseconds)
    keys = -(-tokens // (n * QUANTUM)) * QUANTUM
    return -(-tokens // keys), keys


def decode(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """Compute o [B, Tq, Hq, 512] and lse [B, Tq, Hq] of a call that it `takes`."""
    p, (q, k, _) = call.problem, call.qkv
    blocks, count = p.Tq * -(-p.Hq // SIDE), p.B * p.Tq * p.Hq
    n, keys = ranges_of(p.B * blocks, count, max(1, p.Tk), multiprocessors(p.device))
    parts = call.scratch(n * count * (VALUE + 2), like=lse) if n > 1 else None
    heads, right = q.p.transpose(1, 2), (reach_of(p.mask) or (0, 0))[1]
    copied = (descriptor(x, SIDE, columns=m) for x in (heads, k.p) for m in (HALF, ROW - VALUE))
    out = Out(None, None, parts) if n > 1 else Out(array(o), lse, None)
    cache = Cache(call.arrays.lengths, k.table, k.columns or 0, k.page or 0)
    work = Work(p.Tq, p.Hq, right, keys, n, p.scores.scale * LOG2E)
    call.run(decode_latent, (p.B * n * blocks,), *copied, cache, out, work, num_warps=4)
    if parts is not None:
        combine(call, parts, n, (o, lse))
