"""The emulator in place of an Apple GPU, which tests install in the Metal backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.metal.interface import Output, padded
from ...backends.metal.texts import Kernel
from . import Launch, emulate

Array = NDArray[Any]
CARRIED = {"bfloat16": np.dtype(np.uint16)}


class Emulator:
    """Runs kernels on this CPU, with NumPy arrays.

    schedule, seed, sanitizer: as in `emulate`. change: a mutation that is applied to every text; the sanitizer then
    watches only texts that it changes.
    bytes: the most threadgroup memory that a launch used.
    """

    name = "emulator"

    def __init__(self, schedule: str = "forward", seed: int = 0, sanitizer: str = "", change: Any = None):
        self.schedule, self.seed, self.sanitizer, self.change = schedule, seed, sanitizer, change
        self.bytes = 0

    def array(self, x: Array, dtype: str) -> Array:
        """The numbers in C order, padded to the smallest array that a kernel receives."""
        return padded(x)

    def numpy(self, x: Array) -> Array:
        """The array itself."""
        return x

    def run(
        self,
        kernel: Kernel,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Output],
        grid: Sequence[int],
        threadgroup: Sequence[int],
    ) -> dict[str, Any]:
        """The outputs of one launch."""
        shapes = {name: (x.shape, CARRIED.get(x.dtype) or np.dtype(x.dtype)) for name, x in outputs.items()}
        text = self.change(kernel.text) if self.change else kernel.text
        sanitizer = "" if self.change and text == kernel.text else self.sanitizer
        x, y, z = grid
        launch = Launch((x, y, z), (threadgroup[0], threadgroup[1], threadgroup[2]), shapes)
        results = emulate(text, inputs, launch, schedule=self.schedule, seed=self.seed, sanitizer=sanitizer)
        self.bytes = max(self.bytes, results.counts["bytes"])
        return results
