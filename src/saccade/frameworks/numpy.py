"""Attention on NumPy arrays: float16, float32, float64, and bfloat16 through ml_dtypes."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends import Extras
from ..mask import Mask
from ..problem import Problem, Spec, check_gradients, describe
from .call import Alibi, Options, Ready, find, in_use, make, seed_value

Array = NDArray[Any]


class _Call(NamedTuple):
    ready: Ready
    q: Array
    k: Array
    v: Array
    extras: Extras
    lifted: bool


def attention(
    q: Array, k: Array, v: Array, mask: Mask | None, bias: Any, sinks: Any, seed: Any, options: Options, verb: str
) -> tuple[Array, Array]:
    """(o, lse) as `saccade.attention` describes them, by the backend's forward, or its decode.

    verb: "forward", whose lse a backward may follow; "result", where only o is kept; "decode".
    """
    call = _call(q, k, v, mask, bias, sinks, seed, options)
    problem, plan, backend, _ = call.ready
    compute = backend.forward if verb == "forward" else backend.decode
    o, lse = compute(problem, plan, call.q, call.k, call.v, call.extras)
    o = _restore(o, q.dtype)
    return (o[0], lse[0]) if call.lifted else (o, lse)


def attention_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, mask: Mask | None, dlse: Array | None,
    bias: Any, sinks: Any, seed: Any, options: Options, grads: Set[str],
) -> tuple[Array, Array, Array, dict[str, Array]]:  # fmt: skip
    """(dq, dk, dv, extras) as `saccade.attention_backward` describes them."""
    call = _call(q, k, v, mask, bias, sinks, seed, options, needs_grad=True, bias_grad="bias" in grads)
    problem, plan, backend, _ = call.ready
    rows = {"do": do, "o": o, "lse": lse, **({} if dlse is None else {"dlse": dlse})}
    rows = {name: _lift(_array(name, x), call.lifted) for name, x in rows.items()}
    check_gradients(problem, {name: _spec(x) for name, x in rows.items()})
    dq, dk, dv, more = backend.backward(
        problem, plan, _carrier(rows["do"], problem), call.q, call.k, call.v, _carrier(rows["o"], problem),
        rows["lse"], call.extras, dlse=rows.get("dlse"), grads=grads,
    )  # fmt: skip
    first = [_restore(x, q.dtype) for x in (dq, dk, dv)]
    dq, dk, dv = (x[0] for x in first) if call.lifted else first
    given: dict[str, Any] = {"bias": bias, "slopes": getattr(bias, "slopes", None), "sinks": sinks}
    return dq, dk, dv, {n: g.reshape(given[n].shape).astype(given[n].dtype, copy=False) for n, g in more.items()}


def decode(q: Array, cache: Any, mask: Mask | None, bias: Any, sinks: Any, options: Options) -> tuple[Array, Array]:
    """(o, lse) of new queries over the cache, as `saccade.decode` describes them."""
    k, v = _array("the cache's k", cache.k), _array("the cache's v", cache.v)
    capacity = k.shape[1]
    longest, mask = in_use(np.asarray(cache.lengths), k.shape[0], capacity, mask)
    if isinstance(bias, np.ndarray) and bias.ndim and bias.shape[-1] == capacity:
        bias = bias[..., :longest]
    return attention(q, k[:, :longest], v[:, :longest], mask, bias, sinks, 0, options, "decode")


def _call(
    q: Array, k: Array, v: Array, mask: Mask | None, bias: Any, sinks: Any, seed: Any, options: Options,
    needs_grad: bool = False, bias_grad: bool = False,
) -> _Call:  # fmt: skip
    q, k, v = _array("q", q), _array("k", k), _array("v", v)
    lifted = q.ndim == k.ndim == v.ndim == 3
    if lifted:
        q, k, v = q[None], k[None], v[None]
    slopes = None
    if isinstance(bias, Alibi):
        bias, slopes = None, _array("the slopes of alibi", bias.slopes)
    extra = [None if x is None else _spec(_array(name, x)) for name, x in (("bias", bias), ("sinks", sinks))]
    alibi = None if slopes is None else _spec(slopes)
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, *extra, alibi, options, needs_grad, bias_grad)
    found = find(mask, key)
    if found is None:
        problem = describe(
            _spec(q), _spec(k), _spec(v), mask=mask, scale=options.scale, softcap=options.softcap, sinks=extra[1],
            bias=extra[0], alibi=alibi, dropout=options.dropout, descale=options.descale, needs_grad=needs_grad,
            bias_grad=bias_grad, deterministic=options.deterministic,
        )  # fmt: skip
        found = make(mask, key, problem, options.backend)
    problem = found.problem
    if seed is None:
        seed = int(np.random.default_rng().integers(1 << 63)) if problem.dropout else 0
    extras = Extras(
        None if bias is None else _widen(bias, problem).reshape(problem.bias),
        None if slopes is None else _widen(slopes, problem).reshape(problem.alibi),
        None if sinks is None else _widen(sinks, problem),
        seed_value(seed),
    )
    return _Call(found, _carrier(q, problem), _carrier(k, problem), _carrier(v, problem), extras, lifted)


def _array(name: str, x: Any) -> Array:
    if type(x) is not np.ndarray and (not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray)):
        raise TypeError(f"{name} is {type(x).__name__}; expected a NumPy array, as q is one: convert it first")
    if not x.dtype.isnative:
        raise TypeError(
            f"{name} has foreign byte order {x.dtype}; expected native: x.astype(x.dtype.newbyteorder('='))"
        )
    return x


def _spec(x: Array) -> Spec:
    return Spec(x.shape, x.dtype.name, "cpu")


def _lift(x: Array, lifted: bool) -> Array:
    return x[None] if lifted else x


def _carrier(x: Array, problem: Problem) -> Array:
    # kernels read any strides, but for the last dimension's
    if (x.strides[-1] != x.itemsize and x.shape[-1] != 1) or not x.flags.aligned:
        x = np.ascontiguousarray(x)
    return x.view(np.uint16) if problem.dtype == "bfloat16" else x


def _restore(x: Array, dtype: np.dtype[Any]) -> Array:
    return x if x.dtype == dtype else x.view(dtype)


def _widen(x: Array, problem: Problem) -> Array:
    return x.astype(problem.accumulator, copy=False)
