"""Launching the kernels of the delta rule: values that solve a triangular system, then those of other recurrences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .kernels import recurrent_backward as kernels_backward
from .kernels import recurrent_delta as kernels
from .kernels.recurrent_backward import Cotangent
from .recurrent_call import Call, power_of_two, tokens


class _Solved(NamedTuple):
    # the call with what states take up as its values; inverses and pairs [B, T, H, C]; states before chunks, last ones
    call: Call
    inverse: Tensor
    pairs: Tensor | None
    kept: Tensor
    final: Tensor


def _by_columns(call: Call, kernel: Any, *args: Any) -> None:
    # programs have all rows of a state
    rows = max(16, power_of_two(call.p.K))
    call.by_states(kernel, *args, BK=rows, num_warps=4 if rows <= 128 else 8)


def _solve(call: Call, paired: bool) -> _Solved:
    p, (q, k, v) = call.p, call.given
    inverse, pairs = call.rows(call.C), call.rows(call.C) if paired else None
    e, kept, final = call.rows(p.V, dtype=call.narrow), call.states(call.slots, call.narrow), call.states(p.N)
    call.by_chunks(kernels.solve, 1, q, k, call.sides, inverse, pairs, call.size, p.scale)
    _by_columns(call, kernels.states, k, v, call.sides, call.initial, inverse, e, kept, final, call.size)
    return _Solved(call._replace(given=(q, k, tokens(e))), inverse, pairs, kept, final)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(o, the final state)."""
    solved = _solve(call, False)
    return solved.call.outputs(solved.kept, call.p.out_dtype, False)[0], solved.final


def backward(call: Call, arrays: Mapping[str, Any], do: Tensor, dfinal: Tensor | None) -> dict[str, Tensor]:
    """Gradients by name, in the dtypes of the arrays."""
    p, (q, k, _), solved, given = call.p, call.given, _solve(call, True), tokens(do)
    de, dkept, dinitial = call.rows(p.V, dtype=call.narrow), call.states(call.slots, call.narrow), call.states(p.N)
    _by_columns(
        call, kernels.dstates, q, k, given, call.sides, dfinal, solved.inverse, solved.pairs, de, dkept, dinitial,
        call.size, p.scale,
    )  # fmt: skip
    dq, dk = call.for_keys()
    dg, dbeta = call.shares(call.tiles, call.sides.g), call.shares(call.tiles, call.sides.beta)
    call.by_chunks(
        kernels_backward.dqdk, call.tiles, *solved.call.given, Cotangent(given, None, None), de, call.sides,
        solved.kept, dkept, dq, dk, dg, dbeta, call.size, p.scale, num_warps=8,
    )  # fmt: skip
    return {**call.found(arrays, dq, dk, dg, dbeta), "v": de.to(arrays["v"].dtype), "initial_state": dinitial}
