"""The catalogue of recurrences with diagonal states: D = H V channels with N = K numbers each, G = Hk groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .. import recurrent
from ..recurrent import diagonal_reference as reference
from .recurrent import Arrays, Op, Sizes, expected

# arrays that models keep in float32
WIDE = frozenset({"initial_state", "A", "D", "delta_bias", "a_param"})


def oracle(function: Any, arrays: Arrays, options: Arrays, dtype: Any, grad_outputs: Any) -> Any:
    """The reference; 16-bit plain recurrences also have wide states and round last. grad_outputs: (dy, dfinal)."""
    wide = np.dtype(dtype).type if np.dtype(dtype).itemsize > 2 else np.float32
    rest: Arrays = {**arrays, **options, "dtype": wide}
    order = rest.pop("order", 0)
    if grad_outputs is not None:
        rest["cotangents"] = *grad_outputs, order
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        borders = rest.pop("cu_seqlens", None)
        results = function(**rest) if borders is None else reference.packed(function, borders, **rest)
        if grad_outputs is not None:
            return {n: x.astype(arrays[n].dtype if wide is not np.float64 else wide) for n, x in results.items()}
        return results[0].astype(dtype), results[1]


# axes of slots and of channels by name of the array, counted from the last; B and C have channels only if constant
SLOTS = {"A": 1, "B": 1, "C": 1, "initial_state": 1, "state": 1}
CHANNELS = {"u": 1, "delta": 1, "z": 1, "o": 1, "D": 1, "delta_bias": 1, **dict.fromkeys(SLOTS, 2)}


def in_order(n: int, op: Op, arrays: Arrays, dtype: Any, grad_outputs: Any) -> Arrays:
    """The plain recurrence in the n-th order of its slots, of a scan's channels in each group, and of tokens in sums.

    Without the tokens, a sum over them would have one order, and that may be close to exact by luck.
    """
    op = replace(op, options={**op.options, "order": n})
    if n == 0 or "A" not in arrays:
        return expected(op, arrays, dtype, grad_outputs)
    rng, (D, N) = np.random.default_rng(n), arrays["A"].shape
    groups = max(x.shape[2] if x.ndim == 4 else 1 for x in (arrays["B"], arrays["C"]))
    channels = (rng.permuted(np.arange(D).reshape(groups, -1), axis=1)).reshape(-1)
    orders = ((rng.permutation(N), SLOTS), (channels, CHANNELS))

    def turned(name: str, x: Any, back: bool = False) -> Any:
        name = name if name in CHANNELS else name[1:]
        for order, axes in orders:
            if name in axes and not (name in ("B", "C") and axes is CHANNELS and x.ndim != 2):
                x = np.take(x, np.argsort(order) if back else order, -axes[name])
        return x

    cotangents = grad_outputs and (turned("o", grad_outputs[0]), turned("state", grad_outputs[1]))
    results = expected(op, {name: turned(name, x) for name, x in arrays.items()}, dtype, cotangents)
    return {name: turned(name, x, True) for name, x in results.items()}


def _channels(rng: np.random.Generator, s: Sizes, *names: str) -> Arrays:
    return {name: rng.standard_normal((s.B, s.T, s.H * s.V)) for name in names}


def scan_inputs(rng: np.random.Generator, s: Sizes, form: str = "BTGN") -> Arrays:
    """u, delta, A, B and C. form: the dimensions of B; those of C are the opposite choice."""
    D, N = s.H * s.V, s.K
    shapes = {"BTGN": (s.B, s.T, s.Hk, N), "BTN": (s.B, s.T, N), "DN": (D, N), "N": (N,)}
    other = {"BTGN": "BTGN", "BTN": "DN", "DN": "N", "N": "BTGN"}[form]
    return {
        **_channels(rng, s, "u", "delta"),
        "A": -np.exp(rng.uniform(-3, 2, (D, N))),
        "B": rng.standard_normal(shapes[form]),
        "C": rng.standard_normal(shapes[other]),
        "initial_state": rng.standard_normal((s.N, D, N)),
    }


def _full(rng: np.random.Generator, s: Sizes) -> Arrays:
    sides = {name: rng.standard_normal(s.H * s.V) for name in ("D", "delta_bias")}
    return {**scan_inputs(rng, s), **sides, **_channels(rng, s, "z")}


def _bare(rng: np.random.Generator, s: Sizes, form: str) -> Arrays:
    arrays = scan_inputs(rng, s, form)
    return {**arrays, "delta": abs(arrays["delta"])}


def _gated(rng: np.random.Generator, s: Sizes, state: bool = True) -> Arrays:
    D = s.H * s.V
    arrays = {**_channels(rng, s, "x", "r", "i"), "a_param": rng.uniform(-8, 3, D)}
    return {**arrays, "initial_state": rng.standard_normal((s.N, D))} if state else arrays


def _conv(rng: np.random.Generator, s: Sizes, K: int, bias: bool) -> Arrays:
    D = s.H * s.V
    arrays = {**_channels(rng, s, "x"), "weight": rng.standard_normal((D, K))}
    arrays |= {"bias": rng.standard_normal(D)} if bias else {}
    return {**arrays, "initial_state": rng.standard_normal((s.N, D, K - 1))}


def conv(chunk: int | None = None, **arguments: Any) -> Any:
    """`causal_conv1d`, which has no states between chunks, so `chunk` has no effect."""
    return recurrent.causal_conv1d(**arguments)


def _scan_row(name: str, make: Any, **options: Any) -> Op:
    return Op(name, recurrent.selective_scan, make, partial(oracle, reference.selective_scan), options, WIDE, in_order)


def _gated_row(name: str, state: bool) -> Op:
    return Op(
        name, recurrent.rg_lru, partial(_gated, state=state), partial(oracle, reference.rg_lru), {}, WIDE, in_order
    )


def _conv_row(name: str, K: int, bias: bool, **options: Any) -> Op:
    make = partial(_conv, K=K, bias=bias)
    return Op(name, conv, make, partial(oracle, reference.causal_conv1d), options, in_order=in_order)


OPS = [
    _scan_row("selective_scan", _full, delta_softplus=True),
    *(_scan_row(f"selective_scan-{form}", partial(_bare, form=form)) for form in ("BTN", "DN", "N")),
    _gated_row("rg_lru", True),
    _gated_row("rg_lru-documents", False),
    _conv_row("causal_conv1d", 4, True, activation="silu"),
    *(_conv_row(f"causal_conv1d-{K}", K, False) for K in (1, 2, 8)),
]
