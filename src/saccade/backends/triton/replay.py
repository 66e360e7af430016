"""A call made again with other arrays of the same layout: its launches, without the way to them.

Triton finds a compiled kernel by looking at every argument. Here the first call of a layout keeps the kernels and the
arguments that stay, and later calls put in their own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

import triton

from . import launch

# the launcher's arguments are Triton's own affair: those of this version are known, and only there is it looked into
KNOWN = triton.__version__.startswith("3.6.")
# addresses of one array whose descriptors are kept
MOST = 64
# arrays of scratch begin at multiples of as many bytes
ALIGNED = 256


class Slot(NamedTuple):
    """An argument that changes: number `n` of the call's arrays, with strides where the kernel takes them."""

    n: int
    strides: tuple[int, ...] | None

    def of(self, pointers: list[int]) -> Any:
        """The argument of a call whose arrays lie there."""
        pointer = pointers[self.n]
        return pointer if self.strides is None else (pointer, *self.strides)


class Described(NamedTuple):
    """The tensor descriptor of array number `n`: what the driver makes one of, and those made so far, by address."""

    n: int
    how: tuple[Any, ...]
    made: dict[int, Any]

    def of(self, pointers: list[int]) -> Any:
        """The argument of a call whose arrays lie there."""
        pointer = pointers[self.n]
        found = self.made.get(pointer)
        if found is None:
            if len(self.made) >= MOST:
                self.made.clear()
            found = self.made[pointer] = driver.active.utils.fill_tma_descriptor(pointer, *self.how)  # type: ignore[attr-defined]
        return found


class Step(NamedTuple):
    """One launch: the C function, what comes before the stream and after it, and which arguments are left open."""

    launch: Any
    grid: tuple[int, int, int]
    args: list[Any]
    opened: list[tuple[int, Slot | Described]]


class Made(NamedTuple):
    """An array that a call makes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    zero: bool


class Recorder(launch.AttentionLaunch):
    """A call that keeps its launches and its scratch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[tuple[Any, tuple[int, ...], list[Any]]] = []
        self.made: list[tuple[Tensor, bool]] = []

    def run(self, kernel: Any, grid: tuple[int, ...], *args: Any, **given: Any) -> Any:
        compiled = super().run(kernel, grid, *args, **given)
        by_name = dict(zip(kernel.arg_names, args, strict=False)) | given
        self.steps.append((compiled, grid, [by_name[name] for name in kernel.arg_names]))
        return compiled

    def scratch(self, *shape: int, like: Tensor, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
        found = super().scratch(*shape, like=like, dtype=dtype, zero=zero)
        self.made.append((found, zero))
        return found


class Replay:
    """Calls of one problem on one device, by the strides of their arrays and by which of them are one."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.index = self.device.index or 0
        self.empty = _short_way(self.device.type) or self._empty
        self.known: dict[Any, Recording] = {}

    def __call__(
        self, given: Sequence[Tensor], first: Callable[[], tuple[Recorder, list[Tensor]]]
    ) -> list[Tensor] | None:
        """The arrays that the call makes; None where Triton itself is to look at `given` again, or steps lie inside.

        first: makes the call the long way, and returns it with its results.
        """
        pointers = [x.data_ptr() for x in given]
        if torch.cuda.current_device() != self.index or any(p & 15 for p in pointers):
            return None
        key = (*[x.stride() for x in given], *map(pointers.index, pointers))
        found = self.known.get(key)
        if found is None:
            if any(x.stride(-1) != 1 for x in given):
                return None
            call, results = first()
            self.known[key] = _recording(call, given, results)
            return results
        made = [self.empty(x.shape, x.strides, x.dtype) for x in found.made]
        for x, how in zip(made, found.made, strict=True):
            if how.zero:
                x.zero_()
        pointers += [x.data_ptr() for x in made]
        if found.size:
            # held until the last launch: its memory is another call's as soon as it is free
            scratch = self.empty((found.size,), (1,), torch.uint8)
            first_byte = scratch.data_ptr()
            pointers += [first_byte + begin for begin in found.begins]
        active: Any = driver.active
        stream = active.get_current_stream(self.index)
        for run, grid, args, opened in found.steps:
            # a list of its own: another thread may be at this call too
            filled = args.copy()
            for n, a in opened:
                filled[n] = a.of(pointers)
            run(*grid, stream, *filled)
        return made[: found.results]

    def _empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)


def _short_way(kind: str) -> Any:
    # to an array of (shape, strides, dtype), without an operator: 1 us in place of 3 to 7
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # pyright: ignore[reportPrivateUsage]
    return getattr(guards, f"_empty_strided_{kind}", None)


class Recording(NamedTuple):
    """Of one layout: the arrays to make, the first of which are results; one piece of scratch of size bytes, and where
    in it each array of scratch begins; the launches."""

    made: list[Made]
    results: int
    size: int
    begins: list[int]
    steps: list[Step]


def _recording(call: Recorder, given: Sequence[Tensor], results: list[Tensor]) -> Recording:
    made = [(x, False) for x in results] + [(x, zero) for x, zero in call.made if zero]
    scratch = [x for x, zero in call.made if not zero]
    places: dict[int, int] = {}
    for n, x in enumerate([*given, *(x for x, _ in made), *scratch]):
        places.setdefault(x.data_ptr(), n)
    steps: list[Step] = []
    for kernel, grid, args in call.steps:
        x, y, z = (*grid, 1, 1)[:3]
        run, described = _launcher(kernel.run.launch)
        how: Any = kernel.run
        head = [
            kernel.function, how.launch_cooperative_grid, how.launch_pdl, None, None, kernel.packed_metadata, None,
            None, None,
        ]  # fmt: skip
        head += [part for a in args for part in _open(a, places, described)]
        opened = [(n, a) for n, a in enumerate(head) if isinstance(a, (Slot, Described))]
        steps.append(Step(run, (x, y, z), head, opened))
    ends = list(accumulate((-(-x.nbytes // ALIGNED) * ALIGNED for x in scratch), initial=0))
    shapes = [Made(tuple(x.shape), x.stride(), x.dtype, zero) for x, zero in made]
    return Recording(shapes, len(results), ends[-1], ends[:-1], steps)


def _launcher(run: Any) -> tuple[Any, Iterator[Any]]:
    # the C function, and how each tensor descriptor among its arguments is made: Triton's wrapper would make all anew
    names = run.__code__.co_freevars if hasattr(run, "__code__") else ()
    if "tensordesc_meta" not in names:
        return run, iter(())
    kept: dict[str, Any] = dict(zip(names, (cell.cell_contents for cell in run.__closure__), strict=True))
    return kept["launcher"], iter(kept["tensordesc_meta"])


def _open(a: Any, places: dict[int, int], described: Iterator[Any]) -> tuple[Any, ...]:
    # what is none of the call's arrays stays: the lists of plans
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if isinstance(a, launch.Array):
        return (Slot(places[a.p.data_ptr()], tuple(a[1:])),)
    if isinstance(a, TensorDescriptor):
        of = next(described)
        kind = of["swizzle"], of["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[of["elem_type"]], of["block_size"]
        how = *kind, a.shape, a.strides, int(a.padding == "nan")
        return Described(places[a.base.data_ptr()], how, {}), *a.shape, *a.strides
    if isinstance(a, Tensor) and a.data_ptr() in places:
        return (Slot(places[a.data_ptr()], None),)
    return (a,)
