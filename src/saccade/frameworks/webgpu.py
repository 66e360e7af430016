"""Attention on float32 and float16 arrays that stay on a WebGPU device; results are float32 arrays on the device.

Side arrays (bias, slopes, sinks) and their gradients are NumPy arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends import Inputs, Outputs
from ..backends.webgpu.arrays import GpuArray
from ..operands import Request
from ..problem import check_gradients
from .call import LentArrays, first_keys, gradients_of, prepare, rows_of, spec
from .source import STRIDED, Source, pages_in_use


def attention(
    q: GpuArray, k: GpuArray, v: GpuArray, request: Request, verb: str, cache: Any = None, source: Source = STRIDED
) -> tuple[GpuArray, GpuArray]:
    """(o, lse) of `saccade.attention`, both float32; verb: as for NumPy arrays.

    cache: the cache of k and v, which may be rows of codes; None without a cache. source: how they are stored.
    """
    call = _lent(q, k, v, request, cache=cache, source=source)
    problem, plan, backend, _ = call.planned
    compute = backend.forward if verb == "forward" else backend.decode
    o, lse = compute(problem, plan, call.inputs)
    return _lowered(o, call.lifted), _lowered(lse, call.lifted)


def attention_backward(
    q: GpuArray, k: GpuArray, v: GpuArray, outputs: Outputs, request: Request, grads: frozenset[str]
) -> tuple[GpuArray, GpuArray, GpuArray, dict[str, Any]]:
    """(dq, dk, dv, extras) of `saccade.attention_backward`, float32; extras are NumPy arrays."""
    call = _lent(q, k, v, request, grads)
    problem, plan, backend, _ = call.planned
    rows = {name: _lift(_array(name, x, q), call.lifted) for name, x in rows_of(outputs).items()}
    specs = {name: spec(x, q.gpu.place) for name, x in rows.items()}
    if specs["o"].dtype != "float32":
        raise TypeError(f"o has dtype {specs['o'].dtype}; expected float32, as a forward on the device returns it")
    specs["o"] = specs["o"]._replace(dtype=problem.dtype)
    check_gradients(problem, specs)
    dq, dk, dv, more = backend.backward(problem, plan, call.inputs, Outputs(**rows), grads=grads)
    dq, dk, dv = (_lowered(x, call.lifted) for x in (dq, dk, dv))
    return dq, dk, dv, gradients_of(request, more, problem.Tk)


def decode(q: GpuArray, cache: Any, request: Request) -> tuple[GpuArray, GpuArray]:
    """(o, lse) of new queries over cache.k and cache.v on the device; cache.lengths [B] is a NumPy array."""
    k, v = _array("the cache's k", cache.k, q), _array("the cache's v", cache.v, q)
    if hasattr(cache, "block_table"):
        # scales are in the rows
        source, request = pages_in_use(cache._replace(quantised=None), request)
        return attention(q, k, v, request, "decode", cache, source)
    # the first tokens of one sequence are the start of its buffer; those of several sequences are not contiguous
    longest, request = first_keys(cache, np.asarray(cache.lengths), request, cut=k.shape[0] == 1)
    if longest < k.shape[1]:
        k, v = _beginning(k, longest), _beginning(v, longest)
    return attention(q, k, v, request, "decode", cache)


def _beginning(x: GpuArray, n: int) -> GpuArray:
    return x.first((x.shape[0], n, *x.shape[2:]))


def _lent(
    q: GpuArray,
    k: GpuArray,
    v: GpuArray,
    request: Request,
    grads: frozenset[str] | None = None,
    cache: Any = None,
    source: Source = STRIDED,
) -> LentArrays:
    k, v = _array("k", k, q), _array("v", v, q)
    lifted = q.ndim == k.ndim == v.ndim == 3
    q, k, v = (_lift(x, lifted) for x in (q, k, v))
    like_k, like_v = k, v
    how = getattr(cache, "quantised", None)
    if how is not None:
        # rows also have scales; describe only the codes
        source = source._replace(quantised=how, key=(source.key, how))
        like_k, like_v = (_like(x, how.width(n)) for x, n in zip((k, v), cache.sizes, strict=True))
    request = request._replace(side=request.side.checked(_side))
    planned, extras = prepare(q.gpu.place, q, like_k, like_v, request, grads, source)
    return LentArrays(planned, Inputs(q, k, v, extras), lifted)


def _like(x: GpuArray, width: int) -> Any:
    return np.broadcast_to(np.uint8(0), (*x.shape[:-1], width))


def _array(name: str, x: Any, q: GpuArray) -> GpuArray:
    if not isinstance(x, GpuArray):
        hint = "put it there by saccade.backends.webgpu.array"
        raise TypeError(f"{name} is {type(x).__name__}; expected a GpuArray, as q is one: {hint}")
    if x.gpu is not q.gpu:
        raise ValueError(f"{name} lives on {x.gpu.name} and q on {q.gpu.name}; move them together")
    return x


def _side(name: str, x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {type(x).__name__}; expected a NumPy array, also where q is on the device")
    return x


def _lift(x: GpuArray, lifted: bool) -> GpuArray:
    return x.reshape(1, *x.shape) if lifted else x


def _lowered(x: GpuArray, lifted: bool) -> GpuArray:
    return x.reshape(*x.shape[1:]) if lifted else x
