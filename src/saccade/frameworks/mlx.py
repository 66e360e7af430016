"""Attention on MLX arrays, with gradients: Metal kernels on an Apple GPU, the CPU core on MLX's CPU device.

On a GPU a call becomes a part of MLX's lazy graph. On the CPU it needs the numbers immediately, so it works under
`mx.grad` but not under `mx.compile`. `mx.vmap` does not support custom kernels; use `integrations.mlx.vmap`. The
gradients of biases, slopes, tables, gates and sinks need the numbers immediately on both devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..backends import Inputs, Outputs
from ..errors import Unsupported
from ..operands import Request
from ..problem import check_gradients
from . import numpy as host
from .call import PlannedCall, first_keys, gradients_of, prepare, rows_of, spec
from .source import pages_in_use

Array = NDArray[Any]
KINDS: dict[Any, str] = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float64: "float64"}


def attention(q: mx.array, k: mx.array, v: mx.array, request: Request, verb: str) -> tuple[mx.array, mx.array]:
    """(o, lse) of `saccade.attention`, differentiable with respect to all MLX arrays; verb: as for NumPy arrays."""
    _same(q, k, v)
    if request.options.return_max or request.options.return_entropy:
        raise Unsupported("mlx", ["return_max and return_entropy are for NumPy and torch: convert q, k and v"])
    if request.options.dropout and request.seed is None:
        # the backward must drop the same weights as the forward
        request = request._replace(seed=int(np.random.default_rng().integers(1 << 63)))
    call = MlxCall(request)
    side = {name: x for name, x in request.side._asdict().items() if isinstance(x, mx.array)}
    inputs = [q, k, v, *side.values()]
    o, lse = call.differentiable(verb, inputs)(q, k, v)
    fixed = [mx.stop_gradient(x) for x in (q, k, v, o, lse)]
    for name, x in side.items():
        o, lse = (y + zeros for y, zeros in zip((o, lse), call.zeros(name, inputs)(x, *fixed), strict=True))
    return o, lse


def attention_backward(
    q: mx.array, k: mx.array, v: mx.array, outputs: Outputs, request: Request, grads: frozenset[str]
) -> tuple[mx.array, mx.array, mx.array, dict[str, Any]]:
    """(dq, dk, dv, extras) of `saccade.attention_backward`; extras are NumPy arrays."""
    _same(q, k, v, *rows_of(outputs).values())
    return MlxCall(request).backward(q, k, v, outputs, grads)


def decode(q: mx.array, cache: Any, request: Request) -> tuple[mx.array, mx.array]:
    """(o, lse) of new queries over cache.k and cache.v, MLX arrays; cache.lengths [B] is a NumPy array.

    The keys of a cache in pages are copied out of them. Raises Unsupported for a cache of codes.
    """
    if getattr(cache, "quantised", None) is not None:
        raise Unsupported("mlx", ["caches of codes are for NumPy and torch: convert q and the cache"])
    _same(q, cache.k, cache.v)
    if hasattr(cache, "block_table"):
        source, request = pages_in_use(cache, request)
        pages = mx.array(source.table)
        k, v = (x[pages].flatten(1, 2)[:, : source.tokens] for x in (cache.k, cache.v))
        return attention(q, k, v, request, "decode")
    longest, request = first_keys(cache, np.asarray(cache.lengths), request)
    return attention(q, cache.k[:, :longest], cache.v[:, :longest], request, "decode")


class MlxCall:
    """One call without q, k and v, with NumPy side arrays."""

    def __init__(self, request: Request):
        self.request = request._replace(side=request.side.checked(_host))

    def differentiable(self, verb: str, inputs: list[mx.array]) -> Any:
        """A function (q, k, v) -> [o, lse] with its gradient; inputs: all MLX arrays of the call."""
        function = mx.custom_function(partial(self.forward, verb))

        def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
            q, k, v = primals
            gradients = self.backward(q, k, v, Outputs(*outputs, *cotangents), frozenset())[:3]
            return first_order(gradients, *inputs, *cotangents)

        function.vjp(vjp)
        return function

    def zeros(self, name: str, inputs: list[mx.array]) -> Any:
        """A function (x, q, k, v, o, lse) -> zeros like [o, lse], whose gradient is that of the call's side array x.

        MLX does not tell a vjp which gradients are needed. It calls that of this function only if x needs one.
        """
        # x + -0.0 has the bits of x
        function = mx.custom_function(lambda *arrays: [mx.full(y.shape, -0.0, y.dtype) for y in arrays[4:]])

        def vjp(primals: Any, cotangents: Any, _: Any) -> Any:
            _, q, k, v, o, lse = primals
            more = self.backward(q, k, v, Outputs(o, lse, *cotangents), frozenset([name]))[3]
            gradients = first_order([to_mlx(more[name])], *inputs, *cotangents)
            return *gradients, *map(mx.zeros_like, primals[1:])

        function.vjp(vjp)
        return function

    def forward(self, verb: str, q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        """[o, lse] by the backend's forward, or its decode."""
        (q, k, v), lifted = _lifted(q, k, v)
        if on_host(self.request.options.backend):
            o, lse = host.attention(to_numpy(q), to_numpy(k), to_numpy(v), self.request, verb)
            results = to_mlx(o), to_mlx(lse)
        else:
            planned, inputs = self._planned(q, k, v)
            compute = planned.backend.forward if verb == "forward" else planned.backend.decode
            o, lse = compute(planned.problem, planned.plan, inputs)
            results = _whole(o, q.dtype), _whole(lse, mx.float32)
        return [x[0] if lifted else x for x in results]

    def backward(
        self, q: mx.array, k: mx.array, v: mx.array, outputs: Outputs, grads: frozenset[str]
    ) -> tuple[mx.array, mx.array, mx.array, dict[str, Any]]:
        """(dq, dk, dv, extras)."""
        (q, k, v), lifted = _lifted(q, k, v)
        rows = {name: x[None] if lifted else x for name, x in rows_of(outputs).items()}
        if on_host(self.request.options.backend):
            on_cpu = Outputs(**{name: to_numpy(x) for name, x in rows.items()})
            arrays = to_numpy(q), to_numpy(k), to_numpy(v)
            *gradients, more = host.attention_backward(*arrays, on_cpu, self.request, grads)
            dq, dk, dv = map(to_mlx, gradients)
        else:
            planned, inputs = self._planned(q, k, v, grads)
            check_gradients(planned.problem, {name: spec(described(x), "mlx") for name, x in rows.items()})
            outputs = Outputs(**rows)
            *gradients, more = planned.backend.backward(planned.problem, planned.plan, inputs, outputs, grads=grads)
            more = gradients_of(self.request, more, planned.problem.Tk)
            dq, dk, dv = (_whole(x, q.dtype) for x in gradients)
        return (dq[0], dk[0], dv[0], more) if lifted else (dq, dk, dv, more)

    def _planned(
        self, q: mx.array, k: mx.array, v: mx.array, grads: frozenset[str] | None = None
    ) -> tuple[PlannedCall, Inputs]:
        planned, extras = prepare("mlx", described(q), described(k), described(v), self.request, grads)
        return planned, Inputs(q, k, v, extras)


def first_order(gradients: Sequence[mx.array], *inputs: mx.array) -> list[mx.array]:
    """These gradients, which were computed from `inputs`; a derivative of them raises Unsupported."""

    def vjp(*_: Any) -> Any:
        raise Unsupported("mlx", ["second derivatives are not supported for MLX arrays: torch tensors have them"])

    # to MLX, gradients that the CPU core computed are constants, with derivatives of 0
    function = mx.custom_function(lambda *arrays: list(arrays[: len(gradients)]))
    function.vjp(vjp)
    results: Any = function(*gradients, *inputs)
    return list(results)


def on_host(backend: str | None) -> bool:
    """Whether the CPU core computes the call: if it is named, or on MLX's CPU device if no backend is named."""
    return backend == "cpu" or (backend is None and mx.default_device() == mx.Device(mx.cpu))


def to_numpy(x: mx.array) -> Array:
    """x as a NumPy array, bfloat16 through ml_dtypes; this evaluates x."""
    try:
        if x.dtype == mx.bfloat16:
            import ml_dtypes

            return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(x)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            "on MLX's CPU device numbers are needed immediately: call this outside mx.compile and mx.vmap, or on a "
            "GPU; saccade.integrations.mlx.vmap works on both"
        ) from error


def to_mlx(x: Array) -> mx.array:
    """x as an MLX array."""
    if x.dtype.name == "bfloat16":
        return mx.array(x.view(np.uint16)).view(mx.bfloat16)
    return mx.array(x, dtype=mx.float64) if x.dtype == np.float64 else mx.array(x)


def _whole(x: Any, dtype: Any) -> mx.array:
    # a backend returns NumPy zeros if there is nothing to compute
    return x if isinstance(x, mx.array) else mx.zeros(x.shape, dtype)


def _lifted(q: mx.array, k: mx.array, v: mx.array) -> tuple[tuple[mx.array, mx.array, mx.array], bool]:
    lifted = q.ndim == k.ndim == v.ndim == 3
    return ((q[None], k[None], v[None]), True) if lifted else ((q, k, v), False)


def described(x: mx.array) -> Array:
    """A NumPy array with the shape and dtype of x, without its numbers."""
    return np.broadcast_to(np.zeros((), numpy_dtype(KINDS[x.dtype])), tuple(x.shape))


def _same(*arrays: Any) -> None:
    for x in arrays:
        if not isinstance(x, mx.array):
            raise TypeError(f"an argument is {type(x).__name__}; expected an array of MLX, like q: mx.array(x)")
        if x.dtype not in KINDS:
            raise TypeError(f"an array is {x.dtype}; expected float32, float16 or bfloat16: x.astype(...)")


def _host(name: str, x: Any) -> Any:
    if isinstance(x, mx.array):
        return to_numpy(x)
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {type(x).__name__}; expected an MLX or NumPy array")
    return x
