"""The choice of a cache's kind of arrays, made once, when the cache is created."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import is_torch
from ..backends import load
from ..operands import DTYPES
from .storage import Arrays, NumpyArrays


def arrays_for(dtype: Any, device: Any) -> Arrays:
    """The arrays of a cache: NumPy arrays, unless dtype is a torch dtype or device is one of torch's or WebGPU's."""
    if dtype is None:
        raise TypeError(f"dtype is None; expected one of {', '.join(DTYPES)}")
    arrays = _arrays_for(dtype, device)
    if (name := str(arrays.dtype).rpartition(".")[2]) not in DTYPES:
        codes = "; codes of numbers are stored with quantised=" if "8" in name else ""
        raise TypeError(f"dtype is {name}; expected one of {', '.join(DTYPES)}{codes}")
    return arrays


def _arrays_for(dtype: Any, device: Any) -> Arrays:
    if device is None and isinstance(dtype, (str, type, np.dtype)):
        return NumpyArrays(dtype, device)
    of_torch = is_torch(dtype) or is_torch(device) or str(device) not in ("None", "cpu")
    kind = _kind("webgpu" if str(device).partition(":")[0] == "webgpu" else "torch" if of_torch else "numpy")
    return kind(dtype, device)


def kind_of(x: object) -> type[Arrays]:
    """The kind of an array."""
    return _kind("webgpu" if hasattr(x, "gpu") else "torch" if is_torch(x) else "numpy")


def device_of(x: Any) -> Any:
    """The device of an array, as `KVCache` takes it."""
    return x.gpu.place if hasattr(x, "gpu") else x.device if is_torch(x) else None


def _kind(name: str) -> Any:
    # torch and WebGPU are imported when they are first used
    if name == "webgpu":
        load(name)
        from .webgpu import WebgpuArrays as kind
    elif name == "torch":
        from .torch import TorchArrays as kind
    else:
        kind = NumpyArrays
    return kind
