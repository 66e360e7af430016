"""NumPy and torch by duck typing. torch is never imported here: a caller with a tensor has imported it already."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np


class Array(Protocol):
    """An array of NumPy, torch, MLX or JAX, or of `saccade.backends.webgpu`, for type checkers.

    A union would be of unknown types for everyone who lacks one of these packages.
    """

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)
# an array, or nested lists of numbers
ArrayOrList: TypeAlias = Array | Sequence[Any]
# an array, or a tuple of arrays if an argument asks for more than one; a checker does not know which
ArrayOrTuple: TypeAlias = Any


def is_torch(x: object) -> bool:
    """Whether x is a torch object (tensor, dtype or device), without importing torch."""
    return any(cls.__module__.partition(".")[0] == "torch" for cls in type(x).__mro__)


def is_mlx(x: object) -> bool:
    """Whether x is an MLX array, without importing MLX."""
    return type(x).__module__.partition(".")[0] == "mlx"


def namespace(x: object) -> Any:
    """The module whose functions accept x: torch or numpy. Raises TypeError for arrays of any other library."""
    if is_torch(x):
        return sys.modules["torch"]
    if isinstance(x, np.ndarray | np.generic):
        return np
    name = f"{type(x).__module__}.{type(x).__qualname__}"
    raise TypeError(f"an array is a {name}; expected a NumPy array or torch tensor: convert it, by numpy.asarray(x)")


def cast(x: Any, dtype: Any) -> Any:
    """x converted to a dtype of its own framework; x itself if it has that dtype already."""
    return x.to(dtype) if is_torch(x) else x.astype(dtype, copy=False)


@cache
def numpy_dtype(name: Any) -> np.dtype[Any]:
    """A NumPy dtype from anything that names one, "bfloat16" included (through ml_dtypes)."""
    if isinstance(name, str) and name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def narrow(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """x in the NumPy dtype that represents `dtype` between backends; bfloat16 is represented by its bits, uint16."""
    if dtype != "bfloat16":
        return x.astype(dtype, copy=False)
    # round to nearest even; NaN keeps a bit of its payload
    bits = x.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def widened(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """x as float32; uint16 carries bfloat16."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32, copy=False)
