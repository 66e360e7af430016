"""Attention on NumPy arrays: float16, float32, float64, and bfloat16 through ml_dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import Inputs, Outputs
from ..operands import NO_SIDE, Request
from ..problem import check_gradients
from .call import LentArrays, first_keys, gradients_of, name_of, prepare, rows_of, spec
from .source import STRIDED, Source, pages_in_use, stored

Array = NDArray[Any]


def attention(q: Array, k: Array, v: Array, request: Request, verb: str, source: Source = STRIDED) -> tuple[Array, ...]:
    """(o, lse, *more) of `saccade.attention`, computed by the backend's forward or decode.

    verb: "forward" if a backward may follow; "result" if only o is used; "decode".
    """
    call = _lent(q, k, v, request, source=source)
    problem, plan, backend, _ = call.planned
    compute = backend.forward if verb == "forward" else backend.decode
    o, *rows = compute(problem, plan, call.inputs)
    results = _restore(o, q.dtype), *rows
    return tuple(x[0] for x in results) if call.lifted else results


def attention_backward(
    q: Array, k: Array, v: Array, outputs: Outputs, request: Request, grads: frozenset[str]
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """(dq, dk, dv, extras) of `saccade.attention_backward`."""
    call = _lent(q, k, v, request, grads)
    problem, plan, backend, _ = call.planned
    rows = {name: _lift(array(name, x), call.lifted) for name, x in rows_of(outputs).items()}
    check_gradients(problem, {name: spec(x, "cpu") for name, x in rows.items()})
    outputs = Outputs(**rows | {"o": carrier(rows["o"]), "do": carrier(rows["do"])})
    dq, dk, dv, more = backend.backward(problem, plan, call.inputs, outputs, grads=grads)
    first = [_restore(x, q.dtype) for x in (dq, dk, dv)]
    dq, dk, dv = (x[0] for x in first) if call.lifted else first
    return dq, dk, dv, gradients_of(request, more, problem.Tk)


def decode(q: Array, cache: Any, request: Request) -> tuple[Array, ...]:
    """(o, lse, *more) of `saccade.decode`."""
    k, v = array("the cache's k", cache.k), array("the cache's v", cache.v)
    if hasattr(cache, "block_table"):
        source, request = pages_in_use(cache, request)
        return attention(q, k, v, request, "decode", source)
    longest, request = first_keys(cache, np.asarray(cache.lengths), request)
    source = stored(cache).first(longest)
    return attention(q, k[:, :longest], v[:, :longest], request, "decode", source)


def _lent(
    q: Array, k: Array, v: Array, request: Request, grads: frozenset[str] | None = None, source: Source = STRIDED
) -> LentArrays:
    q, k, v = array("q", q), array("k", k), array("v", v)
    lifted = q.ndim == k.ndim == v.ndim == 3
    if lifted:
        q, k, v = q[None], k[None], v[None]
    if request.side is not NO_SIDE:
        request = Request(request.mask, request.side.checked(array), request.options, request.seed)
    planned, extras = prepare("cpu", q, k, v, request, grads, source)
    return LentArrays(planned, Inputs(carrier(q), carrier(k), carrier(v), extras), lifted)


def array(name: str, x: Any) -> Array:
    """x; raises TypeError unless it is a NumPy array of native byte order."""
    if type(x) is not np.ndarray and (not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray)):
        raise TypeError(f"{name} is {type(x).__name__}; expected a NumPy array, like q: convert it first")
    if not x.dtype.isnative:
        raise TypeError(
            f"{name} has foreign byte order {x.dtype}; expected native: x.astype(x.dtype.newbyteorder('='))"
        )
    return x


def _lift(x: Array, lifted: bool) -> Array:
    return x[None] if lifted else x


def carrier(x: Array) -> Array:
    """x in the form that kernels read: the last dimension contiguous, bfloat16 as uint16."""
    # kernels read any strides, except in the last dimension
    if (x.strides[-1] != x.itemsize and x.shape[-1] != 1) or not x.flags.aligned:
        x = np.ascontiguousarray(x)
    return x.view(np.uint16) if name_of(x.dtype) == "bfloat16" else x


def _restore(x: Array, dtype: np.dtype[Any]) -> Array:
    return x if x.dtype == dtype else x.view(dtype)
