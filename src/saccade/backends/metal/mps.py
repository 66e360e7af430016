"""Kernels on an Apple GPU through torch, which compiles a Metal text unchanged for its MPS device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import Output
from .texts import Kernel, signature

Array = NDArray[Any]


class Mps:
    """Launches kernels by `torch.mps.compile_shader`. Arrays are tensors on `device`."""

    name = "mps"

    def __init__(self, device: str = "mps"):
        self.device = device

    def array(self, x: Any, dtype: str) -> Tensor:
        """A contiguous tensor on the device."""
        if isinstance(x, Tensor):
            return x.contiguous()
        tensor = torch.from_numpy(np.ascontiguousarray(x))
        return (tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor).to(self.device)

    def numpy(self, x: Tensor) -> Array:
        """The numbers of x, with bfloat16 as uint16; waits until they are computed."""
        numbers: Array = (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).cpu().numpy()
        return numbers

    def run(
        self,
        kernel: Kernel,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Output],
        grid: Sequence[int],
        threadgroup: Sequence[int],
    ) -> dict[str, Tensor]:
        """One launch."""
        results = {
            name: torch.empty(x.shape, dtype=getattr(torch, x.dtype), device=self.device) for name, x in outputs.items()
        }
        tensors: dict[str, Any] = {**inputs, **results}
        arrays = [tensors[name] for name in (*kernel.inputs, *kernel.outputs)]
        function(kernel)(*arrays, threads=list(grid), group_size=list(threadgroup))
        return results


@cache
def function(kernel: Kernel) -> Any:
    """The compiled kernel, compiled once per text."""
    return getattr(torch.mps.compile_shader(kernel.text), signature(kernel.text).name)
