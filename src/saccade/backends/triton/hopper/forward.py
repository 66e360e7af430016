"""The forward of exact attention on Hopper: one warp that copies, two or three warpgroups that multiply.

A tile of BM = 64 · NC query rows is one piece of work. A producer warp walks the segments of keys of the tile and
copies Q once and K and V tile by tile into rings of shared memory (TMA, mbarriers full and empty). Every consumer
warpgroup owns 64 rows: S = Q Kᵀ of key tile j is issued before O += P V of key tile j - 1, so that the softmax of j
runs while the tensor cores still add j - 1. P stays in registers: it is the A operand of the second product.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
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

LOG2E = math.log2(math.e)
# bytes of keys and values that the heads of one section may take of the L2 cache
L2_KEYS = 32 << 20


class Tiles(NamedTuple):
    """BN: keys of a tile. NC: consumer warpgroups, 64 rows each. stages: depth of the K ring and of the V ring."""

    BN: int
    NC: int
    stages: int

    @property
    def BM(self) -> int:
        """Query rows of a tile."""
        return 64 * self.NC


# by head size, 16-bit types
TILES = {64: Tiles(128, 3, 2), 128: Tiles(128, 2, 2), 256: Tiles(64, 2, 2)}


@gluon.jit
def _place(w, order_ptr, n_tiles, BH, Hq, section, Bm):
    # sections of heads whose keys share the L2 cache; inside one, the longest tiles of all its heads first
    per = section * n_tiles
    first = (w // per) * section
    inside = gl.minimum(section, BH - first)
    rest = w % per
    bh = first + rest % inside
    b = bh // Hq
    mask_b = gl.where(Bm > 1, b, 0)
    tile = gl.load(order_ptr + mask_b * n_tiles + rest // inside)
    return b, bh % Hq, mask_b, tile


@gluon.jit
def _tell(slot, value):
    slot.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _told(slot):
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _copy_tile(desc, b, h, row, ring, full, empty, step, BYTES: gl.constexpr, STAGES: gl.constexpr):
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    tma.async_copy_global_to_shared(desc, [b, h, row, 0], full.index(slot), ring.index(slot))


@gluon.jit
def _producer(q_desc, k_desc, v_desc, plan, sizes, smem, bars, D: gl.constexpr, BN: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip # noqa: E501
    next_ptr, order_ptr, ptr_ptr, seg_ptr = plan
    n_work, n_tiles, BH, Hq, G, section, Bm = sizes
    q_smem, k_ring, v_ring, work = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    BYTES: gl.constexpr = BN * D * 2
    step = 0
    round = 0
    w = gl.program_id(0)
    while w < n_work:
        # first come, first served: the next piece of work is drawn while this one is copied
        after = gl.atomic_add(next_ptr, 1) + gl.num_programs(0)
        b, h, mask_b, tile = _place(w, order_ptr, n_tiles, BH, Hq, section, Bm)
        first = gl.load(ptr_ptr + mask_b * n_tiles + tile)
        last = gl.load(ptr_ptr + mask_b * n_tiles + tile + 1)
        mbarrier.wait(q_empty, (round & 1) ^ 1)
        _tell(work.index(0), b)
        _tell(work.index(1), h)
        _tell(work.index(2), tile)
        _tell(work.index(3), first)
        _tell(work.index(4), last)
        gl.thread_barrier()
        mbarrier.expect(q_full, NC * 64 * D * 2)
        for c in gl.static_range(NC):
            tma.async_copy_global_to_shared(q_desc, [b, h, (tile * NC + c) * 64, 0], q_full, q_smem.index(c))
        round += 1
        # V lags one tile behind K, as its consumers do
        before = -1
        for i in range(first, last):
            begin = gl.load(seg_ptr + 3 * i)
            end = gl.load(seg_ptr + 3 * i + 1)
            for j in range(begin, end, BN):
                _copy_tile(k_desc, b, h // G, j, k_ring, k_full, k_empty, step, BYTES, STAGES)
                if before >= 0:
                    _copy_tile(v_desc, b, h // G, before, v_ring, v_full, v_empty, step - 1, BYTES, STAGES)
                before = j
                step += 1
        if before >= 0:
            _copy_tile(v_desc, b, h // G, before, v_ring, v_full, v_empty, step - 1, BYTES, STAGES)
        w = after
    mbarrier.wait(q_empty, (round & 1) ^ 1)
    _tell(work.index(0), -1)
    gl.thread_barrier()
    mbarrier.arrive(q_full)


@gluon.jit
def _interval(rows, n: gl.constexpr, mask_b, mask, Tq, Tk, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # the keys [lo, hi) that band n lets each of rows [64, 1] see
    bands_ptr, bands_b, row_lo_ptr, row_hi_ptr, rows_b = mask
    band = bands_ptr + (bands_b * mask_b * NB + n) * 8
    lo = gl.maximum(rows - gl.load(band + 1), gl.load(band + 2))
    hi = gl.minimum(rows - gl.load(band) + 1, gl.minimum(gl.load(band + 3), Tk))
    hi = gl.where((rows >= gl.load(band + 4)) & (rows < gl.load(band + 5)), hi, 0)
    if HAS_ROWS:
        at = rows_b * mask_b * Tq + rows
        lo = gl.maximum(lo, gl.load(row_lo_ptr + at, mask=rows < Tq, other=0))
        hi = gl.minimum(hi, gl.load(row_hi_ptr + at, mask=rows < Tq, other=0))
    return lo, hi


@gluon.jit
def _masked(s, rows, keys, mask_b, mask, Tq, Tk, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # s [64, BN] with -inf where no band allows row [64, 1] and key [1, BN]
    lo, hi = _interval(rows, 0, mask_b, mask, Tq, Tk, NB, HAS_ROWS)
    if NB == 1:
        s = gl.where(keys >= lo, s, float("-inf"))
        return gl.where(keys < hi, s, float("-inf"))
    else:
        allowed = (keys >= lo) & (keys < hi)
        for n in gl.static_range(1, NB):
            lo, hi = _interval(rows, n, mask_b, mask, Tq, Tk, NB, HAS_ROWS)
            allowed = allowed | ((keys >= lo) & (keys < hi))
        return gl.where(allowed, s, float("-inf"))


@gluon.jit
def _by_thread(x, MAX: gl.constexpr):
    # x [64, BN] to [64, 8], over the columns that one thread holds: no shuffles, chains that run side by side
    x = gl.reshape(x, [64, x.shape[1] // 8, 8])
    return gl.max(x, 1) if MAX else gl.sum(x, 1)


@gluon.jit
def _softmax(s, m, l, unit, cap, first_row, j, mask_b, mask, Tq, Tk, MASKED: gl.constexpr, NB: gl.constexpr, HAS_ROWS: gl.constexpr, SOFTCAP: gl.constexpr):  # fmt: skip # noqa: E501
    # s [64, BN] scores; returns p = exp2(s · unit - m), the new m and l, and the factor of what was summed before
    BN: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    if SOFTCAP:
        # cap · tanh(x) = cap - 2 cap / (1 + e^2x), in units of log2
        s = cap - 2.0 * cap / (1.0 + gl.exp2(s * unit))
    if MASKED:
        rows = gl.expand_dims(first_row + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
        keys = gl.expand_dims(j + gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
        s = _masked(s, rows, keys, mask_b, mask, Tq, Tk, NB, HAS_ROWS)
    factor = 1.0 if SOFTCAP else unit
    m_new = gl.maximum(m, gl.convert_layout(gl.max(_by_thread(s, True), 1), m.type.layout))
    # a row without a key yet keeps m = -inf; 0 in its place leaves p = 0
    m_unit = gl.where(m_new == float("-inf"), 0.0, m_new * factor)
    alpha = gl.exp2(m * factor - m_unit)
    p = gl.exp2(s * factor - gl.expand_dims(m_unit, 1))
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1) + _by_thread(p, False)
    return p, m_new, l, alpha


@gluon.jit
def _operand(p, layout: gl.constexpr, dtype: gl.constexpr):
    # the registers of p as the first operand of a product: each thread keeps its elements
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _after_softmax(l):
    # never sleeps, as l >= 0; ptxas moves no wait for a product above this branch, into the softmax meant to hide it
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .f32 t, u;
        add.f32 t, $4, $5;
        add.f32 u, $6, $7;
        add.f32 t, t, u;
        setp.lt.f32 p, t, 0f00000000;
        @p nanosleep.u32 0;
        mov.b32 $0, $4;
        mov.b32 $1, $5;
        mov.b32 $2, $6;
        mov.b32 $3, $7;
        }""",
        "=f,=f,=f,=f,f,f,f,f", [l], gl.float32, False, 4,
    )  # fmt: skip


@gluon.jit
def _step(EARLY: gl.constexpr, state, q, smem, bars, unit, cap, first_row, j, mask_b, mask, Tq, Tk, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, NB: gl.constexpr, HAS_ROWS: gl.constexpr, SOFTCAP: gl.constexpr):  # fmt: skip # noqa: E501
    # scores of key tile j beside the product of the tile before it
    o, p, m, l, step = state
    O: gl.constexpr = o.type.layout
    dtype: gl.constexpr = q.dtype
    if not EARLY:
        p = _operand(p, O, dtype)
    _, k_ring, v_ring, _ = smem
    _, _, k_full, k_empty, v_full, v_empty = bars
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    slot = step % STAGES
    mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
    k = k_ring.index(slot).reshape([BN, D]).permute([1, 0])
    s = warpgroup_mma(q, k, gl.zeros([64, BN], gl.float32, S), use_acc=False, is_async=True)
    last = step - 1
    v_slot = last % STAGES
    mbarrier.wait(v_full.index(v_slot), (last // STAGES) & 1)
    o = warpgroup_mma(p, v_ring.index(v_slot).reshape([BN, D]), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(slot))
    p, m, l, alpha = _softmax(s, m, l, unit, cap, first_row, j, mask_b, mask, Tq, Tk, MASKED, NB, HAS_ROWS, SOFTCAP)  # fmt: skip # noqa: E501
    l = _after_softmax(l)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_empty.index(v_slot))
    o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O)), 1)
    if EARLY:
        p = _operand(p, O, dtype)
    return o, p, m, l, step + 1


@gluon.jit
def _consumer(which: gl.constexpr, out, plan, mask, smem, bars, unit, cap, D: gl.constexpr, BN: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, NB: gl.constexpr, HAS_ROWS: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr):  # fmt: skip # noqa: E501
    o_ptr, o_b, o_t, o_h, lse_ptr, sinks_ptr, Tq, Tk = out
    seg_ptr, Hq, Bm = plan
    q_smem, k_ring, v_ring, work = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    R: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    EARLY: gl.constexpr = NC == 3
    factor = 1.0 if SOFTCAP else unit
    q = q_smem.index(which).reshape([64, D])
    step = 0
    round = 0
    mbarrier.wait(q_full, 0)
    b = _told(work.index(0))
    while b >= 0:
        h = _told(work.index(1))
        tile = _told(work.index(2))
        first = _told(work.index(3))
        last = _told(work.index(4))
        mask_b = gl.where(Bm > 1, b, 0)
        first_row = (tile * NC + which) * 64
        o = gl.zeros([64, D], gl.float32, O)
        m = gl.full([64], float("-inf"), gl.float32, R)
        l = _by_thread(gl.zeros([64, BN], gl.float32, S), False)
        if first < last:
            # the first key tile has no product to run beside
            j = gl.load(seg_ptr + 3 * first)
            slot = step % STAGES
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            k = k_ring.index(slot).reshape([BN, D]).permute([1, 0])
            s = warpgroup_mma(q, k, gl.zeros([64, BN], gl.float32, S), use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot))
            p, m, l, alpha = _softmax(s, m, l, unit, cap, first_row, j, mask_b, mask, Tq, Tk, True, NB, HAS_ROWS, SOFTCAP)  # fmt: skip # noqa: E501
            if EARLY:
                p = _operand(p, O, dtype)
            step += 1
            for i in range(first, last):
                begin = gl.load(seg_ptr + 3 * i)
                end = gl.load(seg_ptr + 3 * i + 1)
                kind = gl.load(seg_ptr + 3 * i + 2)
                begin += gl.where(i == first, BN, 0)
                # whole tiles of a FULL segment need no test
                plain = gl.where(kind == 2, begin + gl.maximum(end - begin, 0) // BN * BN, begin)
                for j in range(begin, plain, BN):
                    o, p, m, l, step = _step(EARLY, (o, p, m, l, step), q, smem, bars, unit, cap, first_row, j, mask_b, mask, Tq, Tk, D, BN, STAGES, False, NB, HAS_ROWS, SOFTCAP)  # fmt: skip # noqa: E501
                for j in range(plain, end, BN):
                    o, p, m, l, step = _step(EARLY, (o, p, m, l, step), q, smem, bars, unit, cap, first_row, j, mask_b, mask, Tq, Tk, D, BN, STAGES, True, NB, HAS_ROWS, SOFTCAP)  # fmt: skip # noqa: E501
            slot = (step - 1) % STAGES
            mbarrier.wait(v_full.index(slot), ((step - 1) // STAGES) & 1)
            mbarrier.arrive(q_empty)
            if not EARLY:
                p = _operand(p, O, dtype)
            o = warpgroup_mma(p, v_ring.index(slot).reshape([BN, D]), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_empty.index(slot))
        else:
            mbarrier.arrive(q_empty)
        l = gl.convert_layout(gl.sum(l, 1), R)
        # out [64, D] and lse [64]; a row without keys gives 0 and -inf, or its sink
        rows = first_row + gl.arange(0, 64, R)
        lse = gl.where(l > 0.0, m * factor + gl.log2(l), float("-inf"))
        inv = gl.where(l > 0.0, 1.0 / l, 0.0)
        if SINKS:
            sink = gl.load(sinks_ptr + h) * 1.4426950408889634
            top = gl.maximum(lse, sink)
            top = gl.where(top == float("-inf"), 0.0, top)
            both = top + gl.log2(gl.exp2(lse - top) + gl.exp2(sink - top))
            inv = gl.where(l > 0.0, inv * gl.exp2(lse - both), 0.0)
            lse = both
        gl.store(lse_ptr + (b.to(gl.int64) * Tq + rows) * Hq + h, lse * 0.6931471805599453, mask=rows < Tq)
        o = o * gl.expand_dims(gl.convert_layout(inv, gl.SliceLayout(1, O)), 1)
        o = o.to(dtype)
        rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, O))
        columns = gl.arange(0, D, gl.SliceLayout(0, O))
        base = o_ptr + b.to(gl.int64) * o_b + h.to(gl.int64) * o_h
        where = gl.expand_dims(rows.to(gl.int64) * o_t, 1) + gl.expand_dims(columns, 0)
        gl.store(base + where, o, mask=gl.expand_dims(rows < Tq, 1))
        round += 1
        mbarrier.wait(q_full, round & 1)
        b = _told(work.index(0))


@gluon.jit(do_not_specialize=["bands_b", "rows_b", "n_work", "n_tiles", "BH", "Hq", "G", "section", "Bm", "Tq", "Tk"])
def _forward(q_desc, k_desc, v_desc, o_ptr, o_b, o_t, o_h, lse_ptr, sinks_ptr, next_ptr, order_ptr, ptr_ptr, seg_ptr, bands_ptr, bands_b, row_lo_ptr, row_hi_ptr, rows_b, n_work, n_tiles, BH, Hq, G, section, Bm, Tq, Tk, unit, cap, D: gl.constexpr, BN: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, NB: gl.constexpr, HAS_ROWS: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr):  # fmt: skip # noqa: E501
    dtype: gl.constexpr = q_desc.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [NC, 1, 1, 64, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], v_desc.layout)
    work = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    mbarrier.init(q_full, 1)
    mbarrier.init(q_empty, NC)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(k_empty.index(i), NC)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(v_empty.index(i), NC)
    fence_async_shared()
    out = (o_ptr, o_b, o_t, o_h, lse_ptr, sinks_ptr, Tq, Tk)
    plan = (next_ptr, order_ptr, ptr_ptr, seg_ptr)
    read = (seg_ptr, Hq, Bm)
    sizes = (n_work, n_tiles, BH, Hq, G, section, Bm)
    mask = (bands_ptr, bands_b, row_lo_ptr, row_hi_ptr, rows_b)
    smem = (q_smem, k_ring, v_ring, work)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if NC == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, out, read, mask, smem, bars, unit, cap, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS)),
                (_consumer, (1, out, read, mask, smem, bars, unit, cap, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS)),
                (_producer, (q_desc, k_desc, v_desc, plan, sizes, smem, bars, D, BN, NC, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, out, read, mask, smem, bars, unit, cap, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS)),
                (_consumer, (1, out, read, mask, smem, bars, unit, cap, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS)),
                (_consumer, (2, out, read, mask, smem, bars, unit, cap, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS)),
                (_producer, (q_desc, k_desc, v_desc, plan, sizes, smem, bars, D, BN, NC, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def longest_first(ptr: Any, seg: Any, n_tiles: int, Bm: int) -> Any:
    """The tiles of every mask by falling number of visited keys, later tiles first among equals: int32 [Bm * n_tiles].

    ptr [Bm * n_tiles + 1] and seg [n, 3]: the host arrays of a plan.
    """
    total = np.concatenate([[0], np.cumsum(seg[:, 1].astype(np.int64) - seg[:, 0])])
    keys = (total[ptr[1:]] - total[ptr[:-1]]).reshape(Bm, n_tiles)
    return (n_tiles - 1 - np.argsort(-keys[:, ::-1], axis=1, kind="stable")).astype(np.int32).reshape(-1)


def declines(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bands: torch.Tensor) -> str:
    """Why these inputs are not served here, "" if they are."""
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; served are bfloat16 and float16, all alike"
    if q.shape[-1] not in TILES or v.shape[-1] != q.shape[-1]:
        return f"head sizes {q.shape[-1]} and {v.shape[-1]}; served are {sorted(TILES)}, equal"
    if not scale > 0.0:
        return f"scale {scale}; served are scales above 0, as the maximum is taken before scaling"
    if not 1 <= bands.shape[1] <= 4:
        return f"{bands.shape[1]} bands; served are 1 to 4"
    for name, x in (("q", q), ("k", k), ("v", v)):
        strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1]) if n > 1]
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s % 8 or s <= 0 for s in strides):
            return f"{name} has strides {x.stride()}; served are contiguous rows on 16-byte boundaries"
    return ""


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    # [B, H, T, D]: what is read beyond T is 0
    B, T, H, D = x.shape
    b, t, h, _ = (s if n > 1 else D for s, n in zip(x.stride(), x.shape))
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    return TensorDescriptor(x, [B, H, T, D], [b, h, t, 1], [1, 1, rows, D], layout)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, ptr: torch.Tensor, seg: torch.Tensor,
    order: torch.Tensor, n_tiles: int, Bm: int, bands: torch.Tensor, row_lo: torch.Tensor | None = None,
    row_hi: torch.Tensor | None = None, softcap: float = 0.0, sinks: torch.Tensor | None = None, out: torch.Tensor,
    lse: torch.Tensor, tiles: Tiles | None = None, grid: int = 0, section: int = 0,
) -> None:  # fmt: skip
    """o and lse of attention into out [B, Tq, Hq, D] and lse [B, Tq, Hq].

    q [B, Tq, Hq, D], k, v [B, Tk, Hk, D], bf16 or fp16, as `declines` allows; out of q's type, its rows contiguous.
    ptr, seg: the plan's segments for tiles of BM rows, in keys that are multiples of BN; order: `longest_first` of
    them. bands int32 [1 | B, NB, 8]; row_lo, row_hi int32 [1 | B, Tq]; sinks fp32 [Hq]; all on q's device.
    tiles, grid (CTAs) and section (query heads that run side by side) override what head size and device suggest.
    """
    B, Tq, Hq, D = q.shape
    Tk, Hk = k.shape[1], k.shape[2]
    BN, NC, stages = tiles or TILES[D]
    G, n_work = Hq // Hk, n_tiles * B * Hq
    section = section or min(max(1, L2_KEYS // (4 * D * Tk)) * G, B * Hq)
    grid = min(grid or _multiprocessors(q.device), n_work)
    rows = row_lo is not None
    unit = 2.0 * LOG2E * scale / softcap if softcap else scale * LOG2E
    _forward[(grid,)](
        _descriptor(q, 64), _descriptor(k, BN), _descriptor(v, BN), out, out.stride(0), out.stride(1), out.stride(2),
        lse, lse if sinks is None else sinks, torch.zeros(1, dtype=torch.int32, device=q.device), order, ptr, seg, bands, int(bands.shape[0] > 1),
        row_lo if rows else bands, row_hi if rows else bands, int(rows and row_lo.shape[0] > 1),
        n_work, n_tiles, B * Hq, Hq, G, section, Bm, Tq, Tk, unit, softcap * LOG2E,
        D=D, BN=BN, NC=NC, STAGES=stages, NB=bands.shape[1], HAS_ROWS=rows, SOFTCAP=softcap != 0.0,
        SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
