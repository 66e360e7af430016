"""Array leaves of a mask: how they are read, copied and compared, and how changes of their contents are detected.

A leaf is a read-only NumPy array, a torch tensor by reference, or the bits of one of them. The memory of a CPU tensor
can be written in ways that torch does not count (through NumPy, `.data`, another process), so its contents are compared
with a snapshot each time. The contents of a CUDA tensor cannot be compared without waiting for the device. There
torch's count of in-place writes decides, and nothing is cached while a CUDA graph is captured.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bits import Bits, unpacked


class _Snapshot(NamedTuple):
    """The contents of a CPU tensor when it was last read.

    copy: a tensor, or bits for booleans of two or more dimensions; None for a tensor that is never written to.
    raw: the contents as bytes if they are few, because bytes compare ten times as fast.
    """

    owner: weakref.ref[Any]
    copy: Any
    number: int
    raw: bytes | None = None

    def holds(self, now: NDArray[Any]) -> bool:
        """Whether `now` equals the snapshot."""
        if self.raw is not None:
            return now.tobytes() == self.raw
        if isinstance(self.copy, Bits):
            return now.dtype == np.bool_ and bool(np.array_equal(self.copy.packed, Bits.of(now).packed))
        return np.array_equal(self.copy.numpy(), now)


# integers this large reach beyond every sequence, from any position; the sum with half of it still fits int64
FAR = 1 << 62

# by id of the tensor
_snapshots: dict[int, _Snapshot] = {}
_numbers = count(1)
_FEW_BYTES = 4096


def is_tensor(array: Any) -> bool:
    """Whether a leaf is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def readable(array: Any) -> bool:
    """Whether a leaf can be read without waiting: a NumPy array, or a CPU tensor that is not fake."""
    if isinstance(array, Bits):
        return readable(array.packed)
    if isinstance(array, np.ndarray):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and type(array) in (torch.Tensor, torch.nn.Parameter) and array.is_cpu


def at_once(array: Any) -> NDArray[Any] | None:
    """The contents of a `readable` leaf; None for others, and while torch traces or transforms."""
    torch = sys.modules.get("torch")
    if not readable(array) or (torch is not None and torch.compiler.is_compiling()):
        return None
    try:
        return host(array)
    except RuntimeError:
        # a tensor that a transform wraps has no memory
        return None


def host(array: Any) -> NDArray[Any]:
    """An array leaf as a NumPy array: a view, or a copy of bits or from another device."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, Bits):
        return unpacked(host(array.packed), 0, array.n)
    if hasattr(array, "detach"):
        return array.detach().cpu().numpy()
    return np.asarray(array)


def freeze(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only NumPy array: the array itself if it cannot be written to, else a copy."""
    if array.flags.owndata and not array.flags.writeable:
        return array
    array = array.copy()
    array.flags.writeable = False
    return array


def version(array: Any) -> int:
    """A number that changes with the contents of a leaf; -1 if changes cannot be detected and nothing may be cached."""
    if isinstance(array, np.ndarray):
        return 0
    if readable(array):
        known = _read(array)
        return -1 if known is None else known.number
    if not is_tensor(array) or (array.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing()):
        return -1
    try:
        return array._version
    except RuntimeError:
        # inference tensors do not count writes
        return -1


def snapshot(array: Any) -> Any:
    """The present contents of a leaf. For a CPU tensor a copy, the same one until the contents change."""
    known = None if isinstance(array, np.ndarray) or not readable(array) else _read(array)
    return array if known is None or known.copy is None else known.copy


def to_tensor(array: NDArray[Any]) -> Any:
    """A copy of a read-only NumPy array as a CPU tensor that is never written to."""
    tensor = sys.modules["torch"].from_numpy(array.copy())
    _snapshots[id(tensor)] = _Snapshot(weakref.ref(tensor, _forget(id(tensor))), None, 0)
    return tensor


def equal(a: Any, b: Any, bits: bool = False) -> bool:
    """Whether two arrays have equal shapes and contents; bits: compare zero or nonzero. A CUDA tensor equals itself."""
    if a is b:
        return True
    if not (readable(a) and readable(b)) or tuple(a.shape) != tuple(b.shape):
        return False
    if isinstance(a, Bits) and isinstance(b, Bits):
        return bool(np.array_equal(host(a.packed), host(b.packed)))
    a, b = host(a), host(b)
    return bool(np.array_equal(a != 0, b != 0) if bits else np.array_equal(a, b))


def _read(tensor: Any) -> _Snapshot | None:
    known = _snapshots.get(id(tensor))
    if known is not None and known.owner() is not tensor:
        known = None
    if known is not None and known.copy is None:
        return known
    try:
        now: Any = tensor.numpy()
    except (RuntimeError, TypeError):
        # a tensor that a transform wraps has no memory
        return None
    if known is None or now.shape != tuple(known.copy.shape) or not known.holds(now):
        raw = now.tobytes() if now.nbytes <= _FEW_BYTES else None
        copy = Bits.of(now) if now.dtype == np.bool_ and now.ndim > 1 else to_tensor(now)
        known = _Snapshot(weakref.ref(tensor, _forget(id(tensor))), copy, next(_numbers), raw)
        _snapshots[id(tensor)] = known
    return known


def _forget(key: int) -> Callable[[Any], None]:
    # at the end of the interpreter, names of the module may be None
    def forget(dead: Any, snapshots: dict[int, _Snapshot] = _snapshots) -> None:
        known = snapshots.get(key)
        if known is not None and known.owner is dead:
            del snapshots[key]

    return forget
