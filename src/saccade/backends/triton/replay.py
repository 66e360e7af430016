"""Replays a call for other arrays of the same layout: the recorded launches, without their preparation.

To find a compiled kernel, Triton inspects every argument. Here the first call of a layout records the kernels and the
constant arguments, and later calls insert their own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from ...captures import keep_captured
from . import chip, launch, versions
from .launches import PLAIN, Launches

# the number of addresses of one array whose descriptors are cached; the number of recurrences whose replays are
MOST, MOST_CALLS = 64, 512
# scratch arrays start at multiples of this many bytes
ALIGNED = 256


class Described(NamedTuple):
    """The tensor descriptor of array number `n`: its layout for the driver, and cached descriptors by address."""

    n: int
    layout: tuple[Any, ...]
    descriptors: dict[int, Any]

    def of(self, pointers: list[int]) -> Any:
        """The argument for a call whose arrays have these pointers."""
        pointer = pointers[self.n]
        descriptor = self.descriptors.get(pointer)
        if descriptor is None:
            if len(self.descriptors) >= MOST:
                self.descriptors.clear()
            utils: Any = driver.active.utils  # type: ignore[attr-defined]
            fill = utils.fill_tma_descriptor if versions.FLAT_LAUNCHER else utils.fill_tma_descriptor_tiled
            descriptor = self.descriptors[pointer] = fill(pointer, *self.layout)
        return descriptor


class Step(NamedTuple):
    """One launch: the C function, the grid, and a function from arrays' pointers to the arguments after the stream."""

    launch: Any
    grid: tuple[int, int, int]
    args: Callable[[list[int]], list[Any]]


class Allocation(NamedTuple):
    """An array that a call allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    zero: bool


class Recorder(Launches):
    """Launches that are recorded, and the scratch that they need."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[tuple[Any, tuple[int, ...], list[Any]]] = []
        self.scratches: list[tuple[Tensor, bool]] = []

    def run(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        compiled = super().run(kernel, grid, *args, **options)
        by_name = dict(zip(kernel.arg_names, args, strict=False)) | options
        self.steps.append((compiled, grid, [by_name[name] for name in kernel.arg_names]))
        return compiled

    def scratch(self, *shape: int, like: Tensor, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
        scratch = super().scratch(*shape, like=like, dtype=dtype, zero=zero)
        self.scratches.append((scratch, zero))
        return scratch


class AttentionRecorder(Recorder, launch.AttentionLaunch):
    """A call of attention that records its launches and its scratch."""


class Replay:
    """Recordings of one problem on one device, by the arrays' strides and by which arguments are the same array."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.index = self.device.index or 0
        self.empty = _short_way(self.device.type) or self._empty
        self.known: dict[Any, Recording] = {}

    def __call__(
        self, arrays: Sequence[Tensor], first: Callable[[], tuple[Recorder, list[Tensor]]]
    ) -> list[Tensor] | None:
        """The call's results; None if a pointer is not aligned to 16 bytes, the device is not current, or rows are
        strided.

        first: makes the call without a recording, and returns it with its results.
        """
        pointers = [x.data_ptr() for x in arrays]
        if torch.cuda.current_device() != self.index or any(p & 15 for p in pointers):
            return None
        key = (*[x.stride() for x in arrays], *map(pointers.index, pointers))
        recording = self.known.get(key)
        if recording is None:
            if any(x.stride(-1) != 1 for x in arrays):
                return None
            call, results = first()
            self.known[key] = _recording(call, arrays, results)
            return results
        # lists of the plan are constants of the recording
        keep_captured(recording, self.device)
        new = [self.empty(x.shape, x.strides, x.dtype) for x in recording.allocations]
        for x, allocation in zip(new, recording.allocations, strict=True):
            if allocation.zero:
                x.zero_()
        pointers += [x.data_ptr() for x in new]
        if recording.size:
            # referenced until the last launch: freed memory may be given to another call at once
            scratch = self.empty((recording.size,), (1,), torch.uint8)
            first_byte = scratch.data_ptr()
            pointers += [first_byte + offset for offset in recording.offsets]
        active: Any = driver.active
        stream = active.get_current_stream(self.index)
        for run, grid, args in recording.steps:
            run(*grid, stream, *args(pointers))
        return new[: recording.results]

    def _empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)


def replayed(key: Hashable, args: tuple[Any, ...], compute: Callable[[Launches], Sequence[Tensor]]) -> Sequence[Tensor]:
    """The results of a recurrence. The first call with this key and layout runs `compute`; later ones replay it.

    key: all that the launches depend on besides the arrays' layouts and dtypes. args: nested tuples with all arrays
    that they read. compute: allocates all scratch and results with the `Launches` passed to it, and calls no operator
    of torch.
    """
    if versions.why_not() or chip.interpreted():
        return compute(PLAIN)
    arrays = list(_tensors(args))
    present = [x for x in arrays if x is not None]
    if not all(x.numel() for x in present):
        return compute(PLAIN)

    def first() -> tuple[Recorder, list[Tensor]]:
        recorder = Recorder()
        return recorder, list(compute(recorder))

    replay = _replay_of((key, *(x if x is None else x.dtype for x in arrays)), str(present[0].device))
    results = replay(present, first)
    return compute(PLAIN) if results is None else results


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor | None]:
    # the tensors in nested tuples, and None for each that a call lacks
    for x in args:
        if x is None or isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors(x)  # pyright: ignore[reportUnknownArgumentType]


@lru_cache(MOST_CALLS)
def _replay_of(key: Hashable, device: str) -> Replay:
    return Replay(device)


def _short_way(kind: str) -> Any:
    # a function that allocates (shape, strides, dtype) without an operator: 1 us instead of 3 to 7
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # pyright: ignore[reportPrivateUsage]
    return getattr(guards, f"_empty_strided_{kind}", None)


class Recording(NamedTuple):
    """The recording of one layout: arrays to allocate, the first `results` of which are the results; the size in bytes
    of one piece of scratch and the offsets of the scratch arrays in it; the launches."""

    allocations: list[Allocation]
    results: int
    size: int
    offsets: list[int]
    steps: list[Step]


def _recording(call: Recorder, arrays: Sequence[Tensor], results: list[Tensor]) -> Recording:
    new = [(x, False) for x in results] + [(x, zero) for x, zero in call.scratches if zero]
    returned = {x.data_ptr() for x in results}
    scratch = [x for x, zero in call.scratches if not zero and x.data_ptr() not in returned]
    places: dict[int, int] = {}
    for n, x in enumerate([*arrays, *(x for x, _ in new), *scratch]):
        places.setdefault(x.data_ptr(), n)
    steps: list[Step] = []
    for kernel, grid, args in call.steps:
        launcher: Any = kernel.run
        head: list[Any] = [kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl]
        if versions.FLAT_LAUNCHER:
            head += [None, None, kernel.packed_metadata, None, None, None]
        else:
            head += [kernel.packed_metadata, *(None,) * 5, launcher.arg_annotations, launcher.kernel_signature]
        run, described = _launcher(launcher.launch)
        x, y, z = (*grid, 1, 1)[:3]
        steps.append(Step(run, (x, y, z), _arguments(head, args, places, described)))
    ends = list(accumulate((-(-x.nbytes // ALIGNED) * ALIGNED for x in scratch), initial=0))
    allocations = [Allocation(tuple(x.shape), x.stride(), x.dtype, zero) for x, zero in new]
    return Recording(allocations, len(results), ends[-1], ends[:-1], steps)


def _launcher(run: Any) -> tuple[Any, Iterator[Any]]:
    # the C function, and the metadata of each tensor descriptor argument; Triton's own wrapper would rebuild them all
    names = run.__code__.co_freevars if hasattr(run, "__code__") else ()
    if "tensordesc_meta" not in names:
        return run, iter(())
    cells: dict[str, Any] = dict(zip(names, (cell.cell_contents for cell in run.__closure__), strict=True))
    return cells["launcher"], iter(cells["tensordesc_meta"])


def _arguments(
    head: Sequence[Any], args: Sequence[Any], places: dict[int, int], described: Iterator[Any]
) -> Callable[[list[int]], list[Any]]:
    # Pointers of the call's arrays -> the launcher's arguments, as an expression that is compiled once: a loop over the
    # changing arguments would take longer than everything else that a launch does in Python.
    values: dict[str, Any] = {}
    first = ", ".join(_constant(a, values) for a in head)
    own = ", ".join(part for a in args for part in _source(a, places, described, values))
    return eval(f"lambda p: [{first}, {own}]" if versions.FLAT_LAUNCHER else f"lambda p: [{first}, [{own}]]", values)


def _constant(a: Any, values: dict[str, Any]) -> str:
    if a is None or type(a) is int:
        return repr(a)
    name = f"x{len(values)}"
    values[name] = a
    return name


def _source(a: Any, places: dict[int, int], described: Iterator[Any], values: dict[str, Any]) -> list[str]:
    # an argument as an expression of the pointers p; an array that is not the call's, such as a plan's list, is
    # constant
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if isinstance(a, TensorDescriptor):
        meta = next(described)
        kind = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]
        layout = *kind, a.shape, a.strides, int(a.padding == "nan")
        name = _constant(Described(places[a.base.data_ptr()], layout, {}), values)
        return [f"{name}.of(p)", *(repr(n) for n in (*a.shape, *a.strides))]
    if isinstance(a, launch.Array):
        # each Array is one of the call's arrays
        strides = (_constant(n, values) for n in a[1:])
        return [f"(p[{places[a.p.data_ptr()]}], {', '.join(strides)})"]
    if isinstance(a, Tensor) and a.data_ptr() in places:
        return [f"p[{places[a.data_ptr()]}]"]
    if isinstance(a, tuple):
        items: tuple[Any, ...] = a
        if any(isinstance(x, (Tensor, tuple)) for x in items):
            parts = [part for x in items for part in _source(x, places, described, values)]
            return [f"({', '.join(parts)},)"]
    return [_constant(a, values)]
