"""The recurrences' catalogue: for each operator its random inputs, the public call and the oracle; and their runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import recurrent
from ..arrays import numpy_dtype
from ..recurrent import reference
from .compare import Met, measure_all
from .tensors import get, put

Array = NDArray[Any]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """As `recurrent.problem` has them; borders are those of packed sequences, None for none."""

    B: int = 2
    T: int = 65
    H: int = 4
    Hk: int = 2
    K: int = 8
    V: int = 12
    borders: tuple[int, ...] | None = None

    @property
    def N(self) -> int:
        """Sequences."""
        return self.B if self.borders is None else len(self.borders) - 1


@dataclass(frozen=True)
class Op:
    """One row. make(generator, sizes) gives its floating arrays in float64, the initial state among them.

    call is the public function, options what it takes beside arrays. oracle(arrays, options, dtype, cotangents) gives
    the outputs, or the gradients by name. kept: arrays that stay in the accumulator's dtype.
    """

    name: str
    call: Callable[..., Any]
    make: Callable[[np.random.Generator, Sizes], Arrays]
    oracle: Callable[..., Any]
    options: Arrays = field(default_factory=dict)
    kept: frozenset[str] = frozenset({"initial_state"})

    def __str__(self) -> str:
        return self.name


def make(op: Op, sizes: Sizes, dtype: str, seed: int = 0) -> Arrays:
    """The inputs of a row in `dtype`, with cu_seqlens where the sizes have borders."""
    wide, arrays = "float64" if dtype == "float64" else "float32", op.make(np.random.default_rng(seed), sizes)
    arrays = {n: x.astype(wide).astype(numpy_dtype(wide if n in op.kept else dtype)) for n, x in arrays.items()}
    return arrays if sizes.borders is None else {**arrays, "cu_seqlens": np.array(sizes.borders, np.int64)}


def expected(op: Op, arrays: Arrays, dtype: Any = np.float64, cotangents: Any = None) -> Arrays:
    """Outputs and, with cotangents, gradients ("dq", ...) by the oracle, every step rounded to `dtype`."""
    out: Arrays = dict(zip(("o", "state"), op.oracle(arrays, op.options, dtype, None), strict=True))
    if cotangents is not None:
        out.update({f"d{n}": x for n, x in op.oracle(arrays, op.options, dtype, cotangents).items()})
    return out


def computed(op: Op, arrays: Arrays, backend: str, cotangents: Any = None, **options: Any) -> Arrays:
    """The same by the public call on torch tensors, and its autograd."""
    import torch

    given = {n: put(x) for n, x in arrays.items()}
    leaves = {n: x.requires_grad_() for n, x in given.items() if cotangents is not None and x.is_floating_point()}
    o, state = op.call(**given, **op.options, **options, return_state=True, backend=backend)
    out = {"o": get(o.detach()), "state": get(state.detach())}
    if cotangents is not None:
        torch.autograd.backward([o, state], [put(x) for x in cotangents])
        out.update({f"d{n}": get(x.grad) for n, x in leaves.items()})
    return out


def cotangents(ref: Arrays, dtype: str, seed: int = 1) -> tuple[Array, Array]:
    """Random gradients of both outputs, that of o in `dtype`."""
    rng, wide = np.random.default_rng(seed), "float64" if dtype == "float64" else "float32"
    do, dstate = (rng.standard_normal(ref[n].shape).astype(wide) for n in ("o", "state"))
    return do.astype(numpy_dtype(dtype)), dstate


def verify(
    op: Op, sizes: Sizes, dtype: str, backend: str, seed: int = 0, *, backward: bool = True, **options: Any
) -> list[Met]:  # fmt: skip
    """The measures of every output and gradient of a row, by the tolerance rule."""
    arrays = make(op, sizes, dtype, seed)
    given = cotangents(expected(op, arrays), dtype) if backward else None
    got, ref = computed(op, arrays, backend, given, **options), expected(op, arrays, cotangents=given)
    plain = expected(op, arrays, numpy_dtype(dtype), given)
    return measure_all(got, ref, {n: x[None] for n, x in plain.items()}, numpy_dtype(dtype))


def _matrix(arrays: Arrays, options: Arrays, dtype: Any, given: Any) -> Any:
    if given is None:
        return reference.matrix_state(**arrays, **options, dtype=dtype)
    return reference.matrix_state_backward(*given, **arrays, **options, dtype=dtype)


def _rows(rng: np.random.Generator, s: Sizes) -> Arrays:
    shapes = {"q": (s.B, s.T, s.Hk, s.K), "k": (s.B, s.T, s.Hk, s.K), "v": (s.B, s.T, s.H, s.V)}
    state = rng.standard_normal((s.N, s.H, s.K, s.V))
    return {**{n: rng.standard_normal(shape) for n, shape in shapes.items()}, "initial_state": state}


def _head_decay(rng: np.random.Generator, s: Sizes) -> Arrays:
    return {**_rows(rng, s), "g": -rng.exponential(0.3, (s.B, s.T, s.H))}


OPS = [Op("scalar_decay", recurrent.scalar_decay, _head_decay, _matrix)]
