"""Gradients of attention on Hopper: five products in one kernel, one CTA for each tile of keys.

With s = scale q·k (capped where softcap > 0), P = exp(s - lse), dP = dO Vᵀ and dS = P (dP - delta):
dV = Pᵀ dO, dK = scale dSᵀ Q, dQ = scale dS K. A CTA keeps its K and V in shared memory and visits the row tiles that
see them, for all query heads of its key head, so dK and dV stay in registers until the end and need no atomics. Scores
are computed transposed, keys × queries, so that Pᵀ and dSᵀ leave the tensor cores as the register operand of dV and dK.
Only dS goes through shared memory, for dQ.

dQ is a sum over key tiles, that is over CTAs. Each CTA adds its terms to an fp32 buffer with vector reductions in L2.
In fixed order (the default) row tile m counts the key tiles that have added to it; a key tile adds when the count
reaches its rank. It waits only for earlier places of the same head. Those drew smaller tickets and are running already,
so there is no deadlock.

Warps: 8 compute, 1 loads (TMA), 2 keep the order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import Array, AttentionLaunch, array
from .gluon_names import async_load, async_store, reinterpret
from .masking import Mask, masked_weights
from .pipeline import Ring, wait_empty
from .schedule import BackwardSchedule, ForwardSchedule
from .softmax import Scores
from .staging import SumTile, convert, prepare
from .tile_scheduler import KeyBlock, first_tile, next_tile, rank_of, row_tile_of

LOG2E = gl.constexpr(1.4426950408889634)

# 16 bytes per thread, 512 consecutive bytes per warp
_ADD4 = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};")
_ADD4_OPERANDS = gl.constexpr("=r,=r,=r,=r,l,l,l,l,f,f,f,f")
_AWAIT = gl.constexpr("""{
    .reg .pred p;
    again: ld.acquire.gpu.global.u32 $0, [$1];
    setp.ne.u32 p, $0, $2;
    @p bra again;
}""")
_RELEASE = gl.constexpr("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [$1], $2; mov.u32 $0, 0;")


class BackwardPipeline(NamedTuple):
    """Shared memory of a CTA.

    rows: a ring of row tiles (q, do, stat). q, do: [1, BM, 1, D]; stat: [2 BM], lse in base 2 and delta. k, v:
    [1, 1, BN, 1, D], loaded when kv_full completes. p, ds: [1, BN, BM], the same array where p stays in registers.
    may_add, added: mbarriers [2, 1], for even and odd steps, between the compute warps and the order warps.
    """

    rows: Any
    k: Any
    v: Any
    kv_full: Any
    p: Any
    ds: Any
    may_add: Any
    added: Any


class Config(NamedTuple):
    """Constants of the backward kernel.

    G: query heads per key head. NB: bands. LISTS_B, BANDS_B, ROWS_B: whether batch entries have lists, bands and row
    intervals of their own. BLOCKS: a tile may have 64 keys inside a block of the mask and 64 outside. ORDERED: dQ is
    added in a fixed order. WIDE: dk and dv are float32.
    """

    STAGES: int
    G: int
    NB: int
    LISTS_B: bool
    BANDS_B: bool
    ROWS_B: bool
    BLOCKS: bool
    ORDERED: bool
    WIDE: bool


@gluon.jit
def _load(inputs, block, schedule, pipeline, G: gl.constexpr):
    """One warp: loads K and V once, then Q, dO, lse and delta of every step and of one step more, which is not used."""
    q, k, v, do, stat = inputs
    rows = pipeline.rows
    q_s, do_s, stat_s = rows.tiles
    BM: gl.constexpr = q.block_shape[1]
    BN: gl.constexpr = k.block_shape[1]
    mbarrier.expect(pipeline.kv_full, 2 * k.block_type.nbytes)
    async_load(k, [block.b, block.n * BN, block.hk, 0], pipeline.kv_full, pipeline.k.index(0))
    async_load(v, [block.b, block.n * BN, block.hk, 0], pipeline.kv_full, pipeline.v.index(0))
    tile, steps = first_tile(block, schedule, G, 1)
    for i in range(steps + 1):
        h = block.hk * G + tile.g
        stage = wait_empty(rows, i)
        full = rows.full.index(stage)
        mbarrier.expect(full, 2 * q.block_type.nbytes + stat.block_type.nbytes)
        async_load(q, [block.b, tile.m * BM, h, 0], full, q_s.index(stage))
        at = ((block.b * block.Hq + h) * block.M + tile.m) * 2 * BM
        async_load(stat, [at], full, stat_s.index(stage))
        async_load(do, [block.b, tile.m * BM, h, 0], full, do_s.index(stage))
        tile = next_tile(tile)


@gluon.jit
def _keep_order(W: gl.constexpr, block, schedule, pipeline, counts, place, CONFIG: gl.constexpr):
    """One warp for even steps, one for odd. It lets the CTA add when the row tile's count is its rank, then counts.

    A fence and two trips to L2 separate an addition from the permission for the next. They take longer than a step.
    """
    G: gl.constexpr = CONFIG.G
    tile, steps = first_tile(block, schedule, G, 1)
    steps = steps if CONFIG.ORDERED else 0
    if W == 1:
        tile = next_tile(tile)
    rank = rank_of(schedule, tile.m, place) if steps > W else 0
    for i in range(W, steps, 2):
        count, after = counts + row_tile_of(block, tile, G), rank + 1
        gl.inline_asm_elementwise(_AWAIT, "=r,l,r", [count, rank], dtype=gl.int32, is_pure=False, pack=1)
        mbarrier.arrive(pipeline.may_add.index(W), count=1)
        # looks up the step after the next during this addition
        tile = next_tile(next_tile(tile))
        rank = rank_of(schedule, tile.m, place)
        mbarrier.wait(pipeline.added.index(W), (i // 2) & 1)
        gl.inline_asm_elementwise(_RELEASE, "=r,l,r", [count, after], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add(sums, dq, BM: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """Add dq [BM, D] to its tile of the fp32 buffer, which is in the order of the accumulator's registers.

    Four values of a thread, 2 rows × 2 columns, are 16 consecutive bytes. The 128 threads of a warpgroup write 2 KiB,
    a piece of 64 rows × 8 columns. `convert` restores the order.
    """
    row = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, layout)), 1)
    col = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
    thread = (row // 16 % 4) * 32 + (row % 8) * 4 + col % 8 // 2
    piece = row // 64 * (D // 8) + col // 8
    at = sums + (piece * 512 + thread * 4)
    gl.inline_asm_elementwise(_ADD4, _ADD4_OPERANDS, [at.to(gl.int64), dq], dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def _compute(block, schedule, pipeline, mask, scores, gradients, CONFIG: gl.constexpr):
    """Eight warps: all five products. Scores and dP of a step are computed while the previous step ends.

    gradients: sums of dq; dk and dv as descriptors, or as arrays if they are float32.
    """
    sums, dk_out, dv_out = gradients
    rows, ds_s = pipeline.rows, pipeline.ds
    q_s, do_s, stat_s = rows.tiles
    dtype: gl.constexpr = q_s.dtype
    G: gl.constexpr = CONFIG.G
    BM: gl.constexpr = q_s.shape[2]
    BN: gl.constexpr = pipeline.k.shape[2]
    D: gl.constexpr = q_s.shape[4]
    STAGES: gl.constexpr = q_s.shape[0]
    SHARED_P: gl.constexpr = BN == 64
    # with 128 keys each warpgroup owns 64 of them; with 64 keys both groups have all of them and half of the columns
    HALVES: gl.constexpr = 2 if BN == 64 else 1
    WARPS: gl.constexpr = [8 // HALVES, HALVES]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, BM // HALVES, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, D // HALVES, 16])
    HALVES_Q: gl.constexpr = 2 if BM == 64 else 1
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8 // HALVES_Q, HALVES_Q], [16, D // HALVES_Q, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    tile, steps = first_tile(block, schedule, G, 8)
    ragged = block.n * BN + BN > mask.Tk
    k = reinterpret(pipeline.k.index(0), dtype, [BN, D], tile_layout)
    none_s = gl.zeros([BN, BM], gl.float32, s_layout)
    none_q = gl.zeros([BM, D], gl.float32, q_layout)
    dk = gl.zeros([BN, D], gl.float32, kv_layout)
    dv = gl.zeros([BN, D], gl.float32, kv_layout)

    mbarrier.wait(pipeline.kv_full, 0)
    mbarrier.wait(rows.full.index(0), 0)
    q = reinterpret(q_s.index(0), dtype, [BM, D], tile_layout)
    s = warpgroup_mma(k, q.permute((1, 0)), none_s, use_acc=False)
    for i in range(steps):
        stage, after = i % STAGES, (i + 1) % STAGES
        # a zero that the compiler cannot fold; with a constant it keeps 60 registers of matrix descriptors in the loop
        zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)
        k = reinterpret(pipeline.k.index(zero), dtype, [BN, D], tile_layout)
        v = reinterpret(pipeline.v.index(zero), dtype, [BN, D], tile_layout)
        ds_t = ds_s.index(zero)
        q = reinterpret(q_s.index(stage), dtype, [BM, D], tile_layout)
        do = reinterpret(do_s.index(stage), dtype, [BM, D], tile_layout)
        stat = stat_s.index(stage)
        dp = warpgroup_mma(v, do.permute((1, 0)), none_s, use_acc=False, is_async=True)
        lse = stat.slice(0, BM).load(gl.SliceLayout(0, s_layout))
        if scores.softcap is not None:
            # tanh(x) = 1 - 2 / (1 + exp 2x)
            th = 1.0 - 2.0 / (1.0 + gl.exp2(s * (2.0 * LOG2E * scores.scale / scores.softcap)))
            p = gl.exp2(th * (scores.softcap * LOG2E) - gl.expand_dims(lse, 0))
        else:
            p = gl.exp2(s * (scores.scale * LOG2E) - gl.expand_dims(lse, 0))
        if (tile.kind != 2) | ragged:
            p = masked_weights(p, tile.m * BM, block.n * BN, tile.kind, mask, CONFIG.BLOCKS)
        if SHARED_P:
            p_t = pipeline.p.index(zero)
            p_t.store(p.to(dtype))
            fence_async_shared()
            dv = warpgroup_mma(p_t, do, dv, is_async=True)
        else:
            p_a = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
            dv = warpgroup_mma(p_a, do, dv, is_async=True)
        if scores.softcap is not None:
            p *= 1.0 - th * th
        delta = stat.slice(BM, BM).load(gl.SliceLayout(0, s_layout))
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
        ds_t.store(ds)
        fence_async_shared()
        dv = warpgroup_mma_wait(0, deps=[dv])
        dq = warpgroup_mma(ds_t.permute((1, 0)), k, none_q, use_acc=False, is_async=True)
        if SHARED_P:
            dk = warpgroup_mma(ds_t, q, dk, is_async=True)
        else:
            ds_a = gl.convert_layout(ds, a_layout, assert_trivial=True)
            dk = warpgroup_mma(ds_a, q, dk, is_async=True)
        # scores of the next step; they and dK overlap with the additions
        mbarrier.wait(rows.full.index(after), ((i + 1) // STAGES) & 1)
        q = reinterpret(q_s.index(after), dtype, [BM, D], tile_layout)
        s = warpgroup_mma(k, q.permute((1, 0)), none_s, use_acc=False, is_async=True)
        at = sums + row_tile_of(block, tile, G).to(gl.int64) * (BM * D)
        tile = next_tile(tile)
        dq = warpgroup_mma_wait(2, deps=[dq])
        if CONFIG.ORDERED:
            mbarrier.wait(pipeline.may_add.index(i % 2), (i // 2) & 1)
        _add(at, dq, BM, D, q_layout)
        if CONFIG.ORDERED:
            mbarrier.arrive(pipeline.added.index(i % 2), count=1)
        s, dk = warpgroup_mma_wait(0, deps=[s, dk])
        mbarrier.arrive(rows.empty.index(stage))

    if CONFIG.WIDE:
        # fp32 results go from registers to memory, because they do not fit into the space of k and v
        keys = block.n * BN + gl.arange(0, BN, gl.SliceLayout(1, kv_layout))
        row = (block.b.to(gl.int64) * mask.Tk + keys) * (block.Hq // G) + block.hk
        at = gl.expand_dims(row * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, kv_layout)), 0)
        inside = gl.expand_dims(keys < mask.Tk, 1)
        gl.store(dk_out + at, dk * scores.scale, mask=inside)
        gl.store(dv_out + at, dv, mask=inside)
    else:
        k = reinterpret(pipeline.k.index(0), dtype, [BN, D], tile_layout)
        v = reinterpret(pipeline.v.index(0), dtype, [BN, D], tile_layout)
        k.store((dk * scores.scale).to(dtype))
        v.store(dv.to(dtype))
        fence_async_shared()
        async_store(dk_out, [block.b, block.n * BN, block.hk, 0], pipeline.k.index(0))
        async_store(dv_out, [block.b, block.n * BN, block.hk, 0], pipeline.v.index(0))
        tma.store_wait(0)


@gluon.jit
def _backward(q, k, v, do, stat, dk, dv, sums, counts, schedule, mask, scores, sizes, CONFIG: gl.constexpr):
    """Grid: one CTA for each (key tile, key head, batch entry); tickets go by place within `section` heads."""
    bands, row_lo, row_hi = mask
    B, Hk, Tq, Tk, M, N, section = sizes
    STAGES: gl.constexpr = CONFIG.STAGES
    G: gl.constexpr = CONFIG.G
    BM: gl.constexpr = q.block_shape[1]
    BN: gl.constexpr = k.block_shape[1]
    D: gl.constexpr = q.block_shape[3]
    dtype: gl.constexpr = q.dtype
    ticket = gl.program_id(0)
    if CONFIG.ORDERED:
        ticket = gl.atomic_add(counts, 1, sem="relaxed")
    # tickets of a section: key tiles in ascending order, for each tile all heads of the section
    of = ticket // (N * section)
    width = gl.minimum(section, B * Hk - of * section)
    inner = ticket - of * (N * section)
    place = inner // width
    bh = of * section + inner % width
    b, hk = bh // Hk, bh % Hk
    cell = place + (b * N if CONFIG.LISTS_B else 0)
    n, long = place, 0
    LONG: gl.constexpr = schedule.order is not None
    if LONG:
        # key tiles with long lists have ranks and sums of their own
        n = gl.load(schedule.order + cell)
        n, long = n & ((1 << 30) - 1), n >> 30
    rank_ptr = schedule.rank_ptr + ((b if CONFIG.LISTS_B else 0) * (2 if LONG else 1) + long) * M
    counts += 1 + long * (B * Hk * G * M)
    sums += (long * (B * Hk * G * M)).to(gl.int64) * (BM * D)
    if CONFIG.BANDS_B:
        bands += b * CONFIG.NB * 8
    if CONFIG.ROWS_B:
        row_lo += b.to(gl.int64) * Tq
        row_hi += b.to(gl.int64) * Tq

    q_s = gl.allocate_shared_memory(dtype, [STAGES] + q.block_shape, q.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES] + q.block_shape, q.layout)
    k_s = gl.allocate_shared_memory(dtype, [1] + k.block_shape, k.layout)
    v_s = gl.allocate_shared_memory(dtype, [1] + k.block_shape, k.layout)
    stat_s = gl.allocate_shared_memory(gl.float32, [STAGES] + stat.block_shape, stat.layout)
    ds_s = gl.allocate_shared_memory(dtype, [1, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    p_s = ds_s
    if BN == 64:
        p_s = gl.allocate_shared_memory(dtype, [1, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    may_add = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(STAGES):
        mbarrier.init(full.index(x), count=1)
        mbarrier.init(empty.index(x), count=1)
    for x in gl.static_range(2):
        mbarrier.init(may_add.index(x), count=1)
        mbarrier.init(added.index(x), count=1)
    mbarrier.init(kv_full, count=1)

    rows = Ring((q_s, do_s, stat_s), full, empty)
    pipeline = BackwardPipeline(rows, k_s, v_s, kv_full, p_s, ds_s, may_add, added)
    schedule = BackwardSchedule(schedule.ptr, schedule.seg, rank_ptr, schedule.ranks, schedule.order)
    block, gradients = KeyBlock(cell, b, hk, n, Hk * G, M), (sums, dk, dv)
    mask = (bands, 0, row_lo, row_hi, 0, Tq, Tk)
    gl.warp_specialize(
        [
            # not built in a variable, because Triton would turn the constant NB into a runtime number
            (_compute, (block, schedule, pipeline, Mask(*mask, CONFIG.NB), scores, gradients, CONFIG)),
            (_load, ((q, k, v, do, stat), block, schedule, pipeline, G)),
            (_keep_order, (0, block, schedule, pipeline, counts, place, CONFIG)),
            (_keep_order, (1, block, schedule, pipeline, counts, place, CONFIG)),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )


class Tile(NamedTuple):
    """Rows and keys of a tile, and the number of row tiles in the ring."""

    BM: int
    BN: int
    stages: int


TILES = {64: Tile(64, 128, 4), 128: Tile(64, 128, 3), 256: Tile(64, 64, 2)}


def backward(
    call: AttentionLaunch,
    schedules: tuple[ForwardSchedule, BackwardSchedule],
    rows: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Compute the gradients of attention into dq, dk, dv.

    call: with q [B, Tq, Hq, D], k, v [B, Tk, Hk, D], bfloat16 or float16, D 64, 128 or 256, as `fits` allows.
    schedules: of its plan. rows: do like q; lse and delta float32 [B, Tq, Hq]. gradients: dq, dk, dv like q, k, v, or
    float32 and contiguous. Without `deterministic`, key tiles add to dQ in any order.
    """
    p, (q, k, v), (do, lse, delta), (dq, dk, dv) = call.problem, (x.p for x in call.qkv), rows, gradients
    ((_, lists, _, _, _, blocks), schedule), (BM, BN, stages) = schedules, TILES[p.D]
    M, N = -(-p.Tq // BM), -(-p.Tk // BN)
    tiles, sum_tile = p.B * p.Hq * M, SumTile(BM, p.D, 1 if schedule.order is None else 2)
    stat, sums = call.scratch(tiles * 2 * BM, like=q), call.scratch(sum_tile.KINDS * tiles * BM * p.D, like=q)
    counts = call.scratch(sum_tile.KINDS * tiles + 1, like=q, dtype=torch.int32)
    grid, wide = (M, p.Hq, p.B), dk.dtype is torch.float32
    lse, delta = (Array(x, *x.stride()) for x in (lse, delta))
    call.run(prepare, grid, lse, delta, stat, sums, counts, (p.Hq, p.Tq), TILE=sum_tile)
    rows_of, keys_of = [1, BM, 1, p.D], [1, BN, 1, p.D]
    inputs = _tiles(q, rows_of), _tiles(k, keys_of), _tiles(v, keys_of), _tiles(do, rows_of)
    line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    stats = TensorDescriptor(stat, list(stat.shape), [1], [2 * BM], line)
    outputs = (x if wide else _tiles(x, keys_of) for x in (dk, dv))
    mask = lists.bands, lists.row_lo, lists.row_hi
    bands_b, rows_b = (x is not None and x.shape[0] > 1 for x in mask[:2])
    lists_b = len(schedule.ptr) - 1 > N
    config = Config(stages, p.G, lists.bands.shape[1], lists_b, bands_b, rows_b, blocks, p.deterministic, wide)
    scores, sizes = Scores(p.scores.scale, p.scores.softcap or None), (p.B, p.Hk, p.Tq, p.Tk, M, N, min(p.B * p.Hk, 16))
    arrays = *inputs, stats, *outputs, sums, counts, schedule, mask
    call.run(_backward, (N * p.B * p.Hk,), *arrays, scores, sizes, CONFIG=config, num_warps=8)
    call.run(convert, grid, sums, array(dq), p.scores.scale, (p.Hq, p.Tq), TILE=sum_tile)


def _tiles(x: Tensor, block: list[int]) -> TensorDescriptor:
    # a dimension of size 1 may have any stride; give it one that the copy engine takes
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape, x.stride(), strict=True)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block, layout)
