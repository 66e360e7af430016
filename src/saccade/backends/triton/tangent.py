"""The verb of forward-mode derivatives: one grid per part of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import Unsupported
from ...plan import Plan
from ...problem import Problem
from .. import Inputs
from . import tiles
from .chip import on
from .kernels.rows import Array
from .kernels.tangent import Moved, Sums
from .kernels.tangent import tangent as kernel
from .launch import AttentionLaunch
from .stored import array

# a tangent of zero
ZERO = Array(None, None, None, None)


def tangent(
    problem: Problem, plan: Plan, inputs: Inputs, o: Tensor, lse: Tensor, tangents: Inputs
) -> tuple[Tensor, Tensor]:
    """(do [B, Tq, Hq, Dv] in the inputs' dtype, dlse [B, Tq, Hq] float32); P V is computed again, because o is rounded.

    Raises Unsupported for heads of q larger than one product takes.
    """
    if problem.D > tiles.WIDEST:
        raise Unsupported("triton", [f"the head size is D = {problem.D}: tangents have at most {tiles.WIDEST}"])
    # the results of several parts are added in float32
    do = torch.empty(o.shape, dtype=torch.float32 if len(plan.parts) > 1 else o.dtype, device=o.device)
    dlse = torch.empty_like(lse, memory_format=torch.contiguous_format)
    if dlse.numel():
        with on(o):
            _launch(AttentionLaunch(problem, plan, inputs), lse.contiguous(), tangents, do, dlse)
    return do.to(o.dtype), dlse


def _launch(call: AttentionLaunch, lse: Tensor, tangents: Inputs, do: Tensor, dlse: Tensor) -> None:
    last, (q, k, v, extras) = len(call.plan.parts) - 1, tangents
    if call.order is not None:
        k, v = (None if x is None else x.index_select(1, call.order.there) for x in (k, v))
    sums = Sums(array(do), dlse)
    if last:
        weighted, rows = call.scratch(*do.shape, like=do), call.scratch(3, *lse.shape, like=lse)
        sums = sums._replace(weighted=array(weighted), rows=rows)
    of_q, of_k, of_v = (ZERO if x is None else array(x) for x in (q, k, v))
    moved = Moved(of_q, of_k, of_v, call.linear(extras), sums)
    for n in range(last + 1):
        tile, at, programs = call.row_tiles("dq", n)
        # the four tiles of keys and values, twice as many as in a backward, have no room for a pipeline
        tile = tile._replace(BN=min(tile.BN, 16 if call.problem.Dv > 128 else 32), num_warps=8, num_stages=1)
        arrays = call.arrays._replace(words=at.words, lse=lse)
        args = arrays, moved, call.scores_of(n), *call.drop, call.config(tile, at.mask, ADD=n > 0, LAST=n == last)
        call.start(kernel, programs, *args, tile=tile)
