"""The operations of Gluon whose names differ among Triton 3.6 to 3.9; kernels import them from here."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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


def _async_add() -> Any:
    if hasattr(tma, "async_atomic_add"):
        return tma.async_atomic_add
    from triton._C.libtriton import ir

    # Triton 3.6 compiles the operation, but its language has no function for it
    @builtin
    def async_add(tensor_desc, coord, src, _semantic: Any = None) -> None:
        at = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, at, src.handle)

    return async_add


# adds a tile of shared memory to a tile of memory
async_add = _async_add()
