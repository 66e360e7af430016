"""Launching kernels and allocating what they need besides results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import tiles

# the tile of kernels that read each number once
SMALL = tiles.Tile(32, 0, 4, 1)


class Launches:
    """Launches kernels and allocates scratch; replay.py replaces it to record both."""

    def run(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        """Launch a kernel over a grid; returns the compiled kernel.

        Products and sums are fused on every version: Triton 3.9 warns that its default will change.
        """
        return kernel[grid](*args, enable_fp_fusion=True, **options)

    def start(self, kernel: Any, grid: int, *args: Any, tile: tiles.Tile, **constants: Any) -> Any:
        """Launch a kernel over a 1-d grid."""
        return self.run(kernel, (grid,), *args, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages)

    def scratch(self, *shape: int, like: Tensor, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
        """An array that a call needs besides its results, on the device of `like`."""
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=like.device)


PLAIN = Launches()
