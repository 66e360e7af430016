"""Arrays and codes as the compiled core takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...quantised import Quantised

Array = NDArray[Any]
# the core's numbers for the kinds of codes
_CODES = {"int8": 1, "int4": 2, "fp8": 3}


def numbers(how: Quantised | None) -> tuple[int, int]:
    """The core's number for a kind of codes, and the numbers per scale; zeros for None."""
    return (0, 0) if how is None else (_CODES[how.kind], how.group)


def dense(x: Array) -> Array:
    """x with a contiguous last dimension, which kernels need."""
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)
