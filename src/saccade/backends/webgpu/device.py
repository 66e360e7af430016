"""An open device: its buffers, pipelines and bind groups, cached between calls, and one submit per call.

adapters.py chooses the adapter, memory.py manages memory, and texts.py knows what a kernel needs.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import wgpu
from numpy.typing import DTypeLike, NDArray

from ...errors import Unsupported
from . import adapters, texts
from .memory import Array, Buffer, Memory
from .step import Read, Step
from .texts import Kernel

_TICKS = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
# number of cached bind groups
_GROUPS = 1024
FORKED = "a device was opened before this process was forked, and would hang in it: start processes by spawn"


class Gpu:
    """A device of one process, which threads can share.

    name, driver, backend: as the adapter reports them; a backend is "Vulkan", for example. software: it computes on the
    CPU. limits: the device's own, under WebGPU's names with dashes. features: those it was opened with. timed: `run`
    can time its steps. vendor: its PCI number. place: the name by which `at` finds this device in this process.
    """

    def __init__(self, adapter: Any):
        self.adapter = adapter
        info = adapter.info
        self.name = str(info["device"])
        self.driver = str(info["description"] or info["vendor"])
        self.backend = str(info["backend_type"])
        self.software = adapters.software(adapter)
        self.described = adapters.describe(adapter)
        self.lost = False
        self.vendor = int(info.get("vendor_id", 0))
        self.place = f"webgpu:{next(numbers)}"
        self.process = os.getpid()
        self._device = adapters.open_device(adapter)
        self.limits: Mapping[str, int] = dict(self._device.limits)
        self.features: frozenset[str] = frozenset(map(str, self._device.features))
        self.timed = "timestamp-query" in self.features
        self._memory = Memory(self._device, self.limits["max-buffer-size"], self.name)
        self._lock = threading.RLock()
        self._groups: OrderedDict[tuple[Any, ...], tuple[Any, Any]] = OrderedDict()
        self._layouts: dict[tuple[str, ...], Any] = {}
        self._pipelines: dict[tuple[str, str], Any] = {}
        self._kernels: dict[tuple[str, str], Kernel] = {}
        places[self.place] = self

    def __repr__(self) -> str:
        return f"Gpu({self.name!r}, {self.driver!r}, {self.backend})"

    @cached_property
    def shuffle(self) -> int:
        """How many consecutive invocations exchange numbers by subgroup operations: a power of two, 1 for none."""
        return adapters.shuffled(self, self.vendor) if "subgroup" in self.features else 1

    def changed(self, text: str, label: str, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The words after one workgroup of this kernel has run with them as its only binding."""
        buffer = self.upload(words)
        self.run([Step(self.kernel(text, "main", label), [buffer], (1, 1, 1))])
        result = self.download(buffer, np.uint32, words.shape)
        self.release(buffer)
        return result

    def kernel(self, text: str, entry: str, label: str = "") -> Kernel:
        """The kernel of this text, checked against this device once. Raises Unsupported with all that is missing."""
        kernel = self._kernels.get((text, entry))
        if kernel is None:
            kernel = self._kernels[text, entry] = texts.check(text, entry, self.limits, self.features, label)
        return kernel

    def buffer(self, nbytes: int) -> Buffer:
        """A storage buffer of zeros with at least max(nbytes, 16) bytes."""
        with self._guarded():
            return self._memory.buffer(nbytes)

    def upload(self, a: Array) -> Buffer:
        """A storage buffer with the elements of a in C order, and zeros up to its end."""
        with self._guarded():
            return self._memory.upload(a)

    def uniform(self, data: bytes) -> Buffer:
        """A uniform buffer with these bytes, padded to a multiple of 16; cached, so that equal bytes share one."""
        with self._guarded():
            return self._memory.uniform(data)

    def release(self, buffer: Buffer) -> None:
        """Return a storage buffer to the pool. Submitted work still sees its bytes; nothing else may use it."""
        # finalizers may call this at any time: neither a lost device nor a fork may raise here
        if not self.lost and os.getpid() == self.process:
            with self._lock:
                self._memory.release(buffer)

    def run(self, steps: Sequence[Step], *, timed: bool = False) -> list[float] | None:
        """Submit the steps in order; each sees the results of those before it. Returns seconds per step if timed.

        Raises Unsupported and RuntimeError as `call` does.
        """
        return self.call(steps, timed=timed)[1]

    def download(self, buffer: Buffer, dtype: DTypeLike, shape: tuple[int, ...]) -> Array:
        """The first elements of a buffer as a new array; waits for everything submitted before."""
        return self.call((), [(buffer, dtype, shape)])[0][0]

    def copy(self, pieces: Sequence[tuple[Buffer, int, Buffer, int, int]]) -> None:
        """Submit copies of (source, offset, target, offset, bytes), all multiples of 4 bytes."""
        with self._guarded():
            encoder = self._device.create_command_encoder()
            self._memory.clear_stale(encoder)
            for source, start, target, offset, size in pieces:
                encoder.copy_buffer_to_buffer(source, start, target, offset, size)
            self._memory.submit(encoder, [])

    def wait(self) -> None:
        """Return when everything submitted is done."""
        buffer = self.buffer(16)
        self.download(buffer, np.uint32, (4,))
        self.release(buffer)

    def call(
        self, steps: Sequence[Step], reads: Sequence[Read] = (), *, timed: bool = False
    ) -> tuple[list[Array], list[float] | None]:
        """`run` and then `download` of several buffers, in one submit: (arrays, seconds or None).

        Raises Unsupported for a binding or a grid beyond the device's limits, or if the device cannot time steps;
        RuntimeError if the device is lost or refuses a kernel.
        """
        if timed and not self.timed:
            raise Unsupported("webgpu", [f"{self.name} has no timestamp-query: time whole calls instead"])
        arrays = [np.empty(shape, dtype) for _, dtype, shape in reads]
        pieces = [(read[0], array.reshape(-1).view(np.uint8)) for read, array in zip(reads, arrays, strict=True)]
        ticks = np.empty(2 * len(steps) if timed else 0, np.uint64)
        with self._guarded():
            bound = [(self._pipeline(step.kernel), self._group(step), self._grid(step)) for step in steps]
            encoder = self._device.create_command_encoder()
            self._memory.clear_stale(encoder)
            recorded = self._record(encoder, bound, timed)
            if recorded is not None:
                pieces.append((recorded, ticks.view(np.uint8)))
            self._memory.submit(encoder, pieces)
        return arrays, (np.diff(ticks.reshape(-1, 2)).ravel() * 1e-9).tolist() if timed else None

    def _record(self, encoder: Any, bound: Sequence[tuple[Any, Any, tuple[int, int, int]]], timed: bool) -> Buffer:
        """Record dispatches (pipeline, bind group, workgroups); if timed, return the buffer of times in ns."""
        if not bound:
            return None
        n = len(bound)
        queries = self._device.create_query_set(type="timestamp", count=2 * n) if timed else None
        # one pass suffices, because the runtime orders dispatches that share a buffer; timestamps need a pass for each
        for i, items in enumerate([[item] for item in bound] if timed else [bound]):
            writes = {"beginning_of_pass_write_index": 2 * i, "end_of_pass_write_index": 2 * i + 1}
            recorder = encoder.begin_compute_pass(timestamp_writes={"query_set": queries, **writes} if timed else None)
            for pipeline, group, grid in items:
                recorder.set_pipeline(pipeline)
                recorder.set_bind_group(0, group)
                recorder.dispatch_workgroups(*grid)
            recorder.end()
        if queries is None:
            return None
        ticks = self._device.create_buffer(size=16 * n, usage=_TICKS)
        encoder.resolve_query_set(queries, 0, 2 * n, ticks, 0)
        return ticks

    def _grid(self, step: Step) -> tuple[int, int, int]:
        largest = self.limits["max-compute-workgroups-per-dimension"]
        if max(step.grid) > largest:
            raise Unsupported(
                "webgpu", [f"{step.kernel.label} needs {step.grid} workgroups; at most {largest} each way"]
            )
        return step.grid

    def _layout(self, kinds: tuple[str, ...]) -> Any:
        layout = self._layouts.get(kinds)
        if layout is None:
            entries = [
                {"binding": n, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}}
                for n, kind in enumerate(kinds)
            ]
            layout = self._layouts[kinds] = self._device.create_bind_group_layout(entries=entries)
        return layout

    def _pipeline(self, kernel: Kernel) -> Any:
        pipeline = self._pipelines.get((kernel.text, kernel.entry))
        if pipeline is None:
            layout = self._device.create_pipeline_layout(bind_group_layouts=[self._layout(kernel.bindings)])
            try:
                module = self._device.create_shader_module(label=kernel.label, code=kernel.text)
                compute = {"module": module, "entry_point": kernel.entry}
                pipeline = self._device.create_compute_pipeline(label=kernel.label, layout=layout, compute=compute)
            except wgpu.GPUValidationError as error:
                raise RuntimeError(f"{self.name} refuses the kernel {kernel.label}: {error}") from error
            self._pipelines[kernel.text, kernel.entry] = pipeline
        return pipeline

    def _group(self, step: Step) -> Any:
        kinds = step.kernel.bindings
        if len(step.bindings) != len(kinds):
            raise ValueError(f"{step.kernel.label} got {len(step.bindings)} bindings; expected {len(kinds)}")
        ranges = [b if isinstance(b, tuple) else (b, 0, b.size) for b in step.bindings]
        key = (kinds, *((id(buffer), offset, size) for buffer, offset, size in ranges))
        known = self._groups.get(key)
        if known is None:
            largest = self.limits["max-storage-buffer-binding-size"]
            for n, (_, _, size) in enumerate(ranges):
                if size > largest and kinds[n] != "uniform":
                    reason = f"binding {n} of {step.kernel.label} has {size} bytes; {self.name} binds at most {largest}"
                    raise Unsupported("webgpu", [reason])
            entries = [
                {"binding": n, "resource": {"buffer": buffer, "offset": offset, "size": size}}
                for n, (buffer, offset, size) in enumerate(ranges)
            ]
            group = self._device.create_bind_group(layout=self._layout(kinds), entries=entries)
            # the entry keeps the buffers alive, so that no other buffer gets their id
            known = self._groups[key] = group, ranges
            if len(self._groups) > _GROUPS:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(key)
        return known[0]

    @contextmanager
    def _guarded(self) -> Generator[None]:
        """Admit one thread at a time. Raises RuntimeError for a lost device, or in a process that did not open it."""
        if os.getpid() != self.process:
            raise RuntimeError(FORKED)
        with self._lock:
            try:
                yield
            except (wgpu.GPUError, RuntimeError) as error:
                if "lost" not in str(error).lower():
                    raise
                self.lost = True
                message = f"the device {self.name} is lost, with all arrays on it: call again, which opens it again"
                raise RuntimeError(message) from error


def open_gpu(name: str | None = None) -> Gpu:
    """The device of this name, opened once.

    name, or SACCADE_WEBGPU_ADAPTER, is a part of the adapter's name, driver or vendor; upper and lower case are equal.
    The default is the first hardware adapter. A software adapter is used, with a warning, if it is named or is the only
    one. Raises Unsupported with every reason if no adapter is usable, RuntimeError in a fork of a process that has one.
    """
    wanted = (name or os.environ.get("SACCADE_WEBGPU_ADAPTER") or "").lower()
    with _opening:
        if any(gpu.process != os.getpid() for gpu in _opened.values()):
            raise RuntimeError(FORKED)
        gpu = _opened.get(wanted)
        if gpu is None or gpu.lost:
            gpu = _opened[wanted] = adapters.first_usable(wanted, _open)
        return gpu


def _open(adapter: Any) -> Gpu:
    # two names may select the same adapter, and its arrays must work together
    same = (gpu for gpu in _opened.values() if gpu.described == adapters.describe(adapter) and not gpu.lost)
    return next(same, None) or Gpu(adapter)


def at(place: str) -> Gpu:
    """The device of this `Gpu.place`; without a number, that of `open_gpu`. Raises ValueError for an unknown place."""
    if ":" not in place:
        return open_gpu()
    gpu = places.get(place)
    if gpu is None:
        raise ValueError(f"there is no device {place}; open here: {', '.join(places) or 'none'}")
    return gpu


numbers = itertools.count()
places: weakref.WeakValueDictionary[str, Gpu] = weakref.WeakValueDictionary()
_opening = threading.Lock()
_opened: dict[str, Gpu] = {}
