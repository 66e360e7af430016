"""What every runtime of Metal kernels offers, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .texts import Kernel

Array = NDArray[Any]
# MLX puts an array with fewer numbers into another address space
LEAST = 8


class Output(NamedTuple):
    """Shape and dtype name of an array that a kernel makes."""

    shape: tuple[int, ...]
    dtype: str


class Runtime(Protocol):
    """What launches a kernel. Arrays are of its own kind."""

    name: str

    def array(self, x: Array, dtype: str) -> Any:
        """A NumPy array, bfloat16 as uint16, as an array of this runtime with at least `LEAST` numbers."""
        ...

    def numpy(self, x: Any) -> Array:
        """The other way."""
        ...

    def run(
        self,
        kernel: Kernel,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Output],
        grid: Sequence[int],
        threadgroup: Sequence[int],
    ) -> dict[str, Any]:
        """The outputs of one launch; grid counts threads."""
        ...


def padded(x: Array) -> Array:
    """The numbers of x in C order, and zeros up to the least that a kernel is given."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat if flat.size >= LEAST else np.concatenate([flat, np.zeros(LEAST - flat.size, flat.dtype)])
