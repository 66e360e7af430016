"""The forward of exact attention on Hopper: one warp that copies, one to three warpgroups that multiply.

A tile of BM = 64 · NC query rows of one head is one piece of work; a persistent grid draws pieces from a counter,
longest first. A producer warp walks the tile's segments of keys and copies Q once and K and V tile by tile into rings
of shared memory (TMA; mbarriers full and empty), of Q too where there is room: then the next piece begins at once.
Every consumer warpgroup owns 64 rows: S = Q Kᵀ of key tile j is issued before O += P V of key tile j - 1, and the
softmax of j runs while the tensor cores still add j - 1. P stays in registers: it is the first operand of the second
product.

8-bit floats (e4m3) come with factors of q k and of v. Their products sum over neighbours in memory alone,
so V is turned before, by `staging.turn`, its keys in the order in which P lies in registers.
"""

from __future__ import annotations

import math

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

from ..chip import multiprocessors
from ..launch import PLAIN, Launches
from .masking import place_of
from .softmax import after_softmax, by_thread, finish, softmax
from .staging import turn
from .tiles import Tiles, descriptor, section_of, tiled, tiles_of

LOG2E = math.log2(math.e)


@gluon.constexpr_function
def _product(dtype: gl.dtype, n: int) -> gl.NVMMADistributedLayout:
    # sums of a warpgroup, [64, n]; a step of a product takes 32 bytes of its operands
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 256 // dtype.primitive_bitwidth])


@gluon.constexpr_function
def _lift(dtype: gl.dtype) -> float:
    # log2 of the largest weight: e4m3 has few numbers below 2^-6
    return 8.0 if dtype.primitive_bitwidth == 8 else 0.0


@gluon.jit
def _place(w, order_ptr, n_tiles, long, BH, Hq, section, Bm):
    # the long tiles of all heads, then sections of heads whose keys share the L2 cache: in each the longest tiles first
    start = 0
    if w < long * BH:
        section = BH
    else:
        start = long
        w -= long * BH
    per = section * (n_tiles - start)
    first = (w // per) * section
    inside = gl.minimum(section, BH - first)
    rest = w % per
    bh = first + rest % inside
    b = bh // Hq
    mask_b = gl.where(Bm > 1, b, 0)
    tile = gl.load(order_ptr + mask_b * n_tiles + start + rest // inside)
    return b, bh % Hq, mask_b, tile


@gluon.jit
def _tell(slot, value):
    slot.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _told(slot):
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _copy_tile(
    desc, b, h, row, ring, full, empty, step, BYTES: gl.constexpr, STAGES: gl.constexpr, TURNED: gl.constexpr
):  # fmt: skip
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    if TURNED:
        tma.async_copy_global_to_shared(desc, [b, h, 0, row], full.index(slot), ring.index(slot))
    else:
        tma.async_copy_global_to_shared(desc, [b, h, row, 0], full.index(slot), ring.index(slot))


@gluon.jit
def _producer(
    descs, plan, sizes, smem, bars,
    D: gl.constexpr, BN: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, QS: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc = descs
    next_ptr, order_ptr, ptr_ptr, seg_ptr = plan
    n_work, n_tiles, long, BH, Hq, G, section, Bm = sizes
    q_smem, k_ring, v_ring, work = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    WIDTH: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = BN * D * WIDTH
    step = 0
    turn = 0
    w = gl.program_id(0)
    while w < n_work:
        # the next piece of work, where there are more than programs, is drawn while this one is copied
        after = n_work
        if n_work > gl.num_programs(0):
            after = gl.atomic_add(next_ptr, 1) + gl.num_programs(0)
        b, h, mask_b, tile = _place(w, order_ptr, n_tiles, long, BH, Hq, section, Bm)
        first = gl.load(ptr_ptr + mask_b * n_tiles + tile)
        last = gl.load(ptr_ptr + mask_b * n_tiles + tile + 1)
        slot = turn % QS
        told = 8 * slot
        mbarrier.wait(q_empty.index(slot), ((turn // QS) & 1) ^ 1)
        _tell(work.index(told), b)
        _tell(work.index(told + 1), h)
        _tell(work.index(told + 2), tile)
        _tell(work.index(told + 3), first)
        _tell(work.index(told + 4), last)
        for c in gl.static_range(3):
            _tell(work.index(told + 5 + c), gl.load(seg_ptr + 3 * first + c, mask=first < last, other=0))
        gl.thread_barrier()
        full = q_full.index(slot)
        mbarrier.expect(full, NC * 64 * D * WIDTH)
        for c in gl.static_range(NC):
            tma.async_copy_global_to_shared(q_desc, [b, h, (tile * NC + c) * 64, 0], full, q_smem.index(slot * NC + c))
        turn += 1
        # V lags one tile behind K, as its consumers do
        before = -1
        for i in range(first, last):
            begin = gl.load(seg_ptr + 3 * i)
            end = gl.load(seg_ptr + 3 * i + 1)
            for j in range(begin, end, BN):
                _copy_tile(k_desc, b, h // G, j, k_ring, k_full, k_empty, step, BYTES, STAGES, False)
                if before >= 0:
                    _copy_tile(v_desc, b, h // G, before, v_ring, v_full, v_empty, step - 1, BYTES, STAGES, WIDTH == 1)
                before = j
                step += 1
        if before >= 0:
            _copy_tile(v_desc, b, h // G, before, v_ring, v_full, v_empty, step - 1, BYTES, STAGES, WIDTH == 1)
        w = after
    slot = turn % QS
    mbarrier.wait(q_empty.index(slot), ((turn // QS) & 1) ^ 1)
    _tell(work.index(8 * slot), -1)
    gl.thread_barrier()
    mbarrier.arrive(q_full.index(slot))


@gluon.jit
def _operand(p, layout: gl.constexpr, dtype: gl.constexpr):
    # p as the first operand of a product: every thread keeps its elements
    p = p.to(dtype)
    if dtype.primitive_bitwidth == 8:
        # of 16 keys a thread has two pairs, and as an operand four neighbours
        BN: gl.constexpr = p.shape[1]
        p = gl.reshape(gl.permute(gl.reshape(p, [64, BN // 16, 2, 4, 2]), [0, 1, 3, 2, 4]), [64, BN])
    return gl.convert_layout(p, gl.DotOperandLayout(0, layout, 32 // dtype.primitive_bitwidth))


@gluon.jit
def _scores(q, k_ring, k_full, step, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    S: gl.constexpr = _product(q.dtype, BN)
    slot = step % STAGES
    mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
    k = k_ring.index(slot).reshape([BN, D]).permute([1, 0])
    return warpgroup_mma(q, k, gl.zeros([64, BN], gl.float32, S), use_acc=False, is_async=True)


@gluon.jit
def _weighted(p, o, v_ring, v_full, step, D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    slot = step % STAGES
    mbarrier.wait(v_full.index(slot), (step // STAGES) & 1)
    if v_ring.dtype.primitive_bitwidth == 8:
        return warpgroup_mma(p, v_ring.index(slot).reshape([D, BN]).permute([1, 0]), o, is_async=True)
    else:
        return warpgroup_mma(p, v_ring.index(slot).reshape([BN, D]), o, is_async=True)


@gluon.jit
def _step(
    state, j, test: gl.constexpr, kind, q, smem, bars, place, mask, factors, EARLY: gl.constexpr, D: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, NB: gl.constexpr, HAS_ROWS: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    # the scores and the softmax of key tile j beside the product of the tile before it
    o, p, m, l, step = state
    _, k_ring, v_ring, _ = smem
    _, _, k_full, k_empty, v_full, v_empty = bars
    O: gl.constexpr = o.type.layout
    if not EARLY:
        p = _operand(p, O, q.dtype)
    s = _scores(q, k_ring, k_full, step, D, BN, STAGES)
    o = _weighted(p, o, v_ring, v_full, step - 1, D, BN, STAGES)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(step % STAGES))
    p, m, l, alpha = softmax(s, m, l, j, test, kind, place, mask, factors, NB, HAS_ROWS, SOFTCAP, _lift(q.dtype))
    l = after_softmax(l)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_empty.index((step - 1) % STAGES))
    o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O)), 1)
    if EARLY:
        p = _operand(p, O, q.dtype)
    return o, p, m, l, step + 1


@gluon.jit
def _consumer(
    which: gl.constexpr, data, D: gl.constexpr, BN: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr,
    NB: gl.constexpr, HAS_ROWS: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, QS: gl.constexpr,
):  # fmt: skip
    # rows [64 · which, 64 · which + 64) of every tile that the producer tells of
    out, seg_ptr, Bm, mask, smem, bars, units = data
    unit, cap, descale_ptr, BH, Hq = units
    q_smem, k_ring, v_ring, work = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S: gl.constexpr = _product(q_smem.dtype, BN)
    O: gl.constexpr = _product(q_smem.dtype, D)
    R: gl.constexpr = gl.SliceLayout(1, S)
    # three warpgroups have too few registers to hold p in fp32 beside the next scores: rounded at once there
    EARLY: gl.constexpr = NC == 3
    step = 0
    turn = 0
    mbarrier.wait(q_full.index(0), 0)
    b = _told(work.index(0))
    while b >= 0:
        slot = turn % QS
        told = 8 * slot
        q = q_smem.index(slot * NC + which).reshape([64, D])
        h = _told(work.index(told + 1))
        tile = _told(work.index(told + 2))
        first = _told(work.index(told + 3))
        last = _told(work.index(told + 4))
        first_row = (tile * NC + which) * 64
        place = place_of(first_row, gl.where(Bm > 1, b, 0), mask, NB, HAS_ROWS)
        if q.dtype.primitive_bitwidth == 8:
            # of q k, and behind those of all heads of v
            at = descale_ptr + b * Hq + h
            factors = (unit * gl.load(at), cap, gl.load(at + BH))
        else:
            factors = (unit, cap, 1.0)
        o = gl.zeros([64, D], gl.float32, O)
        m = gl.full([64], float("-inf"), gl.float32, R)
        l = by_thread(gl.zeros([64, BN], gl.float32, S), False)
        if first < last:
            # the first key tile has no product to run beside
            j = _told(work.index(told + 5))
            kind = _told(work.index(told + 7))
            test = (kind != 2) | (_told(work.index(told + 6)) - j < BN)
            s = _scores(q, k_ring, k_full, step, D, BN, STAGES)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(step % STAGES))
            p, m, l, _ = softmax(s, m, l, j, test, kind, place, mask, factors, NB, HAS_ROWS, SOFTCAP, _lift(q.dtype))
            if EARLY:
                p = _operand(p, O, q.dtype)
            step += 1
            for i in range(first, last):
                begin = gl.load(seg_ptr + 3 * i) + gl.where(i == first, BN, 0)
                end = gl.load(seg_ptr + 3 * i + 1)
                kind = gl.load(seg_ptr + 3 * i + 2)
                # whole tiles of a FULL segment need no test
                plain = gl.where(kind == 2, begin + gl.maximum(end - begin, 0) // BN * BN, begin)
                for j in range(begin, plain, BN):
                    o, p, m, l, step = _step(
                        (o, p, m, l, step), j, False, kind, q, smem, bars, place, mask, factors,
                        EARLY, D, BN, STAGES, NB, HAS_ROWS, SOFTCAP,
                    )  # fmt: skip
                for j in range(plain, end, BN):
                    o, p, m, l, step = _step(
                        (o, p, m, l, step), j, True, kind, q, smem, bars, place, mask, factors,
                        EARLY, D, BN, STAGES, NB, HAS_ROWS, SOFTCAP,
                    )  # fmt: skip
            mbarrier.arrive(q_empty.index(slot))
            if not EARLY:
                p = _operand(p, O, q.dtype)
            o = _weighted(p, o, v_ring, v_full, step - 1, D, BN, STAGES)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_empty.index((step - 1) % STAGES))
        else:
            mbarrier.arrive(q_empty.index(slot))
        finish(o, m, l, (b, h, first_row), out, factors, D, SOFTCAP, SINKS, _lift(q.dtype))
        turn += 1
        slot = turn % QS
        mbarrier.wait(q_full.index(slot), (turn // QS) & 1)
        b = _told(work.index(8 * slot))


NUMBERS = ["bands_b", "rows_b", "n_work", "n_tiles", "long", "BH", "Hq", "G", "section", "Bm", "Tq", "Tk"]


@gluon.jit(do_not_specialize=NUMBERS)
def _forward(
    q_desc, k_desc, v_desc, o_ptr, o_b, o_t, o_h, lse_ptr, sinks_ptr, next_ptr, order_ptr, ptr_ptr, seg_ptr,
    bands_ptr, bands_b, row_lo_ptr, row_hi_ptr, rows_b, n_work, n_tiles, long, BH, Hq, G, section, Bm, Tq, Tk, unit,
    cap, descale_ptr, D: gl.constexpr, BN: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr, NB: gl.constexpr,
    HAS_ROWS: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, QS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [QS * NC, 1, 1, 64, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k_desc.layout)
    turned: gl.constexpr = dtype.primitive_bitwidth == 8
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, D, BN] if turned else [STAGES, 1, 1, BN, D], v_desc.layout)
    # the tile at work: b, h, tile, its segments [first, last), and begin, end and kind of the first
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
    out = (o_ptr, o_b, o_t, o_h, lse_ptr, sinks_ptr, Tq, Hq)
    plan = (next_ptr, order_ptr, ptr_ptr, seg_ptr)
    sizes = (n_work, n_tiles, long, BH, Hq, G, section, Bm)
    mask = (bands_ptr, bands_b, row_lo_ptr, row_hi_ptr, rows_b, Tq, Tk)
    smem = (q_smem, k_ring, v_ring, work)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    data = (out, seg_ptr, Bm, mask, smem, bars, (unit, cap, descale_ptr, BH, Hq))
    # 65536 registers, or half of them where two CTAs share a multiprocessor: 240, 160 or 232 for a consumer's thread
    if NC == 1:
        gl.warp_specialize(
            [
                (_consumer, (0, data, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS, QS)),
                (_producer, ((q_desc, k_desc, v_desc), plan, sizes, smem, bars, D, BN, NC, STAGES, QS)),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif NC == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, data, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS, QS)),
                (_consumer, (1, data, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS, QS)),
                (_producer, ((q_desc, k_desc, v_desc), plan, sizes, smem, bars, D, BN, NC, STAGES, QS)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, data, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS, QS)),
                (_consumer, (1, data, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS, QS)),
                (_consumer, (2, data, D, BN, NC, STAGES, NB, HAS_ROWS, SOFTCAP, SINKS, QS)),
                (_producer, ((q_desc, k_desc, v_desc), plan, sizes, smem, bars, D, BN, NC, STAGES, QS)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, ptr: torch.Tensor, seg: torch.Tensor,
    order: torch.Tensor, n_tiles: int, long: int = 0, Bm: int, bands: torch.Tensor, row_lo: torch.Tensor | None = None,
    row_hi: torch.Tensor | None = None, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    descale: torch.Tensor | None = None, out: torch.Tensor, lse: torch.Tensor, tiles: Tiles | None = None,
    grid: int = 0, section: int = 0, launches: Launches = PLAIN,
) -> None:  # fmt: skip
    """o and lse of attention into out [B, Tq, Hq, D] and lse [B, Tq, Hq].

    q [B, Tq, Hq, D], k, v [B, Tk, Hk, D], bf16, fp16 or e4m3, as `fits` allows; out of q's type, or bf16 beside e4m3,
    its rows contiguous. ptr, seg: the plan's segments for tiles of BM rows, in keys that are multiples of BN; order:
    `longest_first` of them, the first `long` of all heads before the others. bands int32 [1 | B, NB, 8]; row_lo, row_hi
    int32 [1 | B, Tq]; sinks fp32 [Hq]; descale fp32 [2, B, Hq], the factors of q k and of v; all on q's device. tiles,
    grid (CTAs) and section (query heads that run side by side) override what head size and device suggest.
    """
    (B, Tq, Hq, D), (_, Tk, Hk, _) = q.shape, k.shape
    BN, NC, stages, QS = tiles or tiles_of(q.dtype, D)
    G, n_work = Hq // Hk, n_tiles * B * Hq
    section = section or section_of(Tk, D, G, B * Hq)
    # one warpgroup alone leaves room for a second CTA, whose products run beside its softmax
    ctas = 2 if NC == 1 else 1
    grid = min(grid or ctas * multiprocessors(str(q.device)), n_work)
    rows = row_lo is not None
    unit = 2.0 * LOG2E * scale / softcap if softcap else scale * LOG2E
    counter = launches.scratch(1, like=q, dtype=torch.int32, zero=True) if n_work > grid else order
    v_tiles = descriptor(v, BN) if descale is None else across(v, BN, launches)
    launches.run(
        _forward, (grid,), descriptor(q, 64), descriptor(k, BN), v_tiles, out, *out.stride()[:3],
        lse, lse if sinks is None else sinks, counter, order, ptr, seg, bands, int(bands.shape[0] > 1),
        row_lo if rows else bands, row_hi if rows else bands, int(rows and row_lo.shape[0] > 1),
        n_work, n_tiles, long, B * Hq, Hq, G, section, Bm, Tq, Tk, unit, softcap * LOG2E,
        lse if descale is None else descale,
        D=D, BN=BN, NC=NC, STAGES=stages, NB=bands.shape[1], HAS_ROWS=rows, SOFTCAP=softcap != 0.0,
        SINKS=sinks is not None, QS=QS, num_warps=4, maxnreg=128 if NC == 1 else None,
    )  # fmt: skip


def across(v: torch.Tensor, BN: int, launches: Launches) -> TensorDescriptor:
    """v [B, Tk, Hk, D] of 8-bit floats as tiles [D, BN] of [B, Hk, D, keys], the keys as `turn` orders them."""
    B, Tk, Hk, D = v.shape
    n = -(-Tk // BN)
    made = launches.scratch(B, Hk, D, n * BN, like=v, dtype=v.dtype)
    b, t, h, _ = v.stride()
    bits = v.view(torch.uint8), made.view(torch.uint8)
    launches.run(turn, (n, Hk, B), *bits, b, t, h, Hk, Tk, D=D, BN=BN, num_warps=4)
    return tiled(made, [D, BN])
