"""Recurrences over matrix states on the CPU: lays out the arrays and hands them to the compiled core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import narrow, widened
from ...recurrent.problem import MAPS, Matrix
from . import CARRIER, THREADS, _core, elsewhere, get_num_threads

__all__ = ["TAKES", "THREADS", "backward", "forward", "unsupported"]

Array = NDArray[Any]

TAKES = {
    *("g", "beta", "initial_state", "cu_seqlens", "rule", "feature_map", "normalize", "causal"),
    *("initial_dtype", "state_dtype"),
}
LARGEST = 1024
# a call of fewer than TASKS heads splits the columns of their states into blocks of at least BLOCK
TASKS, BLOCK = 8, 32
DECAYS = ("", "head", "channel")


def unsupported(problem: Matrix) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = elsewhere(problem.device, problem.dtype)
    if max(problem.F, problem.V) > LARGEST:
        reasons.append(f"a state has {problem.F} rows and {problem.V} columns: at most {LARGEST} of each")
    return reasons


def forward(problem: Matrix, arrays: Mapping[str, Any]) -> tuple[Array, Array]:
    """(o [B, T, H, V], final state [N, H, F, columns])."""
    p = problem
    o = np.empty((p.B, p.T, p.H, p.V), CARRIER[p.out_dtype])
    final = np.empty((p.N, p.H, p.F, p.columns), p.accumulator)
    if final.size:
        _core.recurrent_forward(_options(p), get_num_threads(), *_inputs(p, arrays), o, final)
    return o, narrow(final, p.state_dtype or p.accumulator)


def backward(
    problem: Matrix, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
) -> dict[str, Array]:
    """Gradients by name of all arrays of the call, in their dtypes; bfloat16 is stored as uint16."""
    p, wide = problem, np.dtype(problem.accumulator)
    do, dfinal = cotangents
    if do is None:
        do = np.zeros((p.B, p.T, p.H, p.V), CARRIER[p.out_dtype])
    shares = -(-p.V // _block(p))
    rows, whole = (shares * p.B, p.T, p.H), shares == 1 and p.Hk == p.H
    kind = CARRIER[p.dtype] if whole else wide
    dq, dk = np.empty((*rows, p.K), kind), np.empty((*rows, p.K), kind)
    dv = np.empty((p.B, p.T, p.H, p.V), CARRIER[p.dtype])
    dg = np.empty((*rows, p.K if p.decay == "channel" else 1), wide) if p.decay else None
    dbeta = np.empty((*rows, 1), wide) if p.beta else None
    dinitial = np.empty((p.N, p.H, p.F, p.columns), wide)
    if dinitial.size:
        down = do, None if dfinal is None else _wide(p, dfinal)
        call, threads = _options(p), get_num_threads()
        _core.recurrent_backward(call, threads, *_inputs(p, arrays), *down, dq, dk, dv, dg, dbeta, dinitial)
    gradients = {"v": dv, "initial_state": narrow(dinitial, p.initial_dtype or p.accumulator)}
    for name, x in (("q", dq), ("k", dk)):
        if not whole:
            # added in order: blocks of columns, and the heads of v that share a head of q and k
            x = x.reshape(shares, p.B, p.T, p.Hk, p.H // p.Hk, p.K).sum((0, 4))
        gradients[name] = narrow(x, p.dtype) if x.dtype == wide else x
    for name, x in (("g", dg), ("beta", dbeta)):
        if x is not None:
            x = x.reshape(shares, *arrays[name].shape).sum(0)
            gradients[name] = narrow(x, "bfloat16" if arrays[name].dtype == np.uint16 else arrays[name].dtype.name)
    return gradients


def _block(p: Matrix) -> int:
    # columns of a state per task, a multiple of 16 that follows from the shape alone
    shares = 1 if p.normalize else max(1, min(p.V // BLOCK, TASKS // max(1, p.N * p.H)))
    return -(-p.V // (16 * shares)) * 16


def _options(p: Matrix) -> Any:
    feature = (*("",), *MAPS).index(p.feature_map)
    return _core.Recurrence(
        p.B,
        p.T,
        p.N,
        p.H,
        p.Hk,
        p.K,
        p.F,
        p.V,
        p.scale,
        p.chunk,
        feature,
        DECAYS.index(p.decay),
        p.rule == "delta",
        p.normalize,
        p.causal,
        _block(p),
    )


def _wide(p: Matrix, state: Array) -> Array:
    # states, or their gradients, in the dtype of sums
    return np.ascontiguousarray(widened(state) if state.itemsize == 2 else state, p.accumulator)


def _inputs(p: Matrix, arrays: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    state = arrays["initial_state"]
    initial = None if state is None else _wide(p, state)
    a = arrays
    return a["q"], a["k"], a["v"], a["g"], a["beta"], a["cu_seqlens"], initial
