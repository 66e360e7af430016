"""The choice of a cache's kind of arrays, made once, when the cache is created."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import is_torch, numpy_dtype
from ..backends import load
from ..operands import DTYPES
from .storage import Arrays, NumpyArrays


def arrays_for(dtype: Any, device: Any) -> Arrays:
    """The arrays of a cache: NumPy arrays, unless dtype is a torch dtype or device is one of torch's or WebGPU's."""
    name = _name_of(dtype)
    if name not in DTYPES:
        codes = "; codes of numbers are stored with quantised=" if "8" in name else ""
        raise TypeError(f"dtype is {name}; expected one of {', '.join(DTYPES)}{codes}")
    if device is None and isinstance(dtype, (str, type, np.dtype)):
        return NumpyArrays(name, device)
    of_torch = is_torch(dtype) or is_torch(device) or str(device) not in ("None", "cpu")
    kind = _kind("webgpu" if str(device).partition(":")[0] == "webgpu" else "torch" if of_torch else "numpy")
    return kind(name, device)


def _name_of(dtype: Any) -> str:
    name = str(dtype).rpartition(".")[2]
    if name in DTYPES or is_torch(dtype):
        return name
    try:
        # np.dtype(None) is float64
        return str(numpy_dtype(dtype if dtype is not None else "None"))
    except TypeError:
        return repr(dtype)


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
