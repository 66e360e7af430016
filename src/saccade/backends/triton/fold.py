"""Merging partial results in place on a GPU: one read and one write, where `saccade.merge` makes several passes."""

from __future__ import annotations

from torch import Tensor

from .chip import on
from .kernels import fold as kernels_fold
from .kernels.fold import Partial
from .kernels.rows import Blocks
from .launches import PLAIN, SMALL
from .tiles import block


def fold(o: Tensor, lse: Tensor, more_o: Tensor, more_lse: Tensor) -> None:
    """Merge (more_o, more_lse) into o [B, T, H, Dv] and lse [B, T, H], float32; each batch entry must be contiguous."""
    B, T, H, Dv = o.shape
    if not o.numel():
        return
    x, y = (Partial(a, b, a.stride(0), b.stride(0)) for a, b in ((o, lse), (more_o, more_lse)))
    grid, blocks = (-(-T * H // SMALL.BM) * B,), Blocks(Dv, block(Dv), SMALL.BM)
    with on(o):
        PLAIN.run(kernels_fold.fold, grid, x, y, T * H, blocks, num_warps=SMALL.num_warps)
