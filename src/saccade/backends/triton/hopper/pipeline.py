"""Rings of tiles in shared memory, and turns: one warp copies tiles, and warpgroups take turns at multiplying them.

The tile of step n is in stage n % DEPTH.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Ring(NamedTuple):
    """Tiles in shared memory and the barriers of their stages.

    tiles: [DEPTH or a multiple, ...], or several such arrays that are filled together. full, empty: mbarriers
    [DEPTH, 1]. full completes when the tiles of a stage have arrived, empty when all readers have released them.
    """

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def write_number(slot, number):
    """Write an int32 to shared memory [1], by one warp."""
    slot.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_number(slot, WARPS: gl.constexpr):
    """Read an int32 from shared memory [1], in every thread of so many warps."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def wait_empty(ring, step):
    """The stage of a step, once its readers have released it."""
    DEPTH: gl.constexpr = ring.empty.shape[0]
    mbarrier.wait(ring.empty.index(step % DEPTH), ((step // DEPTH) & 1) ^ 1)
    return step % DEPTH


@gluon.jit
def wait_full(ring, step):
    """The stage of a step, once its tiles have arrived."""
    DEPTH: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(step % DEPTH), (step // DEPTH) & 1)
    return step % DEPTH


@gluon.jit
def release(ring, step):
    """Return the stage of a step to the warp that copies."""
    mbarrier.arrive(ring.empty.index(step % ring.empty.shape[0]))


@gluon.constexpr_function
def _turn_asm(verb: str, which: int) -> str:
    # barriers below 8 are Triton's; 256 threads: the warpgroup whose turn it is, and the one before it
    return f"bar.{verb} {8 + which}, 256; mov.u32 $0, $1;"


@gluon.jit
def take_turn(which: gl.constexpr, step):
    """Wait until the warpgroup before `which` has issued its products."""
    asm: gl.constexpr = _turn_asm("sync", which)
    gl.inline_asm_elementwise(asm, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(which: gl.constexpr, step):
    """Let warpgroup `which` issue its products. Every turn is passed and taken once per key tile, so none is lost."""
    asm: gl.constexpr = _turn_asm("arrive", which)
    gl.inline_asm_elementwise(asm, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def skip(which: gl.constexpr, step, n, pipeline, TURNS: gl.constexpr, NC: gl.constexpr):
    """The step behind n key tiles that no row of warpgroup `which` sees; it releases them, and passes its turns."""
    for _ in range(n):
        if TURNS:
            take_turn(which, step)
            pass_turn((which + 1) % NC, step)
        wait_full(pipeline.k, step)
        release(pipeline.k, step)
        wait_full(pipeline.v, step)
        release(pipeline.v, step)
        step += 1
    return step
