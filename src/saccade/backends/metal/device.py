"""Where kernels run: on MLX on an Apple GPU, on torch for tensors on its MPS device, or on a replacement of MLX.

Tests replace MLX by the emulator. Arrays are NumPy arrays, with bfloat16 as uint16, or the runtime's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import is_torch, namespace
from ...errors import Unsupported, how_to_install
from .interface import Runtime

Array = NDArray[Any]

_runtime: Runtime | None = None


def install(runtime: Runtime | None) -> Runtime | None:
    """Run kernels on this runtime from now on, or on MLX for None; returns the previous runtime."""
    global _runtime
    before, _runtime = _runtime, runtime
    return before


def missing() -> list[str]:
    """Reasons why no kernel can run here."""
    if _runtime is not None:
        return []
    try:
        import mlx.core as mx
    except ImportError as error:
        return [f"it needs the package {error.name}: {how_to_install('metal')}"]
    return [] if mx.metal.is_available() else ["this machine has no Metal device: run it on a Mac with Apple silicon"]


def runtime(like: Any = None) -> Runtime:
    """The runtime that launches kernels on arrays such as `like`; raises Unsupported if there is none."""
    if is_torch(like) and like.device.type == "mps":
        from .mps import Mps

        return Mps()
    if _runtime is None:
        if reasons := missing():
            raise Unsupported("metal", reasons)
        from .mlx import Mlx

        install(Mlx())
    assert _runtime is not None
    return _runtime


def misplaced(device: str) -> list[str]:
    """Reasons why arrays on this device cannot be computed here."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "mlx", "mps"):
        return [f"its arrays live on {device}: move them to the CPU", *missing()]
    return [] if kind == "mps" else missing()


def on_host(x: Any) -> Any:
    """An array of any kind as a NumPy array; None stays None."""
    return None if x is None else np.asarray(x.detach().cpu() if is_torch(x) else x)


def bits(x: Any) -> Any:
    """Codes, or scales in bfloat16, as unsigned integers of their size."""
    if is_torch(x):
        torch = namespace(x)
        return x.view(torch.uint8 if x.element_size() == 1 else torch.uint16)
    return x.view(np.uint8 if x.dtype.itemsize == 1 else np.uint16)


def like(q: Any, here: Runtime, *arrays: Any) -> tuple[Any, ...]:
    """Arrays of the runtime converted to the caller's kind: NumPy's if q is one."""
    return tuple(here.numpy(x) if isinstance(q, np.ndarray) else x for x in arrays)


def zeros(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Zeros, as a tensor on its device if `like` is a torch tensor, otherwise as a NumPy array."""
    if is_torch(like):
        torch = namespace(like)
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device)
    return np.zeros(shape, np.uint16 if dtype == "bfloat16" else dtype)
