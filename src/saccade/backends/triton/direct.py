"""A call made again with other arrays of the same layout: its launches, without the way to them.

Triton finds a compiled kernel by looking at every argument. Here the first call of a layout keeps the kernels and the
arguments that stay, and later calls put in their own arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from ...plan import Plan
from ...problem import Problem
from .. import Extras
from . import launch

# the launcher's arguments are Triton's own affair: those of this version are known
KNOWN = triton.__version__.startswith("3.6.")


class Slot(NamedTuple):
    """An argument that changes: number `n` of the call's arrays, with strides where the kernel takes them."""

    n: int
    strides: tuple[int, ...] | None


class Step(NamedTuple):
    """One launch: its compiled kernel and its arguments, arrays of the call left open."""

    kernel: Any
    grid: int
    args: tuple[Any, ...]


class Recorder(launch.Call):
    """A call that keeps its launches."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[tuple[Any, int, list[Any]]] = []

    def start(self, kernel: Any, grid: int, *args: Any, tile: Any, **constants: Any) -> Any:
        compiled = super().start(kernel, grid, *args, tile=tile, **constants)
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants
        self.steps.append((compiled, grid, [given[name] for name in kernel.arg_names]))
        return compiled


class Direct:
    """Calls (threads, q, k, v, lse wanted) -> (o, lse) of one problem; None for tensors on another device."""

    def __init__(self, problem: Problem, plan: Plan, compute: Callable[[launch.Call, Tensor, Tensor], Any]) -> None:
        self.problem, self.plan, self.compute = problem, plan, compute
        self.device = torch.device(problem.device)
        self.index = self.device.index or 0
        self.known: dict[Any, tuple[list[Any], list[Step]]] = {}

    def __call__(self, threads: int, q: Tensor, k: Tensor, v: Tensor, want_lse: bool) -> tuple[Tensor, Tensor] | None:
        if torch.cuda.current_device() != self.index or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        key = q.stride(), k.stride(), v.stride()
        found = self.known.get(key)
        if found is None:
            if any(x.stride(-1) != 1 for x in (q, k, v)):
                return None
            return self._record(key, q, k, v)
        made, steps = found
        arrays = [q, k, v, *(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in made)]
        stream = driver.active.get_current_stream(self.index)
        for kernel, grid, args in steps:
            filled = [
                a if type(a) is not Slot else arrays[a.n] if a.strides is None else (arrays[a.n], *a.strides)
                for a in args
            ]
            kernel.run(grid, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *filled)
        return arrays[3], arrays[4]

    def _record(self, key: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = self.problem
        rows = (p.B, p.Tq, p.Hq)
        o, lse = q.new_empty((*rows, p.Dv)), q.new_empty(rows, dtype=torch.float32)
        call = Recorder(p, self.plan, q, k, v, Extras())
        self.compute(call, o, lse)
        arrays = [q, k, v, o, lse]
        steps = [Step(kernel, grid, tuple(_open(a, arrays) for a in args)) for kernel, grid, args in call.steps]
        self.known[key] = [(x.shape, x.dtype) for x in arrays[3:]], steps
        return o, lse


def _open(a: Any, arrays: list[Tensor]) -> Any:
    # tensors that lists and plans keep stay; scratch of the call is made anew each time
    tensor, strides = (a[0], tuple(a[1:])) if isinstance(a, launch.Array) else (a, None)
    if not isinstance(tensor, Tensor) or tensor.dtype is torch.int32:
        return a
    for n, x in enumerate(arrays):
        if tensor is x:
            return Slot(n, strides)
    arrays.append(tensor)
    return Slot(len(arrays) - 1, strides)
