"""The Hopper backward for tiles of 128 keys: each of two warpgroups owns 64 of them, and they are loosely coupled.

P and dS stay in registers as operands of the products for dV and dK. dS also goes through shared memory, because dQ
sums over the keys of both warpgroups. Each computes half of dQ one step late, when the other has long written its dS,
so neither waits for the softmax of the other. dQ is staged in shared memory. Two warps let the copy engine add it, for
even and odd steps, in the fixed order if there is one.

The grid is persistent. The warp that loads draws tickets and announces their key tiles to the others; it loads the
first row tiles of the next key tile while the last one ends. Steps are counted over all key tiles of a CTA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_pipeline import (
    AWAIT,
    LOG2E,
    load_keys,
    load_rows,
    pair_of_barriers,
    shared_inputs,
    store_float32,
)
from .gluon_names import async_add, async_store, barrier, reinterpret
from .masking import masked_weights
from .pipeline import Ring, read_number, release, wait_empty, wait_full, write_number
from .tile_scheduler import block_of, first_tile, next_tile, queue_of, rank_of, row_tile_of

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


class ByKeys(NamedTuple):
    """Shared memory of a CTA.

    inputs: `SharedInputs`. tiles: int32 [STAGES, 1], the row tile of a stage, whether its pairs are tested, and its
    kind, m << 11 | tested << 10 | kind. kv_empty: an mbarrier [1], which completes when nothing reads k and v any more.
    announced: a ring of two key tiles, 8 numbers each: their ticket or -1 at the end, batch entry, key head, key tile
    and steps. ds: [2, 1, BN, 1, BM]; dq: [2, BM, D] float32. ds_full, ds_free: mbarriers [2, 1], for even and odd
    steps. may_add, added: the same, between the warpgroups and the warps that add.
    """

    inputs: Any
    tiles: Any
    kv_empty: Any
    announced: Any
    ds: Any
    ds_full: Any
    ds_free: Any
    dq: Any
    may_add: Any
    added: Any


class Announcement(NamedTuple):
    """A key tile as the warp that loads announces it."""

    ticket: Any
    b: Any
    hk: Any
    n: Any
    steps: Any


@gluon.jit
def _announced(pipeline, piece, WARPS: gl.constexpr):
    # the announcement of a piece, once it is there
    numbers, at = pipeline.announced.tiles, 8 * wait_full(pipeline.announced, piece)
    ticket, b = read_number(numbers.index(at), WARPS), read_number(numbers.index(at + 1), WARPS)
    hk, n = read_number(numbers.index(at + 2), WARPS), read_number(numbers.index(at + 3), WARPS)
    return Announcement(ticket, b, hk, n, read_number(numbers.index(at + 4), WARPS))


@gluon.jit
def _announce(pipeline, piece, what):
    numbers, slot = pipeline.announced.tiles, wait_empty(pipeline.announced, piece)
    for x in gl.static_range(5):
        write_number(numbers.index(8 * slot + x), what[x])
    barrier()
    mbarrier.arrive(pipeline.announced.full.index(slot), count=1)


@gluon.jit
def _load_rows(inputs, block, tile, pipeline, step, sizes, CONFIG: gl.constexpr):
    stage = wait_empty(pipeline.inputs.rows, step)
    BN: gl.constexpr = inputs.k.block_shape[1]
    tested = (tile.kind != 2) | (block.n * BN + BN > sizes.Tk)
    write_number(pipeline.tiles.index(stage), tile.m << 11 | tested.to(gl.int32) << 10 | tile.kind)
    barrier()
    load_rows(inputs, block, tile, pipeline.inputs, stage, sizes, CONFIG.G)
    return next_tile(tile, not CONFIG.ORDERED)


@gluon.jit
def _load(inputs, schedule, counts, sizes, pipeline, CONFIG: gl.constexpr):
    """One warp: draws tickets, announces their key tiles, and loads K and V once and the row tile of every step."""
    tickets = sizes.B * sizes.Hk * sizes.N
    start = 0
    piece = 0
    ticket = gl.atomic_add(counts, 1, sem="relaxed")
    while ticket < tickets:
        block = block_of(ticket, schedule, sizes, CONFIG)
        tile, steps = first_tile(block, schedule, CONFIG.G, not CONFIG.ORDERED, 1)
        _announce(pipeline, piece, Announcement(ticket, block.b, block.hk, block.n, steps))
        # the ring of rows empties before k and v do
        early = start + gl.minimum(steps, CONFIG.STAGES)
        for i in range(start, early):
            tile = _load_rows(inputs, block, tile, pipeline, i, sizes, CONFIG)
        mbarrier.wait(pipeline.kv_empty, piece & 1 ^ 1)
        load_keys(inputs, block, pipeline.inputs)
        for i in range(early, start + steps):
            tile = _load_rows(inputs, block, tile, pipeline, i, sizes, CONFIG)
        start += steps
        piece += 1
        ticket = gl.atomic_add(counts, 1, sem="relaxed")
    _announce(pipeline, piece, Announcement(-1, 0, 0, 0, 0))


@gluon.jit
def _add_in_order(W: gl.constexpr, schedule, counts, sums, sizes, pipeline, CONFIG: gl.constexpr):
    """One warp for even steps, one for odd: the copy engine adds dQ to its row tile when the tile's count is its rank.

    counts: the tickets drawn, then the key tiles that have added to each row tile. sums: a descriptor of all sums.
    """
    G: gl.constexpr = CONFIG.G
    BM: gl.constexpr = sums.block_shape[0]
    start = 0
    piece = 0
    what = _announced(pipeline, piece, 1)
    while what.ticket >= 0:
        block = block_of(what.ticket, schedule, sizes, CONFIG)
        queue = queue_of(block, schedule, counts, sizes, CONFIG)
        tile, steps = first_tile(block, schedule, G, not CONFIG.ORDERED, 1)
        # the first step whose number is even or odd
        skipped = (start ^ W) & 1
        if skipped == 1:
            tile = next_tile(tile, not CONFIG.ORDERED)
        rank = 0
        if CONFIG.ORDERED:
            rank = rank_of(queue, tile.m) if steps > skipped else 0
        for i in range(start + skipped, start + steps, 2):
            row, after = row_tile_of(block, tile, sizes, G), rank + 1
            # looks up the step after the next before it waits
            tile = next_tile(next_tile(tile, not CONFIG.ORDERED), not CONFIG.ORDERED)
            if CONFIG.ORDERED:
                count = queue.counts + row
                gl.inline_asm_elementwise(AWAIT, "=r,l,r", [count, rank], dtype=gl.int32, is_pure=False, pack=1)
                rank = rank_of(queue, tile.m)
            mbarrier.wait(pipeline.added.index(W), i >> 1 & 1)
            if CONFIG.ADDED or after > 1:
                async_add(sums, [(queue.start + row) * BM, 0], pipeline.dq.index(W))
            else:
                async_store(sums, [(queue.start + row) * BM, 0], pipeline.dq.index(W))
            tma.store_wait(0)
            mbarrier.arrive(pipeline.may_add.index(W), count=1)
            if CONFIG.ORDERED:
                gl.inline_asm_elementwise(_RELEASE, "=r,l,r", [count, after], dtype=gl.int32, is_pure=False, pack=1)
        barrier()
        release(pipeline.announced, piece)
        start += steps
        piece += 1
        what = _announced(pipeline, piece, 1)


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
def _ds(pipeline, x):
    # dS of even or odd steps, [BN, BM]
    ds = pipeline.ds
    BN: gl.constexpr = ds.shape[2]
    BM: gl.constexpr = ds.shape[4]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(ds.index(x), ds.dtype, [BN, BM], layout)


@gluon.jit
def _store_columns(W: gl.constexpr, N: gl.constexpr, out, x, at, pipeline):
    # columns [64 N, 64 N + 64) of dK, in place of the warpgroup's rows of a dS
    _ds(pipeline, N).slice(W * 64, 64).slice(0, 64, dim=1).store(x)
    fence_async_shared()
    source = pipeline.ds.index(N).slice(W * 64, 64, dim=1).slice(0, 64, dim=3)
    async_store(out, [at[0], at[1], at[2], 64 * N], source)


@gluon.jit
def _stage_dq(W: gl.constexpr, dq, pipeline, i):
    # the half of dQ of step i goes to shared memory, to be added from there
    mbarrier.wait(pipeline.may_add.index(i & 1), i >> 1 & 1 ^ 1)
    to = pipeline.dq.index(i & 1)
    if to.shape[0] == 64:
        COLUMNS: gl.constexpr = to.shape[1] // 2
        to.slice(W * COLUMNS, COLUMNS, dim=1).store(dq)
    else:
        to.slice(W * 64, 64).store(dq)
    fence_async_shared()
    mbarrier.arrive(pipeline.added.index(i & 1), count=1)


@gluon.jit
def _compute(W: gl.constexpr, pipeline, mask, scores, gradients, sizes, CONFIG: gl.constexpr):
    """A warpgroup: the products of keys [64 W, 64 W + 64) of every key tile, and half of dQ.

    gradients: dk and dv as descriptors of 64 keys, and 64 columns of dk, or as arrays if they are float32.
    """
    dk_out, dv_out = gradients
    rows, k_s, v_s, kv_full = pipeline.inputs
    q_s, do_s, stat_s = rows.tiles
    dtype: gl.constexpr = q_s.dtype
    BM: gl.constexpr = q_s.shape[2]
    BN: gl.constexpr = k_s.shape[2]
    D: gl.constexpr = q_s.shape[4]
    STAGES: gl.constexpr = q_s.shape[0]
    gl.static_assert(STAGES == 2 or STAGES == 4)
    LOG2: gl.constexpr = STAGES // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLUMNS: gl.constexpr = D // 2 if BM == 64 else D
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    none_s = gl.zeros([64, BM], gl.float32, s_layout)
    none_q = gl.zeros([64, COLUMNS], gl.float32, q_layout)

    start = 0
    piece = 0
    what = _announced(pipeline, piece, 4)
    while what.ticket >= 0:
        first = what.n * BN + W * 64
        dk = gl.zeros([64, D], gl.float32, kv_layout)
        dv = gl.zeros([64, D], gl.float32, kv_layout)
        mbarrier.wait(kv_full, piece & 1)
        for i in range(start, start + what.steps):
            stage, before = i & (STAGES - 1), (i + 1) & 1
            # a zero that the compiler cannot fold; with a constant it keeps 60 registers of matrix descriptors
            zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)
            k = reinterpret(k_s.index(zero), dtype, [BN, D], tile_layout)
            v = reinterpret(v_s.index(zero), dtype, [BN, D], tile_layout).slice(W * 64, 64)
            q = reinterpret(q_s.index(stage), dtype, [BM, D], tile_layout)
            do = reinterpret(do_s.index(stage), dtype, [BM, D], tile_layout)
            stat = stat_s.index(stage)
            # dQ of the previous step; in the first step of a key tile the product is not used
            mbarrier.wait(pipeline.ds_full.index(before), (i - 1) >> 1 & 1)
            dq = _half_of_dq(W, _ds(pipeline, before), k, none_q)
            mbarrier.wait(rows.full.index(stage), i >> LOG2 & 1)
            s = warpgroup_mma(k.slice(W * 64, 64), q.permute((1, 0)), none_s, use_acc=False, is_async=True)
            tile = read_number(pipeline.tiles.index(stage), 4)
            lse = stat.slice(0, BM).load(gl.SliceLayout(0, s_layout))
            dq = warpgroup_mma_wait(1, deps=[dq])
            if i > start:
                mbarrier.arrive(pipeline.ds_free.index(before), count=1)
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
            if (tile & 1024) != 0:
                kind = tile & 1023
                if W == 1:
                    # swaps the sets of bands of the two halves
                    kind = kind & 3 | (kind >> 6 & 15) << 2 | (kind >> 2 & 15) << 6
                p = masked_weights(p, (tile >> 11 & 0x1FFFFF) * BM, first, kind, what.b, mask, CONFIG)
            p_a = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
            if scores.softcap is not None:
                p *= 1.0 - th * th
            delta = stat.slice(BM, BM).load(gl.SliceLayout(0, s_layout))
            dp = warpgroup_mma_wait(0, deps=[dp])
            dv = warpgroup_mma(p_a, do, dv, is_async=True)
            ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
            mbarrier.wait(pipeline.ds_free.index(i & 1), i >> 1 & 1 ^ 1)
            _ds(pipeline, i & 1).slice(W * 64, 64).store(ds)
            fence_async_shared()
            mbarrier.arrive(pipeline.ds_full.index(i & 1), count=1)
            ds_a = gl.convert_layout(ds, a_layout, assert_trivial=True)
            dk = warpgroup_mma(ds_a, q, dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
            mbarrier.arrive(rows.empty.index(stage), count=1)

        start += what.steps
        # without a step it is a product of what lies there, and is not used
        last = start - 1
        mbarrier.wait(pipeline.ds_full.index(last & 1), last >> 1 & 1)
        k = reinterpret(k_s.index(0), dtype, [BN, D], tile_layout)
        dq = _half_of_dq(W, _ds(pipeline, last & 1), k, none_q)
        # read again, because registers are short in the loop
        at = _announced(pipeline, piece, 4)
        at = at.b, at.n * BN + W * 64, at.hk
        if not CONFIG.WIDE:
            # dv replaces v, which is not read any more
            reinterpret(v_s.index(0), dtype, [BN, D], tile_layout).slice(W * 64, 64).store(dv.to(dtype))
            fence_async_shared()
            async_store(dv_out, [at[0], at[1], at[2], 0], v_s.index(0).slice(W * 64, 64, dim=1))
        dq = warpgroup_mma_wait(0, deps=[dq])
        tma.store_wait(0)
        mbarrier.arrive(pipeline.kv_empty, count=1)
        if what.steps > 0:
            mbarrier.arrive(pipeline.ds_free.index(last & 1), count=1)
        dk *= scores.scale
        if CONFIG.WIDE:
            store_float32(dv_out, dv, at, sizes, CONFIG.DV)
            store_float32(dk_out, dk, at, sizes, CONFIG.D)
        else:
            # dk replaces a dS, or both, once the other warpgroup has read them
            mbarrier.wait(pipeline.ds_free.index(last & 1), last >> 1 & 1)
            if D == 64:
                _store_columns(W, 0, dk_out, dk.to(dtype), at, pipeline)
            else:
                low, high = gl.split(gl.permute(gl.reshape(dk.to(dtype), [64, 2, 64]), (0, 2, 1)))
                _store_columns(W, 0, dk_out, low, at, pipeline)
                _store_columns(W, 1, dk_out, high, at, pipeline)
        if what.steps > 0:
            _stage_dq(W, dq, pipeline, last)
        tma.store_wait(0)
        release(pipeline.announced, piece)
        piece += 1
        what = _announced(pipeline, piece, 4)


@gluon.jit
def partition(inputs, results, schedule, mask, scores, sizes, CONFIG: gl.constexpr):
    """Allocates the shared memory of a CTA and starts its partitions of warps, which draw key tiles until none is left.

    results: dk, dv, the sums of dq, and counts, int32, which begin with the number of tickets drawn.
    """
    q, k = inputs.q, inputs.k
    dk, dv, sums, counts = results
    BM: gl.constexpr = q.block_shape[1]
    BN: gl.constexpr = k.block_shape[1]
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = shared_inputs(inputs, CONFIG.STAGES, 2)
    ds_s = gl.allocate_shared_memory(q.dtype, [2, 1, BN, 1, BM], gl.NVMMASharedLayout(128, 16, 4))
    dq_s = gl.allocate_shared_memory(gl.float32, [2] + sums.block_shape, sums.layout)
    tiles = gl.allocate_shared_memory(gl.int32, [CONFIG.STAGES, 1], line)
    numbers = gl.allocate_shared_memory(gl.int32, [16, 1], line)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    mbarrier.init(kv_empty, count=2)
    # two warpgroups and two warps read an announcement
    announced = Ring(numbers, pair_of_barriers(1), pair_of_barriers(4))
    ds_full, ds_free, added = pair_of_barriers(2), pair_of_barriers(2), pair_of_barriers(2)
    may_add = pair_of_barriers(1)
    pipeline = ByKeys(shared, tiles, kv_empty, announced, ds_s, ds_full, ds_free, dq_s, may_add, added)
    gl.warp_specialize(
        [
            (_compute, (0, pipeline, mask, scores, (dk, dv), sizes, CONFIG)),
            (_compute, (1, pipeline, mask, scores, (dk, dv), sizes, CONFIG)),
            (_load, (inputs, schedule, counts, sizes, pipeline, CONFIG)),
            (_add_in_order, (0, schedule, counts, sums, sizes, pipeline, CONFIG)),
            (_add_in_order, (1, schedule, counts, sums, sizes, pipeline, CONFIG)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
