"""What the two forms of the Hopper backward share: shared memory, constants, and the warp that loads."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_names import async_load
from .pipeline import wait_empty
from .tile_scheduler import first_tile, next_tile

LOG2E = gl.constexpr(1.4426950408889634)

# waits until the count of a row tile is this key tile's rank
AWAIT = gl.constexpr("""{
    .reg .pred p;
    again: ld.acquire.gpu.global.u32 $0, [$1];
    setp.ne.u32 p, $0, $2;
    @p bra again;
}""")


class BackwardPipeline(NamedTuple):
    """Shared memory of a CTA.

    rows: a ring of row tiles (q, do, stat). q, do: [1, BM, 1, D | Dv]; stat: [2 BM], lse in base 2 and delta. k, v:
    [1, 1, BN, 1, D | Dv], with D padded to a power of two, loaded when kv_full completes. ds: [1 | 2, BN, BM].
    may_add, added: mbarriers [2, 1], for even and odd steps, between the warps that compute and the two that keep the
    order. p: [1, BN, BM], by columns only.
    By keys only: dq [2, BM, D] float32; ds_full, ds_free: mbarriers [2, 1]; done: an mbarrier [1].
    """

    rows: Any
    k: Any
    v: Any
    kv_full: Any
    ds: Any
    may_add: Any
    added: Any
    p: Any = None
    dq: Any = None
    ds_full: Any = None
    ds_free: Any = None
    done: Any = None


class Config(NamedTuple):
    """Constants of the backward kernel.

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
def store_float32(out, x, first, block, Tk, G: gl.constexpr, D: gl.constexpr):
    """Store x, the dk or dv of keys from `first` on, in a float32 array: it does not fit into the space of k and v.

    D: the numbers of a row of `out`, of which x may be a part; further columns of x are zeros.
    """
    keys = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    row = (block.b.to(gl.int64) * Tk + keys) * (block.Hq // G) + block.hk
    columns = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)), 0)
    stored = gl.expand_dims(keys < Tk, 1)
    if x.shape[1] > D:
        stored &= columns < D
    gl.store(out + gl.expand_dims(row * D, 1) + columns, x, mask=stored)


@gluon.jit
def load(inputs, block, schedule, pipeline, EXTRA: gl.constexpr, CONFIG: gl.constexpr):
    """One warp: loads K and V once, then Q, dO, lse and delta of every step and of EXTRA more, which are not used."""
    q, k, v, do, stat = inputs
    rows = pipeline.rows
    q_s, do_s, stat_s = rows.tiles
    BM: gl.constexpr = q.block_shape[1]
    BN: gl.constexpr = k.block_shape[1]
    mbarrier.expect(pipeline.kv_full, k.block_type.nbytes + v.block_type.nbytes)
    async_load(k, [block.b, block.n * BN, block.hk, 0], pipeline.kv_full, pipeline.k.index(0))
    async_load(v, [block.b, block.n * BN, block.hk, 0], pipeline.kv_full, pipeline.v.index(0))
    tile, steps = first_tile(block, schedule, CONFIG.G, not CONFIG.ORDERED, 1)
    for i in range(steps + EXTRA):
        h = block.hk * CONFIG.G + tile.g
        stage = wait_empty(rows, i)
        full = rows.full.index(stage)
        mbarrier.expect(full, q.block_type.nbytes + do.block_type.nbytes + stat.block_type.nbytes)
        async_load(q, [block.b, tile.m * BM, h, 0], full, q_s.index(stage))
        at = ((block.b * block.Hq + h) * block.M + tile.m) * 2 * BM
        async_load(stat, [at], full, stat_s.index(stage))
        async_load(do, [block.b, tile.m * BM, h, 0], full, do_s.index(stage))
        tile = next_tile(tile, not CONFIG.ORDERED)
