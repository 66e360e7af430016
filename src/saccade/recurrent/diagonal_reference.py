"""Recurrences over diagonal states, slow and simple: the float64 oracle, and the plain recurrence in any dtype.

Every function takes the arrays of its public call by name, `dtype`, and optionally cotangents (dy, dfinal, order):
without them it returns (y, final state), with them the gradients of sum(dy * y) + sum(dfinal * final state) by name.
order: a number; the terms of gradients that are sums over tokens are added in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# arrays without tokens and sequences
PARAMETERS = ("A", "D", "delta_bias", "a_param", "weight", "bias")


def packed(function: Callable[..., Any], cu_seqlens: Array, cotangents: Any = None, **arrays: Any) -> Any:
    """function applied to each sequence separately; its (y, final state) or gradients are concatenated."""
    results: list[Any] = []
    for s, (begin, end) in enumerate(pairwise(cu_seqlens)):
        piece = dict(arrays)
        for name, x in arrays.items():
            if isinstance(x, np.ndarray) and name == "initial_state":
                piece[name] = x[s : s + 1]
            elif isinstance(x, np.ndarray) and name not in PARAMETERS and x.ndim > 2:
                piece[name] = x[:, begin:end]
        if cotangents is not None:
            piece["cotangents"] = cotangents[0][:, begin:end], cotangents[1][s : s + 1], cotangents[2]
        results.append(function(**piece))
    if isinstance(results[0], tuple):
        return tuple(np.concatenate([f[n] for f in results], 1 - n) for n in range(2))
    return {name: _together(name, arrays[name], [f[name] for f in results]) for name in results[0]}


def _together(name: str, like: Array, parts: list[Array]) -> Array:
    if name == "initial_state":
        return np.concatenate(parts)
    return np.concatenate(parts, 1) if name not in PARAMETERS and like.ndim > 2 else sum(parts, np.zeros_like(parts[0]))


def _softplus(x: Array) -> Array:
    return np.logaddexp(x.dtype.type(0), x)


def _sigmoid(x: Array) -> Array:
    return np.exp(-_softplus(-x))


def _of_channels(x: Array, D: int) -> Array:
    # B or C as [B, T, D, N]
    if x.ndim <= 2:
        return x + np.zeros((1, 1, D, 1), x.dtype)
    x = x[:, :, None] if x.ndim == 3 else x
    return x.repeat(D // x.shape[2], 2)


def _of_tokens(d: Array, order: int) -> Array:
    # the sum over batch and tokens
    d = d.reshape(-1, *d.shape[2:])
    return (np.random.default_rng(order).permutation(d) if order else d).sum(0)


def _shaped_like(d: Array, x: Array, order: int) -> Array:
    # the gradient of the argument of `_of_channels`
    if x.ndim <= 2:
        total = _of_tokens(d, order)
        return total if x.ndim == 2 else total.sum(0)
    return d.sum(2) if x.ndim == 3 else d.reshape(*x.shape[:3], d.shape[2] // x.shape[2], x.shape[3]).sum(3)


def selective_scan(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    initial_state: Any = None,
    cotangents: Any = None,
    dtype: Any = np.float64,
) -> Any:
    """`saccade.recurrent.selective_scan`."""
    arrays = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}
    wide = {name: x.astype(dtype) for name, x in arrays.items() if x is not None}
    u, rate, skip, z = wide["u"], wide["A"], wide.get("D"), wide.get("z")
    (batch, T, channels), N = u.shape, A.shape[1]
    Bt, Ct = (np.broadcast_to(_of_channels(wide[n], channels), (batch, T, channels, N)) for n in "BC")
    raw = wide["delta"] + wide.get("delta_bias", dtype(0))
    step = _softplus(raw) if delta_softplus else raw
    a = np.exp(step[..., None] * rate)
    h = np.zeros((batch, T + 1, channels, N), dtype)
    if initial_state is not None:
        h[:, 0] = initial_state
    for t in range(T):
        h[:, t + 1] = a[:, t] * h[:, t] + (step[:, t] * u[:, t])[..., None] * Bt[:, t]
    inner = (Ct * h[:, 1:]).sum(-1)
    p = inner if skip is None else inner + skip * u
    gate = dtype(1) if z is None else z * _sigmoid(z)
    if cotangents is None:
        return p * gate, h[:, T]
    dy, dh, order = *(x.astype(dtype) for x in cotangents[:2]), cotangents[2]
    dp = dy * gate
    dhs = np.zeros_like(h[:, 1:])
    for t in reversed(range(T)):
        dh = dhs[:, t] = dh + Ct[:, t] * dp[:, t, :, None]
        dh = a[:, t] * dh
    dx = dhs * a * h[:, :-1]
    through_B = (dhs * Bt).sum(-1)
    dstep = u * through_B + (dx * rate).sum(-1)
    draw = dstep * _sigmoid(raw) if delta_softplus else dstep
    grads = {
        "u": step * through_B + (0 if skip is None else skip * dp),
        "delta": draw,
        "A": _of_tokens(dx * step[..., None], order),
        "B": _shaped_like(dhs * (step * u)[..., None], B, order),
        "C": _shaped_like(h[:, 1:] * dp[..., None], C, order),
        "D": _of_tokens(dp * u, order),
        "delta_bias": _of_tokens(draw, order),
    }
    if z is not None:
        grads["z"] = dy * p * _sigmoid(z) * (1 + z * _sigmoid(-z))
    grads = {name: grads[name] for name in wide}
    return grads if initial_state is None else {**grads, "initial_state": dh}


def rg_lru(
    x: Array,
    r: Array,
    i: Array,
    a_param: Array,
    *,
    initial_state: Any = None,
    cotangents: Any = None,
    dtype: Any = np.float64,
) -> Any:
    """`saccade.recurrent.rg_lru`."""
    x, r, i, a_param = (v.astype(dtype) for v in (x, r, i, a_param))
    slope, sr, si = -8 * _softplus(a_param), _sigmoid(r), _sigmoid(i)
    a, unit = np.exp(slope * sr), -np.expm1(2 * slope * sr)
    if initial_state is None:
        a[:, :1], unit[:, :1] = 0, 1
    root, h = np.sqrt(unit), np.zeros((x.shape[0], x.shape[1] + 1, x.shape[2]), dtype)
    if initial_state is not None:
        h[:, 0] = initial_state
    for t in range(x.shape[1]):
        h[:, t + 1] = a[:, t] * h[:, t] + root[:, t] * si[:, t] * x[:, t]
    if cotangents is None:
        return h[:, 1:], h[:, -1]
    dy, dfinal, order = cotangents
    dhs, dh = np.zeros_like(x), dfinal.astype(dtype)
    for t in reversed(range(x.shape[1])):
        dh = dhs[:, t] = dh + dy[:, t].astype(dtype)
        dh = a[:, t] * dh
    # the slope of the square root is at most 1000
    droot = dhs * si * x / np.sqrt(np.maximum(4 * unit, dtype(1e-6)))
    dlog = a * dhs * h[:, :-1] - 2 * a * a * droot
    grads = {
        "x": dhs * root * si,
        "r": dlog * slope * sr * _sigmoid(-r),
        "i": dhs * root * x * si * _sigmoid(-i),
        "a_param": _of_tokens(dlog * sr, order) * -8 * _sigmoid(a_param),
    }
    return grads if initial_state is None else {**grads, "initial_state": dh}


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Any = None,
    *,
    activation: Any = None,
    initial_state: Any = None,
    cotangents: Any = None,
    dtype: Any = np.float64,
) -> Any:
    """`saccade.recurrent.causal_conv1d`."""
    w, (batch, T, D), K = weight.astype(dtype), x.shape, weight.shape[1]
    before = np.zeros((batch, D, K - 1), dtype) if initial_state is None else initial_state.astype(dtype)
    all_x = np.concatenate([before.swapaxes(1, 2), x.astype(dtype)], 1)
    p = sum((w[:, j] * all_x[:, j : j + T] for j in range(K)), np.zeros((batch, T, D), dtype))
    p = p if bias is None else p + bias.astype(dtype)
    if cotangents is None:
        return p * _sigmoid(p) if activation == "silu" else p, all_x[:, T:].swapaxes(1, 2)
    dy, dfinal, order = cotangents
    dp = dy.astype(dtype) * (_sigmoid(p) * (1 + p * _sigmoid(-p)) if activation == "silu" else dtype(1))
    dall = np.zeros_like(all_x)
    dall[:, T:] += dfinal.astype(dtype).swapaxes(1, 2)
    for j in range(K):
        dall[:, j : j + T] += w[:, j] * dp
    dw = [_of_tokens(dp * all_x[:, j : j + T], order) for j in range(K)]
    grads = {"x": dall[:, K - 1 :], "weight": np.stack(dw, 1)}
    if bias is not None:
        grads["bias"] = _of_tokens(dp, order)
    return grads if initial_state is None else {**grads, "initial_state": dall[:, : K - 1].swapaxes(1, 2)}
