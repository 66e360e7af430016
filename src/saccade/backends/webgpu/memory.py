"""A device's buffers: storage from a pool, uniform blocks cached by content, and a staging buffer for reading."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import wgpu
from numpy.typing import NDArray

from ...errors import Unsupported

Array = NDArray[Any]
# a buffer of wgpu, which has no type annotations
Buffer = Any

_STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
_UNIFORM = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
_STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
# most bytes in the pool; most cached uniform blocks; bytes read at a time
_POOLED, _UNIFORMS, CHUNK = 1 << 30, 1024, 1 << 26


class Memory:
    """The buffers of one device; its owner allows one thread at a time."""

    def __init__(self, device: Any, largest: int, name: str):
        self._device, self._largest, self._name = device, largest, name
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._free_bytes = 0
        # reused buffers, to be zeroed by the next submit
        self._stale: dict[int, Buffer] = {}
        self._uniforms: OrderedDict[bytes, Buffer] = OrderedDict()
        self._staging: Buffer = None

    def buffer(self, nbytes: int) -> Buffer:
        """A buffer whose content is zero from the next submit on."""
        buffer, fresh = self._take(nbytes)
        if not fresh:
            self._stale[id(buffer)] = buffer
        return buffer

    def upload(self, a: Array) -> Buffer:
        """A buffer with the bytes of a, and zeros up to its end."""
        data = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        buffer, _ = self._take(data.size)
        # the length of a write must be a multiple of 4
        whole = data.size & ~3
        tail = np.zeros(buffer.size - whole, np.uint8)
        tail[: data.size - whole] = data[whole:]
        if whole:
            self._device.queue.write_buffer(buffer, 0, data, 0, whole)
        if tail.size:
            self._device.queue.write_buffer(buffer, whole, tail)
        return buffer

    def uniform(self, data: bytes) -> Buffer:
        """The uniform block with these bytes."""
        data = data + bytes(-len(data) % 16)
        buffer = self._uniforms.get(data)
        if buffer is None:
            buffer = self._uniforms[data] = self._device.create_buffer(size=len(data), usage=_UNIFORM)
            self._device.queue.write_buffer(buffer, 0, data)
            if len(self._uniforms) > _UNIFORMS:
                self._uniforms.popitem(last=False)
        self._uniforms.move_to_end(data)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Return a buffer to the pool, or free it if the pool is full."""
        if not buffer.usage & wgpu.BufferUsage.STORAGE:
            return
        # a buffer returned before any submit must not be zeroed later: its next owner may have filled it
        self._stale.pop(id(buffer), None)
        if self._free_bytes + buffer.size > _POOLED:
            buffer.destroy()
        else:
            self._free[buffer.size].append(buffer)
            self._free_bytes += buffer.size

    def clear_stale(self, encoder: Any) -> None:
        """Record commands that zero the reused buffers returned by `buffer`; they stay stale until `submit`."""
        for buffer in self._stale.values():
            encoder.clear_buffer(buffer)

    def submit(self, encoder: Any, pieces: Sequence[tuple[Buffer, Array]]) -> None:
        """Submit the encoder, after `clear_stale`, and copies of the buffers' first bytes into the byte arrays.

        It is one submit, unless an array is longer than CHUNK.
        """
        self._submit(encoder, [piece for piece in pieces if piece[1].size <= CHUNK], 0)
        for buffer, flat in pieces:
            for start in range(0, flat.size if flat.size > CHUNK else 0, CHUNK):
                self._submit(self._device.create_command_encoder(), [(buffer, flat[start : start + CHUNK])], start)

    def _submit(self, encoder: Any, pieces: Sequence[tuple[Buffer, Array]], source: int) -> None:
        # lengths of copies, like those of buffers, are multiples of 4; mapped ranges are multiples of 8
        places = np.cumsum([0, *(-(-flat.size // 8) * 8 for _, flat in pieces)]).tolist()
        staging = self._staged(places[-1])
        for (buffer, flat), place in zip(pieces, places, strict=False):
            encoder.copy_buffer_to_buffer(buffer, source, staging, place, -(-flat.size // 4) * 4)
        self._device.queue.submit([encoder.finish()])
        self._stale.clear()
        if not places[-1]:
            return
        # the copies have been submitted, so wgpu need not submit an empty encoder before it maps
        try:
            staging.map_async("READ_NOSYNC", 0, places[-1]).sync_wait()
        except BaseException:
            # an interrupt leaves it mapped, and a copy into a mapped buffer ends the process
            self._staging = None
            raise
        try:
            mapped = np.frombuffer(staging.read_mapped(0, places[-1], copy=False), np.uint8)
            for (_, flat), place in zip(pieces, places, strict=False):
                flat[:] = mapped[place : place + flat.size]
            # a view must not outlive the mapping
            del mapped
        finally:
            staging.unmap()

    def _staged(self, nbytes: int) -> Buffer:
        if nbytes and (self._staging is None or self._staging.size < nbytes):
            self._staging = self._device.create_buffer(size=1 << max(16, (nbytes - 1).bit_length()), usage=_STAGING)
        return self._staging

    def _take(self, nbytes: int) -> tuple[Buffer, bool]:
        """(a storage buffer, whether it is new and therefore zero)."""
        size = max(16, -(-nbytes // 4) * 4)
        if size > self._largest:
            reason = f"an array has {nbytes} bytes; a buffer of {self._name} holds at most {self._largest}"
            raise Unsupported("webgpu", [reason])
        if self._free[size]:
            self._free_bytes -= size
            return self._free[size].pop(), False
        try:
            return self._device.create_buffer(size=size, usage=_STORAGE), True
        except wgpu.GPUOutOfMemoryError:
            # the memory may be full of pooled buffers
            for buffers in self._free.values():
                for buffer in buffers:
                    buffer.destroy()
            self._free.clear()
            self._free_bytes = 0
            return self._device.create_buffer(size=size, usage=_STORAGE), True
