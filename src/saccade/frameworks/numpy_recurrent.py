"""Recurrences on NumPy arrays: float16, float32, float64, and bfloat16 through ml_dtypes. Forward alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..backends import choose_room
from ..errors import Unsupported
from ..recurrent.family import Family, check_borders
from .call import spec
from .numpy import array, carrier


def compute(family: Family, given: dict[str, Any], options: Any) -> tuple[NDArray[Any], ...]:
    """The outputs of a family's operator as arrays."""
    arrays: dict[str, Any] = {}
    for name, x in given.items():
        arrays[name] = None if x is None else np.asarray(x) if name in family.integers else array(name, x)
    problem = family.describe({n: None if x is None else spec(x, "cpu") for n, x in arrays.items()}, options)
    backend = choose_room(problem, options.backend)
    if getattr(backend, "TAKES_TENSORS", False):
        raise Unsupported(
            str(options.backend), ["its recurrences take torch tensors: convert them by torch.from_numpy"]
        )
    if arrays.get("cu_seqlens") is not None:
        arrays["cu_seqlens"] = check_borders(arrays["cu_seqlens"], problem.T)
    carried = {n: x if x is None or n in family.integers else carrier(x) for n, x in arrays.items()}
    found = backend.forward(problem, carried)
    dtypes = (numpy_dtype(s.dtype) for s in problem.outputs)
    return tuple(x if x.dtype == dtype else x.view(dtype) for x, dtype in zip(found, dtypes, strict=True))
