"""The interface of all runtimes of Metal kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .texts import Kernel

Array = NDArray[Any]
# MLX puts arrays with fewer numbers into another address space
LEAST = 8


class Output(NamedTuple):
    """Shape and dtype name of an output array of a kernel."""

    shape: tuple[int, ...]
    dtype: str


class Runtime(Protocol):
    """Launches kernels. Arrays are of the runtime's own kind."""

    name: str

    def array(self, x: Array, dtype: str) -> Any:
        """A NumPy array, with bfloat16 as uint16, as an array of this runtime with at least `LEAST` numbers."""
        ...

    def numpy(self, x: Any) -> Array:
        """The numbers of x as a NumPy array, with bfloat16 as uint16."""
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
    """The numbers of x in C order, with zeros appended up to `LEAST` numbers."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat if flat.size >= LEAST else np.concatenate([flat, np.zeros(LEAST - flat.size, flat.dtype)])
