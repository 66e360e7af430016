"""Partial results on a GPU folded in place, one read and one write for what `saccade.merge` passes over many times."""

from __future__ import annotations

from torch import Tensor

from .chip import on
from .kernels import fold as kernels_fold
from .launch import PLAIN, SMALL
from .tiles import block


def fold(o: Tensor, lse: Tensor, more_o: Tensor, more_lse: Tensor) -> None:
    """Fold (more_o, more_lse) into o [B, T, H, Dv] and lse [B, T, H], float32; rows of each batch entry contiguous."""
    B, T, H, Dv = o.shape
    if not o.numel():
        return
    given = o, lse, more_o, more_lse
    with on(o):
        PLAIN.run(
            kernels_fold.fold, (-(-T * H // SMALL.BM), B), *given, *(x.stride(0) for x in given), T * H,
            DV=Dv, BLOCK_DV=block(Dv), BM=SMALL.BM, num_warps=SMALL.num_warps,
        )  # fmt: skip
