"""Patches of Triton's interpreter: scalars with new NumPy, rounding to bfloat16, reproducible sums, scans by rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from ...arrays import narrow


def prepare() -> None:
    """Patch the interpreter, once per process."""
    tool: Any = interpreter
    patch, builder = tool._patch_lang_tensor, tool.InterpreterBuilder
    if patch.__module__ == __name__:
        return
    dot, cast, splat = builder.create_dot, builder.cast_impl, builder.create_splat

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # NumPy no longer converts an array [1] to a number
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = _wide(a), _wide(b)
        if d.dtype.scalar is not tl.float32 or a.data.dtype.kind != "f":
            return dot(self, a, b, d, *rest)
        # in float64, because libraries sum float32 differently from one processor to another
        product = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(product.astype(np.float32), tl.float32)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar is tl.bfloat16 and (source.dtype.scalar is tl.float32 or source.dtype.scalar.is_int()):
            return interpreter.TensorHandle(narrow(source.data.astype(np.float32), "bfloat16"), tl.bfloat16)
        return cast(self, source, kind)

    def create_splat(self: Any, kind: Any, x: Any) -> Any:
        # the result of a comparison has the dtype of its operands; Triton 3.9 refuses masks that are not booleans
        if x.data.dtype == np.bool_:
            x = interpreter.TensorHandle(x.data, tl.int1)
        return splat(self, kind, x)

    # the interpreter's overflow checks of every sum take most of its time
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    tool.ScanOps.generic_scan = _scan
    tool._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl, builder.create_splat = create_dot, cast_impl, create_splat


def _scan(self: Any, tensors: Any) -> Any:
    # one step per row of the axis; the interpreter's own scan takes one step per number
    arrays = [np.moveaxis(x.handle.data, self.axis, 0) for x in tensors]
    rows: list[Any] = []
    for i in range(len(arrays[0])):
        here = tuple(self.to_tensor(x[i], to.dtype) for x, to in zip(arrays, tensors, strict=True))
        row = self.combine_fn.fn(*rows[-1], *here) if rows else here
        rows.append(row if isinstance(row, tuple) else (row,))
    stacked = (np.stack([row[n].handle.data.reshape(x[0].shape) for row in rows]) for n, x in enumerate(arrays))
    return [self.to_tensor(np.moveaxis(x, 0, self.axis), to.dtype) for x, to in zip(stacked, tensors, strict=True)]


def _wide(x: Any) -> Any:
    if x.dtype.scalar is not tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
