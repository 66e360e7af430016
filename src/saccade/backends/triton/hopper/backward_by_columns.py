"""The Hopper backward for tiles of 64 keys (D = 192 and 256): both warpgroups have all keys and half of the columns.

P and dS go through shared memory, from where the products for dV, dK and dQ read them. dQ leaves the step from
registers, by vector reductions in L2, because shared memory has no room for it.
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
from .gluon_names import async_store, reinterpret
from .masking import masked_weights
from .pipeline import wait_empty
from .tile_scheduler import block_of, first_tile, next_tile, queue_of, rank_of, row_tile_of

# 16 bytes per thread, 512 consecutive bytes per warp
_ADD4 = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};")
_ADD4_OPERANDS = gl.constexpr("=r,=r,=r,=r,l,l,l,l,f,f,f,f")
_RELEASE = gl.constexpr("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [$1], $2; mov.u32 $0, 0;")


class ByColumns(NamedTuple):
    """Shared memory of a CTA.

    inputs: `SharedInputs`. p, ds: [1, BN, BM]. may_add, added: mbarriers [2, 1], for even and odd steps, between the
    warps that compute and the two that keep the order.
    """

    inputs: Any
    p: Any
    ds: Any
    may_add: Any
    added: Any


@gluon.jit
def _load(inputs, block, schedule, sizes, pipeline, CONFIG: gl.constexpr):
    """One warp: loads K and V once, then the row tile of every step and of one more, which is not used."""
    load_keys(inputs, block, pipeline.inputs)
    tile, steps = first_tile(block, schedule, CONFIG.G, not CONFIG.ORDERED, 1)
    for i in range(steps + 1):
        stage = wait_empty(pipeline.inputs.rows, i)
        load_rows(inputs, block, tile, pipeline.inputs, stage, sizes, CONFIG.G)
        tile = next_tile(tile, not CONFIG.ORDERED)


@gluon.jit
def _keep_order(W: gl.constexpr, block, schedule, queue, sizes, pipeline, CONFIG: gl.constexpr):
    """One warp for even steps, one for odd. It lets the CTA add when the row tile's count is its rank, then counts up.

    A fence and two trips to L2 separate an addition from the permission for the next. They take longer than a step.
    """
    G: gl.constexpr = CONFIG.G
    tile, steps = first_tile(block, schedule, G, not CONFIG.ORDERED, 1)
    steps = steps if CONFIG.ORDERED else 0
    if W == 1:
        tile = next_tile(tile, not CONFIG.ORDERED)
    rank = rank_of(queue, tile.m) if steps > W else 0
    for i in range(W, steps, 2):
        count, after = queue.counts + row_tile_of(block, tile, sizes, G), rank + 1
        gl.inline_asm_elementwise(AWAIT, "=r,l,r", [count, rank], dtype=gl.int32, is_pure=False, pack=1)
        mbarrier.arrive(pipeline.may_add.index(W), count=1)
        # looks up the step after the next during this addition
        tile = next_tile(next_tile(tile, not CONFIG.ORDERED), not CONFIG.ORDERED)
        rank = rank_of(queue, tile.m)
        mbarrier.wait(pipeline.added.index(W), (i // 2) & 1)
        gl.inline_asm_elementwise(_RELEASE, "=r,l,r", [count, after], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add(sums, dq):
    """Add dq [BM, D] to its tile of the fp32 buffer, which is in the order of the accumulator's registers.

    Four values of a thread, 2 rows × 2 columns, are 16 consecutive bytes. The 128 threads of a warpgroup write 2 KiB,
    a piece of 64 rows × 8 columns. `convert` restores the order.
    """
    BM: gl.constexpr = dq.shape[0]
    D: gl.constexpr = dq.shape[1]
    row = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, dq.type.layout)), 1)
    col = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, dq.type.layout)), 0)
    thread = (row // 16 % 4) * 32 + (row % 8) * 4 + col % 8 // 2
    piece = row // 64 * (D // 8) + col // 8
    at = sums + (piece * 512 + thread * 4)
    gl.inline_asm_elementwise(_ADD4, _ADD4_OPERANDS, [at.to(gl.int64), dq], dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def _first_columns(x, n: gl.constexpr):
    """The first n columns of x in shared memory."""
    if x.shape[1] == n:
        return x
    else:
        return x.slice(0, n, dim=1)


@gluon.jit
def _scores(k, q, none, D: gl.constexpr):
    # keys × queries, in flight: one product, or two if D is no power of two
    REST: gl.constexpr = D % 128
    q_first = _first_columns(q, D - REST).permute((1, 0))
    s = warpgroup_mma(_first_columns(k, D - REST), q_first, none, use_acc=False, is_async=True)
    if REST > 0:
        q_rest = q.slice(D - REST, REST, dim=1).permute((1, 0))
        s = warpgroup_mma(k.slice(D - REST, REST, dim=1), q_rest, s, is_async=True)
    return s


@gluon.jit
def _compute(work, pipeline, mask, scores, gradients, sizes, CONFIG: gl.constexpr):
    """Eight warps: all five products. Scores of a step are computed while the previous step ends.

    work: the keys of the CTA and the schedule. gradients: sums of dq; dk and dv as descriptors, or as arrays if they
    are float32. Of 192 columns of q and k, which lie in tiles of 256, the first 128 and the rest have products of their
    own: columns of a product are a power of two.
    """
    block, schedule = work
    sums, dk_out, dv_out = gradients
    rows, ds_s = pipeline.inputs.rows, pipeline.ds
    q_s, do_s, stat_s = rows.tiles
    dtype: gl.constexpr = q_s.dtype
    G: gl.constexpr = CONFIG.G
    BM: gl.constexpr = q_s.shape[2]
    k_s, v_s = pipeline.inputs.k, pipeline.inputs.v
    BN: gl.constexpr = k_s.shape[2]
    DV: gl.constexpr = do_s.shape[4]
    BLOCK: gl.constexpr = q_s.shape[4]
    REST: gl.constexpr = CONFIG.D % 128
    D: gl.constexpr = CONFIG.D - REST
    STAGES: gl.constexpr = q_s.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BM // 2, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DV // 2, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    tile, steps = first_tile(block, schedule, G, not CONFIG.ORDERED, 8)
    ragged = block.n * BN + BN > mask.Tk
    k = reinterpret(k_s.index(0), dtype, [BN, BLOCK], tile_layout)
    none_s = gl.zeros([BN, BM], gl.float32, s_layout)
    none_q = gl.zeros([BM, D], gl.float32, k_layout)
    none_r = gl.zeros([BM, 64], gl.float32, rest_layout)
    dk = gl.zeros([BN, D], gl.float32, k_layout)
    dk_rest = gl.zeros([BN, 64], gl.float32, rest_layout)
    dv = gl.zeros([BN, DV], gl.float32, v_layout)

    mbarrier.wait(pipeline.inputs.kv_full, 0)
    mbarrier.wait(rows.full.index(0), 0)
    q = reinterpret(q_s.index(0), dtype, [BM, BLOCK], tile_layout)
    s = warpgroup_mma_wait(0, deps=[_scores(k, q, none_s, CONFIG.D)])
    for i in range(steps):
        stage, after = i % STAGES, (i + 1) % STAGES
        # a zero that the compiler cannot fold; with a constant it keeps 60 registers of matrix descriptors in the loop
        zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)
        k = reinterpret(k_s.index(zero), dtype, [BN, BLOCK], tile_layout)
        v = reinterpret(v_s.index(zero), dtype, [BN, DV], tile_layout)
        ds_t = ds_s.index(zero)
        q = reinterpret(q_s.index(stage), dtype, [BM, BLOCK], tile_layout)
        do = reinterpret(do_s.index(stage), dtype, [BM, DV], tile_layout)
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
            p = masked_weights(p, tile.m * BM, block.n * BN, tile.kind, block.b, mask, CONFIG)
        p_t = pipeline.p.index(zero)
        p_t.store(p.to(dtype))
        fence_async_shared()
        dv = warpgroup_mma(p_t, do, dv, is_async=True)
        if scores.softcap is not None:
            p *= 1.0 - th * th
        delta = stat.slice(BM, BM).load(gl.SliceLayout(0, s_layout))
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
        ds_t.store(ds)
        fence_async_shared()
        dv = warpgroup_mma_wait(0, deps=[dv])
        dq = warpgroup_mma(ds_t.permute((1, 0)), _first_columns(k, D), none_q, use_acc=False, is_async=True)
        if REST > 0:
            k_rest, q_rest = k.slice(D, REST, dim=1), q.slice(D, REST, dim=1)
            dq_rest = warpgroup_mma(ds_t.permute((1, 0)), k_rest, none_r, use_acc=False, is_async=True)
            dk_rest = warpgroup_mma(ds_t, q_rest, dk_rest, is_async=True)
        dk = warpgroup_mma(ds_t, _first_columns(q, D), dk, is_async=True)
        # scores of the next step; they and dK overlap with the additions
        mbarrier.wait(rows.full.index(after), ((i + 1) // STAGES) & 1)
        q = reinterpret(q_s.index(after), dtype, [BM, BLOCK], tile_layout)
        s = _scores(k, q, none_s, CONFIG.D)
        at = sums + row_tile_of(block, tile, sizes, G).to(gl.int64) * (BM * CONFIG.D)
        tile = next_tile(tile, not CONFIG.ORDERED)
        if REST > 0:
            # in flight: dk of the first columns, and the scores by two products
            dq, dq_rest, dk_rest = warpgroup_mma_wait(3, deps=[dq, dq_rest, dk_rest])
        else:
            dq = warpgroup_mma_wait(2, deps=[dq])
        if CONFIG.ORDERED:
            mbarrier.wait(pipeline.may_add.index(i % 2), (i // 2) & 1)
        _add(at, dq)
        if REST > 0:
            _add(at + BM * D, dq_rest)
        if CONFIG.ORDERED:
            mbarrier.arrive(pipeline.added.index(i % 2), count=1)
        s, dk = warpgroup_mma_wait(0, deps=[s, dk])
        mbarrier.arrive(rows.empty.index(stage))

    if CONFIG.WIDE:
        at = block.b, block.n * BN, block.hk
        store_float32(dk_out, dk * scores.scale, at, sizes, CONFIG.D)
        if REST > 0:
            store_float32(dk_out + D, dk_rest * scores.scale, at, sizes, CONFIG.D)
        store_float32(dv_out, dv, at, sizes, CONFIG.DV)
    else:
        k = reinterpret(k_s.index(0), dtype, [BN, BLOCK], tile_layout)
        v = reinterpret(v_s.index(0), dtype, [BN, DV], tile_layout)
        _first_columns(k, D).store((dk * scores.scale).to(dtype))
        if REST > 0:
            k.slice(D, REST, dim=1).store((dk_rest * scores.scale).to(dtype))
        v.store(dv.to(dtype))
        fence_async_shared()
        async_store(dk_out, [block.b, block.n * BN, block.hk, 0], k_s.index(0))
        async_store(dv_out, [block.b, block.n * BN, block.hk, 0], v_s.index(0))
        tma.store_wait(0)


@gluon.jit
def partition(inputs, results, schedule, mask, scores, sizes, CONFIG: gl.constexpr):
    """Allocates the shared memory of a CTA and starts its partitions of warps, for one key tile.

    results: dk, dv, the sums of dq, and counts, int32, which begin with the number of tickets drawn in a fixed order.
    """
    q, k = inputs.q, inputs.k
    dk, dv, sums, counts = results
    BM: gl.constexpr = q.block_shape[1]
    BN: gl.constexpr = k.block_shape[1]
    ticket = gl.program_id(0)
    if CONFIG.ORDERED:
        ticket = gl.atomic_add(counts, 1, sem="relaxed")
    block = block_of(ticket, schedule, sizes, CONFIG)
    queue = queue_of(block, schedule, counts, sizes, CONFIG)
    shared = shared_inputs(inputs, CONFIG.STAGES, 1)
    ds_s = gl.allocate_shared_memory(q.dtype, [1, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    p_s = gl.allocate_shared_memory(q.dtype, [1, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    pipeline = ByColumns(shared, p_s, ds_s, pair_of_barriers(1), pair_of_barriers(1))
    gradients = sums + queue.start.to(gl.int64) * (BM * CONFIG.D), dk, dv
    gl.warp_specialize(
        [
            (_compute, ((block, schedule), pipeline, mask, scores, gradients, sizes, CONFIG)),
            (_load, (inputs, block, schedule, sizes, pipeline, CONFIG)),
            (_keep_order, (0, block, schedule, queue, sizes, pipeline, CONFIG)),
            (_keep_order, (1, block, schedule, queue, sizes, pipeline, CONFIG)),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )
