"""The simplest kernel, to read first: one head, one key per step, online softmax."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .device import runtime
from .interface import Output
from .shapes import LARGEST_HEAD
from .texts import TYPES, kernel

# queries per threadgroup, one SIMD-group each
ROWS = 4


def single_head(
    q: NDArray[np.floating], k: NDArray[np.floating], v: NDArray[np.floating], *, causal: bool = False
) -> tuple[NDArray[np.floating], NDArray[np.float32]]:
    """(o [Tq, D], lse [Tq]) of q [Tq, D] and k, v [Tk, D], all float32 or all float16; sums are float32.

    causal: the last query sees the last key. Raises ValueError for other shapes or dtypes, Unsupported on a machine
    without a Metal device.
    """
    shapes = [list(x.shape) for x in (q, k, v)]
    if (
        q.ndim != 2
        or k.ndim != 2
        or k.shape != v.shape
        or q.shape[1] != k.shape[1]
        or not 0 < q.shape[1] <= LARGEST_HEAD
    ):
        raise ValueError(f"q, k, v have shapes {shapes}; expected [Tq, D], [Tk, D], [Tk, D], D up to {LARGEST_HEAD}")
    dtype = q.dtype.name
    if dtype not in TYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected float32 or float16 alike")
    here, (Tq, D) = runtime(), q.shape
    sizes = np.array([Tq, len(k), causal], np.int32)
    inputs = {name: here.array(x, dtype) for name, x in {"q": q, "k": k, "v": v}.items()}
    inputs |= {"sizes": here.array(sizes, "int32"), "scale": here.array(np.array([D**-0.5], np.float32), "float32")}
    outputs = {"o": Output((Tq, D), dtype), "lse": Output((Tq,), "float32")}
    program = kernel("single_head", {"T": dtype, "D": D, "ROWS": ROWS})
    results = here.run(program, inputs, outputs, (32 * ROWS, -(-Tq // ROWS), 1), (32 * ROWS, 1, 1))
    return here.numpy(results["o"]), here.numpy(results["lse"])
