"""Arrays that stay on the device between calls."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .device import Gpu, open_gpu
from .memory import Buffer

# dtypes that kernels read; WGSL has neither bfloat16 nor float64
CARRIED = ("float32", "float16", "int32", "uint32")


class GpuArray:
    """A C-ordered array on a device, which users cannot change.

    shape, dtype: as in NumPy. gpu: the device. buffer: its storage, at least as long as the array; it returns to the
    device's pool when no array shares it any more.

    Examples:
        >>> from saccade.backends.webgpu import array
        >>> x = array(np.arange(6, dtype=np.float32)).reshape(2, -1)
        >>> x.numpy()
        array([[0., 1., 2.],
               [3., 4., 5.]], dtype=float32)
    """

    def __init__(self, gpu: Gpu, buffer: Buffer, shape: tuple[int, ...], dtype: DTypeLike, owner: Any = None):
        self.gpu, self.buffer, self.shape, self.dtype = gpu, buffer, tuple(shape), np.dtype(dtype)
        if owner is None:
            owner = _Owner()
            weakref.finalize(owner, gpu.release, buffer).atexit = False
        self._owner = owner

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"GpuArray(shape={self.shape}, dtype={self.dtype}, on {self.gpu.name!r})"

    def reshape(self, *shape: int | tuple[int, ...]) -> GpuArray:
        """The same elements in another shape, which may contain one -1; the storage is shared."""
        wanted = _sizes(*shape, free=self.size)
        if math.prod(wanted) != self.size:
            raise ValueError(f"shape is {shape}; expected one of {self.size} elements, as {self.shape} has")
        return GpuArray(self.gpu, self.buffer, wanted, self.dtype, self._owner)

    def first(self, shape: tuple[int, ...]) -> GpuArray:
        """The first elements of the array, in C order, as an array of this shape; the storage is shared."""
        shape = _sizes(shape)
        if math.prod(shape) > self.size:
            raise ValueError(f"shape is {shape}; expected at most {self.size} elements, as {self.shape} has")
        return GpuArray(self.gpu, self.buffer, shape, self.dtype, self._owner)

    def numpy(self) -> NDArray[Any]:
        """A copy as a NumPy array; waits until the array is computed."""
        return self.gpu.download(self.buffer, self.dtype, self.shape)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("copy is False; expected None or True, because the array is copied from the device")
        return self.numpy().astype(self.dtype if dtype is None else dtype, copy=False)


class _Owner:
    """Exists as long as an array that uses its buffer."""


def array(x: Any, gpu: Gpu | None = None) -> GpuArray:
    """A copy of x on the device, by default the device of `open_gpu()`.

    x: float32, float16, int32 or uint32 of any shape, a NumPy array or an object that converts to one; bfloat16 becomes
    float32. Returns a GpuArray, x itself if it is one. Raises TypeError for another dtype.

    Examples:
        >>> from saccade.backends.webgpu import array
        >>> q = k = v = array(np.ones((1, 128, 8, 64), np.float32))
        >>> o = saccade.attention(q, k, v, saccade.mask.causal())  # stays on the device
    """
    if isinstance(x, GpuArray):
        if gpu is not None and x.gpu is not gpu:
            raise ValueError(f"the array lives on {x.gpu.name}; expected {gpu.name}: copy it by x.numpy()")
        return x
    if str(getattr(x, "dtype", "")) == "torch.bfloat16":
        x = x.float()
    host = np.asarray(x.detach() if hasattr(x, "detach") else x)
    if host.dtype.name == "bfloat16":
        host = host.astype(np.float32)
    _check_dtype(host.dtype)
    gpu = gpu or open_gpu()
    return GpuArray(gpu, gpu.upload(host), host.shape, host.dtype)


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32, gpu: Gpu | None = None) -> GpuArray:
    """Zeros of this shape on the device; dtypes and errors as in `array`, and ValueError for a size below 0.

    Examples:
        >>> from saccade.backends.webgpu import empty
        >>> empty((2, 3)).numpy()
        array([[0., 0., 0.],
               [0., 0., 0.]], dtype=float32)
    """
    _check_dtype(np.dtype(dtype))
    gpu = gpu or open_gpu()
    shape = _sizes(shape)
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return GpuArray(gpu, gpu.buffer(nbytes), shape, dtype)


def write_rows(target: GpuArray, source: GpuArray, starts: NDArray[Any], counts: NDArray[Any]) -> None:
    """target[b, starts[b] : starts[b] + counts[b]] = source[b, : counts[b]], on the device.

    target is [B, n, ...] and source [B, T, ...] with the same other dimensions and dtype; starts and counts [B] are
    NumPy arrays. Only the owner of target may call this. Raises ValueError for arrays on different devices, for rows
    that differ, and for rows that are not a multiple of 4 bytes.
    """
    n, T = target.shape[1], source.shape[1]
    pieces = zip(starts.tolist(), counts.tolist(), strict=True)
    _copy(target, 2, source, 2, [(b * T, b * n + start, count) for b, (start, count) in enumerate(pieces)])


def write_slots(target: GpuArray, source: GpuArray, slots: NDArray[Any]) -> None:
    """Write row i of source [n, ...] to row slots[i] of target [a, b, ...], whose first two dimensions count as one.

    slots: a NumPy array [n]. Errors as in `write_rows`.
    """
    _copy(target, 2, source, 1, _runs(np.arange(len(slots)), slots))


def take_rows(parts: Sequence[GpuArray], at: NDArray[Any]) -> GpuArray:
    """Rows `at` of the concatenation of arrays [n, ...] that differ only in n. Errors as in `write_rows`."""
    rows, begin = empty((len(at), *parts[0].shape[1:]), parts[0].dtype, parts[0].gpu), 0
    for part in parts:
        to = np.flatnonzero((at >= begin) & (at < begin + len(part)))
        _copy(rows, 1, part, 1, _runs(at[to] - begin, to))
        begin += len(part)
    return rows


def copy_block(array: GpuArray, old: int, new: int) -> None:
    """array[new] = array[old]; only the owner of the array may call this."""
    # WebGPU allows no copy within one buffer
    between = empty((1, *array.shape[1:]), array.dtype, array.gpu)
    _copy(between, 1, array, 1, [(old, 0, 1)])
    _copy(array, 1, between, 1, [(0, new, 1)])


def _runs(first: NDArray[Any], second: NDArray[Any]) -> list[tuple[int, int, int]]:
    # (first, second, length) of the runs in which both arrays count up by one
    if not len(first):
        return []
    breaks = np.flatnonzero((np.diff(first) != 1) | (np.diff(second) != 1)) + 1
    begins = np.concatenate([[0], breaks])
    lengths = np.diff(np.append(begins, len(first)))
    return list(zip(first[begins].tolist(), second[begins].tolist(), lengths.tolist(), strict=True))


def _copy(target: GpuArray, n: int, source: GpuArray, m: int, pieces: Sequence[tuple[int, int, int]]) -> None:
    # pieces: (row of source, row of target, number of rows)
    # n, m: how many leading dimensions of target and of source count rows
    if source.gpu is not target.gpu:
        raise ValueError(
            f"an array lives on {source.gpu.place}; expected {target.gpu.place}, where the one written to is"
        )
    rows = [f"{x.dtype} {list(x.shape[lead:])}" for x, lead in ((target, n), (source, m))]
    if rows[0] != rows[1]:
        raise ValueError(f"rows are {rows[1]}; expected {rows[0]}, as the array written to has")
    row = int(np.prod(target.shape[n:], dtype=np.int64)) * target.dtype.itemsize
    if row % 4:
        raise ValueError(f"a row {list(target.shape[n:])} has {row} bytes; expected a multiple of 4")
    copies = [(source.buffer, a * row, target.buffer, b * row, count * row) for a, b, count in pieces if count * row]
    if copies and source.buffer is target.buffer:
        raise ValueError("an array is copied into itself; expected two buffers: copy it first, by array(x.numpy())")
    if copies:
        source.gpu.copy(copies)


def _sizes(*shape: Any, free: int | None = None) -> tuple[int, ...]:
    # the sizes of a shape, given one by one or as one tuple; free: the number of elements, if one size may be -1
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    sizes = tuple(map(operator.index, shape))
    if free is not None and sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        sizes = tuple(free // rest if n == -1 and rest else n for n in sizes)
    if min(sizes, default=0) < 0:
        raise ValueError(f"shape is {shape}; expected sizes of at least 0{'' if free is None else ', or one -1'}")
    return sizes


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if not dtype.isnative:
        raise TypeError(f"dtype has foreign byte order {dtype}; expected native: x.astype(x.dtype.newbyteorder('='))")
    if dtype.name not in CARRIED:
        raise TypeError(f"dtype is {dtype}; expected one of {', '.join(CARRIED)}: cast it")
