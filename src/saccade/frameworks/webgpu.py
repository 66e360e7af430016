"""Attention on arrays that stay on a WebGPU device: float32 and float16, results float32 and on the device too.

What is as long as heads or a mask alone (bias, slopes, sinks) stays NumPy's, and so do its gradients.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np

from ..backends import Extras
from ..backends.webgpu.arrays import GpuArray
from ..mask import Mask
from ..problem import Problem, Spec, check_gradients, describe
from .call import Alibi, Options, Ready, find, in_use, make, seed_value


class _Call(NamedTuple):
    ready: Ready
    q: GpuArray
    k: GpuArray
    v: GpuArray
    extras: Extras
    lifted: bool


def attention(
    q: GpuArray, k: GpuArray, v: GpuArray, mask: Mask | None, bias: Any, sinks: Any, seed: Any, options: Options,
    verb: str,
) -> tuple[GpuArray, GpuArray]:  # fmt: skip
    """(o, lse) as `saccade.attention` describes them, both float32; verb as for NumPy arrays."""
    call = _call(q, k, v, mask, bias, sinks, seed, options)
    problem, plan, backend, _ = call.ready
    compute = backend.forward if verb == "forward" else backend.decode
    o, lse = compute(problem, plan, call.q, call.k, call.v, call.extras)
    return _lowered(o, call.lifted), _lowered(lse, call.lifted)


def attention_backward(
    do: GpuArray, q: GpuArray, k: GpuArray, v: GpuArray, o: GpuArray, lse: GpuArray, mask: Mask | None,
    dlse: GpuArray | None, bias: Any, sinks: Any, seed: Any, options: Options, grads: Set[str],
) -> tuple[GpuArray, GpuArray, GpuArray, dict[str, Any]]:  # fmt: skip
    """(dq, dk, dv, extras) as `saccade.attention_backward` describes them; float32, extras in memory."""
    call = _call(q, k, v, mask, bias, sinks, seed, options, "bias" in grads, True)
    problem, plan, backend, _ = call.ready
    given = {"do": do, "o": o, "lse": lse, **({} if dlse is None else {"dlse": dlse})}
    rows = {name: _lift(_array(name, x, q), call.lifted) for name, x in given.items()}
    specs = {name: _spec(x) for name, x in rows.items()}
    if specs["o"].dtype == "float32":
        # what forward gives, whatever the dtype of q
        specs["o"] = specs["o"]._replace(dtype=problem.dtype)
    check_gradients(problem, specs)
    dq, dk, dv, more = backend.backward(
        problem, plan, rows["do"], call.q, call.k, call.v, rows["o"], rows["lse"], call.extras, dlse=rows.get("dlse"),
        grads=grads,
    )  # fmt: skip
    asked: dict[str, Any] = {"bias": bias, "slopes": getattr(bias, "slopes", None), "sinks": sinks}
    extra = {name: x.reshape(asked[name].shape).astype(asked[name].dtype) for name, x in more.items()}
    return _lowered(dq, call.lifted), _lowered(dk, call.lifted), _lowered(dv, call.lifted), extra


def decode(
    q: GpuArray, cache: Any, mask: Mask | None, bias: Any, sinks: Any, options: Options
) -> tuple[GpuArray, GpuArray]:  # fmt: skip
    """(o, lse) of new queries over cache.k and cache.v on the device; cache.lengths [B] is NumPy's."""
    k, v = _array("the cache's k", cache.k, q), _array("the cache's v", cache.v, q)
    B, capacity = k.shape[:2]
    # the first tokens of one sequence are the beginning of its buffer; of several they are no array
    longest, mask = in_use(np.asarray(cache.lengths), B, capacity, mask, cut=B == 1)
    if longest < capacity:
        k, v = _beginning(k, longest), _beginning(v, longest)
        if isinstance(bias, np.ndarray) and bias.ndim and bias.shape[-1] == capacity:
            bias = bias[..., :longest]
    return attention(q, k, v, mask, bias, sinks, 0, options, "decode")


def _beginning(x: GpuArray, n: int) -> GpuArray:
    return x.first((x.shape[0], n, *x.shape[2:]))


def _call(
    q: GpuArray, k: GpuArray, v: GpuArray, mask: Mask | None, bias: Any, sinks: Any, seed: Any, options: Options,
    bias_grad: bool = False, needs_grad: bool = False,
) -> _Call:  # fmt: skip
    k, v = _array("k", k, q), _array("v", v, q)
    lifted = q.ndim == k.ndim == v.ndim == 3
    q, k, v = (_lift(x, lifted) for x in (q, k, v))
    slopes = None
    if isinstance(bias, Alibi):
        bias, slopes = None, bias.slopes
    side = [_side(name, x) for name, x in (("bias", bias), ("the slopes of alibi", slopes), ("sinks", sinks))]
    specs = [_spec(x) for x in (q, k, v)]
    key = ("webgpu", *specs, *side, options, bias_grad, needs_grad)
    ready = find(mask, key)
    if ready is None:
        problem = describe(
            *specs, mask=mask, scale=options.scale, softcap=options.softcap, bias=side[0], alibi=side[1],
            sinks=side[2], dropout=options.dropout, descale=options.descale, needs_grad=needs_grad,
            bias_grad=bias_grad, deterministic=options.deterministic,
        )  # fmt: skip
        ready = make(mask, key, problem, options.backend)
    return _Call(ready, q, k, v, _extras(ready.problem, bias, slopes, sinks, seed), lifted)


def _extras(problem: Problem, bias: Any, slopes: Any, sinks: Any, seed: Any) -> Extras:
    if seed is None:
        seed = int(np.random.default_rng().integers(1 << 63)) if problem.dropout else 0
    return Extras(
        None if bias is None else _wide(bias).reshape(problem.bias),
        None if slopes is None else _wide(slopes).reshape(problem.alibi),
        None if sinks is None else _wide(sinks),
        seed_value(seed),
    )


def _wide(x: Any) -> Any:
    return x.astype(np.float32, copy=False)


def _array(name: str, x: Any, q: GpuArray) -> GpuArray:
    if not isinstance(x, GpuArray):
        hint = "put it there by saccade.backends.webgpu.array"
        raise TypeError(f"{name} is {type(x).__name__}; expected a GpuArray, as q is one: {hint}")
    if x.gpu is not q.gpu:
        raise ValueError(f"{name} lives on {x.gpu.name} and q on {q.gpu.name}; move them together")
    return x


def _side(name: str, x: Any) -> Spec | None:
    if x is None:
        return None
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {type(x).__name__}; expected a NumPy array, also where q is on the device")
    return Spec(x.shape, x.dtype.name, "webgpu")


def _spec(x: GpuArray) -> Spec:
    return Spec(x.shape, x.dtype.name, "webgpu")


def _lift(x: GpuArray, lifted: bool) -> GpuArray:
    return x.reshape(1, *x.shape) if lifted else x


def _lowered(x: GpuArray, lifted: bool) -> GpuArray:
    return x.reshape(*x.shape[1:]) if lifted else x
