"""What the two forms of the Hopper backward share: constants, shared memory for inputs, and how they are loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_names import async_load
from .pipeline import Ring

LOG2E = gl.constexpr(1.4426950408889634)

# waits until the count of a row tile is this key tile's rank
AWAIT = gl.constexpr("""{
    .reg .pred p;
    again: ld.acquire.gpu.global.u32 $0, [$1];
    setp.ne.u32 p, $0, $2;
    @p bra again;
}""")


class Inputs(NamedTuple):
    """Descriptors of tiles: q, do of BM rows; k, v of BN keys; stat of BM rows, lse in base 2 and delta."""

    q: Any
    k: Any
    v: Any
    do: Any
    stat: Any


class SharedInputs(NamedTuple):
    """Inputs in shared memory.

    rows: a ring of row tiles (q, do, stat). q, do: [1, BM, 1, D | Dv]; stat: [2 BM]. k, v: [1, 1, BN, 1, D | Dv], with
    D padded to a power of two. kv_full: an mbarrier [1], which completes when k and v have arrived.
    """

    rows: Any
    k: Any
    v: Any
    kv_full: Any


class Config(NamedTuple):
    """Constants of the backward kernels.

    D, DV: numbers of a row of q and k, and of v. G: query heads per key head. NB: bands. LISTS_B, BANDS_B, ROWS_B:
    whether batch entries have lists, bands and row intervals of their own. BLOCKS: a tile may have 64 keys inside a
    block of the mask and 64 outside. ORDERED: dQ is added in a fixed order. WIDE: dk and dv are float32. ADDED:
    as in `staging.SumTile`.
    """

    STAGES: int
    D: int
    DV: int
    G: int
    NB: int
    LISTS_B: bool
    BANDS_B: bool
    ROWS_B: bool
    BLOCKS: bool
    ORDERED: bool
    WIDE: bool
    ADDED: bool


@gluon.jit
def pair_of_barriers(COUNT: gl.constexpr):
    """Two mbarriers [2, 1], for even and odd steps or key tiles."""
    pair = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for x in gl.static_range(2):
        mbarrier.init(pair.index(x), count=COUNT)
    return pair


@gluon.jit
def shared_inputs(inputs, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Allocate the `SharedInputs`; READERS: the arrivals that release a row tile."""
    q, k, v, do, stat = inputs
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_shape, q.layout)
    do_s = gl.allocate_shared_memory(q.dtype, [STAGES] + do.block_shape, do.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [1] + k.block_shape, k.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [1] + v.block_shape, v.layout)
    stat_s = gl.allocate_shared_memory(gl.float32, [STAGES] + stat.block_shape, stat.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    for x in gl.static_range(STAGES):
        mbarrier.init(full.index(x), count=1)
        mbarrier.init(empty.index(x), count=READERS)
    mbarrier.init(kv_full, count=1)
    return SharedInputs(Ring((q_s, do_s, stat_s), full, empty), k_s, v_s, kv_full)


@gluon.jit
def load_keys(inputs, block, shared):
    """One warp: load the K and V of a key tile."""
    k, v = inputs.k, inputs.v
    BN: gl.constexpr = k.block_shape[1]
    mbarrier.expect(shared.kv_full, k.block_type.nbytes + v.block_type.nbytes)
    async_load(k, [block.b, block.n * BN, block.hk, 0], shared.kv_full, shared.k.index(0))
    async_load(v, [block.b, block.n * BN, block.hk, 0], shared.kv_full, shared.v.index(0))


@gluon.jit
def load_rows(inputs, block, tile, shared, stage, sizes, G: gl.constexpr):
    """One warp: load q, dO, lse and delta of a row tile to a stage that `wait_empty` has found free."""
    q, do, stat = inputs.q, inputs.do, inputs.stat
    q_s, do_s, stat_s = shared.rows.tiles
    BM: gl.constexpr = q.block_shape[1]
    h = block.hk * G + tile.g
    full = shared.rows.full.index(stage)
    mbarrier.expect(full, q.block_type.nbytes + do.block_type.nbytes + stat.block_type.nbytes)
    async_load(q, [block.b, tile.m * BM, h, 0], full, q_s.index(stage))
    async_load(stat, [((block.b * sizes.Hk * G + h) * sizes.M + tile.m) * 2 * BM], full, stat_s.index(stage))
    async_load(do, [block.b, tile.m * BM, h, 0], full, do_s.index(stage))


@gluon.jit
def store_float32(out, x, at, sizes, D: gl.constexpr):
    """Store x, the dk or dv of keys, in a float32 array: it does not fit into the space of k and v.

    at: the batch entry, the first key and the key head. D: the numbers of a row of `out`, of which x may be a part;
    further columns of x are zeros.
    """
    b, first, hk = at
    keys = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    row = (b.to(gl.int64) * sizes.Tk + keys) * sizes.Hk + hk
    columns = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)), 0)
    stored = gl.expand_dims(keys < sizes.Tk, 1)
    if x.shape[1] > D:
        stored &= columns < D
    gl.store(out + gl.expand_dims(row * D, 1) + columns, x, mask=stored)
