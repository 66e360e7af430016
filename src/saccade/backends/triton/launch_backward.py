"""The backward by the portable kernels: its arrays, and the gradients of side arrays from sums of dS."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from ...statistics import gates_gradient
from . import launch


def backward(
    call: launch.AttentionLaunch, arrays: Any, grads: Set[str], more: dict[str, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of the arrays of `launch.backward`; adds the gradients that grads names to `more`."""
    problem, (q, k, v) = call.problem, (x.p for x in call.qkv)
    # a key that no row of its class sees has no owner and needs a zero; parts are added in float32
    new = torch.zeros if call.plan.parts[0].step > 1 or problem.batch_invariant else torch.empty
    sums = torch.float32 if len(call.plan.parts) > 1 else dtype
    dq, dk, dv = (new(x.shape, dtype=sums, device=x.device) for x in (q, k, v))
    if not arrays.lse.numel() or not problem.Tk:
        dq, dk, dv = dq.zero_(), dk.zero_(), dv.zero_()
    for name, shape in (("bias", problem.scores.bias), ("table", call.distances_shape)):
        if name in grads and shape:
            more[name] = q.new_zeros(shape, dtype=torch.float32)
    of_ds = (problem.Tq, problem.Tk) if "log_f" in grads else (None, None)
    rows, keys = (None if n is None else arrays.lse.new_zeros((problem.B, problem.Hq, n)) for n in of_ds)
    gradients = launch.Gradients(dq, dk, dv, more.get("bias"), more.get("table"), rows, keys)
    slopes = launch.backward(call, arrays, gradients, "slopes" in grads and bool(problem.scores.alibi))
    if rows is not None:
        more["log_f"] = gates_gradient(rows, keys, launch.positions_of(problem, call.plan).tolist())
    if slopes is not None and problem.scores.alibi:
        more["slopes"] = slopes.sum(0, keepdim=True) if problem.scores.alibi[0] == 1 else slopes
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
