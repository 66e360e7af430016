"""A call made again with other arrays of the same layout: its launches, without the way to them.

Triton finds a compiled kernel by looking at every argument. Here the first call of a layout keeps the kernels and the
arguments that stay, and later calls put in their own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

import triton

from . import launch

# the launcher's arguments are Triton's own affair: those of this version are known
KNOWN = triton.__version__.startswith("3.6.")


class Slot(NamedTuple):
    """An argument that changes: number `n` of the call's arrays, with strides where the kernel takes them."""

    n: int
    strides: tuple[int, ...] | None


class Step(NamedTuple):
    """One launch: Triton's launcher, the grid, the kernel's handle and data, its arguments with arrays left open."""

    launcher: Any
    grid: int
    function: Any
    packed: Any
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


class Replay:
    """Calls of one problem on one device, by the strides of their arrays."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.index = self.device.index or 0
        self.known: dict[Any, tuple[list[Any], int, list[Step]]] = {}

    def __call__(
        self, given: Sequence[Tensor], first: Callable[[], tuple[Recorder, list[Tensor]]]
    ) -> list[Tensor] | None:
        """The arrays that the call makes; None where Triton itself is to look at `given` again.

        first: makes the call the long way, and returns it with the arrays that it made.
        """
        pointers = [x.data_ptr() for x in given]
        if torch.cuda.current_device() != self.index or any(p & 15 for p in pointers):
            return None
        key = tuple([x.stride() for x in given])
        found = self.known.get(key)
        if found is None:
            call, made = first()
            shapes, steps = _kept(call, [*given, *made], len(given))
            self.known[key] = shapes, len(made), steps
            return made
        shapes, results, steps = found
        made = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        pointers += [x.data_ptr() for x in made]
        active: Any = driver.active
        stream = active.get_current_stream(self.index)
        for launcher, grid, function, packed, args in steps:
            filled = [
                a if type(a) is not Slot else pointers[a.n] if a.strides is None else (pointers[a.n], *a.strides)
                for a in args
            ]
            launcher.launch(
                grid, 1, 1, stream, function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, packed,
                None, None, None, *filled,
            )  # fmt: skip
        # scratch stands behind the results
        return made[:results]


def _kept(call: Recorder, arrays: list[Tensor], given: int) -> tuple[list[Any], list[Step]]:
    steps = [
        Step(kernel.run, grid, kernel.function, kernel.packed_metadata, tuple(_open(a, arrays) for a in args))
        for kernel, grid, args in call.steps
    ]
    return [(x.shape, x.dtype) for x in arrays[given:]], steps


def _open(a: Any, arrays: list[Tensor]) -> Any:
    # the int32 lists of plans stay; scratch of the call is made anew each time
    tensor, strides = (a[0], tuple(a[1:])) if isinstance(a, launch.Array) else (a, None)
    if not isinstance(tensor, Tensor):
        return a
    for n, x in enumerate(arrays):
        if tensor is x:
            return Slot(n, strides)
    if tensor.dtype is torch.int32:
        return tensor
    arrays.append(tensor)
    return Slot(len(arrays) - 1, strides)
