"""Kernels on an Apple GPU through MLX. A launch is lazy: it adds a node to MLX's graph.

MLX composes a kernel's signature from the names in its body; texts.py provides the header and the body.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .interface import LEAST, Output
from .texts import Kernel

Array = NDArray[Any]
DTYPES: dict[str, Any] = {name: getattr(mx, name) for name in ("float32", "float16", "bfloat16", "int32")}


class Mlx:
    """Launches kernels with `mx.fast.metal_kernel`. stream: an MLX stream, None for the default."""

    name = "mlx"

    def __init__(self, stream: Any = None):
        self.stream = stream

    def array(self, x: Any, dtype: str) -> Any:
        """An MLX array with at least as many numbers as a kernel needs."""
        if not isinstance(x, mx.array):
            x = mx.array(np.ascontiguousarray(x))
            x = x.view(mx.bfloat16) if dtype == "bfloat16" and x.dtype == mx.uint16 else x
        return x if x.size >= LEAST else mx.pad(x.reshape(-1), (0, LEAST - x.size))

    def numpy(self, x: Any) -> Array:
        """The numbers of x, with bfloat16 as uint16; waits until they are computed."""
        return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)

    def run(
        self,
        kernel: Kernel,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Output],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        verbose: bool = False,
    ) -> dict[str, Any]:
        """One launch; `verbose` prints the text that MLX composes."""
        arrays: list[Any] = launcher(kernel)(
            # an input may be another kernel's result, which may be too small too
            inputs=[self.array(inputs[name], "") for name in kernel.inputs],
            output_shapes=[outputs[name].shape for name in kernel.outputs],
            output_dtypes=[DTYPES[outputs[name].dtype] for name in kernel.outputs],
            grid=tuple(grid),
            threadgroup=tuple(threadgroup),
            stream=self.stream,
            verbose=verbose,
        )
        return dict(zip(kernel.outputs, arrays, strict=True))


@cache
def launcher(kernel: Kernel) -> Any:
    """MLX's object for a kernel, created once per text, because each new object compiles a library."""
    safe: dict[str, Any] = {}
    if "compile_options" in (mx.fast.metal_kernel.__doc__ or inspect.getdoc(mx.fast.metal_kernel) or ""):
        # exp(-inf) must be 0
        safe["compile_options"] = {"math_mode": "safe"}
    header = f"#include <metal_simdgroup_matrix>\n{kernel.header}"
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=header,
        ensure_row_contiguous=True,
        **safe,
    )
