"""The Hopper backward for tiles of 128 keys: each of two warpgroups owns 64 of them, and they are loosely coupled.

P and dS stay in registers as operands of the products for dV and dK. dS also goes through shared memory, because dQ
sums over the keys of both warpgroups. Each computes half of dQ one step late, when the other has long written its dS,
so neither waits for the softmax of the other. dQ is staged in shared memory. Two warps let the copy engine add it, for
even and odd steps, in the fixed order if there is one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_pipeline import AWAIT, LOG2E, store_float32
from .gluon_names import async_add, async_store, reinterpret
from .masking import masked_weights
from .tile_scheduler import first_tile, next_tile, rank_of, row_tile_of

# the lane that started the additions waits until they are visible, not only until their source may be overwritten
_RELEASE = gl.constexpr("""{
    .reg .pred p;
    cp.async.bulk.wait_group 0;
    fence.proxy.async;
    fence.acq_rel.gpu;
    elect.sync _|p, -1;
    @p st.relaxed.gpu.global.u32 [$1], $2;
    mov.u32 $0, 0;
}""")


@gluon.jit
def add_in_order(W: gl.constexpr, work, pipeline, sums, queue, CONFIG: gl.constexpr):
    """One warp for even steps, one for odd: the copy engine adds dQ to its row tile when the tile's count is its rank.

    work: the keys of the CTA and the schedule. sums: a descriptor of all sums. queue: the counts of the key tile's
    queue, the number of its first row tile, and the place of the key tile.
    """
    block, schedule = work
    G: gl.constexpr = CONFIG.G
    BM: gl.constexpr = sums.block_shape[0]
    counts, start, place = queue
    tile, steps = first_tile(block, schedule, G, not CONFIG.ORDERED, 1)
    if W == 1:
        tile = next_tile(tile, not CONFIG.ORDERED)
    rank = 0
    if CONFIG.ORDERED:
        rank = rank_of(schedule, tile.m, place) if steps > W else 0
    for i in range(W, steps, 2):
        row, after = row_tile_of(block, tile, G), rank + 1
        # looks up the step after the next before it waits
        tile = next_tile(next_tile(tile, not CONFIG.ORDERED), not CONFIG.ORDERED)
        if CONFIG.ORDERED:
            count = counts + row
            gl.inline_asm_elementwise(AWAIT, "=r,l,r", [count, rank], dtype=gl.int32, is_pure=False, pack=1)
            rank = rank_of(schedule, tile.m, place)
        mbarrier.wait(pipeline.added.index(W), (i // 2) & 1)
        if CONFIG.ADDED or after > 1:
            async_add(sums, [(start + row) * BM, 0], pipeline.dq.index(W))
        else:
            async_store(sums, [(start + row) * BM, 0], pipeline.dq.index(W))
        tma.store_wait(0)
        mbarrier.arrive(pipeline.may_add.index(W), count=1)
        if CONFIG.ORDERED:
            gl.inline_asm_elementwise(_RELEASE, "=r,l,r", [count, after], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _half_of_dq(W: gl.constexpr, ds, k, none):
    # half W of dSᵀ K, in flight: half of the columns of 64 rows, or 64 of 128 rows. none: zeros of its shape
    if ds.shape[1] == 64:
        COLUMNS: gl.constexpr = k.shape[1] // 2
        half = k.slice(W * COLUMNS, COLUMNS, dim=1)
        return warpgroup_mma(ds.permute((1, 0)), half, none, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(ds.slice(W * 64, 64, dim=1).permute((1, 0)), k, none, use_acc=False, is_async=True)


@gluon.jit
def _stage_dq(W: gl.constexpr, dq, pipeline, i):
    # the half of dQ of step i goes to shared memory, to be added from there
    mbarrier.wait(pipeline.may_add.index(i % 2), ((i // 2) & 1) ^ 1)
    to = pipeline.dq.index(i % 2)
    if to.shape[0] == 64:
        COLUMNS: gl.constexpr = to.shape[1] // 2
        to.slice(W * COLUMNS, COLUMNS, dim=1).store(dq)
    else:
        to.slice(W * 64, 64).store(dq)
    fence_async_shared()
    mbarrier.arrive(pipeline.added.index(i % 2), count=1)


@gluon.jit
def compute(W: gl.constexpr, work, pipeline, mask, scores, gradients, CONFIG: gl.constexpr):
    """A warpgroup: the products of keys [64 W, 64 W + 64) of the tile, and half of dQ.

    work: the keys of the CTA and the schedule. gradients: dk and dv as descriptors of 64 keys, or as arrays if they are
    float32.
    """
    block, schedule = work
    dk_out, dv_out = gradients
    rows, ds_s = pipeline.rows, pipeline.ds
    q_s, do_s, stat_s = rows.tiles
    dtype: gl.constexpr = q_s.dtype
    G: gl.constexpr = CONFIG.G
    BM: gl.constexpr = q_s.shape[2]
    BN: gl.constexpr = pipeline.k.shape[2]
    D: gl.constexpr = q_s.shape[4]
    STAGES: gl.constexpr = q_s.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLUMNS: gl.constexpr = D // 2 if BM == 64 else D
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    tile, steps = first_tile(block, schedule, G, not CONFIG.ORDERED, 4)
    first = block.n * BN + W * 64
    ragged = first + 64 > mask.Tk
    none_s = gl.zeros([64, BM], gl.float32, s_layout)
    none_q = gl.zeros([64, COLUMNS], gl.float32, q_layout)
    dk = gl.zeros([64, D], gl.float32, kv_layout)
    dv = gl.zeros([64, D], gl.float32, kv_layout)
    mbarrier.wait(pipeline.kv_full, 0)
    for i in range(steps):
        stage = i % STAGES
        # a zero that the compiler cannot fold; with a constant it keeps 60 registers of matrix descriptors in the loop
        zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)
        k = reinterpret(pipeline.k.index(zero), dtype, [BN, D], tile_layout)
        v = reinterpret(pipeline.v.index(zero), dtype, [BN, D], tile_layout).slice(W * 64, 64)
        q = reinterpret(q_s.index(stage), dtype, [BM, D], tile_layout)
        do = reinterpret(do_s.index(stage), dtype, [BM, D], tile_layout)
        stat = stat_s.index(stage)
        # dQ of the previous step; in the first step it comes from undefined shared memory and is not used
        mbarrier.wait(pipeline.ds_full.index((i + 1) % 2), ((i + 1) // 2 - 1) & 1)
        dq = _half_of_dq(W, ds_s.index((i + 1) % 2), k, none_q)
        mbarrier.wait(rows.full.index(stage), (i // STAGES) & 1)
        s = warpgroup_mma(k.slice(W * 64, 64), q.permute((1, 0)), none_s, use_acc=False, is_async=True)
        lse = stat.slice(0, BM).load(gl.SliceLayout(0, s_layout))
        dq = warpgroup_mma_wait(1, deps=[dq])
        if i > 0:
            mbarrier.arrive(pipeline.ds_free.index((i + 1) % 2), count=1)
            _stage_dq(W, dq, pipeline, i - 1)
        # dP comes after dQ, whose registers it reuses
        dp = warpgroup_mma(v, do.permute((1, 0)), none_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if scores.softcap is not None:
            # tanh(x) = 1 - 2 / (1 + exp 2x)
            th = 1.0 - 2.0 / (1.0 + gl.exp2(s * (2.0 * LOG2E * scores.scale / scores.softcap)))
            p = gl.exp2(th * (scores.softcap * LOG2E) - gl.expand_dims(lse, 0))
        else:
            p = gl.exp2(s * (scores.scale * LOG2E) - gl.expand_dims(lse, 0))
        if (tile.kind != 2) | ragged:
            kind = tile.kind
            if W == 1:
                # swaps the sets of bands of the two halves
                kind = kind & 3 | (kind >> 6 & 15) << 2 | (kind >> 2 & 15) << 6
            p = masked_weights(p, tile.m * BM, first, kind, mask, CONFIG.BLOCKS)
        p_a = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
        if scores.softcap is not None:
            p *= 1.0 - th * th
        delta = stat.slice(BM, BM).load(gl.SliceLayout(0, s_layout))
        dp = warpgroup_mma_wait(0, deps=[dp])
        dv = warpgroup_mma(p_a, do, dv, is_async=True)
        ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
        mbarrier.wait(pipeline.ds_free.index(i % 2), ((i // 2) & 1) ^ 1)
        ds_s.index(i % 2).slice(W * 64, 64).store(ds)
        fence_async_shared()
        mbarrier.arrive(pipeline.ds_full.index(i % 2), count=1)
        ds_a = gl.convert_layout(ds, a_layout, assert_trivial=True)
        dk = warpgroup_mma(ds_a, q, dk, is_async=True)
        tile = next_tile(tile, not CONFIG.ORDERED)
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        mbarrier.arrive(rows.empty.index(stage), count=1)
    if steps > 0:
        i = steps - 1
        mbarrier.wait(pipeline.ds_full.index(i % 2), (i // 2) & 1)
        k = reinterpret(pipeline.k.index(0), dtype, [BN, D], tile_layout)
        dq = _half_of_dq(W, ds_s.index(i % 2), k, none_q)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _stage_dq(W, dq, pipeline, i)

    dk *= scores.scale
    if CONFIG.WIDE:
        store_float32(dk_out, dk, first, block, mask.Tk, G, CONFIG.D)
        store_float32(dv_out, dv, first, block, mask.Tk, G, CONFIG.DV)
    else:
        # results replace k and v once the other warpgroup has read k for the last time
        mbarrier.arrive(pipeline.done, count=1)
        mbarrier.wait(pipeline.done, 0)
        k = pipeline.k.index(0).slice(W * 64, 64, dim=1)
        v = pipeline.v.index(0).slice(W * 64, 64, dim=1)
        reinterpret(pipeline.k.index(0), dtype, [BN, D], tile_layout).slice(W * 64, 64).store(dk.to(dtype))
        reinterpret(pipeline.v.index(0), dtype, [BN, D], tile_layout).slice(W * 64, 64).store(dv.to(dtype))
        fence_async_shared()
        async_store(dk_out, [block.b, first, block.hk, 0], k)
        async_store(dv_out, [block.b, first, block.hk, 0], v)
        tma.store_wait(0)
