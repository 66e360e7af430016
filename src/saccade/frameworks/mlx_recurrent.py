"""Recurrences on MLX's arrays, with gradients: Metal kernels on an Apple GPU, the CPU core on MLX's CPU device.

On a GPU a call is a part of MLX's graph. On the CPU it needs numbers at once, so it runs under `mx.grad`, not under
`mx.compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..backends import choose_room
from ..recurrent.family import Family
from .call import spec
from .mlx import KINDS, described, on_host, to_mlx, to_numpy
from .numpy import carrier
from .numpy_recurrent import prepare, restored


def compute(family: Family, given: dict[str, Any], options: Any) -> tuple[mx.array, ...]:
    """The outputs of a family's operator, differentiable in the floating arrays given."""
    for name, x in given.items():
        if x is not None and name not in family.integers:
            _check(name, x, family.names[0])
    names = [n for n in family.names if given[n] is not None and n not in family.integers]
    fixed = {n: _integers(x) for n, x in given.items() if n in family.integers}
    call = _Call(family, names, fixed, options)
    function = mx.custom_function(call.forward)
    function.vjp(lambda primals, cotangents, _: call.backward(tuple(primals), cotangents))
    made: Any = function(*(given[n] for n in names))
    return tuple(made)


class _Call:
    """One call without its floating arrays, whose names are `names`."""

    def __init__(self, family: Family, names: list[str], fixed: dict[str, Any], options: Any) -> None:
        self.family, self.names, self.fixed, self.options = family, names, fixed, options

    def forward(self, *arrays: mx.array) -> list[mx.array]:
        """All outputs."""
        problem, backend, given = self._prepare(arrays)
        found = backend.forward(problem, given)
        return [self._made(x, s.dtype) for x, s in zip(found, problem.outputs, strict=True)]

    def backward(self, arrays: Sequence[mx.array], cotangents: Sequence[mx.array]) -> list[mx.array]:
        """A gradient of each array."""
        problem, backend, given = self._prepare(arrays)
        downs = [carrier(to_numpy(x)) for x in cotangents] if self._host else list(cotangents)
        found = backend.backward(problem, given, downs, frozenset(self.names))
        return [self._made(found[n], KINDS[x.dtype]) for n, x in zip(self.names, arrays, strict=True)]

    @property
    def _host(self) -> bool:
        return on_host(self.options.backend)

    def _prepare(self, arrays: Sequence[mx.array]) -> tuple[Any, Any, dict[str, Any]]:
        given: dict[str, Any] = dict(zip(self.names, arrays, strict=True))
        whole: dict[str, Any] = {n: given[n] if n in given else self.fixed.get(n) for n in self.family.names}
        if self._host:
            return prepare(self.family, {n: to_numpy(x) if n in given else x for n, x in whole.items()}, self.options)
        like = {n: described(x) if n in given else x for n, x in whole.items()}
        problem = self.family.describe(
            {n: None if x is None else spec(x, "mlx") for n, x in like.items()}, self.options
        )
        return problem, choose_room(problem, self.options.backend), whole

    def _made(self, x: Any, dtype: str) -> mx.array:
        if isinstance(x, mx.array):
            return x
        return to_mlx(restored(x, dtype))


def _integers(x: Any) -> Any:
    return None if x is None else np.asarray(to_numpy(x) if isinstance(x, mx.array) else x)


def _check(name: str, x: Any, first: str) -> None:
    if not isinstance(x, mx.array):
        raise TypeError(f"{name} is {type(x).__name__}; expected an array of MLX, as {first} is one: mx.array(x)")
    if x.dtype not in KINDS:
        raise TypeError(f"{name} is {x.dtype}; expected float32, float16 or bfloat16: x.astype(...)")
