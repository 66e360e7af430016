"""Tile sizes and tensor descriptors of the Hopper kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....mask.forms import Grid

# bytes of the L2 cache for the keys and values of a section of heads
L2_KEYS = 32 << 20


class Tiles(NamedTuple):
    """BN: keys of a tile. NC: consumer warpgroups, 1 to 3, of 64 rows each; with one, two CTAs share a multiprocessor.

    stages, q_stages: depths of the rings of K and V, and of Q. every: of 8-bit floats, the key tiles whose products the
    tensor cores add, with 13 bits after the point, before their sum is added in float32; 0 for 16-bit floats.
    pieces: arrays in which a row of q or k lies, because the columns of an array are a power of two.
    stored: the numbers of a row of v where its array has more columns, else 0.
    """

    BN: int
    NC: int
    stages: int
    q_stages: int
    every: int = 0
    pieces: int = 1
    stored: int = 0

    @property
    def BM(self) -> int:
        """Query rows of a tile."""
        return 64 * self.NC


# per head size, for 16-bit floats and for 8-bit floats; the registers have no room for two sums of 256 columns
TILES = {
    64: Tiles(128, 3, 2, 2),
    128: Tiles(128, 2, 2, 2),
    192: Tiles(128, 2, 2, 1, pieces=3),
    256: Tiles(64, 2, 2, 1),
}
TILES_8 = {64: Tiles(128, 2, 4, 2, every=1), 128: Tiles(64, 2, 4, 2, every=1)}
# for masks whose blocks do not contain these tiles: first for blocks of 128, then of 64
IN_BLOCKS = {
    64: (Tiles(128, 2, 4, 2), Tiles(64, 1, 4, 2)),
    128: (Tiles(64, 1, 2, 2),),
    192: (Tiles(64, 1, 2, 1, pieces=3),),
    256: (),
}


def known_tiles(dtype: torch.dtype, D: int) -> tuple[Tiles, ...]:
    """The known tiles of the forward: first those of dense masks, then ever smaller ones for blocks."""
    return (TILES_8[D],) if dtype.itemsize == 1 and D in TILES_8 else (TILES[D], *IN_BLOCKS[D])


def tiles_of(dtype: torch.dtype, D: int, grids: Iterable[Grid] = ()) -> Tiles | None:
    """The first of `known_tiles` that lie inside one block of every grid; None if no tiles do."""
    for x in known_tiles(dtype, D):
        if all(not (g.block_q % x.BM or g.block_k % x.BN) for g in grids):
            return x
    return None


def descriptor(x: torch.Tensor, rows: int, pieces: int = 1, columns: int = 0) -> TensorDescriptor:
    """Tiles of `rows` rows of x [B, T, H, D], addressed (b, h, t, column); reads beyond T and D return 0.

    columns: of a tile; by default 64 if there are several pieces, and otherwise all, padded to a power of two.
    """
    B, T, H, D = x.shape
    b, t, h, _ = (s if n > 1 else D for s, n in zip(x.stride(), x.shape, strict=True))
    columns = columns or (64 if pieces > 1 else padded(D))
    return TensorDescriptor(x, [B, H, T, D], [b, h, t, 1], [1, 1, rows, columns], _layout(x, columns))


def padded(D: int) -> int:
    """The power of two that is at least D."""
    return 1 << (D - 1).bit_length()


def tiled(x: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    """Tiles of the last two axes of a contiguous x [B, H, n, m], addressed by all four."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, *tile], _layout(x, tile[1]))


def _layout(x: torch.Tensor, width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(min(128, width * x.element_size()), 8 * x.element_size(), rank=4)


def section_of(Tk: int, D: int, G: int, heads: int) -> int:
    """Query heads computed together: whole groups of G, as many as keep their keys and values in the L2 cache."""
    return min(max(1, L2_KEYS // (4 * D * Tk)) * G, heads)
