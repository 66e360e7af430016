"""Checks of single arguments of constructors, and of a mask's arrays against the sizes of a problem.

`where` is the constructor and `name` the argument, for messages. torch's symbolic integers are accepted without a read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .algebra import Leaf, Mask, is_array
from .bits import Bits
from .contents import FAR, freeze, host, is_tensor

# B, Tq and Tk; None for a size that a mask does not determine
Sizes = tuple[int | None, int | None, int | None]


def integer(value: Any, where: str, name: str) -> Any:
    """value as an integer; raises TypeError for anything else."""
    if isinstance(value, np.integer):
        return int(value)
    if is_array(value):
        raise TypeError(f"{where}: {name} is an integer, got an array of shape {tuple(value.shape)}")
    if isinstance(value, bool) or not (isinstance(value, int) or type(value).__name__ == "SymInt"):
        raise TypeError(f"{where}: {name} is an integer, got {value!r}")
    return value


def positive(value: Any, where: str, name: str) -> Any:
    """value as an integer of at least 1 and below 2**30; raises ValueError for other integers."""
    value = integer(value, where, name)
    if isinstance(value, int) and not 1 <= value < 1 << 30:
        raise ValueError(f"{where}: {name} {value} given, expected an integer >= 1 and below 2**30")
    return value


def natural(value: Any, where: str, name: str, otherwise: str = "") -> Any:
    """value as an integer of at least 0, else ValueError; `otherwise`: what else the message says is allowed."""
    value = integer(value, where, name)
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{where}: {name} {value} given, expected an integer >= 0{otherwise}")
    return value


def offset(value: Any, where: str) -> Leaf:
    """None, an integer or an int array [B]; raises ValueError for numbers beyond ±`FAR` / 2. Tensors are not read."""
    if value is None:
        return None
    leaf = array(value, where, "offset", (0, 1)) if _is_list(value) else integer(value, where, "offset")
    if type(leaf) is int or isinstance(leaf, np.ndarray):
        near(where, leaf)
    return leaf


def near(where: str, leaf: Any) -> None:
    """Raises ValueError unless offsets are within ±`FAR` / 2, so that sums with other integers fit. Reads an array."""
    within(where, "offset", leaf, -FAR // 2, FAR // 2)


def count(value: Any, where: str, name: str) -> Leaf:
    """An integer of at least 0, or an int array [B]; raises ValueError for a host's array with a negative number."""
    if isinstance(value, np.integer):
        value = int(value)
    leaf = array(value, where, name, (0, 1)) if _is_list(value) else value
    if isinstance(leaf, np.ndarray) and leaf.size and leaf.min() < 0:
        raise ValueError(f"{where}: {name} has {leaf.min()}, expected integers >= 0")
    return leaf if is_array(leaf) else natural(leaf, where, name, " or an int array [B]")


def array(value: Any, where: str, name: str, ndims: tuple[int, ...], dtype: Any = None) -> Leaf:
    """An array of integers, or of booleans if dtype is np.bool_, whose number of dimensions is in `ndims`.

    A torch tensor is stored by reference and not read (a 0-d one as [1]). Anything else becomes a read-only copy.
    Raises TypeError for another dtype and ValueError for another shape.
    """
    if is_tensor(value):
        _check(value, where, name, ndims, dtype)
        return value.reshape(1) if value.ndim == 0 else value
    plain = _plain(value, where, name)
    # only an array that was given has other owners
    value = freeze(plain) if isinstance(value, np.ndarray) else plain
    _check(value, where, name, ndims, dtype)
    if value.ndim == 0:
        return int(value)
    if dtype is not None or not value.size:
        value = value.astype(dtype or np.int64)
    value.flags.writeable = False
    return value


def bits(value: Any, where: str, name: str, ndims: tuple[int, ...]) -> Leaf:
    """Like `array` for booleans; all but torch tensors are stored as bits."""
    if is_tensor(value):
        return array(value, where, name, ndims, np.bool_)
    value = _plain(value, where, name)
    _check(value, where, name, ndims, np.bool_)
    return Bits.of(value if value.size else value.astype(np.bool_))


def _check(value: Any, where: str, name: str, ndims: tuple[int, ...], dtype: Any) -> None:
    actual = value.dtype
    if is_tensor(value):
        wrong = actual.is_floating_point or actual.is_complex or (dtype is None and str(actual) == "torch.bool")
    else:
        wrong = bool(value.size) and actual.kind not in ("iu" if dtype is None else "biu")
    if wrong:
        kind = "an integer" if dtype is None else "a boolean"
        raise TypeError(f"{where}: {name} has dtype {actual}, expected {kind} array")
    if not is_tensor(value):
        signed(where, name, value)
    if value.ndim not in ndims:
        ranks = " or ".join(str(n) for n in ndims)
        raise ValueError(f"{where}: {name} has shape {tuple(value.shape)}, expected {ranks} dimensions")


def signed(where: str, name: str, leaf: Any) -> None:
    """Raises ValueError if a uint64 array has numbers that would be negative as int64. Reads such an array."""
    if str(leaf.dtype).endswith("uint64"):
        most = int(host(leaf).max(initial=0))
        if most >= 1 << 63:
            raise ValueError(f"{where}: {name} has {most}, expected numbers below 2**63, which int64 holds")


def ascending(value: Any, where: str, name: str) -> Leaf:
    """An int array [n] or [B, n] that never decreases; raises ValueError if it does. Tensors are not read."""
    if not is_tensor(value):
        value = _plain(value, where, name)
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "iu" and value.size:
        still_ascending(where, name, value)
        # sorted numbers fit int32 if their ends do; half the memory takes half the time
        if value.dtype != np.int32 and value[..., 0].min() >= -(1 << 31) and value[..., -1].max() < 1 << 31:
            value = value.astype(np.int32)
            value.flags.writeable = False
    return array(value, where, name, (1, 2))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or is_array(value)


def _plain(value: Any, where: str, name: str) -> NDArray[Any]:
    # as a NumPy array of no subclass: a matrix stays two-dimensional when it is indexed, and its pairs would be wrong
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{where}: {name} is a masked array; expected a plain one: x.filled(value) makes one")
    if isinstance(value, np.ndarray):
        return value if type(value) is np.ndarray else value.view(np.ndarray)
    try:
        return np.array(value)
    except TypeError as error:
        raise TypeError(
            f"{where}: {name} is {type(value).__name__}, whose numbers are unknown while it is traced; expected an "
            "array with numbers, because plans depend on them: make the mask outside the traced function"
        ) from error
    except ValueError as error:
        if "maximum number of dimension" in str(error):
            raise ValueError(f"{where}: {name} is a list of too many levels, expected an array") from None
        raise ValueError(f"{where}: {name} has rows of different lengths, expected an array") from None


def flags(value: Any, where: str, name: str, ndims: tuple[int, ...]) -> Leaf:
    """Like `array` for booleans; raises ValueError for a host array of integers other than 0 and 1."""
    if not is_tensor(value):
        value = _plain(value, where, name)
        zeros_and_ones(where, name, value)
    return array(value, where, name, ndims, np.bool_)


def zeros_and_ones(where: str, name: str, leaf: Any) -> None:
    """Raises ValueError if an array of integers has numbers other than 0 and 1. Reads the array."""
    values = host(leaf)
    if values.dtype.kind in "iu" and values.size and (values.min() < 0 or values.max() > 1):
        raise ValueError(
            f"{where}: {name} runs from {values.min()} to {values.max()}, expected booleans, or integers 0 and 1"
        )


def by_batch(mask: Mask, B: int, *_: Any) -> None:
    """Raises ValueError unless every array of the node is [B] or [1]."""
    for leaf in mask.args:
        if getattr(leaf, "shape", (B,)) != (B,):
            fits(mask.kind, "array", leaf, B)


def fits(where: str, name: str, leaf: Any, B: int, *sizes: int) -> None:
    """Raises ValueError unless the array has these sizes, or [B, *sizes]."""
    if tuple(leaf.shape) not in (sizes, (B, *sizes), (1, *sizes)):
        text = ", ".join(map(str, sizes))
        expected = f"[{text}] or [{B}, {text}]" if sizes else f"[B] = [{B}]"
        raise ValueError(f"{where}: {name} has shape {list(leaf.shape)}, expected {expected} for this problem")


def still_ascending(where: str, name: str, leaf: Any) -> None:
    """Raises ValueError if the array decreases. Reads the array."""
    values = host(leaf)
    below = values[..., 1:] < values[..., :-1]
    if not below.any():
        return
    at = np.argwhere(below)[0].tolist()
    at = at if len(at) > 1 else at[0]
    message = f"{where}: {name} decreases after index {at}; sort the documents so that it never does"
    # if the id of padding is the only one out of order, suggest to make it the highest
    rows = values.reshape(-1, values.shape[-1]).astype(np.int64)
    pad = int(rows[(rows[:, 1:] < rows[:, :-1]).any(1)][0, -1])
    cured = np.where(rows == pad, rows.max() + 1, rows)
    if name == "ids" and (cured[:, 1:] >= cured[:, :-1]).all():
        message += f". Where {pad} marks padding, give padding the highest id: "
        message += f"where(ids == {pad}, ids.max() + 1, ids)"
    raise ValueError(message)


def sizes_of(leaves: Iterable[Leaf], ndim: int, Tq: int | None = None, Tk: int | None = None) -> Sizes:
    """(B, Tq, Tk), with B from leaves of more than `ndim` dimensions; None for unknown sizes."""
    batches = (int(a.shape[0]) for a in leaves if is_array(a) and len(a.shape) > ndim and a.shape[0] != 1)
    return next(batches, None), Tq, Tk


def batch_of(mask: Mask) -> Sizes:
    """Like `sizes_of`, for nodes whose arrays are all [B] or [1]."""
    return sizes_of(mask.args, 0)


def within(where: str, name: str, leaf: Any, low: int, high: int) -> None:
    """Raises ValueError unless low <= leaf <= high. Reads an array."""
    if isinstance(leaf, int):
        # without NumPy, which torch.compile would trace as torch
        least = most = leaf
    else:
        values = np.asarray(host(leaf))
        if not values.size:
            return
        least, most = int(values.min()), int(values.max())
    if least < low or most > high:
        raise ValueError(f"{where}: {name} runs from {least} to {most}, expected {low} to {high}")
