"""The forward of exact attention on Hopper: one warp copies, one to three warpgroups multiply.

A piece of work is a tile of BM = 64 · NC query rows of one head. A persistent grid draws pieces from a counter, longest
first. A producer warp walks the tile's segments of keys and copies Q once and K and V tile by tile into rings of shared
memory (TMA; mbarriers full and empty). If there is room, Q has a ring too, so that the next piece can start at once.
Every consumer warpgroup owns 64 rows. With a mask of one band, it computes only the key tiles that some of its rows
see, and tests only those that others of its rows do not see. It issues S = Q Kᵀ of key tile j before O += P V of key
tile j - 1, and computes the softmax of j while the tensor cores still add j - 1. P stays in registers: it is the first
operand of the second product.

8-bit floats (e4m3) have factors for q k and for v. Their products sum only over operands that are contiguous along the
sum, so `staging.transpose` transposes V first and puts its keys in the order in which registers hold P.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....problem import Problem
from ..chip import multiprocessors
from ..launch import AttentionLaunch, array
from .gluon_names import async_load, barrier
from .masking import KeyTile, Mask, RowBlock, seen_by, visits_of
from .pipeline import Ring, pass_turn, read_number, release, skip, take_turn, wait_empty, wait_full, write_number
from .products import add_values, by_row, operand, product_layout, rescaled, scores_of
from .schedule import ForwardSchedule
from .softmax import Output, Scores, after_softmax, by_thread, finish, softmax
from .staging import transpose
from .tile_scheduler import TileScheduler, piece_of
from .tiles import TILES_8, descriptor, padded, section_of, tiled

LOG2E = math.log2(math.e)


class ForwardPipeline(NamedTuple):
    """Shared memory of a CTA.

    q: a ring of row tiles, NC arrays [1, 1, 64, D] per stage. k, v: rings of key tiles [1, 1, BN, D | Dv]; v is
    transposed for 8-bit floats. A tile of q or k is `Tiles.pieces` arrays, one after the other. work: int32, 8 numbers
    per stage of q: batch entry or -1 at the end, head, row tile, and either the keys [begin, end) that it sees, or the
    first and the end of its segments and (begin, end, kind) of the first.
    """

    q: Any
    k: Any
    v: Any
    work: Any


class Accumulator(NamedTuple):
    """The sums of 64 rows after the scores of key tile step - 1.

    o [64, Dv] without the product of that tile, maxima m [64], sums l [64, 8] per thread, and the weights p [64, BN] of
    the tile, in fp32 or rounded to an operand. wide: with `Tiles.every`, the sum [64, Dv] in fp32 to which o is
    added, and the factor [64] that it is multiplied by first; else empty.
    """

    step: Any
    o: Any
    m: Any
    l: Any
    p: Any
    wide: Any


class Rows(NamedTuple):
    """64 rows of a piece of work: the number of their q in the ring, their place, the mask and parameters of scores."""

    q: Any
    block: Any
    mask: Any
    scores: Any


@gluon.jit
def _copy_rows(desc, at, full, tiles, n, PIECES: gl.constexpr):
    # tile n, of the rows from (b, h, row) on
    for piece in gl.static_range(PIECES):
        async_load(desc, [at[0], at[1], at[2], piece * desc.block_shape[3]], full, tiles.index(n * PIECES + piece))


@gluon.jit
def _copy_tile(desc, b, h, row, ring, step, TRANSPOSED: gl.constexpr):
    stage = wait_empty(ring, step)
    full = ring.full.index(stage)
    PIECES: gl.constexpr = ring.tiles.shape[0] // ring.full.shape[0]
    mbarrier.expect(full, PIECES * desc.block_type.nbytes)
    if TRANSPOSED:
        async_load(desc, [b, h, 0, row], full, ring.tiles.index(stage))
    else:
        _copy_rows(desc, (b, h, row), full, ring.tiles, stage, PIECES)


@gluon.jit
def _load(inputs, scheduler, pipeline, TILES: gl.constexpr, RANGE: gl.constexpr):
    """One warp: draws pieces of work, announces them to the consumers, and copies their tiles of q, k and v."""
    q, k, v = inputs
    ring, work = pipeline.q, pipeline.work
    NC: gl.constexpr = TILES.NC
    BN: gl.constexpr = k.block_shape[2]
    TRANSPOSED: gl.constexpr = k.dtype.primitive_bitwidth == 8
    step = 0
    piece = 0
    w = gl.program_id(0)
    while w < scheduler.n_work:
        b, h, mask_b, tile = piece_of(w, scheduler)
        first = gl.load(scheduler.lists.ptr + mask_b * scheduler.n_tiles + tile)
        last = gl.load(scheduler.lists.ptr + mask_b * scheduler.n_tiles + tile + 1)
        stage = wait_empty(ring, piece)
        at = 8 * stage
        write_number(work.index(at), b)
        write_number(work.index(at + 1), h)
        write_number(work.index(at + 2), tile)
        segment = scheduler.lists.seg + 3 * first
        if RANGE:
            write_number(work.index(at + 3), gl.load(segment, mask=first < last, other=0))
            # the segments follow one another without a gap
            write_number(work.index(at + 4), gl.load(scheduler.lists.seg + 3 * last - 2, mask=first < last, other=0))
        else:
            write_number(work.index(at + 3), first)
            write_number(work.index(at + 4), last)
            for c in gl.static_range(3):
                write_number(work.index(at + 5 + c), gl.load(segment + c, mask=first < last, other=0))
        barrier()
        full = ring.full.index(stage)
        mbarrier.expect(full, NC * TILES.pieces * q.block_type.nbytes)
        for c in gl.static_range(NC):
            _copy_rows(q, (b, h, (tile * NC + c) * 64), full, ring.tiles, stage * NC + c, TILES.pieces)
        piece += 1
        # V lags one key tile behind K, as in the consumers
        before = -1
        for i in range(first, last):
            begin = gl.load(scheduler.lists.seg + 3 * i)
            end = gl.load(scheduler.lists.seg + 3 * i + 1)
            for j in range(begin, end, BN):
                _copy_tile(k, b, h // scheduler.G, j, pipeline.k, step, False)
                if before >= 0:
                    _copy_tile(v, b, h // scheduler.G, before, pipeline.v, step - 1, TRANSPOSED)
                before = j
                step += 1
        # if there are more pieces than CTAs, the next one is drawn; late, because it would wait while others are idle
        w = scheduler.n_work
        if scheduler.n_work > gl.num_programs(0):
            w = gl.atomic_add(scheduler.counter, 1, sem="relaxed") + gl.num_programs(0)
        if before >= 0:
            _copy_tile(v, b, h // scheduler.G, before, pipeline.v, step - 1, TRANSPOSED)
    stage = wait_empty(ring, piece)
    write_number(work.index(8 * stage), -1)
    barrier()
    mbarrier.arrive(ring.full.index(stage))


@gluon.constexpr_function
def _take_turns(dtype: gl.dtype, NC: int) -> bool:
    # whether warpgroups take turns at issuing their products
    return dtype.primitive_bitwidth == 16 and NC > 1


@gluon.jit
def _fold(which: gl.constexpr, sums, keys, rows, pipeline, TILES: gl.constexpr):
    # computes scores and softmax of a key tile during the product of the previous tile
    step, o, m, l, p, wide = sums
    dtype: gl.constexpr = pipeline.q.tiles.dtype
    O: gl.constexpr = o.type.layout
    EARLY: gl.constexpr = p.dtype != gl.float32
    RARELY: gl.constexpr = dtype.primitive_bitwidth == 16
    TURNS: gl.constexpr = _take_turns(dtype, TILES.NC)
    if not EARLY:
        p = operand(p, O, dtype)
    stage = wait_full(pipeline.k, step)
    if TURNS:
        take_turn(which, step)
    s = scores_of(pipeline.q, rows.q, pipeline.k, stage)
    o = add_values(p, o, pipeline.v, step - 1, TILES.every)
    if TURNS:
        pass_turn((which + 1) % TILES.NC, step)
    s = warpgroup_mma_wait(1, deps=[s])
    release(pipeline.k, step)
    p, m, l, alpha = softmax(s, m, l, keys, rows.block, rows.mask, rows.scores)
    l = after_softmax(l)
    o = warpgroup_mma_wait(0, deps=[o])
    release(pipeline.v, step - 1)
    if TILES.every == 0:
        o = rescaled(o, alpha, RARELY)
    else:
        total, factor = wide
        if step % TILES.every == 0:
            total, factor = total * by_row(factor, total) + o, alpha
        else:
            o, factor = rescaled(o, alpha, RARELY), factor * alpha
        wide = total, factor
    if EARLY:
        p = operand(p, O, dtype)
    return Accumulator(step + 1, o, m, l, p, wide)


@gluon.jit
def _compute(which: gl.constexpr, pipeline, scheduler, mask, scores, output, TILES: gl.constexpr):
    """A warpgroup: rows [64 · which, 64 · which + 64) of every row tile that `_load` announces."""
    work = pipeline.work
    NC: gl.constexpr = TILES.NC
    BN: gl.constexpr = pipeline.k.tiles.shape[3]
    # a tile of v is [BN, DV] or [DV, BN]
    DV: gl.constexpr = pipeline.v.tiles.shape[3] * pipeline.v.tiles.shape[4] // BN
    dtype: gl.constexpr = pipeline.q.tiles.dtype
    S: gl.constexpr = product_layout(dtype, BN)
    O: gl.constexpr = product_layout(dtype, DV)
    R: gl.constexpr = gl.SliceLayout(1, S)
    # with three warpgroups the registers cannot hold p in fp32 next to the following scores, so p is rounded early
    EARLY: gl.constexpr = NC == 3
    TURNS: gl.constexpr = _take_turns(dtype, NC)
    step = 0
    piece = 0
    if TURNS and which == NC - 1:
        pass_turn(0, step)
    mbarrier.wait(pipeline.q.full.index(0), 0)
    b = read_number(work.index(0), 4)
    while b >= 0:
        stage = piece % pipeline.q.full.shape[0]
        at = 8 * stage
        q = stage * NC + which
        h = read_number(work.index(at + 1), 4)
        tile = read_number(work.index(at + 2), 4)
        first = read_number(work.index(at + 3), 4)
        last = read_number(work.index(at + 4), 4)
        first_row = (tile * NC + which) * 64
        mask_b = gl.where(scheduler.Bm > 1, b, 0)
        own = scores
        if scores.descale is not None:
            # the factor of q k; those of v follow after B · Hq numbers
            factors = scores.descale + b * scheduler.Hq + h
            scale = scores.scale * gl.load(factors)
            own = Scores(scale, scores.softcap, scores.sinks, gl.load(factors + scheduler.BH))
        o = gl.zeros([64, DV], gl.float32, O)
        m = gl.full([64], float("-inf"), gl.float32, R)
        l = by_thread(gl.zeros([64, BN], gl.float32, S), False)
        if first < last:
            block = RowBlock(b, h, first_row, mask_b, seen_by(first_row, mask_b, mask, R))
            if mask.RANGE:
                visits = visits_of(first, last, block.seen, BN)
                j = visits.first
                kind = 0
                test = visits.test
                step = skip(which, step, visits.before, pipeline, TURNS, NC)
            else:
                j = read_number(work.index(at + 5), 4)
                kind = read_number(work.index(at + 7), 4)
                test = (kind != 2) | (read_number(work.index(at + 6), 4) - j < BN)
            # the first key tile has no earlier product to overlap with
            s = scores_of(pipeline.q, q, pipeline.k, wait_full(pipeline.k, step))
            s = warpgroup_mma_wait(0, deps=[s])
            release(pipeline.k, step)
            p, m, l, alpha = softmax(s, m, l, KeyTile(j, kind, test), block, mask, own)
            if EARLY:
                p = operand(p, O, dtype)
            wide = ()
            if TILES.every > 0:
                wide = o, alpha
            sums = Accumulator(step + 1, o, m, l, p, wide)
            if mask.RANGE:
                first = 0
                last = 2
            for i in range(first, last):
                if mask.RANGE:
                    # tests, then no tests, then tests
                    begin = gl.where(i == 0, visits.begin, visits.low)
                    plain = gl.where(i == 0, visits.begin, visits.high)
                    end = gl.where(i == 0, visits.low, visits.end)
                else:
                    begin = gl.load(scheduler.lists.seg + 3 * i) + gl.where(i == first, BN, 0)
                    end = gl.load(scheduler.lists.seg + 3 * i + 1)
                    kind = gl.load(scheduler.lists.seg + 3 * i + 2)
                    # whole tiles of a FULL segment need no test
                    plain = gl.where(kind == 2, begin + gl.maximum(end - begin, 0) // BN * BN, begin)
                for j in range(begin, plain, BN):
                    sums = _fold(which, sums, KeyTile(j, kind, False), Rows(q, block, mask, own), pipeline, TILES)
                for j in range(plain, end, BN):
                    sums = _fold(which, sums, KeyTile(j, kind, True), Rows(q, block, mask, own), pipeline, TILES)
            release(pipeline.q, piece)
            step, o, m, l, p, wide = sums
            if not EARLY:
                p = operand(p, O, dtype)
            o = add_values(p, o, pipeline.v, step - 1, TILES.every)
            o = warpgroup_mma_wait(0, deps=[o])
            if TILES.every > 0:
                o += wide[0] * by_row(wide[1], o)
            release(pipeline.v, step - 1)
            if mask.RANGE:
                step = skip(which, step, visits.behind, pipeline, TURNS, NC)
        else:
            release(pipeline.q, piece)
        finish(o, m, l, RowBlock(b, h, first_row, mask_b, ()), own, output, TILES.stored)
        piece += 1
        stage = wait_full(pipeline.q, piece)
        b = read_number(work.index(8 * stage), 4)


@gluon.jit
def _partition(inputs, scheduler, mask, scores, output, TILES: gl.constexpr):
    """Allocates the shared memory of a CTA and starts its partitions of warps."""
    q, k, v = inputs
    NC: gl.constexpr = TILES.NC
    QS: gl.constexpr = TILES.q_stages
    STAGES: gl.constexpr = TILES.stages
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(q.dtype, [QS * NC * TILES.pieces] + q.block_shape, q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES * TILES.pieces] + k.block_shape, k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_shape, v.layout)
    work = gl.allocate_shared_memory(gl.int32, [8 * QS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), NC)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(k_empty.index(i), NC)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(v_empty.index(i), NC)
    fence_async_shared()
    q_ring, k_ring = Ring(q_tiles, q_full, q_empty), Ring(k_tiles, k_full, k_empty)
    pipeline = ForwardPipeline(q_ring, k_ring, Ring(v_tiles, v_full, v_empty), work)
    # a consumer thread gets 240 (NC = 2) or 160 (NC = 3) of 65536 registers; with two CTAs, 232 of half as many
    if NC == 1:
        gl.warp_specialize(
            [
                (_compute, (0, pipeline, scheduler, mask, scores, output, TILES)),
                (_load, (inputs, scheduler, pipeline, TILES, mask.RANGE)),
            ],
            [1],
            [24],
        )
    elif NC == 2:
        gl.warp_specialize(
            [
                (_compute, (0, pipeline, scheduler, mask, scores, output, TILES)),
                (_compute, (1, pipeline, scheduler, mask, scores, output, TILES)),
                (_load, (inputs, scheduler, pipeline, TILES, mask.RANGE)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, pipeline, scheduler, mask, scores, output, TILES)),
                (_compute, (1, pipeline, scheduler, mask, scores, output, TILES)),
                (_compute, (2, pipeline, scheduler, mask, scores, output, TILES)),
                (_load, (inputs, scheduler, pipeline, TILES, mask.RANGE)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


# flat, because Triton compiles a kernel again when a number inside a tuple becomes 1, divisible by 16, or neither
NUMBERS = ["bands_b", "rows_b", "n_work", "n_tiles", "long", "BH", "Hq", "G", "section", "Bm", "Tq", "Tk"]


@gluon.jit(do_not_specialize=NUMBERS)
def _forward(
    q, k, v, out, lse, counter, lists, bands_b, rows_b, n_work, n_tiles, long, BH, Hq, G, section, Bm, Tq, Tk, scores,
    TILES: gl.constexpr, NB: gl.constexpr, RANGE: gl.constexpr,
):  # fmt: skip
    scheduler = TileScheduler(counter, lists, n_work, n_tiles, long, BH, Hq, G, section, Bm)
    mask = (lists.bands, bands_b, lists.row_lo, lists.row_hi, rows_b, Tq, Tk)
    # not built in a variable, because Triton would turn the constants into runtime numbers
    _partition((q, k, v), scheduler, Mask(*mask, NB, RANGE), scores, Output(out, lse, Tq, Hq), TILES)


def forward(
    call: AttentionLaunch, schedule: ForwardSchedule, o: Tensor, lse: Tensor, *, grid: int = 0, section: int = 0
) -> None:
    """Compute o [B, Tq, Hq, Dv], whose rows are contiguous, and lse float32 [B, Tq, Hq].

    call: with q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv], bf16, fp16 or e4m3, as `fits` allows.
    e4m3 of a size that `TILES_8` lacks is cast to bf16. schedule: of its plan. grid (CTAs) and section (query heads
    computed together) override the choice by head size and device.
    """
    p, (q, k, v) = call.problem, (x.p for x in call.qkv)
    tiles, lists, n_tiles, Bm, long, blocks = schedule
    if q.itemsize == 1 and p.D not in TILES_8:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    heads, n_work = p.B * p.Hq, n_tiles * p.B * p.Hq
    # a single warpgroup leaves room for a second CTA, whose products overlap with its softmax
    ctas = 2 if tiles.NC == 1 else 1
    grid = min(grid or ctas * multiprocessors(str(q.device)), n_work)
    counter = call.scratch(1, like=q, dtype=torch.int32, zero=True) if n_work > grid else lists.order
    copied = descriptor(q, 64, tiles.pieces), descriptor(k, tiles.BN, tiles.pieces), _values(call, v, tiles.BN)
    bands_b, rows_b = (int(x is not None and x.shape[0] > 1) for x in (lists.bands, lists.row_lo))
    section = section or section_of(p.Tk, p.D, p.G, heads)
    numbers = bands_b, rows_b, n_work, n_tiles, long, heads, p.Hq, p.G, section, Bm, p.Tq, p.Tk
    tiles = tiles._replace(stored=0 if padded(p.Dv) == p.Dv else p.Dv)
    NB = lists.bands.shape[1]
    constants = {"TILES": tiles, "NB": NB, "RANGE": NB == 1 and not blocks}
    constants |= {"num_warps": 4, "maxnreg": 128 if tiles.NC == 1 else None}
    call.run(_forward, (grid,), *copied, array(o), lse, counter, lists, *numbers, _scores_of(call), **constants)


def _scores_of(call: AttentionLaunch) -> Scores:
    scale, softcap = call.problem.scores.scale, call.problem.scores.softcap
    unit = 2.0 * LOG2E * scale / softcap if softcap else scale * LOG2E
    descale = None if call.descale is None else _factors(call.problem, *call.descale)
    # some of these are arrays of the call inside a tuple; replay.py does not record calls with sinks or 8-bit floats
    return Scores(unit, softcap * LOG2E if softcap else None, call.sinks, descale)


def _factors(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # [2, B, Hq], factors of q k and of v. A factor of q k that is not positive becomes NaN, because the kernel takes
    # the maximum before scaling, which would not be the maximum of the scores.
    q, k, v = (x.expand(p.B, x.shape[-1]) for x in (q, k, v))
    of_qk = q * k.repeat_interleave(p.G, 1)
    return torch.stack((torch.where(of_qk > 0, of_qk, float("nan")), v.repeat_interleave(p.G, 1)))


def _values(call: AttentionLaunch, v: Tensor, BN: int) -> TensorDescriptor:
    # v [B, Tk, Hk, D] by tiles [BN, D]; for 8-bit floats by tiles [D, BN], with keys in the order of `transpose`
    if v.itemsize > 1:
        return descriptor(v, BN)
    B, Tk, Hk, D = v.shape
    n = -(-Tk // BN)
    out = call.scratch(B, Hk, D, n * BN, like=v, dtype=v.dtype)
    call.run(transpose, (n, Hk, B), array(v.view(torch.uint8)), out.view(torch.uint8), Hk, Tk, D=D, BN=BN, num_warps=4)
    return tiled(out, [D, BN])
