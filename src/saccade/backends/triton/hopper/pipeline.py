"""Rings of tiles in shared memory: one warp copies tiles into them, and warpgroups compute with them.

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
