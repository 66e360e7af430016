"""The operations of Gluon whose names differ among Triton 3.6 to 3.9; kernels import them from here."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def _of(module: Any, *names: str) -> Any:
    # the operation by the first name that this version of Triton has
    return next(getattr(module, name) for name in names if hasattr(module, name))


barrier = _of(gl, "barrier", "thread_barrier")
async_load = _of(tma, "async_load", "async_copy_global_to_shared")
async_store = _of(tma, "async_store", "async_copy_shared_to_global")
_UNDERSCORE = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def reinterpret(x, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory x as another dtype, shape and layout."""
    if _UNDERSCORE:
        return x._reinterpret(dtype, shape, layout)
    else:
        return x.reinterpret(dtype, shape, layout)
