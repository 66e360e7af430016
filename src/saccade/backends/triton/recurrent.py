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
from .kernels.recurrent import Arrays, Cotangent
from .kernels.recurrent_backward import Gradients
from .kernels.recurrent_forward import Outputs
from .kernels.recurrent_states import Ends, States
from .launches import PLAIN, Launches
from .recurrent_call import MatrixLaunch, describe, power_of_two, tokens
from .replay import replayed

TAKES_TENSORS = True
TAKES = {
    *("g", "beta", "initial_state", "cu_seqlens", "rule", "feature_map", "normalize", "causal"),
    *("initial_dtype", "state_dtype"),
}
# the most rows and columns of a state; the most rows under the delta rule, where a program has all rows of a state;
# numbers of a state per program of a step
LARGEST, LARGEST_SOLVED, NUMBERS = 1024, 256, 2048


def unsupported(problem: Matrix) -> list[str]:
    """Reasons why this problem cannot run here."""
    p, reasons = problem, misplaced(problem)
    if p.rule == "delta" and p.K > LARGEST_SOLVED:
        reasons.append(f"a state of {p.K} rows: at most {LARGEST_SOLVED} under the delta rule")
    if p.feature_map == "taylor":
        reasons.append("the Taylor map is computed only on the CPU: move the arrays there, or use another map")
    if max(p.K, p.V) > LARGEST:
        reasons.append(f"a state has {p.K} rows and {p.V} columns: at most {LARGEST} of each")
    mapped = bool(p.feature_map) or p.normalize or not p.causal
    if (p.decay == "channel" and p.beta and p.rule != "delta") or ((p.decay or p.rule == "delta") and mapped):
        together = "decays per channel are computed with beta only in the delta rule, and no decay or delta rule with"
        reasons.append(f"{together} a feature map, a normaliser or causal=False")
    return reasons


def misplaced(problem: Any) -> list[str]:
    """Reasons that all recurrences share: the device of the arrays, and their dtype."""
    reasons = elsewhere(problem.device)
    if problem.dtype not in DTYPES:
        reasons.append(f"{problem.dtype} is not computed by Triton: cast to {', '.join(DTYPES)}")
    return reasons


def forward(problem: Matrix, arrays: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, V], final state [N, H, K, columns])."""
    p, call = problem, describe(problem, arrays)
    if not p.N or not p.B:
        return call.rows(p.V, dtype=p.out_dtype), call.last_states()
    with on(arrays["q"]):
        args = call.arrays, call.sides, call.initial
        o, final = replayed(("forward", p), args, lambda x: _forward(call._replace(launches=x)))
    return o, final


def _forward(call: MatrixLaunch) -> tuple[Tensor, Tensor]:
    p = call.p
    if p.T == 1 and p.causal and not p.normalize and not p.feature_map:
        return _step(call)
    call = _decayed(call)
    if p.rule == "delta":
        return recurrent_delta.forward(call)
    states, final = _states(call)
    o = call.rows(p.V, dtype=p.out_dtype)
    if p.T:
        call.outputs(states, Outputs(o))
    return o, final


def backward(
    problem: Matrix, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
) -> dict[str, Tensor]:
    """Gradients by name of all arrays of the call, in their dtypes."""
    p, call, q = problem, describe(problem, arrays), arrays["q"]
    do, dfinal = cotangents
    do = q.new_zeros((p.B, p.T, p.H, p.V)) if do is None else do.contiguous()
    if p.V == 1:
        # Triton 3.6 loses a 1, here a stride, in a tuple inside a tuple
        do = torch.nn.functional.pad(do, (0, 1))[..., :1]
    dfinal = None if dfinal is None else dfinal.contiguous()
    if p.T == 1:
        # Triton omits the loop over one chunk, and then the order of a product's sums would depend on a state's dtype
        call, dfinal = call._replace(initial=_wide(call.initial)), _wide(dfinal)
    empty, initial = not p.N or not p.B, arrays["initial_state"]
    if empty or not p.T:
        zeros = {n: torch.zeros_like(x) for n, x in arrays.items() if x is not None and n != "cu_seqlens"}
        if empty or dfinal is None or initial is None:
            return zeros
        return {**zeros, "initial_state": dfinal.to(initial.dtype)}

    def compute(launches: Launches) -> list[Tensor]:
        return _backward(call._replace(launches=launches), do, dfinal)

    with on(q):
        if p.normalize:
            # torch adds up the gradients of the divisors between two launches
            return call.gradients(arrays, compute(PLAIN))
        args = call.arrays, call.sides, call.initial, do, dfinal
        return call.gradients(arrays, replayed(("backward", p), args, compute))


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _backward(call: MatrixLaunch, do: Tensor, dfinal: Tensor | None) -> list[Tensor]:
    # as `MatrixLaunch.gradients` takes them
    p, call = call.p, _decayed(call)
    if p.rule == "delta":
        return recurrent_delta.backward(call, do, dfinal)
    states, _ = _states(call)
    cotangent, dstates, dinitial = _cotangent(call, do, states), call.stored_states(), call.states(p.N)
    queries, ends = Arrays(call.arrays.q, None, None, cotangent), Ends(dfinal, dinitial)
    call.by_states(kernels_backward.dstates, queries, call.sides, dstates, ends, call.size)
    dv, *rest = _tokens(call._replace(arrays=call.arrays._replace(do=cotangent)), (states, dstates))
    return [dv, dinitial, *rest]


def _step(call: MatrixLaunch) -> tuple[Tensor, Tensor]:
    # a single token needs no chunk
    p, o, final = call.p, call.rows(call.p.V, dtype=call.p.out_dtype), call.last_states()
    BK = power_of_two(p.K)
    BV = max(1, min(32, NUMBERS // BK, power_of_two(p.V)))
    args = call.arrays, call.sides, Ends(call.initial, final), o, call.size, p.scale
    call.launch(recurrent_step.step, p.N * p.H * -(-p.V // BV), *args, BK=BK, BV=BV, C=1)
    return o, final


def _decayed(call: MatrixLaunch) -> MatrixLaunch:
    # for decays per head, sums of a chunk's logarithms; for decays per channel, the weighted pairs of its tokens, which
    # the delta rule computes later
    p, sides = call.p, call.sides
    if not p.decay:
        return call
    if not p.T:
        # kernels are compiled even for no tokens, and need no sums then
        return call._replace(sides=sides._replace(g=None))
    if p.decay == "channel":
        pairs = call.rows(call.C)
        if p.rule != "delta":
            args = call.arrays._replace(v=None), sides, pairs, call.size
            call.by_chunks(kernels_channels.pairs, 1, *args, BK=call.wide_block(p.K))
        return call._replace(sides=sides._replace(pairs=pairs))
    sums = call.scratch(call.slots, p.H, 2, call.C)
    options: dict[str, Any] = {"C": call.C, "num_warps": 1, "num_stages": 1 if p.dtype == "float32" else 2}
    call.launches.run(kernels.add_logarithms, (call.slots * p.H,), sides.g, sides.cu, sums, call.size, **options)
    return call._replace(sides=sides._replace(sums=sums))


def _states(call: MatrixLaunch) -> tuple[States, Tensor]:
    # (states that queries read, last states)
    states, final = call.stored_states(), call.last_states()
    arrays, ends = call.arrays._replace(q=None), Ends(call.initial, final)
    call.by_states(kernels_forward.states, arrays, call.sides, states, ends, call.size)
    return states, final


def _cotangent(call: MatrixLaunch, do: Tensor, states: States) -> Cotangent:
    # for rows divided by a sum, also the gradient of that sum
    if not call.p.normalize:
        return Cotangent(tokens(do), call.p.scale)
    inverse = call.rows()
    out = Outputs(None, do, inverse, call.shares(call.columns, inverse))
    call.outputs(states, out)
    return Cotangent(tokens(do), 1.0, inverse, out.sums.sum(0))


def _tokens(call: MatrixLaunch, states: tuple[States, States]) -> list[Tensor]:
    # gradients of v, q, k, g and beta; states: the states and their gradients
    p, x, sides, size = call.p, call.arrays, call.sides, call.size
    (dq, dk), dv = call.for_keys(), call.rows(p.V, dtype=p.dtype)
    channels = p.decay == "channel"
    grads = Gradients(dq, dk, call.shares(1 if channels else call.tiles, sides.g), call.shares(call.tiles, sides.beta))
    kernel = kernels_channels.dqdk if channels else kernels_backward.dqdk
    call.by_chunks(kernel, call.tiles, x, sides, states, grads, size)
    args = x._replace(v=None), sides, states[1], dv, size
    call.by_chunks(kernels_backward.dvalues, call.columns, *args, BV=call.wide_block(p.V))
    return [dv, *(x for x in grads if x is not None)]
