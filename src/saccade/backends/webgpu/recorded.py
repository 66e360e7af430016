"""A device that computes nothing: it records what a call would submit, for another host that runs the same kernels.

The lab's page runs the recorded kernels in a browser.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import Unsupported
from . import texts
from .arrays import GpuArray
from .device import Gpu, numbers, places
from .memory import Array
from .step import Step
from .texts import Kernel


@dataclass(eq=False)
class RecordedBuffer:
    """A buffer, with the bytes that it has before the first step."""

    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


class Recorder(Gpu):
    """Accepts the calls of a `Gpu` and records their steps in order; reading from it returns zeros.

    limits: those of the other host, under WebGPU's names with dashes. software: whether that host computes on a CPU.
    A recorder has no features, so that no text requires one.
    """

    def __init__(self, limits: Mapping[str, int], *, software: bool = False):
        self.name, self.driver, self.backend, self.described = "recorder", "none", "none", "recorder"
        self.software, self.lost, self.timed, self.vendor = software, False, False, 0
        self.process, self.place = os.getpid(), f"webgpu:{next(numbers)}"
        places[self.place] = self
        self.limits, self.features = dict(limits), frozenset()
        self.steps: list[Step] = []
        # not `adapters.shuffled`, which would have to run a kernel
        self.shuffle = 1

    def kernel(self, text: str, entry: str, label: str = "") -> Kernel:
        return texts.check(text, entry, self.limits, self.features, label)

    def buffer(self, nbytes: int) -> RecordedBuffer:
        return RecordedBuffer(bytes(max(16, -(-nbytes // 4) * 4)))

    def upload(self, a: Array) -> RecordedBuffer:
        data = np.ascontiguousarray(a).tobytes()
        return RecordedBuffer(data + bytes(max(16 - len(data), -len(data) % 4)))

    def uniform(self, data: bytes) -> RecordedBuffer:
        return RecordedBuffer(data + bytes(-len(data) % 16))

    def release(self, buffer: RecordedBuffer) -> None:
        """Do nothing: a recorded step still needs the bytes."""

    def copy(self, pieces: Sequence[tuple[Any, int, Any, int, int]]) -> None:
        raise Unsupported("webgpu", ["copies between buffers are not recorded: give whole arrays"])

    def call(self, steps: Sequence[Step], reads: Sequence[Any] = (), *, timed: bool = False) -> Any:
        self.steps += steps
        return [np.zeros(shape, dtype) for _, dtype, shape in reads], None

    def job(self, arrays: Mapping[str, GpuArray]) -> dict[str, Any]:
        """The steps so far in a form that JSON can store, and the buffers of `arrays`.

        texts: WGSL, each once. steps: {text, entry, kinds, bindings [[buffer, offset, size]], grid, threads, memory}.
        buffers: {size, and data in base64 unless they are zeros}. arrays: name -> {buffer, shape}.
        """
        bound = [[b if isinstance(b, tuple) else (b, 0, b.size) for b in step.bindings] for step in self.steps]
        buffers: list[RecordedBuffer] = [buffer for ranges in bound for buffer, _, _ in ranges]
        buffers += [x.buffer for x in arrays.values()]
        known = {buffer: n for n, buffer in enumerate(dict.fromkeys(buffers))}
        sources = list(dict.fromkeys(step.kernel.text for step in self.steps))
        return {
            "texts": sources,
            "steps": [
                {
                    "text": sources.index(step.kernel.text),
                    "entry": step.kernel.entry,
                    "kinds": step.kernel.bindings,
                    "bindings": [(known[buffer], offset, size) for buffer, offset, size in ranges],
                    "grid": step.grid,
                    "threads": step.kernel.threads,
                    "memory": step.kernel.workgroup_bytes,
                }
                for step, ranges in zip(self.steps, bound, strict=True)
            ],
            "buffers": [{"size": b.size, **_content(b)} for b in known],
            "arrays": {name: {"buffer": known[x.buffer], "shape": x.shape} for name, x in arrays.items()},
        }


def _content(buffer: RecordedBuffer) -> dict[str, str]:
    return {"data": b64encode(buffer.data).decode()} if any(buffer.data) else {}
