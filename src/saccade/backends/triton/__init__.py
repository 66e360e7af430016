"""The NVIDIA backend: Triton kernels on torch CUDA tensors; under TRITON_INTERPRET=1 on CPU tensors, to look at them.

Not responsible for checking arguments (problem.py) nor for which keys a query tile visits (plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

from ...errors import Unsupported
from ...plan import Limits, Plan
from ...problem import Problem
from .. import Extras

try:
    import torch
    import triton
    from torch import Tensor
except ImportError as error:
    raise Unsupported("triton", [f"it needs the package {error.name}: pip install 'saccade[triton]'"]) from error
from . import launch
from .chip import chip_of, interpreted, multiprocessors, on
from .direct import KNOWN, Direct
from .tiles import tile_of

if interpreted():
    from . import interpret

    interpret.prepare()

LARGEST_HEAD = 256
# frameworks hand over torch tensors as they are, also those on the CPU
TAKES_TENSORS = True
DTYPES = ("float32", "bfloat16", "float16")


def limits(problem: Problem) -> Limits:
    """Tiles of the forward kernel, and as many splits of few queries as fill the chip."""
    chip = chip_of(problem.device)
    forward = tile_of("forward", chip, problem)
    lanes = 2 * multiprocessors(problem.device)
    return Limits(
        f"triton {chip}", forward.BM, forward.BN, quantum=forward.BN, few_queries=16, lanes=lanes, split_least=256
    )


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons: list[str] = []
    kind = problem.device.partition(":")[0]
    if kind != "cuda" and not (kind == "cpu" and interpreted()):
        reasons.append(f"its arrays live on {problem.device}: move them to an NVIDIA GPU by .cuda()")
    if problem.dtype not in DTYPES:
        reasons.append(f"{problem.dtype} is not computed by Triton: cast to float32, bfloat16 or float16")
    if max(problem.D, problem.Dv) > LARGEST_HEAD:
        reasons.append(f"head sizes are D = {problem.D} and Dv = {problem.Dv}: at most {LARGEST_HEAD}")
    if problem.source != "strided":
        reasons.append("paged keys are not read yet: gather them first")
    return reasons


def forward(
    problem: Problem, plan: Plan, q: Tensor, k: Tensor, v: Tensor, extras: Extras, *, out_dtype: str | None = None
) -> tuple[Tensor, Tensor]:
    """(o [B, Tq, Hq, Dv] in out_dtype or the inputs', lse [B, Tq, Hq] float32)."""
    rows = (problem.B, problem.Tq, problem.Hq)
    dtype = getattr(torch, out_dtype or problem.dtype)
    several = len(plan.parts) > 1
    # several parts fold into one another in float32
    o = q.new_empty((*rows, problem.Dv), dtype=torch.float32 if several else dtype)
    lse = q.new_empty(rows, dtype=torch.float32)
    if lse.numel():
        with on(q):
            launch.forward(launch.Call(problem, plan, q, k, v, extras), o, lse)
    return o.to(dtype), lse


def decode(problem: Problem, plan: Plan, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    """forward where no backward follows: few queries are split over the keys."""
    if not plan.split_keys:
        return forward(problem, plan, q, k, v, extras)
    rows = (problem.B, problem.Tq, problem.Hq)
    o, lse = q.new_empty((*rows, problem.Dv)), q.new_empty(rows, dtype=torch.float32)
    if lse.numel():
        with on(q):
            launch.decode(launch.Call(problem, plan, q, k, v, extras), o, lse)
    return o, lse


def direct(problem: Problem, plan: Plan, kind: type, decode: bool) -> Direct | None:
    """A call (threads, q, k, v, lse wanted) -> (o, lse or None) for tensors of `kind` alone, or None."""
    if interpreted() or not KNOWN or len(plan.parts) > 1 or not problem.B * problem.Tq * problem.Hq * problem.Dv:
        return None
    if problem.dropout or problem.sinks or problem.bias or problem.alibi:
        return None
    return Direct(problem, plan, launch.decode if decode and plan.split_keys else launch.forward)


def backward(
    problem: Problem, plan: Plan, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, extras: Extras, *,
    dlse: Tensor | None = None, delta: Tensor | None = None, grads: Set[str] = frozenset(),
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """(dq, dk, dv, more); more holds what grads names of "bias", "slopes", "sinks", as float32."""
    call = launch.Call(problem, plan, q, k, v, extras)
    several = len(plan.parts) > 1
    kept = torch.float32 if several else q.dtype
    dq, dk, dv = (torch.empty(x.shape, dtype=kept, device=x.device) for x in (q, k, v))
    more: dict[str, Tensor] = {}
    if "bias" in grads and problem.bias:
        more["bias"] = q.new_zeros(problem.bias, dtype=torch.float32)
    if not lse.numel() or not problem.Tk:
        dq, dk, dv = dq.zero_(), dk.zero_(), dv.zero_()
    lse = lse.contiguous()
    with on(q):
        if delta is None:
            delta = launch.delta(call, do, o, dlse)
        wanted = "slopes" in grads and bool(problem.alibi)
        slopes = launch.backward(call, do, lse, delta, dq, dk, dv, more.get("bias"), wanted)
    if slopes is not None and problem.alibi:
        more["slopes"] = slopes if problem.alibi[0] > 1 else slopes.sum(0, keepdim=True)
    if "sinks" in grads:
        share = torch.exp(extras.sinks.double() - lse)
        more["sinks"] = -(share * delta).sum((0, 1)).float()
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), more
