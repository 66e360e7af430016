"""Recurrences token by token, slow and simple: the float64 oracle, and the plain recurrence in any dtype."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Rule(NamedTuple):
    """The options of a recurrence over matrix states; dtype: every step is rounded to it."""

    rule: str = "add"
    feature_map: str = ""
    normalize: bool = False
    causal: bool = True
    scale: float | None = None
    dtype: Any = np.float64


class _Walk(NamedTuple):
    # rows after feature map and grouping, [B, T, H, ...], and for each token the states before and after it, and values
    q: Array
    k: Array
    beta: Array
    decay: Array
    o: Array
    final: Array
    before: dict[tuple[int, int], Array]
    after: dict[tuple[int, int], Array]
    e: dict[tuple[int, int], Array]
    u: dict[tuple[int, int], Array]


def matrix_state(q: Array, k: Array, v: Array, cu_seqlens: Any = None, **rest: Any) -> tuple[Array, Array]:
    """(o, final state) of q, k, v and optionally g, beta, initial_state; the other names are the fields of `Rule`."""
    walk, opt, r = _walk((q, k, v), cu_seqlens, **rest)
    with np.errstate(invalid="ignore", divide="ignore"):
        o = walk.o[..., :-1] / walk.o[..., -1:] if opt.normalize else walk.o
    return r(np.where(walk.o[..., -1:] != 0, o, 0) if opt.normalize else o), walk.final


def matrix_state_backward(
    do: Array, dfinal: Any, q: Array, k: Array, v: Array, cu_seqlens: Any = None, **rest: Any
) -> dict[str, Array]:
    """Gradients by name of the given arrays, from those of o and of the final state (or None)."""
    walk, opt, r = _walk((q, k, v), cu_seqlens, **rest)
    outer = _outer(opt, q)
    do = np.concatenate([r(do), np.zeros((*do.shape[:3], int(opt.normalize)))], -1)
    if opt.normalize:
        # the last column divides the others; a row without weight has no gradient
        do = r(do / np.where(walk.o[..., -1:] != 0, walk.o[..., -1:], np.inf))
        total = np.where(walk.o[..., -1] != 0, walk.o[..., -1], np.inf)
        do[..., -1] = r(-(do * walk.o).sum(-1) / total)
    zeros = {"q": walk.q, "k": walk.k, "v": do, "g": walk.decay, "beta": walk.beta, "initial_state": walk.final}
    grads = {name: np.zeros_like(x) for name, x in zeros.items()}
    for n, rows, tokens in sequences(len(q), q.shape[1], cu_seqlens):
        dS = grads["initial_state"][n] if dfinal is None else r(dfinal)[n]
        for t in () if opt.causal else tokens:
            dS = r(dS + outer * product(walk.q[rows, t], do[rows, t]))
        for t in reversed(tokens):
            dS = r(dS + outer * product(walk.q[rows, t], do[rows, t])) if opt.causal else dS
            after, before = walk.after[t, n.start], walk.before[t, n.start]
            grads["q"][rows, t] = r(outer * along(after if opt.causal else walk.final[n], do[rows, t]))
            dk, du = along(dS, walk.u[t, n.start]), r(down(dS, walk.k[rows, t]))
            dv = r(walk.beta[rows, t] * du)
            db = du * walk.e[t, n.start]
            grads["beta"][rows, t] = r(db if walk.beta.shape[3] > 1 else db.sum(-1, keepdims=True))
            if opt.rule == "delta":
                dk, dS = dk - along(before, dv), r(dS - product(walk.k[rows, t], dv))
            grads["k"][rows, t], grads["v"][rows, t] = r(dk), dv
            dg = (dS * before).sum(-1)
            grads["g"][rows, t] = r(dg if walk.decay.shape[3] > 1 else dg.sum(-1, keepdims=True))
            dS = r(walk.decay[rows, t, :, :, None] * dS)
        grads["initial_state"][n] = dS
    for name, x in (("q", q), ("k", k)):
        dx = features_backward(r(x).repeat(v.shape[2] // x.shape[2], 2), grads[name], opt.feature_map, _scale(opt, q))
        grads[name] = r(dx.reshape(*x.shape[:3], -1, x.shape[3]).sum(3))
    grads["v"] = grads["v"][..., : v.shape[3]]
    optional = {
        n: x.reshape(rest[n].shape) for n, x in grads.items() if n not in ("q", "k", "v") and rest.get(n) is not None
    }
    return {**{n: grads[n] for n in ("q", "k", "v")}, **optional}


def _walk(
    qkv: tuple[Array, Array, Array],
    cu_seqlens: Any,
    g: Any = None,
    beta: Any = None,
    initial_state: Any = None,
    **rule: Any,
) -> tuple[_Walk, Rule, Any]:
    opt, (q, k, v) = Rule(**rule), qkv
    r, shape = rounding(opt.dtype), v.shape[:3]
    q, k = (r(features(r(x), opt.feature_map, _scale(opt, q))).repeat(shape[2] // x.shape[2], 2) for x in (q, k))
    values = r(np.concatenate([v, np.ones((*shape, int(opt.normalize)))], -1))
    b = np.ones((*shape, 1)) if beta is None else r(beta).reshape(*shape, -1)
    decay = np.ones((*shape, 1)) if g is None else r(np.exp(r(g))).reshape(*shape, -1)
    N = shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    final = np.zeros((N, shape[2], k.shape[3], values.shape[3])) if initial_state is None else r(initial_state).copy()
    walk = _Walk(q, k, b, decay, np.zeros_like(values), final, {}, {}, {}, {})
    for n, rows, tokens in sequences(shape[0], shape[1], cu_seqlens):
        state = final[n]
        for t in tokens:
            at = t, n.start
            walk.before[at] = state = r(decay[rows, t, :, :, None] * state)
            walk.e[at] = r(values[rows, t] - down(state, k[rows, t])) if opt.rule == "delta" else values[rows, t]
            walk.u[at] = r(b[rows, t] * walk.e[at])
            walk.after[at] = state = r(state + product(k[rows, t], walk.u[at]))
        final[n] = state
        for t in tokens:
            walk.o[rows, t] = r(_outer(opt, q) * down(walk.after[t, n.start] if opt.causal else state, q[rows, t]))
    return walk, opt, r


def _scale(opt: Rule, q: Array) -> float:
    return q.shape[3] ** -0.5 if opt.scale is None else opt.scale


def _outer(opt: Rule, q: Array) -> float:
    # the Taylor map contains the scale
    return 1.0 if opt.feature_map == "taylor" else _scale(opt, q)


def rounding(dtype: Any) -> Any:
    """A function that rounds to dtype and returns float64, or float32 for narrower dtypes."""
    dtype = np.dtype(dtype)
    work = np.float64 if dtype == np.float64 else np.float32
    return lambda x: np.asarray(x).astype(work).astype(dtype).astype(work)


def sequences(B: int, T: int, cu_seqlens: Any) -> Iterator[tuple[slice, slice, range]]:
    """(index of the state, of the batch, range of tokens) of each sequence; without cu_seqlens all B at once."""
    borders = [0, T] if cu_seqlens is None else [int(x) for x in cu_seqlens]
    for n, (first, stop) in enumerate(pairwise(borders)):
        yield slice(0, B) if cu_seqlens is None else slice(n, n + 1), slice(0, B), range(first, stop)


def product(x: Array, y: Array) -> Array:
    """x yᵀ of rows [.., F] and [.., W]."""
    return x[..., :, None] * y[..., None, :]


def down(S: Array, x: Array) -> Array:
    """Sᵀ x of states [.., F, W] and rows [.., F]."""
    return (x[..., None, :] @ S)[..., 0, :]


def along(S: Array, x: Array) -> Array:
    """S x of states [.., F, W] and rows [.., W]."""
    return (S @ x[..., None])[..., 0]


def features(x: Array, name: str, scale: float) -> Array:
    """The feature map of rows [..., K]. The Taylor map has φ(q) · φ(k) = 1 + s + s²/2 for s = scale q · k."""
    if name == "taylor":
        x, (i, j) = x * np.sqrt(scale), np.triu_indices(x.shape[-1])
        return np.concatenate([np.ones_like(x[..., :1]), x, x[..., i] * x[..., j] * np.where(i == j, 0.5**0.5, 1)], -1)
    if name == "elu+1":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    return np.maximum(x, 0) if name == "relu" else np.exp(x) if name == "exp" else x


def features_backward(x: Array, d: Array, name: str, scale: float) -> Array:
    """The gradient of rows x [..., K] from that of their features."""
    if name == "taylor":
        root, (i, j), K = np.sqrt(scale), np.triu_indices(x.shape[-1]), x.shape[-1]
        pairs, dx = d[..., 1 + K :] * np.where(i == j, 0.5**0.5, 1) * scale, root * d[..., 1 : 1 + K]
        for n in range(len(i)):
            dx[..., i[n]] += pairs[..., n] * x[..., j[n]]
            dx[..., j[n]] += pairs[..., n] * x[..., i[n]]
        return dx
    if name == "elu+1":
        return d * np.exp(np.minimum(x, 0))
    return d * (x > 0) if name == "relu" else d * np.exp(x) if name == "exp" else d
