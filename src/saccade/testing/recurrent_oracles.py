"""The oracles of recurrences over matrix states, as the rows of the catalogue call them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..recurrent import reference

Arrays = dict[str, Any]


def matrix(arrays: Arrays, options: Arrays, dtype: Any, grad_outputs: Any) -> Any:
    """The outputs of a recurrence over matrix states, or with cotangents its gradients by name."""
    if grad_outputs is None:
        return reference.matrix_state(**arrays, **options, dtype=dtype)
    return reference.matrix_state_backward(*grad_outputs, **arrays, **options, dtype=dtype)


def delta(arrays: Arrays, options: Arrays, dtype: Any, grad_outputs: Any) -> Any:
    """The same by the delta rule."""
    return matrix(arrays, {**options, "rule": "delta"}, dtype, grad_outputs)


def linear(arrays: Arrays, options: Arrays, dtype: Any, grad_outputs: Any) -> Any:
    """The same as linear attention."""
    defaults = {"feature_map": "elu+1", "normalize": True}
    return matrix(arrays, {**defaults, **options, "feature_map": options["feature_map"] or ""}, dtype, grad_outputs)


def ssd(arrays: Arrays, options: Arrays, dtype: Any, grad_outputs: Any) -> Any:
    """Mamba-2: the oracle of a scalar decay, the elementwise steps around it, and their gradients."""
    a, r = arrays, reference.rounding(dtype)
    x, step, A, D, z = r(a["x"]), r(a["dt"]) + r(a["dt_bias"]), r(a["A"]), r(a["D"])[:, None], r(a["z"])
    soft, (low, high) = r(np.logaddexp(step, 0)), options.get("dt_limit", (-np.inf, np.inf))
    dt = np.clip(soft, low, high)
    inner = {"q": a["C"], "k": a["B"], "v": x, "g": r(dt * A), "beta": dt, "initial_state": a["initial_state"]}
    inner.update({"cu_seqlens": a.get("cu_seqlens"), "scale": 1.0, "dtype": dtype})
    h, state = reference.matrix_state(**inner)
    y, sigmoid = r(h + D * x), r(1 / (1 + np.exp(-z)))
    if grad_outputs is None:
        return r(y * z * sigmoid), state
    dy = r(r(grad_outputs[0]) * z * sigmoid)
    d = reference.matrix_state_backward(dy, grad_outputs[1], **inner)
    ddt = r((d["beta"] + d["g"] * A) * (low <= soft) * (soft <= high) / (1 + np.exp(-step)))
    return {
        "C": d["q"],
        "B": d["k"],
        "x": r(d["v"] + D * dy),
        "dt": ddt,
        "dt_bias": ddt.sum((0, 1)),
        "A": (d["g"] * dt).sum((0, 1)),
        "D": (dy * x).sum((0, 1, 3)),
        "z": r(r(grad_outputs[0]) * y * sigmoid * (1 + z * (1 - sigmoid))),
        "initial_state": d["initial_state"],
    }


def product(arrays: Arrays, options: Arrays, dtype: Any, grad_outputs: Any) -> Any:
    """The delta rule with several steps per token: a decay before the first, an output after the last."""
    B, T, n = arrays["k"].shape[:3]
    steps = {name: arrays[name].reshape(B, T * n, *arrays[name].shape[3:]) for name in ("k", "v", "beta")}
    for name, step in (("q", n - 1), ("g", 0)):
        x = np.zeros((B, T, n, *arrays[name].shape[2:]), arrays[name].dtype)
        x[:, :, step] = arrays[name]
        steps[name] = x.reshape(B, T * n, *x.shape[3:])
    steps["initial_state"] = arrays["initial_state"]
    if "cu_seqlens" in arrays:
        steps["cu_seqlens"] = n * arrays["cu_seqlens"]
    if grad_outputs is None:
        o, state = delta(steps, options, dtype, None)
        return o.reshape(B, T, n, *o.shape[2:])[:, :, -1], state
    do = np.zeros((B, T, n, *grad_outputs[0].shape[2:]), grad_outputs[0].dtype)
    do[:, :, -1] = grad_outputs[0]
    grads = delta(steps, options, dtype, (do.reshape(B, T * n, *do.shape[3:]), grad_outputs[1]))
    for name, step in (("q", n - 1), ("g", 0)):
        grads[name] = grads[name].reshape(B, T, n, *arrays[name].shape[2:])[:, :, step]
    return {name: x.reshape(arrays[name].shape) for name, x in grads.items()}
