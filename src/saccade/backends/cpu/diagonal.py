"""Recurrences over diagonal states on the CPU: lays out the arrays and hands them to the compiled core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import narrow
from ...errors import Unsupported
from ...recurrent.diagonal import Convolution, Diagonal, GatedUnit, Scan
from . import CARRIER, THREADS, _core, elsewhere, get_num_threads

__all__ = ["TAKES", "THREADS", "backward", "forward", "unsupported"]

Array = NDArray[Any]
TAKES = {
    "D",
    "z",
    "delta_bias",
    "initial_state",
    "cu_seqlens",
    "bias",
    "fixed_B",
    "fixed_C",
    "delta_softplus",
    "activation",
}

LARGEST = 256
# tokens per task of a convolution, and the largest number of tasks that sum the weights' gradients separately
PIECE, PIECES = 256, 32


def unsupported(problem: Diagonal) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = elsewhere(problem.device, problem.dtype)
    if isinstance(problem, Scan) and problem.N > LARGEST:
        reasons.append(f"a channel has N = {problem.N} numbers of state: at most {LARGEST}")
    return reasons


def forward(problem: Diagonal, arrays: Mapping[str, Any]) -> tuple[Array, Array]:
    """(y [B, T, D], final state) of `problem.outputs`."""
    y, final = (np.empty(s.shape, CARRIER[s.dtype]) for s in problem.outputs)
    _run(problem, {**_laid_out(problem, arrays), "y": y, "final_state": final}, False)
    return y, final


def backward(
    problem: Diagonal, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
) -> dict[str, Array]:
    """Gradients by name of all arrays of the call, in their dtypes; bfloat16 is stored as uint16."""
    dy, dfinal = cotangents
    y = problem.outputs[0]
    inputs = _laid_out(problem, arrays)
    inputs["dy"] = np.zeros(y.shape, CARRIER[y.dtype]) if dy is None else dy
    inputs["dfinal_state"] = None if dfinal is None else np.ascontiguousarray(dfinal)
    wide = problem.accumulator
    gradients: dict[str, Array] = {}
    for name, x in inputs.items():
        if name in arrays and name != "cu_seqlens" and x is not None:
            gradients[name] = _room_for(problem, name, x, wide)
    # a state that no token reads is returned unchanged
    if "initial_state" in gradients and dfinal is not None:
        gradients["initial_state"][...] = dfinal
    _run(problem, {**inputs, **{f"d{name}": x for name, x in gradients.items()}}, True)
    return {name: _like(arrays[name], x) for name, x in gradients.items()}


def _run(p: Diagonal, arrays: dict[str, Any], backward: bool) -> None:
    threads = get_num_threads()
    if isinstance(p, Scan):
        _core.selective_scan(arrays, p.chunk, p.delta_softplus, backward, threads)
    elif isinstance(p, Convolution):
        _core.causal_conv1d(arrays, _piece(p), p.activation == "silu", backward, threads)
    elif isinstance(p, GatedUnit):
        _core.rg_lru(arrays, p.chunk, backward, threads)
    else:
        raise Unsupported("cpu", [f"it has no kernels of {type(p).__name__}"])


def _laid_out(p: Diagonal, arrays: Mapping[str, Any]) -> dict[str, Any]:
    laid_out = dict(arrays)
    if laid_out["initial_state"] is not None:
        laid_out["initial_state"] = np.ascontiguousarray(laid_out["initial_state"])
    if isinstance(p, Scan):
        for name in ("B", "C"):
            x = laid_out[name]
            laid_out[name] = x[:, :, None] if x.ndim == 3 else np.broadcast_to(x, (p.D, p.N)) if x.ndim == 1 else x
    return laid_out


def _room_for(p: Diagonal, name: str, x: Array, wide: str) -> Array:
    # the core writes gradients of tokens in place, and sums over tokens as one wide row per sequence or per piece
    if name == "initial_state":
        return np.zeros(x.shape, wide)
    if x.ndim > 2:
        return np.empty(x.shape, x.dtype)
    parts = (p.B * p.T + _piece(p) - 1) // _piece(p) if isinstance(p, Convolution) else p.S
    return np.empty((parts, *x.shape), wide)


def _piece(p: Convolution) -> int:
    least = (p.B * p.T + PIECES - 1) // PIECES
    return max(PIECE, (least + PIECE - 1) // PIECE * PIECE)


def _like(array: Array, gradient: Array) -> Array:
    # adds the partial sums, and the channels where one row of the array serves all of them
    if gradient.ndim == array.ndim and gradient.shape == array.shape and gradient.dtype == array.dtype:
        return gradient
    if gradient.size == array.size and array.ndim > 2:
        return gradient.reshape(array.shape)
    total = gradient.sum(0, dtype=np.float64) if len(gradient) != 1 else gradient[0]
    if total.ndim > array.ndim:
        total = total.sum(0, dtype=np.float64)
    return narrow(total, "bfloat16" if array.dtype == np.uint16 else array.dtype.name)
