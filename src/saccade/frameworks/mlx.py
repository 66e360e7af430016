"""Attention on MLX's arrays, with gradients: Metal kernels on an Apple GPU, the CPU core on MLX's CPU device.

On a GPU a call is a part of MLX's graph and computes nothing by itself. On the CPU it needs numbers at once, so it
runs under `mx.grad`, not under `mx.compile`. `mx.vmap` takes no kernels: `integrations.mlx.vmap` does. Bias, slopes
and sinks are constants here.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..backends import Inputs, Outputs
from ..mask import Mask
from ..operands import Side
from ..problem import check_gradients
from . import numpy as host
from .call import Options, Ready, of_first_keys, prepare, spec
from .source import STRIDED, in_use

Array = NDArray[Any]
KINDS: dict[Any, str] = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float64: "float64"}


def attention(
    q: mx.array, k: mx.array, v: mx.array, mask: Mask | None, side: Side, seed: Any, options: Options,
    verb: str,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """(o, lse) as `saccade.attention` describes them, both differentiable in q, k and v; verb as for NumPy arrays."""
    _same(q, k, v)
    call = _Call(mask, side, seed, options)
    if options.dropout and seed is None:
        # a backward must drop what its forward dropped
        call.seed = int(np.random.default_rng().integers(1 << 63))
    o, lse = call.differentiable(verb)(q, k, v)
    return o, lse


def attention_backward(
    do: mx.array, q: mx.array, k: mx.array, v: mx.array, o: mx.array, lse: mx.array, mask: Mask | None,
    dlse: mx.array | None, side: Side, seed: Any, options: Options, grads: Set[str],
) -> tuple[mx.array, mx.array, mx.array, dict[str, Any]]:  # fmt: skip
    """(dq, dk, dv, extras) as `saccade.attention_backward` describes them; extras are NumPy's."""
    _same(q, k, v, do, o, lse, *([] if dlse is None else [dlse]))
    return _Call(mask, side, seed, options).backward((q, k, v), (o, lse), do, dlse, grads)


def decode(
    q: mx.array, cache: Any, mask: Mask | None, side: Side, options: Options
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """(o, lse) of new queries over cache.k and cache.v, arrays of MLX; cache.lengths [B] is NumPy's."""
    _same(q, cache.k, cache.v)
    B, capacity = cache.k.shape[:2]
    longest, mask = in_use(np.asarray(cache.lengths), B, capacity, mask)
    side = of_first_keys(side.checked(_host), capacity, longest)
    return attention(q, cache.k[:, :longest], cache.v[:, :longest], mask, side, 0, options, "decode")


class _Call:
    """One call without q, k and v."""

    def __init__(self, mask: Mask | None, side: Side, seed: Any, options: Options):
        self.mask, self.side, self.seed, self.options = mask, side.checked(_host), seed, options

    def differentiable(self, verb: str) -> Any:
        """A function of (q, k, v) to [o, lse] with its gradient."""
        function = mx.custom_function(partial(self.forward, verb))

        def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
            do, dlse = cotangents
            return self.backward(tuple(primals), outputs, do, dlse, frozenset())[:3]

        function.vjp(vjp)
        return function

    def forward(self, verb: str, q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        """[o, lse] by the backend's forward, or its decode."""
        (q, k, v), lifted = _lifted(q, k, v)
        if on_host(self.options.backend):
            o, lse = host.attention(
                to_numpy(q), to_numpy(k), to_numpy(v), self.mask, self.side, self.seed, self.options, verb
            )
            found = to_mlx(o), to_mlx(lse)
        else:
            ready, extras = self._ready(q, k, v, False)
            compute = ready.backend.forward if verb == "forward" else ready.backend.decode
            o, lse = compute(ready.problem, ready.plan, Inputs(q, k, v, extras))
            found = _whole(o, q.dtype), _whole(lse, mx.float32)
        return [x[0] if lifted else x for x in found]

    def backward(
        self, inputs: Any, outputs: Any, do: mx.array, dlse: mx.array | None, grads: Set[str]
    ) -> tuple[mx.array, mx.array, mx.array, dict[str, Any]]:
        """(dq, dk, dv, extras)."""
        (q, k, v), lifted = _lifted(*inputs)
        rows = {"do": do, "o": outputs[0], "lse": outputs[1], **({} if dlse is None else {"dlse": dlse})}
        rows = {name: x[None] if lifted else x for name, x in rows.items()}
        if on_host(self.options.backend):
            given = {name: to_numpy(x) for name, x in rows.items()}
            found = host.attention_backward(
                given["do"], to_numpy(q), to_numpy(k), to_numpy(v), given["o"], given["lse"], self.mask,
                given.get("dlse"), self.side, self.seed, self.options, grads,
            )  # fmt: skip
            dq, dk, dv = map(to_mlx, found[:3])
            more = found[3]
        else:
            ready, extras = self._ready(q, k, v, True)
            check_gradients(ready.problem, {name: spec(described(x), "mlx") for name, x in rows.items()})
            inputs, outputs = Inputs(q, k, v, extras), Outputs(rows["o"], rows["lse"], rows["do"], rows.get("dlse"))
            *found, more = ready.backend.backward(ready.problem, ready.plan, inputs, outputs, grads=grads)
            dq, dk, dv = (_whole(x, q.dtype) for x in found)
        return (dq[0], dk[0], dv[0], more) if lifted else (dq, dk, dv, more)

    def _ready(self, q: mx.array, k: mx.array, v: mx.array, needs_grad: bool) -> tuple[Ready, Any]:
        return prepare(
            "mlx", described(q), described(k), described(v), self.side, self.mask, self.seed, self.options,
            needs_grad=needs_grad, source=STRIDED,
        )  # fmt: skip


def on_host(backend: str | None) -> bool:
    """Whether the CPU core computes: on MLX's CPU device, where no other backend is named."""
    return backend == "cpu" or (backend is None and mx.default_device() == mx.Device(mx.cpu))


def to_numpy(x: mx.array) -> Array:
    """Its numbers, bfloat16 through ml_dtypes; computed now."""
    try:
        if x.dtype == mx.bfloat16:
            import ml_dtypes

            return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(x)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            "on MLX's CPU device numbers are needed at once: call this outside mx.compile and mx.vmap, or on a GPU; "
            "saccade.integrations.mlx.vmap maps on both"
        ) from error


def to_mlx(x: Array) -> mx.array:
    """The same numbers as an array of MLX."""
    if x.dtype.name == "bfloat16":
        return mx.array(x.view(np.uint16)).view(mx.bfloat16)
    return mx.array(x, dtype=mx.float64) if x.dtype == np.float64 else mx.array(x)


def _whole(x: Any, dtype: Any) -> mx.array:
    # what a backend had nothing to compute for is NumPy's zeros
    found: mx.array = x if isinstance(x, mx.array) else mx.zeros(x.shape, dtype)
    return found


def _lifted(q: mx.array, k: mx.array, v: mx.array) -> tuple[tuple[mx.array, mx.array, mx.array], bool]:
    lifted = q.ndim == k.ndim == v.ndim == 3
    return ((q[None], k[None], v[None]), True) if lifted else ((q, k, v), False)


def described(x: mx.array) -> Array:
    """An array of its shape and dtype without its numbers."""
    return np.broadcast_to(np.zeros((), numpy_dtype(KINDS[x.dtype])), tuple(x.shape))


def _same(*arrays: Any) -> None:
    for x in arrays:
        if not isinstance(x, mx.array):
            raise TypeError(f"an argument is {type(x).__name__}; expected an array of MLX, as q is one: mx.array(x)")
        if x.dtype not in KINDS:
            raise TypeError(f"an array is {x.dtype}; expected float32, float16 or bfloat16: x.astype(...)")


def _host(name: str, x: Any) -> Any:
    if isinstance(x, mx.array):
        return to_numpy(x)
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {type(x).__name__}; expected an array of MLX or of NumPy")
    return x
