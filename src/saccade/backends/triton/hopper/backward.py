"""Gradients of attention on Hopper: five products in one kernel, one CTA for each tile of keys.

With s = scale q·k (capped where softcap > 0), P = exp(s - lse), dP = dO Vᵀ and dS = P (dP - delta):
dV = Pᵀ dO, dK = scale dSᵀ Q, dQ = scale dS K. A CTA keeps its K and V in shared memory and walks the row tiles that see
them, for all query heads of its key head, so dK and dV are registers until the end and need no atomics. Scores are
computed transposed, keys × queries, so that Pᵀ and dSᵀ leave the tensor cores as the register operand of dV and dK;
dS alone goes through shared memory, for dQ.

dQ is a sum over key tiles, that is over CTAs. Each adds its share to an fp32 buffer with vector reductions in L2. In
fixed order (the default) row tile m keeps a count of the key tiles that have added; one adds when the count reaches its
rank. It waits only for earlier places of the same head, which drew smaller tickets and so already run:
no deadlock.

Warps: 8 compute, 1 loads (TMA), 2 keep the order.
"""

from __future__ import annotations

from typing import NamedTuple

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

from ..launch import PLAIN, Launches
from .masking import masked_weights
from .staging import convert, prepare
from .walks import Walks

LOG2E = gl.constexpr(1.4426950408889634)

# 16 bytes a thread, 512 consecutive bytes a warp
_ADD4 = gl.constexpr("red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};")
_ADD4_OPERANDS = gl.constexpr("=r,=r,=r,=r,l,l,l,l,f,f,f,f")
_AWAIT = gl.constexpr("""{
    .reg .pred p;
    again: ld.acquire.gpu.global.u32 $0, [$1];
    setp.ne.u32 p, $0, $2;
    @p bra again;
}""")
_RELEASE = gl.constexpr("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [$1], $2; mov.u32 $0, 0;")


@gluon.jit
def _start(ptr, seg, cell, heads: gl.constexpr, WARPS: gl.constexpr):
    """A key tile's walk: (first segment, end of segments, segment, row tile, its lowest, kind, steps)."""
    first, last = gl.load(ptr + cell), gl.load(ptr + cell + 1)
    # blocks make dozens of segments: a warp adds them up, and every warp does
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    tiles = 0
    for s in range(first, last, 32):
        at, inside = seg + 3 * (s + lane), s + lane < last
        tiles += gl.sum(gl.load(at + 1, inside, 0) - gl.load(at, inside, 0), 0)
    s = gl.maximum(last - 1, 0)
    low, high, kind = gl.load(seg + 3 * s), gl.load(seg + 3 * s + 1), gl.load(seg + 3 * s + 2)
    return first, last, s, high - 1, low, kind, tiles * heads


@gluon.jit
def _next(seg, first, last, s, m, low, kind, g):
    """The step after: the row tile below, else the segment before, else the next query head."""
    m -= 1
    if m < low:
        s -= 1
        if s < first:
            s = gl.maximum(last - 1, 0)
            g += 1
        low, m, kind = gl.load(seg + 3 * s), gl.load(seg + 3 * s + 1) - 1, gl.load(seg + 3 * s + 2)
    return s, m, low, kind, g


@gluon.jit
def _load(
    ptr, seg, cell, q_desc, do_desc, k_desc, v_desc, stat_desc, q_s, do_s, k_s, v_s, stat_s, kv_ready, ready, free,
    b, hk, n, Hq, M,
    G: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: K and V once, then Q, dO, lse and delta of every step, and one step more, whose scores are not used."""
    mbarrier.expect(kv_ready, 2 * BN * D * 2)
    tma.async_copy_global_to_shared(k_desc, [b, n * BN, hk, 0], kv_ready, k_s.index(0))
    tma.async_copy_global_to_shared(v_desc, [b, n * BN, hk, 0], kv_ready, v_s.index(0))
    first, last, s, m, low, kind, steps = _start(ptr, seg, cell, G, 1)
    g = 0
    for i in range(steps + 1):
        stage = i % STAGES
        h = hk * G + g
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        full = ready.index(stage)
        mbarrier.expect(full, 2 * BM * D * 2 + 2 * BM * 4)
        tma.async_copy_global_to_shared(q_desc, [b, m * BM, h, 0], full, q_s.index(stage))
        tma.async_copy_global_to_shared(stat_desc, [((b * Hq + h) * M + m) * 2 * BM], full, stat_s.index(stage))
        tma.async_copy_global_to_shared(do_desc, [b, m * BM, h, 0], full, do_s.index(stage))
        s, m, low, kind, g = _next(seg, first, last, s, m, low, kind, g)


@gluon.jit
def _rank(turn_ptr, turn, m, n):
    """How many key tiles add to row tile m before place n: its runs of places are (first, offset), rank n + offset."""
    low, high = gl.load(turn_ptr + m), gl.load(turn_ptr + m + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(turn + 2 * middle) <= n:
            low = middle
        else:
            high = middle
    return n + gl.load(turn + 2 * low + 1)


@gluon.jit
def _keep_order(
    ptr, seg, cell, turn_ptr, turn, counts, b, hk, n, Hq, M, may_add, added,
    W: gl.constexpr, G: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """A warp for even steps, one for odd: lets the CTA add when the row tile's count is its rank, and counts after.

    Between an addition and the permission for the next lie a fence and two trips to L2, longer than a step.
    """
    first, last, s, m, low, kind, steps = _start(ptr, seg, cell, G, 1)
    steps = steps if ORDERED else 0
    g = 0
    if W == 1:
        s, m, low, kind, g = _next(seg, first, last, s, m, low, kind, g)
    rank = _rank(turn_ptr, turn, m, n) if steps > W else 0
    for i in range(W, steps, 2):
        count, turned = counts + ((b * Hq + hk * G + g) * M + m), rank + 1
        gl.inline_asm_elementwise(_AWAIT, "=r,l,r", [count, rank], dtype=gl.int32, is_pure=False, pack=1)
        mbarrier.arrive(may_add.index(W), count=1)
        # the step after the next is looked up while this one adds
        s, m, low, kind, g = _next(seg, first, last, s, m, low, kind, g)
        s, m, low, kind, g = _next(seg, first, last, s, m, low, kind, g)
        rank = _rank(turn_ptr, turn, m, n)
        mbarrier.wait(added.index(W), (i // 2) & 1)
        gl.inline_asm_elementwise(_RELEASE, "=r,l,r", [count, turned], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add(sums, dq, BM: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """dq [BM, D] added to its tile of the fp32 buffer, which lies in the order of the accumulator's registers.

    Four values of a thread, 2 rows × 2 columns, are 16 consecutive bytes; the 128 threads of a warp group write 2 KiB,
    a piece of 64 rows × 8 columns. `convert` puts them back in place.
    """
    row = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, layout)), 1)
    col = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
    thread = (row // 16 % 4) * 32 + (row % 8) * 4 + col % 8 // 2
    piece = row // 64 * (D // 8) + col // 8
    at = sums + (piece * 512 + thread * 4)
    gl.inline_asm_elementwise(_ADD4, _ADD4_OPERANDS, [at.to(gl.int64), dq], dtype=gl.int32, is_pure=False, pack=4)


@gluon.jit
def _compute(
    ptr, seg, cell, bands, row_lo, row_hi, sums, dk_desc, dv_desc,
    q_s, do_s, k_s, v_s, stat_s, p_s, ds_s, kv_ready, ready, free, may_add, added,
    b, hk, n, Hq, M, Tq, Tk, Tk_out, scale, softcap,
    G: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, NB: gl.constexpr,
    HAS_ROWS: gl.constexpr, BLOCKS: gl.constexpr, SOFTCAP: gl.constexpr, ORDERED: gl.constexpr,
    SHARED_P: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Eight warps: all five products. Scores and dP of a step are under way while the step before ends."""
    dtype: gl.constexpr = q_s.dtype
    # 128 keys: each warp group owns 64; 64 keys: the groups share them and halve the columns
    HALVES: gl.constexpr = 2 if BN == 64 else 1
    WARPS: gl.constexpr = [8 // HALVES, HALVES]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, BM // HALVES, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, D // HALVES, 16])
    HALVES_Q: gl.constexpr = 2 if BM == 64 else 1
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8 // HALVES_Q, HALVES_Q], [16, D // HALVES_Q, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    first, last, seg_at, m, low, kind, steps = _start(ptr, seg, cell, G, 8)
    g = 0
    ragged = n * BN + BN > Tk
    k = k_s.index(0)._reinterpret(dtype, [BN, D], tile_layout)
    v = v_s.index(0)._reinterpret(dtype, [BN, D], tile_layout)
    none_s = gl.zeros([BN, BM], gl.float32, s_layout)
    none_q = gl.zeros([BM, D], gl.float32, q_layout)
    dk = gl.zeros([BN, D], gl.float32, kv_layout)
    dv = gl.zeros([BN, D], gl.float32, kv_layout)

    mbarrier.wait(kv_ready, 0)
    mbarrier.wait(ready.index(0), 0)
    q = q_s.index(0)._reinterpret(dtype, [BM, D], tile_layout)
    s = warpgroup_mma(k, q.permute((1, 0)), none_s, use_acc=False)
    for i in range(steps):
        stage, after = i % STAGES, (i + 1) % STAGES
        # a zero that the compiler cannot see through: else it keeps 60 registers of matrix descriptors over the loop
        zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)
        k = k_s.index(zero)._reinterpret(dtype, [BN, D], tile_layout)
        v = v_s.index(zero)._reinterpret(dtype, [BN, D], tile_layout)
        ds_t = ds_s.index(zero)
        q = q_s.index(stage)._reinterpret(dtype, [BM, D], tile_layout)
        do = do_s.index(stage)._reinterpret(dtype, [BM, D], tile_layout)
        stat = stat_s.index(stage)
        dp = warpgroup_mma(v, do.permute((1, 0)), none_s, use_acc=False, is_async=True)
        lse = stat.slice(0, BM).load(gl.SliceLayout(0, s_layout))
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp 2x)
            th = 1.0 - 2.0 / (1.0 + gl.exp2(s * (2.0 * LOG2E * scale / softcap)))
            p = gl.exp2(th * (softcap * LOG2E) - gl.expand_dims(lse, 0))
        else:
            p = gl.exp2(s * (scale * LOG2E) - gl.expand_dims(lse, 0))
        if (kind != 2) | ragged:
            p = masked_weights(p, bands, row_lo, row_hi, m * BM, n * BN, kind, Tq, Tk, NB, HAS_ROWS, BLOCKS)
        if SHARED_P:
            p_t = p_s.index(zero)
            p_t.store(p.to(dtype))
            fence_async_shared()
            dv = warpgroup_mma(p_t, do, dv, is_async=True)
        else:
            p_a = gl.convert_layout(p.to(dtype), a_layout, assert_trivial=True)
            dv = warpgroup_mma(p_a, do, dv, is_async=True)
        if SOFTCAP:
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
        # scores of the next step; they and dK hide the additions
        mbarrier.wait(ready.index(after), ((i + 1) // STAGES) & 1)
        q = q_s.index(after)._reinterpret(dtype, [BM, D], tile_layout)
        s = warpgroup_mma(k, q.permute((1, 0)), none_s, use_acc=False, is_async=True)
        at = sums + ((b * Hq + hk * G + g) * M + m).to(gl.int64) * (BM * D)
        seg_at, m, low, kind, g = _next(seg, first, last, seg_at, m, low, kind, g)
        dq = warpgroup_mma_wait(2, deps=[dq])
        if ORDERED:
            mbarrier.wait(may_add.index(i % 2), (i // 2) & 1)
        _add(at, dq, BM, D, q_layout)
        if ORDERED:
            mbarrier.arrive(added.index(i % 2), count=1)
        s, dk = warpgroup_mma_wait(0, deps=[s, dk])
        mbarrier.arrive(free.index(stage), count=1)

    if WIDE:
        # fp32, contiguous, from registers: they would not fit where k and v lie
        keys = n * BN + gl.arange(0, BN, gl.SliceLayout(1, kv_layout))
        row = (b.to(gl.int64) * Tk_out + keys) * (Hq // G) + hk
        at = gl.expand_dims(row * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, kv_layout)), 0)
        inside = gl.expand_dims(keys < Tk_out, 1)
        gl.store(dk_desc + at, dk * scale, mask=inside)
        gl.store(dv_desc + at, dv, mask=inside)
    else:
        k = k_s.index(0)._reinterpret(dtype, [BN, D], tile_layout)
        v = v_s.index(0)._reinterpret(dtype, [BN, D], tile_layout)
        k.store((dk * scale).to(dtype))
        v.store(dv.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [b, n * BN, hk, 0], k_s.index(0))
        tma.async_copy_shared_to_global(dv_desc, [b, n * BN, hk, 0], v_s.index(0))
        tma.store_wait(0)


@gluon.jit
def _backward(
    q_desc, k_desc, v_desc, do_desc, stat_desc, dk_desc, dv_desc, sums, counts, ptr, seg, turn_ptr, turn, order,
    bands, row_lo, row_hi, scale, softcap, B, Hk, Tq, Tk, Tk_out, M, N, section,
    LONG: gl.constexpr, BM_LISTS: gl.constexpr, BANDS_B: gl.constexpr, ROWS_B: gl.constexpr, G: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, NB: gl.constexpr,
    HAS_ROWS: gl.constexpr, BLOCKS: gl.constexpr, SOFTCAP: gl.constexpr, ORDERED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Grid: one CTA for each (key tile, key head, batch entry); tickets go by place inside `section` heads."""
    SHARED_P: gl.constexpr = BN == 64
    dtype: gl.constexpr = q_desc.dtype
    ticket = gl.program_id(0)
    if ORDERED:
        ticket = gl.atomic_add(counts, 1, sem="relaxed")
    # heads of a section side by side, key tiles ascending
    of = ticket // (N * section)
    width = gl.minimum(section, B * Hk - of * section)
    inner = ticket - of * (N * section)
    place = inner // width
    bh = of * section + inner % width
    b, hk = bh // Hk, bh % Hk
    cell = place + (b * N if BM_LISTS else 0)
    n, long = place, 0
    KINDS: gl.constexpr = 2 if LONG else 1
    if LONG:
        # long walks have turns and sums of their own
        n = gl.load(order + cell)
        n, long = n & ((1 << 30) - 1), n >> 30
    turn_ptr += ((b if BM_LISTS else 0) * KINDS + long) * M
    counts += 1 + long * (B * Hk * G * M)
    sums += (long * (B * Hk * G * M)).to(gl.int64) * (BM * D)
    if BANDS_B:
        bands += b * NB * 8
    if ROWS_B:
        row_lo += b.to(gl.int64) * Tq
        row_hi += b.to(gl.int64) * Tq
    Hq = Hk * G

    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BM, 1, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, BM, 1, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [1, 1, BN, 1, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, BN, 1, D], k_desc.layout)
    stat_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BM], stat_desc.layout)
    ds_s = gl.allocate_shared_memory(dtype, [1, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    p_s = ds_s
    if SHARED_P:
        p_s = gl.allocate_shared_memory(dtype, [1, BN, BM], gl.NVMMASharedLayout(128, 16, 2))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    may_add = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(STAGES):
        mbarrier.init(ready.index(x), count=1)
        mbarrier.init(free.index(x), count=1)
    for x in gl.static_range(2):
        mbarrier.init(may_add.index(x), count=1)
        mbarrier.init(added.index(x), count=1)
    mbarrier.init(kv_ready, count=1)

    gl.warp_specialize([
        (_compute, (
            ptr, seg, cell, bands, row_lo, row_hi, sums, dk_desc, dv_desc, q_s, do_s, k_s, v_s, stat_s,
            p_s, ds_s, kv_ready, ready, free, may_add, added, b, hk, n, Hq, M, Tq, Tk, Tk_out, scale,
            softcap, G, BM, BN, D, STAGES, NB, HAS_ROWS, BLOCKS, SOFTCAP, ORDERED, SHARED_P, WIDE,
        )),
        (_load, (
            ptr, seg, cell, q_desc, do_desc, k_desc, v_desc, stat_desc, q_s, do_s, k_s, v_s, stat_s, kv_ready,
            ready, free, b, hk, n, Hq, M, G, BM, BN, D, STAGES,
        )),
        (_keep_order, (
            ptr, seg, cell, turn_ptr, turn, counts, b, hk, place, Hq, M, may_add, added, 0, G, ORDERED,
        )),
        (_keep_order, (
            ptr, seg, cell, turn_ptr, turn, counts, b, hk, place, Hq, M, may_add, added, 1, G, ORDERED,
        )),
    ], [1, 1, 1], [24, 24, 24])  # fmt: skip


class Tile(NamedTuple):
    """Rows and keys of a tile, and tiles of rows under way."""

    BM: int
    BN: int
    stages: int


TILES = {64: Tile(64, 128, 4), 128: Tile(64, 128, 3), 256: Tile(64, 64, 2)}


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *, scale: float, walk: Walks,
    bands: Tensor, row_lo: Tensor | None = None, row_hi: Tensor | None = None, softcap: float = 0.0,
    blocks: bool = False, deterministic: bool = True, keys: int | None = None, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, section: int = 0, tile: Tile | None = None,
    launches: Launches = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV of attention.

    do, q, dq: [B, Tq, Hq, D]; k, v, dk, dv: [B, Tk, Hk, D]; bfloat16 or float16, D in 64, 128, 256, last dimension
    contiguous, rows aligned to 16 bytes; gradients may be float32, then contiguous. lse, delta: fp32 [B, Tq, Hq]. walk:
    int32 arrays of `walks` for these tiles, on the device. bands: int32 [1 | B, NB, 8]; row_lo, row_hi: int32
    [1 | B, Tq]. blocks: a tile may hold 64 keys of a block and 64 of none. keys: k and v are read up to here.
    section: key heads whose CTAs run side by side. Not deterministic: the order in which key tiles add to dQ is free.
    """
    (B, Tq, Hq, D), (_, Tk, Hk, _) = q.shape, k.shape
    BM, BN, stages = tile or TILES[D]
    M, N, keys = -(-Tq // BM), -(-Tk // BN), Tk if keys is None else keys
    dq, dk, dv = (x if y is None else y for x, y in zip(map(torch.empty_like, (q, k, v)), (dq, dk, dv), strict=True))
    tiles, kinds = B * Hq * M, 1 if walk.order is None else 2
    stat, sums = launches.scratch(tiles * 2 * BM, like=q), launches.scratch(kinds * tiles * BM * D, like=q)
    counts = launches.scratch(kinds * tiles + 1, like=q, dtype=torch.int32)
    grid = (M, Hq, B)
    launches.run(
        prepare, grid, lse, delta, stat, sums, counts, Hq, Tq, lse.stride(0), lse.stride(1), delta.stride(0),
        delta.stride(1), BM, D, kinds,
    )  # fmt: skip
    rows, cols = [1, BM, 1, D], [1, BN, 1, D]
    line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    has_rows, wide = row_lo is not None, dk.dtype is torch.float32
    launches.run(
        _backward, (N * B * Hk,),
        _tiles(q, rows), _tiles(k[:, :keys], cols), _tiles(v[:, :keys], cols), _tiles(do, rows),
        TensorDescriptor(stat, list(stat.shape), [1], [2 * BM], line),
        *(x if wide else _tiles(x, cols) for x in (dk, dv)), sums, counts, walk.ptr, walk.seg, walk.turn_ptr,
        walk.turn, walk.turn if walk.order is None else walk.order, bands, row_lo if has_rows else bands,
        row_hi if has_rows else bands, scale, softcap, B, Hk, Tq, keys, Tk, M, N, section or min(B * Hk, 16),
        LONG=walk.order is not None, BM_LISTS=len(walk.ptr) - 1 > N, BANDS_B=bands.shape[0] > 1,
        ROWS_B=has_rows and row_lo.shape[0] > 1, G=Hq // Hk,
        BM=BM, BN=BN, D=D, STAGES=stages, NB=bands.shape[1], HAS_ROWS=has_rows, BLOCKS=blocks,
        SOFTCAP=softcap > 0, ORDERED=deterministic, WIDE=wide, num_warps=8,
    )  # fmt: skip
    launches.run(convert, grid, sums, dq, scale, Hq, Tq, dq.stride(0), dq.stride(1), dq.stride(2), BM, D, kinds)
    return dq, dk, dv


def _tiles(x: Tensor, block: list[int]) -> TensorDescriptor:
    # a dimension of one entry may have any stride: give it one that the copy engine takes
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape, x.stride(), strict=True)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block, layout)
