"""Tile sizes, order of work and tensor descriptors of the Hopper kernels, and what they decline."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# bytes of keys and values that the heads of one section may take of the L2 cache
L2_KEYS = 32 << 20


class Tiles(NamedTuple):
    """BN: keys of a tile. NC: consumer warpgroups, 2 or 3, of 64 rows each. stages: depth of the K and V rings."""

    BN: int
    NC: int
    stages: int

    @property
    def BM(self) -> int:
        """Query rows of a tile."""
        return 64 * self.NC


# by head size
TILES = {64: Tiles(128, 3, 2), 128: Tiles(128, 2, 2), 256: Tiles(64, 2, 2)}


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
        strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s % 8 or s <= 0 for s in strides):
            return f"{name} has strides {x.stride()}; served are contiguous rows on 16-byte boundaries"
    return ""


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of x [B, T, H, D], addressed (b, h, t, 0); what is read beyond T is 0."""
    B, T, H, D = x.shape
    b, t, h, _ = (s if n > 1 else D for s, n in zip(x.stride(), x.shape, strict=True))
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    return TensorDescriptor(x, [B, H, T, D], [b, h, t, 1], [1, 1, rows, D], layout)


def section_of(Tk: int, D: int, G: int, heads: int) -> int:
    """Query heads that run side by side: whole groups of G, as many as keep their keys and values in the L2 cache."""
    return min(max(1, L2_KEYS // (4 * D * Tk)) * G, heads)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
