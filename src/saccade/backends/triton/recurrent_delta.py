"""Launching the kernels of the delta rule: values that solve a triangular system, then those of other recurrences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .kernels import recurrent_backward as kernels_backward
from .kernels import recurrent_delta as kernels
from .kernels.recurrent import States
from .kernels.recurrent_backward import Cotangent
from .recurrent_call import MatrixLaunch, power_of_two, tokens


class _Solved(NamedTuple):
    # what states take up, as values; inverses and pairs [B, T, H, C]; states before chunks, last ones
    taken: Tensor
    inverse: Tensor
    pairs: Tensor | None
    kept: States
    final: Tensor


def _by_columns(call: MatrixLaunch, kernel: Any, *args: Any, **constants: Any) -> None:
    # programs have all rows of a state
    rows = max(16, power_of_two(call.p.K))
    call.by_states(kernel, *args, BK=rows, num_warps=4 if rows <= 128 else 8, **constants)


def _solve(call: MatrixLaunch, paired: bool) -> _Solved:
    p, (q, k, v) = call.p, call.given
    inverse, pairs = call.rows(call.C), call.rows(call.C) if paired else None
    e, kept, final = call.rows(p.V, dtype=call.narrow), call.kept(), call.states(p.N)
    call.by_chunks(kernels.solve, 1, q, k, call.sides, inverse, pairs, call.size, p.scale)
    _by_columns(call, kernels.states, k, v, call.sides, call.initial, inverse, e, kept, final, call.size)
    return _Solved(e, inverse, pairs, kept, final)


def forward(call: MatrixLaunch) -> tuple[Tensor, Tensor]:
    """(o, the final state)."""
    p, solved = call.p, _solve(call, False)
    o = call.rows(p.V, dtype=p.out_dtype)
    call._replace(given=(*call.given[:2], tokens(solved.taken))).outputs(solved.kept, o)
    return o, solved.final


def backward(call: MatrixLaunch, arrays: Mapping[str, Any], do: Tensor, dfinal: Tensor | None) -> dict[str, Tensor]:
    """Gradients by name, in the dtypes of the arrays."""
    p, (q, k, _), solved, given = call.p, call.given, _solve(call, True), tokens(do)
    de, dkept, dinitial = call.rows(p.V, dtype=call.narrow), call.kept(), call.states(p.N)
    _by_columns(
        call, kernels.dstates, q, k, given, call.sides, dfinal, solved.inverse, solved.pairs, de, dkept, dinitial,
        call.size, p.scale, num_stages=1,
    )  # fmt: skip
    dq, dk = call.for_keys()
    dg, dbeta = call.shares(call.tiles, call.sides.g), call.shares(call.tiles, call.sides.beta)
    call.by_chunks(
        kernels_backward.dqdk, call.tiles, q, k, tokens(solved.taken), Cotangent(given, None, None), de, call.sides,
        solved.kept, dkept, dq, dk, dg, dbeta, call.size, p.scale, BV=call.wide_block(p.V), num_stages=1,
    )  # fmt: skip
    return {**call.found(arrays, dq, dk, dg, dbeta), "v": de.to(arrays["v"].dtype), "initial_state": dinitial}
