"""Recurrences on MLX arrays, with gradients: Metal kernels on an Apple GPU, the CPU core on MLX's CPU device.

On a GPU a call becomes a part of MLX's lazy graph. On the CPU it needs the numbers immediately, so it works under
`mx.grad` but not under `mx.compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..backends import choose_recurrent
from ..recurrent.family import Family
from .call import spec
from .mlx import KINDS, described, first_order, on_host, to_mlx, to_numpy
from .numpy import carrier
from .numpy_recurrent import prepare, restored


def compute(family: Family, arrays: dict[str, Any], options: Any) -> tuple[mx.array, ...]:
    """The outputs of a family's operator, differentiable with respect to its floating arrays."""
    for name, x in arrays.items():
        if x is not None and name not in family.integers:
            _check(name, x, family.names[0])
    names = [n for n in family.names if arrays[n] is not None and n not in family.integers]
    fixed = {n: _integers(x) for n, x in arrays.items() if n in family.integers}
    call = _Recurrence(family, names, fixed, options)
    function = mx.custom_function(call.forward)
    function.vjp(lambda x, cotangents, _: first_order(call.backward(tuple(x), cotangents), *x, *cotangents))
    results: Any = function(*(arrays[n] for n in names))
    return tuple(results)


class _Recurrence:
    """One call without its floating arrays, which are named `names`."""

    def __init__(self, family: Family, names: list[str], fixed: dict[str, Any], options: Any) -> None:
        self.family, self.names, self.fixed, self.options = family, names, fixed, options

    def forward(self, *arrays: mx.array) -> list[mx.array]:
        """All outputs."""
        problem, backend, inputs = self._prepare(arrays)
        results = backend.forward(problem, inputs)
        return [self._result(x, s.dtype) for x, s in zip(results, problem.outputs, strict=True)]

    def backward(self, arrays: Sequence[mx.array], cotangents: Sequence[mx.array]) -> list[mx.array]:
        """The gradient of each array."""
        problem, backend, inputs = self._prepare(arrays)
        downs = [carrier(to_numpy(x)) for x in cotangents] if self._host else list(cotangents)
        gradients = backend.backward(problem, inputs, downs, frozenset(self.names))
        return [self._result(gradients[n], KINDS[x.dtype]) for n, x in zip(self.names, arrays, strict=True)]

    @property
    def _host(self) -> bool:
        return on_host(self.options.backend)

    def _prepare(self, arrays: Sequence[mx.array]) -> tuple[Any, Any, dict[str, Any]]:
        floats: dict[str, Any] = dict(zip(self.names, arrays, strict=True))
        whole: dict[str, Any] = {n: floats[n] if n in floats else self.fixed.get(n) for n in self.family.names}
        if self._host:
            return prepare(self.family, {n: to_numpy(x) if n in floats else x for n, x in whole.items()}, self.options)
        like = {n: described(x) if n in floats else x for n, x in whole.items()}
        problem = self.family.describe(
            {n: None if x is None else spec(x, "mlx") for n, x in like.items()}, self.options
        )
        return problem, choose_recurrent(problem, self.options.backend), whole

    def _result(self, x: Any, dtype: str) -> mx.array:
        if isinstance(x, mx.array):
            return x
        return to_mlx(restored(x, dtype))


def _integers(x: Any) -> Any:
    return None if x is None else np.asarray(to_numpy(x) if isinstance(x, mx.array) else x)


def _check(name: str, x: Any, first: str) -> None:
    if not isinstance(x, mx.array):
        raise TypeError(f"{name} is {type(x).__name__}; expected an array of MLX, like {first}: mx.array(x)")
    if x.dtype not in KINDS:
        raise TypeError(f"{name} is {x.dtype}; expected float32, float16 or bfloat16: x.astype(...)")
