"""Caches on a WebGPU device; lengths and indices are NumPy arrays, and codes share rows with their scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import quantised as codes
from ..arrays import numpy_dtype
from ..backends.webgpu import arrays as on_device
from ..backends.webgpu.arrays import GpuArray, array, empty
from ..backends.webgpu.codes import encoded, joined, parted
from ..backends.webgpu.device import at
from ..quantised import Quantised
from ..rope import Turn
from .storage import Arrays, Shape, Storage


class WebgpuArrays(Arrays):
    """Arrays on one WebGPU device."""

    name = "GpuArray"
    indexed = False
    copy_block = staticmethod(on_device.copy_block)
    take = staticmethod(on_device.take_rows)

    def __init__(self, dtype: str, device: Any) -> None:
        self.dtype, self.gpu = numpy_dtype(dtype), at(str(device))
        # raises TypeError for a dtype that no kernel reads
        empty((0,), self.dtype, self.gpu)
        self.shown = {"dtype": str(self.dtype), "device": "webgpu"}

    def filled(self, shape: Shape, fill: float, how: Quantised | None) -> tuple[Any, Any]:
        token = self.full(shape[-1:], fill)
        if how is not None:
            token = joined(*codes.encode(token, how), how)
        whole = *shape[:-1], len(token)
        if whole[-2] * token.nbytes % 4:
            text = f"a token's {list(whole[-2:])} of {token.dtype}"
            raise ValueError(f"{text} do not fill whole words; expected an even number")
        # new arrays on the device are zeros
        x = array(np.broadcast_to(token, whole), self.gpu) if token.any() else empty(whole, token.dtype, self.gpu)
        return x, None

    def encode(self, x: Any, how: Quantised | None) -> tuple[Any, Any]:
        return x if how is None else encoded(x, how), None

    def decode(self, x: Any, scale: Any, n: int, how: Quantised) -> Any:
        return codes.decode(*parted(x.numpy(), how, n), how)

    def check(self, name: str, x: Any) -> None:
        if not isinstance(x, GpuArray) or x.dtype != self.dtype:
            raise self.mismatch(name, x)
        if x.gpu is not self.gpu:
            raise ValueError(f"{name} lives on {x.gpu.place}; expected {self.gpu.place}, where the cache lives")

    def write_rows(self, cache: Storage, k: Any, v: Any, starts: Any, counts: Any, turn: Turn | None) -> None:
        counts = np.full_like(starts, k.shape[1]) if counts is None else counts
        for x, new in zip(cache.arrays, cache.stored(k, v), strict=True):
            on_device.write_rows(x, new, starts, counts)

    def write_slots(self, cache: Storage, k: Any, v: Any, first: Any, second: Any, turn: Turn | None) -> None:
        for x, new in zip(cache.arrays, cache.stored(k, v), strict=True):
            on_device.write_slots(x, new, first * x.shape[1] + second)
