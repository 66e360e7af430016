"""Codes of numbers in the compiled core, and the tokens that it appends to caches of codes or of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...quantised import Quantised
from ._core import append as write
from .threads import get_num_threads

Array = NDArray[Any]
# the core's numbers for the kinds of codes
_CODES = {"int8": 1, "int4": 2, "fp8": 3}


def numbers(how: Quantised | None) -> tuple[int, int]:
    """The core's number for a kind of codes, and the numbers per scale; zeros for None."""
    return (0, 0) if how is None else (_CODES[how.kind], how.group)


def dense(x: Array) -> Array:
    """x with a contiguous last dimension, which kernels need."""
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def append(
    x: Array,
    target: Array,
    scale: Array | None,
    first: Array,
    second: Array,
    cos: Array | None,
    sin: Array | None,
    interleaved: bool,
    how: Quantised | None,
) -> bool:
    """`caches.storage.Arrays.write`; always True, because it handles every case."""
    if not target.flags.writeable:
        raise ValueError("an array of the cache is read-only; expected one that append can write to")
    # a source inside of the target would change while it is read
    x = x.copy() if np.may_share_memory(x, target) else x
    x = dense(x)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    cos, sin = (None if a is None else np.ascontiguousarray(a, wide) for a in (cos, sin))
    x, target = (a.view(np.uint16) if a.dtype.name == "bfloat16" else a for a in (x, target))
    write(x, target, scale, *numbers(how), first, second, cos, sin, interleaved, get_num_threads())
    return True
