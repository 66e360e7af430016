"""Decode over latent rows on Hopper: 64 heads of one query, for which the same rows are keys and values.

A row of a latent cache is 512 numbers, which are also the value, and 64 more. A warp copies tiles of 64 rows in three
parts: left and right halves of the values, and the rest. Two warpgroups compute the scores and weights of tiles in
turn, warpgroup 0 of even ones. Both add all tiles: warpgroup 0 the left half of the sums, warpgroup 1 the right half,
because the registers of one cannot hold 64 x 512 sums. While one computes weights, the tensor cores multiply for the
other. The weights of a tile take the place of its rest, which its scores alone need, and are handed over with the
running maximum. This follows the schedule of FlashMLA (DeepSeek, 2025).
"""

from __future__ import annotations

import math
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
from .pipeline import Ring, release, wait_empty, wait_full
from .products import product_layout, rescaled
from .softmax import Scores, after_softmax, by_thread, row_layout, softmax
from .tiles import descriptor

# the numbers of a row and of its value, and of half a value; heads, and keys, of a tile
ROW, VALUE, HALF, SIDE = 576, 512, 256, 64
# the keys of a range are a multiple of two tiles
QUANTUM = 2 * SIDE
LOG2E = math.log2(math.e)
# more ranges than this cost more than they balance
MOST_RANGES = 32


class LatentPipeline(NamedTuple):
    """Shared memory of a CTA.

    q, q_rest: two arrays [1, 1, 64, 256] and one [1, 1, 64, 64] of a tile of heads; q_full: their barrier. keys: three
    rings, of the left and right halves of key tiles and of the rest. ready: [2], completes when the weights of a tile
    are in its rest. rows: float32 [6, 64]; the maximum and the factor of earlier sums of a tile of each stage, and at
    the end the sums of weights of each warpgroup. total: completes when those are there.
    """

    q: Any
    q_rest: Any
    q_full: Any
    keys: Any
    ready: Any
    rows: Any
    total: Any


class Span(NamedTuple):
    """What a CTA computes: heads from `h` on of query t of batch entry b, keys [begin, end), in an even number of
    steps of 64. split: the number of its range."""

    b: Any
    t: Any
    h: Any
    split: Any
    begin: Any
    end: Any
    steps: Any


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
def _copy(desc, at, column, ring, step):
    stage = wait_empty(ring, step)
    full = ring.full.index(stage)
    mbarrier.expect(full, desc.block_type.nbytes)
    async_load(desc, [at[0], 0, at[1], column], full, ring.tiles.index(stage))


@gluon.jit
def _load(inputs, cache, span, pipeline):
    """One warp: copies the heads' queries once, and the key tiles."""
    q, q_rest, k, k_rest = inputs
    if span.steps > 0:
        full = pipeline.q_full
        mbarrier.expect(full, 2 * q.block_type.nbytes + q_rest.block_type.nbytes)
        for half in gl.static_range(2):
            async_load(q, [span.b, span.t, span.h, half * 256], full, pipeline.q.index(half))
        async_load(q_rest, [span.b, span.t, span.h, 512], full, pipeline.q_rest.index(0))
    for step in range(span.steps):
        entry = span.b
        row = span.begin + 64 * step
        if cache.table is not None:
            # of unused rows beyond the last one, any page
            place = gl.minimum(row // cache.page, cache.columns - 1)
            entry = gl.load(cache.table + span.b.to(gl.int64) * cache.columns + place)
            row = row % cache.page
        _copy(k, (entry, row), 0, pipeline.keys[0], step)
        _copy(k, (entry, row), 256, pipeline.keys[1], step)
        _copy(k_rest, (entry, row), 512, pipeline.keys[2], step)


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
def _part(pipeline, n: gl.constexpr, step):
    # part n of a key tile
    tiles = pipeline.keys[n].tiles
    COLUMNS: gl.constexpr = tiles.shape[4]
    return tiles.index(step % 2).reshape([64, COLUMNS])


@gluon.jit
def _scores(span, pipeline, step):
    """Issue q · k for the key tile of a step."""
    n = span.end - span.begin - 64 * step
    if n < 64:
        for part in gl.static_range(3):
            wait_full(pipeline.keys[part], step)
            _clear(_part(pipeline, part, step), n)
        fence_async_shared()
        barrier()
    s = gl.zeros([64, 64], gl.float32, product_layout(pipeline.q.dtype, 64))
    for half in gl.static_range(2):
        wait_full(pipeline.keys[half], step)
        q = pipeline.q.index(half).reshape([64, 256])
        s = warpgroup_mma(q, _part(pipeline, half, step).permute([1, 0]), s, use_acc=half > 0, is_async=True)
    wait_full(pipeline.keys[2], step)
    q = pipeline.q_rest.index(0).reshape([64, 64])
    return warpgroup_mma(q, _part(pipeline, 2, step).permute([1, 0]), s, is_async=True)


@gluon.jit
def _weigh(s, m, l, scores, span, step, pipeline):
    """Hand over the weights of a tile of scores s; returns the new m and l, and the factor of earlier sums."""
    n = span.end - span.begin - 64 * step
    if n < 64:
        columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, s.type.layout)), 0)
        s = gl.where(columns < n, s, float("-inf"))
    p, m, l, alpha = softmax(s, m, l, KeyTile(0, 0, False), None, None, scores)
    # all warps have read the rest of the tile
    barrier()
    _part(pipeline, 2, step).store(p.to(pipeline.q.dtype))
    stage = step % 2
    pipeline.rows.index(2 * stage).store(m)
    pipeline.rows.index(2 * stage + 1).store(alpha)
    fence_async_shared()
    barrier()
    mbarrier.arrive(pipeline.ready.index(stage))
    return m, l, alpha


@gluon.jit
def _take(m, l, step, pipeline):
    """(m, l, factor of earlier sums) after the tile whose weights the other warpgroup hands over."""
    stage = step % 2
    mbarrier.wait(pipeline.ready.index(stage), (step // 2) & 1)
    alpha = pipeline.rows.index(2 * stage + 1).load(m.type.layout)
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1)
    return pipeline.rows.index(2 * stage).load(m.type.layout), l, alpha


@gluon.jit
def _add(half: gl.constexpr, o, alpha, step, pipeline):
    """Issue o · alpha + p v for a half of the values of a key tile."""
    wait_full(pipeline.keys[half], step)
    o = rescaled(o, alpha, True)
    return warpgroup_mma(_part(pipeline, 2, step), _part(pipeline, half, step), o, is_async=True)


@gluon.jit
def _added(half: gl.constexpr, step, pipeline):
    release(pipeline.keys[half], step)
    release(pipeline.keys[2], step)


@gluon.jit
def _even_pair(sums, step, span, scores, pipeline, MORE: gl.constexpr):
    # warpgroup 0: weighs tile `step`, whose scores s are computed, and adds it and the next one
    s, o, m, l = sums
    m, l, alpha = _weigh(s, m, l, scores, span, step, pipeline)
    o = _add(0, o, alpha, step, pipeline)
    m, l, alpha = _take(m, l, step + 1, pipeline)
    o = warpgroup_mma_wait(0, deps=[o])
    _added(0, step, pipeline)
    o = _add(0, o, alpha, step + 1, pipeline)
    if MORE:
        s = _scores(span, pipeline, step + 2)
        o = warpgroup_mma_wait(1, deps=[o])
        _added(0, step + 1, pipeline)
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        o = warpgroup_mma_wait(0, deps=[o])
        _added(0, step + 1, pipeline)
    return s, o, m, l


@gluon.jit
def _odd_pair(sums, step, span, scores, pipeline, MORE: gl.constexpr):
    # warpgroup 1: adds tile `step`, and meanwhile weighs the next one, whose scores s are computed
    s, o, m, l = sums
    m, l, alpha = _take(m, l, step, pipeline)
    o = _add(1, o, alpha, step, pipeline)
    m, l, alpha = _weigh(s, m, l, scores, span, step + 1, pipeline)
    l = after_softmax(l)
    o = warpgroup_mma_wait(0, deps=[o])
    _added(1, step, pipeline)
    o = _add(1, o, alpha, step + 1, pipeline)
    o = warpgroup_mma_wait(0, deps=[o])
    _added(1, step + 1, pipeline)
    if MORE:
        s = _scores(span, pipeline, step + 3)
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
    if span.steps > 0:
        mbarrier.wait(pipeline.q_full, 0)
        s = _scores(span, pipeline, which)
        s = warpgroup_mma_wait(0, deps=[s])
        sums = s, o, m, l
        last = span.steps - 2
        for step in range(0, last, 2):
            if which == 0:
                sums = _even_pair(sums, step, span, scores, pipeline, True)
            else:
                sums = _odd_pair(sums, step, span, scores, pipeline, True)
        if which == 0:
            sums = _even_pair(sums, last, span, scores, pipeline, False)
        else:
            sums = _odd_pair(sums, last, span, scores, pipeline, False)
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
    share = gl.where(none, 0.0, 1.0 / l)
    o = o * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, o.type.layout)), 1)
    # the number of a row among all rows
    first = (span.b.to(gl.int64) * work.Tq + span.t) * work.Hq + span.h
    rows = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    columns = which * 256 + gl.arange(0, 256, gl.SliceLayout(0, ROWS))
    if out.parts is not None:
        parts = (first + gl.arange(0, 64, R)) * work.n + span.split
        # each program has parts of 64 rows
        sums = out.parts + gl.num_programs(0).to(gl.int64) * (64 * 512) + 2 * parts
        if which == 0:
            gl.store(sums, gl.where(none, -2.3e38, m * work.scale * 0.6931471805599453))
            gl.store(sums + 1, l)
        o = gl.convert_layout(o, ROWS)
        parts = ((first + rows) * work.n + span.split) * 512
        gl.store(out.parts + gl.expand_dims(parts, 1) + gl.expand_dims(columns, 0), o)
    else:
        if which == 0:
            lse = gl.where(none, float("-inf"), (m * work.scale + gl.log2(l)) * 0.6931471805599453)
            gl.store(out.lse + first + gl.arange(0, 64, R), lse)
        o = gl.convert_layout(o.to(out.o.p.dtype.element_ty), ROWS)
        base = out.o.p + span.b.to(gl.int64) * out.o.b + span.t.to(gl.int64) * out.o.t
        at = gl.expand_dims((span.h + rows).to(gl.int64) * out.o.h, 1) + gl.expand_dims(columns, 0)
        gl.store(base + at, o)


@gluon.jit
def _ring(desc, READERS: gl.constexpr):
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = gl.allocate_shared_memory(desc.dtype, [2] + desc.block_shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), READERS)
    return Ring(tiles, full, empty)


@gluon.jit
def decode_latent(q, q_rest, k, k_rest, cache, out, work):
    """Grid: B x ranges x queries x blocks of 64 heads. q, k and their rests: descriptors of columns [0, 512) by 256,
    and of [512, 576)."""
    i = gl.program_id(0)
    blocks = work.Hq // 64
    # programs that read the same keys are neighbours
    h, i = i % blocks * 64, i // blocks
    t, i = i % work.Tq, i // work.Tq
    split, b = i % work.n, i // work.n
    stop = gl.load(cache.lengths + b)
    begin = split * work.keys
    end = gl.minimum(gl.minimum(t + stop - work.Tq + work.right + 1, stop), begin + work.keys)
    steps = gl.maximum((end - begin + 127) // 128, 0) * 2
    span = Span(b, t, h, split, begin, end, steps)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    heads = gl.allocate_shared_memory(q.dtype, [2] + q.block_shape, q.layout)
    rest = gl.allocate_shared_memory(q.dtype, [1] + q_rest.block_shape, q_rest.layout)
    keys = _ring(k, 1), _ring(k, 1), _ring(k_rest, 2)
    rows = gl.allocate_shared_memory(gl.float32, [6, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    total = gl.allocate_shared_memory(gl.int64, [1], bar)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(q_full, 1)
    mbarrier.init(total, 2)
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), 1)
    fence_async_shared()
    pipeline = LatentPipeline(heads, rest, q_full, keys, ready, rows, total)
    gl.warp_specialize(
        [
            (_compute, (0, span, work, out, pipeline)),
            (_compute, (1, span, work, out, pipeline)),
            (_load, ((q, q_rest, k, k_rest), cache, span, pipeline)),
        ],
        [4, 1],
        [240, 24],
    )


def takes(call: AttentionLaunch) -> bool:
    """Whether this kernel decodes a call: latent rows of 16-bit floats, in pages of whole tiles or none, no options."""
    p, reach, page = call.problem, reach_of(call.problem.mask), call.arrays.k.page or 0
    if (p.D, p.Dv, p.Hk) != (ROW, VALUE, 1) or not call.columns.SHARED or p.quantised or p.uses - {"source"}:
        return False
    if p.dtype not in ("bfloat16", "float16") or p.scores.scale <= 0 or call.arrays.lengths is None:
        return False
    # a query sees all keys up to its position or, without a mask, all
    return reach is not None and reach[0] == INF and not p.Hq % SIDE and not page % SIDE


def ranges_of(p: Problem, blocks: int) -> tuple[int, int]:
    """(number of ranges, keys per range): as many as fill the multiprocessors with the least idle time."""
    programs, chips = p.B * blocks, multiprocessors(p.device)
    most = max(1, min(MOST_RANGES, p.Tk // (4 * QUANTUM)))
    # the rounds of programs relative to one range; merging costs about a hundredth per range
    n = min(range(1, most + 1), key=lambda n: -(-programs * n // chips) / n * (1 + 0.01 * (n - 1)))
    keys = -(-max(1, p.Tk) // (n * QUANTUM)) * QUANTUM
    return -(-max(1, p.Tk) // keys), keys


def decode(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """Compute o [B, Tq, Hq, 512] and lse [B, Tq, Hq] of a call that it `takes`."""
    p, (q, k, _) = call.problem, call.qkv
    blocks, count = p.Tq * (p.Hq // SIDE), p.B * p.Tq * p.Hq
    n, keys = ranges_of(p, blocks)
    parts = call.scratch(n * count * (VALUE + 2), like=lse) if n > 1 else None
    heads, right = q.p.transpose(1, 2), (reach_of(p.mask) or (0, 0))[1]
    copied = (descriptor(x, SIDE, columns=m) for x in (heads, k.p) for m in (HALF, ROW - VALUE))
    out = Out(None, None, parts) if n > 1 else Out(array(o), lse, None)
    cache = Cache(call.arrays.lengths, k.table, k.columns or 0, k.page or 0)
    work = Work(p.Tq, p.Hq, right, keys, n, p.scores.scale * LOG2E)
    call.run(decode_latent, (p.B * n * blocks,), *copied, cache, out, work, num_warps=4)
    if parts is not None:
        combine(call, parts, n, (o, lse))
