"""Attention on NumPy arrays: float16, float32, float64, and bfloat16 through ml_dtypes."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends import Inputs, Outputs
from ..mask import Mask
from ..operands import NO_SIDE, Side
from ..problem import check_gradients
from .call import LentArrays, Options, like_given, of_first_keys, prepare, spec
from .source import STRIDED, Source, in_use, pages_in_use, stored

Array = NDArray[Any]


def attention(
    q: Array, k: Array, v: Array, mask: Mask | None, side: Side, seed: Any, options: Options, verb: str,
    source: Source = STRIDED,
) -> tuple[Array, Array]:  # fmt: skip
    """(o, lse) as `saccade.attention` describes them, by the backend's forward, or its decode.

    verb: "forward", whose lse a backward may follow; "result", where only o is kept; "decode".
    """
    call = _call(q, k, v, mask, side, seed, options, source=source)
    problem, plan, backend, _ = call.ready
    compute = backend.forward if verb == "forward" else backend.decode
    o, lse = compute(problem, plan, Inputs(call.q, call.k, call.v, call.extras))
    o = _restore(o, q.dtype)
    return (o[0], lse[0]) if call.lifted else (o, lse)


def attention_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, mask: Mask | None, dlse: Array | None,
    side: Side, seed: Any, options: Options, grads: Set[str],
) -> tuple[Array, Array, Array, dict[str, Array]]:  # fmt: skip
    """(dq, dk, dv, extras) as `saccade.attention_backward` describes them."""
    call = _call(q, k, v, mask, side, seed, options, needs_grad=True, bias_grad="bias" in grads)
    problem, plan, backend, _ = call.ready
    rows = {"do": do, "o": o, "lse": lse, **({} if dlse is None else {"dlse": dlse})}
    rows = {name: _lift(array(name, x), call.lifted) for name, x in rows.items()}
    check_gradients(problem, {name: spec(x, "cpu") for name, x in rows.items()})
    inputs = Inputs(call.q, call.k, call.v, call.extras)
    outputs = Outputs(carrier(rows["o"]), rows["lse"], carrier(rows["do"]), rows.get("dlse"))
    dq, dk, dv, more = backend.backward(problem, plan, inputs, outputs, grads=grads)
    first = [_restore(x, q.dtype) for x in (dq, dk, dv)]
    dq, dk, dv = (x[0] for x in first) if call.lifted else first
    return dq, dk, dv, like_given(more, side)


def decode(q: Array, cache: Any, mask: Mask | None, side: Side, options: Options) -> tuple[Array, Array]:
    """(o, lse) of new queries over the cache, as `saccade.decode` describes them."""
    k, v = array("the cache's k", cache.k), array("the cache's v", cache.v)
    if hasattr(cache, "block_table"):
        source, mask = pages_in_use(cache, mask)
        return attention(q, k, v, mask, side, 0, options, "decode", source)
    capacity = k.shape[1]
    longest, mask = in_use(np.asarray(cache.lengths), k.shape[0], capacity, mask)
    side = of_first_keys(side, capacity, longest)
    source = stored(cache).first(longest)
    return attention(q, k[:, :longest], v[:, :longest], mask, side, 0, options, "decode", source)


def _call(
    q: Array, k: Array, v: Array, mask: Mask | None, side: Side, seed: Any, options: Options,
    needs_grad: bool = False, bias_grad: bool = False, source: Source = STRIDED,
) -> LentArrays:  # fmt: skip
    q, k, v = array("q", q), array("k", k), array("v", v)
    lifted = q.ndim == k.ndim == v.ndim == 3
    if lifted:
        q, k, v = q[None], k[None], v[None]
    if side is not NO_SIDE:
        side = side.checked(array)
    ready, extras = prepare(
        "cpu", q, k, v, side, mask, seed, options, needs_grad=needs_grad, bias_grad=bias_grad, source=source
    )
    return LentArrays(ready, carrier(q), carrier(k), carrier(v), extras, lifted)


def array(name: str, x: Any) -> Array:
    """x, which must be a NumPy array of native byte order."""
    if type(x) is not np.ndarray and (not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray)):
        raise TypeError(f"{name} is {type(x).__name__}; expected a NumPy array, as q is one: convert it first")
    if not x.dtype.isnative:
        raise TypeError(
            f"{name} has foreign byte order {x.dtype}; expected native: x.astype(x.dtype.newbyteorder('='))"
        )
    return x


def _lift(x: Array, lifted: bool) -> Array:
    return x[None] if lifted else x


def carrier(x: Array) -> Array:
    """x as kernels take it: its last dimension contiguous, bfloat16 as uint16."""
    # kernels read any strides, but for the last dimension's
    if (x.strides[-1] != x.itemsize and x.shape[-1] != 1) or not x.flags.aligned:
        x = np.ascontiguousarray(x)
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def _restore(x: Array, dtype: np.dtype[Any]) -> Array:
    return x if x.dtype == dtype else x.view(dtype)
