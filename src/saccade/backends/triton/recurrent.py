"""Recurrences over matrix states on NVIDIA: which kernels compute a call, and the launches of sums and decays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ...recurrent.problem import Matrix
from . import DTYPES, recurrent_delta
from .chip import elsewhere, on
from .kernels import recurrent as kernels
from .kernels import recurrent_backward as kernels_backward
from .kernels import recurrent_channels as kernels_channels
from .kernels import recurrent_forward as kernels_forward
from .kernels import recurrent_step
from .kernels.recurrent import States
from .kernels.recurrent_backward import Cotangent
from .kernels.recurrent_forward import Divisors
from .recurrent_call import MatrixLaunch, describe, power_of_two, tokens

TAKES_TENSORS = True
TAKES = {"g", "beta", "initial_state", "cu_seqlens", "rule", "feature_map", "normalize", "causal"}
# rows and columns of a state; rows under the delta rule, of which a program has all, and numbers of state in a step's
LARGEST, LARGEST_SOLVED, NUMBERS = 1024, 256, 2048


def unsupported(problem: Matrix) -> list[str]:
    """Reasons why this problem cannot run here."""
    p, reasons = problem, misplaced(problem)
    if p.rule == "delta" and p.K > LARGEST_SOLVED:
        reasons.append(f"a state of {p.K} rows: at most {LARGEST_SOLVED} under the delta rule")
    if p.feature_map == "taylor":
        reasons.append("the Taylor map is computed on the CPU alone: move the arrays there, or take another map")
    if max(p.K, p.V) > LARGEST:
        reasons.append(f"a state has {p.K} rows and {p.V} columns: at most {LARGEST} of each")
    mapped = bool(p.feature_map) or p.normalize or not p.causal
    if (p.decay == "channel" and (p.beta or p.rule == "delta")) or ((p.decay or p.rule == "delta") and mapped):
        reasons.append("decays of channels beside the delta rule, or either, or a decay, beside a map or a normaliser")
    return reasons


def misplaced(problem: Any) -> list[str]:
    """Reasons that all recurrences have: the device of the arrays, and their dtype."""
    reasons = elsewhere(problem.device)
    if problem.dtype not in DTYPES:
        reasons.append(f"{problem.dtype} is not computed by Triton: cast to {', '.join(DTYPES)}")
    return reasons


def forward(problem: Matrix, arrays: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, V], final state [N, H, K, columns])."""
    p, call = problem, describe(problem, arrays)
    if not p.N or not p.B:
        return call.rows(p.V, dtype=p.out_dtype), call.states(p.N)
    with on(arrays["q"]):
        if p.T == 1 and p.causal and not p.normalize and not p.feature_map:
            return _step(call)
        call = _decayed(call)
        if p.rule == "delta":
            return recurrent_delta.forward(call)
        kept, final = _states(call)
        o = call.rows(p.V, dtype=p.out_dtype)
        if p.T:
            call.outputs(kept, o)
    return o, final


def backward(
    problem: Matrix, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of all arrays given, by name, in their dtypes."""
    p, call, q = problem, describe(problem, arrays), arrays["q"]
    do, dfinal = cotangents
    do = q.new_zeros((p.B, p.T, p.H, p.V)) if do is None else do.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    empty = not p.N or not p.B
    if empty or not p.T:
        found = {n: torch.zeros_like(x) for n, x in arrays.items() if x is not None and n != "cu_seqlens"}
        return found if empty or dfinal is None else {**found, "initial_state": dfinal}
    with on(q):
        call = _decayed(call)
        if p.rule == "delta":
            return recurrent_delta.backward(call, arrays, do, dfinal)
        kept, _ = _states(call)
        given, dkept, dinitial = _cotangent(call, do, kept), call.kept(), call.states(p.N)
        scale = 1.0 if p.normalize else p.scale
        call.by_states(
            kernels_backward.dstates, call.given[0], given, call.sides, dfinal, dkept, dinitial, call.size, scale
        )
        found = _tokens(call, arrays, given, kept, dkept, scale)
    return {**found, "initial_state": dinitial}


def _step(call: MatrixLaunch) -> tuple[Tensor, Tensor]:
    # a single token, without a chunk around it
    p, o, final = call.p, call.rows(call.p.V, dtype=call.p.out_dtype), call.states(call.p.N)
    BK = power_of_two(p.K)
    BV = max(1, min(32, NUMBERS // BK, power_of_two(p.V)))
    call.launch(
        recurrent_step.step, p.N * p.H * -(-p.V // BV), *call.given, call.sides, call.initial, o, final, call.size,
        p.scale, BK=BK, BV=BV, DELTA=p.rule == "delta", CHANNELS=p.decay == "channel",
    )  # fmt: skip
    return o, final


def _decayed(call: MatrixLaunch) -> MatrixLaunch:
    # where heads decay, sums of a chunk's logarithms; where channels do, its pairs of tokens are weighed once
    p, sides = call.p, call.sides
    if not p.decay:
        return call
    if not p.T:
        # kernels are compiled all the same, and find no sums
        return call._replace(sides=sides._replace(g=None))
    if p.decay == "channel":
        q, k, _ = call.given
        pairs = call.rows(call.C)
        call.by_chunks(kernels_channels.pairs, 1, q, k, sides, pairs, call.size, BK=call.wide_block(p.K))
        return call._replace(sides=sides._replace(pairs=pairs))
    sums = call.given[0].p.new_empty((call.slots, p.H, 2, call.C), dtype=torch.float32)
    call.by_chunks(kernels.add_logarithms, 1, sides.g, sides.cu, sums, call.size, num_warps=1)
    return call._replace(sides=sides._replace(sums=sums))


def _states(call: MatrixLaunch) -> tuple[States, Tensor]:
    # (the states that queries meet, the last ones)
    _, k, v = call.given
    kept, final = call.kept(), call.states(call.p.N)
    call.by_states(kernels_forward.states, k, v, call.sides, call.initial, kept, final, call.size)
    return kept, final


def _cotangent(call: MatrixLaunch, do: Tensor, kept: States) -> Cotangent:
    # of rows that are divided by a sum, the gradient of that sum too
    if not call.p.normalize:
        return Cotangent(tokens(do), None, None)
    inverse = call.rows()
    divisors = Divisors(do, inverse, call.shares(call.columns, inverse))
    call.outputs(kept, None, divisors)
    return Cotangent(tokens(do), inverse, divisors.sums.sum(0))


def _tokens(
    call: MatrixLaunch, arrays: Mapping[str, Any], do: Cotangent, kept: States, dkept: States, scale: float
) -> dict[str, Tensor]:
    # the gradients of what has a row for each token
    p, (q, k, v), sides, size = call.p, call.given, call.sides, call.size
    (dq, dk), dv, dbeta = call.for_keys(), call.rows(p.V, dtype=p.dtype), None
    if p.decay == "channel":
        dg = call.shares(1, sides.g)
        call.by_chunks(
            kernels_channels.dqdk, call.tiles, q, k, v, do, sides, kept, dkept, dq, dk, dg, size, scale
        )  # fmt: skip
    else:
        dg, dbeta = call.shares(call.tiles, sides.g), call.shares(call.tiles, sides.beta)
        call.by_chunks(
            kernels_backward.dqdk, call.tiles, q, k, v, do, None, sides, kept, dkept, dq, dk, dg, dbeta, size, scale
        )
    call.by_chunks(
        kernels_backward.dvalues, call.columns, q, k, do, sides, dkept, dv, size, scale, BV=call.wide_block(p.V)
    )
    return {**call.found(arrays, dq, dk, dg, dbeta), "v": dv}
