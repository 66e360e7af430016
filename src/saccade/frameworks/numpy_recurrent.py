"""Recurrences on NumPy arrays, only forward: float16, float32, float64, and bfloat16 through ml_dtypes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..backends import choose_recurrent
from ..errors import Unsupported
from ..operands import Spec
from ..recurrent.family import Family, check_borders
from .call import spec
from .numpy import array, carrier


def compute(family: Family, arrays: dict[str, Any], options: Any) -> tuple[NDArray[Any], ...]:
    """The outputs of a family's operator as arrays."""
    problem, backend, carried = prepare(family, arrays, options)
    results = backend.forward(problem, carried)
    return tuple(restored(x, s.dtype) for x, s in zip(results, problem.outputs, strict=True))


def prepare(family: Family, inputs: dict[str, Any], options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(problem, backend, arrays by name in the dtypes that carry them)."""
    arrays: dict[str, Any] = {}
    for name, x in inputs.items():
        arrays[name] = None if x is None else np.asarray(x) if name in family.integers else array(name, x)
    specs = tuple(None if arrays[n] is None else spec(arrays[n], "cpu") for n in family.names)
    described = _described
    try:
        hash(options)
    except TypeError:
        # an unhashable option has a wrong type; `describe` raises the error about it
        described = _described.__wrapped__
    problem, backend = described(family, options, specs)
    if backend.TAKES_TENSORS:
        raise Unsupported(
            str(options.backend), ["its recurrences take torch tensors: convert arrays with torch.from_numpy"]
        )
    if arrays.get("cu_seqlens") is not None:
        arrays["cu_seqlens"] = check_borders(arrays["cu_seqlens"], problem.T)
    return problem, backend, {n: x if x is None or n in family.integers else carrier(x) for n, x in arrays.items()}


@lru_cache(maxsize=512)
def _described(family: Family, options: Any, specs: tuple[Spec | None, ...]) -> tuple[Any, Any]:
    problem = family.describe(dict(zip(family.names, specs, strict=True)), options)
    return problem, choose_recurrent(problem, options.backend)


def restored(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """x in its own dtype again, from the dtype that carried it (bfloat16 as uint16)."""
    kind = numpy_dtype(dtype)
    return x if x.dtype == kind else x.view(kind)
