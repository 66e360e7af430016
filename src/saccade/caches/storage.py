"""The arrays of caches. `Arrays` is one kind of them, of NumPy, torch or WebGPU, chosen once per cache."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import cast, is_torch, namespace, numpy_dtype
from ..backends import ORDER, load
from ..errors import Unsupported
from ..quantised import Quantised, decode, encode, quantised
from ..rope import Turn, rotated

Shape = tuple[int, ...]
# tokens [n, heads, size], the array to write them to, its scales, and the angles by which the tokens are rotated first
Target = tuple[Any, Any, Any, Turn | None]


class Storage:
    """k [*rows, kv_heads, head_dim] and v [*rows, kv_heads, v_dim] in dtype, or codes of numbers in dtype.

    Codes have scales, k_scale and v_scale [*rows, kv_heads, groups], as described in `saccade.quantised`. On a WebGPU
    device the scales share rows of uint32 with the codes (`saccade.backends.webgpu.codes`), and k_scale is None.
    gates: float64 [*rows, query heads], the running sums of the logarithms of forget gates; None without gates.
    aliased: whether v is a view of the first numbers of k, so that only k is written. rotary: what eviction rotates.
    """

    gates: Any = None
    aliased: bool = False
    rotary: slice = slice(None)

    def __init__(
        self,
        rows: Shape,
        kv_heads: int,
        sizes: tuple[int, int | None],
        arrays: Arrays,
        fill: float,
        codes: str | None,
        group: int | None,
    ) -> None:
        D, Dv = sizes[0], sizes[0] if sizes[1] is None else sizes[1]
        for name, size in (("kv_heads", kv_heads), ("head_dim", D), ("v_dim", Dv)):
            at_least(name, size, 1)
        if group is not None and codes is None:
            raise ValueError(f"group is {group} and quantised None; expected a kind of codes with a group")
        self.kv_heads, self.sizes = kv_heads, (D, Dv)
        self.quantised = None if codes is None else quantised(codes, group, D, Dv)
        self._arrays = arrays
        self.k, self.k_scale = self._arrays.filled((*rows, kv_heads, D), fill, self.quantised)
        self.v, self.v_scale = self._values((*rows, kv_heads, Dv), fill)

    def _values(self, shape: Shape, fill: float) -> tuple[Any, Any]:
        return self._arrays.filled(shape, fill, self.quantised)

    @property
    def arrays(self) -> list[Any]:
        """k and v, their scales if these are separate arrays, and the gates if there are any; without views."""
        values = (None, None) if self.aliased else (self.v, self.v_scale)
        return [x for x in (self.k, values[0], self.k_scale, values[1], self.gates) if x is not None]

    @property
    def kind(self) -> Arrays:
        """The kind of the arrays."""
        return self._arrays

    def numbers(self) -> tuple[Any, Any]:
        """k and v as numbers: the arrays themselves, or the float32 numbers of their codes, in memory."""
        if self.quantised is None:
            return self.k, self.v
        pairs = zip((self.k, self.v), (self.k_scale, self.v_scale), self.sizes, strict=True)
        k, v = (self._arrays.decode(*x, self.quantised) for x in pairs)
        return k, v

    def stored(self, k: Any, v: Any) -> list[Any]:
        """Tokens k and v in the form of `arrays`."""
        pairs = [self._arrays.encode(x, self.quantised) for x in (k, v)]
        return [x for parts in zip(*pairs, strict=True) for x in parts if x is not None]

    def shown(self, **more: Any) -> str:
        """The `repr` of a cache: its class, the arguments `more`, and those of all caches."""
        more |= {"kv_heads": self.kv_heads, "head_dim": self.sizes[0], "v_dim": self.sizes[1], **self._arrays.shown}
        if self.gates is not None:
            more |= {"gate_heads": int(self.gates.shape[-1])}
        if self.quantised is not None:
            more |= {"quantised": self.quantised.kind, "group": self.quantised.group}
        return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in more.items())})"

    def in_memory(self, what: str) -> None:
        """Raise Unsupported for a cache on a WebGPU device, where `what` is not implemented."""
        if not self._arrays.indexed:
            where = "of a cache on its device: apply rope before keys are appended, or use a cache in memory"
            raise Unsupported("webgpu", [f"{what} {where}"])

    def check_tokens(self, k: Any, v: Any, rows: str, lead: Shape) -> None:
        """Raise unless k and v are arrays [*lead, n, kv_heads, size] of the cache's kind, with the same n.

        rows: how error messages name all but the last two dimensions.
        """
        for name, x, size in (("k", k, self.sizes[0]), ("v", v, self.sizes[1])):
            self._arrays.check(name, x)
            shape = tuple(x.shape)
            if len(shape) != len(lead) + 3 or (*shape[: len(lead)], *shape[-2:]) != (*lead, self.kv_heads, size):
                raise ValueError(f"{name} has shape {list(shape)}; expected [{rows}, {self.kv_heads}, {size}]")
        n, m = int(k.shape[len(lead)]), int(v.shape[len(lead)])
        if n != m:
            raise ValueError(f"k has {n} tokens and v {m}; expected the same number")

    def check_rotation(self, rotation: Any) -> None:
        """Raise Unsupported if stored codes of keys are to be rotated, because each rotation would round them again."""
        if rotation is not None and self.quantised is not None:
            why = "each rotation would quantise stored keys again: leave rotation out, and positions count on"
            raise Unsupported(self.quantised.kind, [why])


class Arrays(Protocol):
    """One kind of array, with the dtype and the device of the tokens of one cache.

    The arrays of a cache are [a, b, heads, width]. Lengths and indices are NumPy arrays, or tensors on the device of
    the cache.
    """

    dtype: Any
    # the class of the arrays, and the arguments of a cache that choose them
    name: str = "ndarray"
    shown: dict[str, Any]
    # whether the arrays of a cache can be indexed by arrays
    indexed: bool = True
    # converts a NumPy array to an array of the framework on the host
    on_host: Callable[[Any], Any] = staticmethod(np.asarray)
    tile: Callable[[Any, Shape], Any] = staticmethod(np.tile)

    def full(self, shape: Shape, fill: float) -> Any:
        """An array in dtype, filled with `fill`."""
        return np.full(shape, fill, self.dtype)

    def sums(self, shape: Shape) -> Any:
        """An array of float64 zeros."""
        return np.zeros(shape)

    def holds(self, x: Any) -> bool:
        """Whether x is an array of this kind, of any dtype. A masked array is not: its masked numbers would be kept."""
        return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)

    def check_place(self, name: str, x: Any) -> None:
        """Raise unless x is on the device of the cache, without a derivative that storing it would lose."""

    def filled(self, shape: Shape, fill: float, how: Quantised | None) -> tuple[Any, Any]:
        """An array for numbers of this shape [..., n], filled with `fill`, and its scales or None."""
        if how is None:
            return self.full(shape, fill), None
        x, scale = (self.tile(part, (*shape[:-1], 1)) for part in encode(self.full(shape[-1:], fill), how))
        return x, scale

    def encode(self, x: Any, how: Quantised | None) -> tuple[Any, Any]:
        """(what is stored, scales) of numbers x [..., n]: x and None, or codes and scales."""
        return (x, None) if how is None else encode(x, how)

    def decode(self, x: Any, scale: Any, n: int, how: Quantised) -> Any:
        """The float32 numbers [..., n] of codes and scales, in memory."""
        return decode(x, scale, how)

    def check(self, name: str, x: Any) -> None:
        """Raise unless x is an array of this kind, dtype and device, without a gradient that storing it would lose."""
        ...

    def steps(self, n: int, dtype: str = "int64") -> Any:
        """The integers 0 to n - 1, on the device of the lengths."""
        return np.arange(n, dtype=dtype)

    def indices(self, x: NDArray[Any]) -> Any:
        """Integers from the host, moved to the device of the lengths."""
        return x

    def write_rows(self, cache: Storage, k: Any, v: Any, starts: Any, counts: Any, turn: Turn | None) -> None:
        """Write k and v [B, T, heads, size] to a cache, entry b to row b from slot starts[b] on.

        counts [B]: how many of the T tokens, from the first on, are written; None for all. turn: the rotation of k.
        """
        B, T = k.shape[:2]
        if counts is turn is cache.quantised is None and B:
            # if all lengths are known to be equal, one slice suffices
            if getattr(starts, "is_cpu", True) and (starts == starts[0]).all():
                first = int(starts[0])
                at: Any = slice(None), slice(first, first + T)
            else:
                at = self.steps(B)[:, None], starts[:, None] + self.steps(T)
            cache.k[at] = k
            if not cache.aliased:
                cache.v[at] = v
            return
        k, v = (x.reshape(B * T, *x.shape[2:]) for x in (k, v))
        self.write_slots(cache, k, v, *self.slots(starts, T, counts), turn)

    def slots(self, starts: Any, T: int, counts: Any) -> tuple[Any, Any]:
        """(rows, slots) of T tokens in B rows, [B * T] each, from starts[b] on; slots are -1 after counts[b] tokens."""
        steps = self.steps(T)
        slots = starts[:, None] + steps
        rows = self.steps(len(starts))[:, None] + 0 * slots
        if counts is not None:
            # computed without waiting for a device
            slots = (slots + 1) * (steps < counts[:, None]) - 1
        return rows.reshape(-1), slots.reshape(-1)

    def write_slots(self, cache: Storage, k: Any, v: Any, first: Any, second: Any, turn: Turn | None) -> None:
        """Write tokens k and v [n, heads, size] to slots (first[i], second[i]) of a cache, unless second[i] < 0.

        first, second: int64 [n]. turn: the rotation of k, for n tokens or for a batch of them.
        """
        if turn is not None:
            shape = len(k), turn.cos.shape[-1]
            turn = Turn(turn.cos.reshape(shape), turn.sin.reshape(shape), turn.interleaved)
        targets = (k, cache.k, cache.k_scale, turn), (v, cache.v, cache.v_scale, None)
        self.write(targets[:1] if cache.aliased else targets, first, second, cache.quantised)

    @staticmethod
    def write(targets: Iterable[Target], first: Any, second: Any, how: Quantised | None) -> None:
        """`write_slots` for arrays that are not in a cache. how: the kind of their codes."""
        append = append_of("cpu")
        for x, array, scale, turn in targets:
            # the kernel writes only contiguous numbers
            dense = array.strides[-1] == array.itemsize or array.shape[-1] == 1
            angles = turn or (None, None, False)
            if append is None or not dense or not append(x, array, scale, first, second, *angles, how):
                at = second >= 0
                for rows, new in rows_of((x, array, scale, turn), at, how):
                    rows[first[at], second[at]] = new

    @staticmethod
    def copy_block(array: Any, old: int, new: int, /) -> None:
        """Copy array[old] to array[new]."""
        array[new] = array[old]

    @staticmethod
    def take(parts: Sequence[Any], at: NDArray[np.int64]) -> Any:
        """Rows `at` of the concatenation of `parts`; a view if the rows are consecutive."""
        x = parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts)
        if len(at) and at[-1] - at[0] + 1 == len(at) and (np.diff(at) == 1).all():
            return x[int(at[0]) : int(at[-1]) + 1]
        return x[at]

    def mismatch(self, name: str, x: Any) -> TypeError:
        """The error for an array of another kind or dtype."""
        dtype = x.dtype if is_torch(x) else repr(str(getattr(x, "dtype", "float32")))
        return TypeError(
            f"{name} is {type(x).__name__} of {getattr(x, 'dtype', 'no dtype')}; expected {self.name} of {self.dtype}, "
            f"as the cache holds: convert {name}, or make the cache with dtype={dtype}"
        )


class NumpyArrays(Arrays):
    """NumPy arrays."""

    def __init__(self, dtype: str, device: Any) -> None:
        self.dtype = numpy_dtype(dtype)
        self.shown = {"dtype": str(self.dtype)}

    def check(self, name: str, x: Any) -> None:
        if not self.holds(x) or x.dtype != self.dtype:
            raise self.mismatch(name, x)


@cache
def append_of(place: str, verb: str = "append") -> Callable[..., bool] | None:
    """A device's `append` or `append_rows`. None if its backend lacks it or is not built; formulas then replace it."""
    try:
        return next((getattr(load(name), verb) for name, kinds in ORDER.items() if place in kinds), None)
    except Unsupported:
        return None


def rows_of(target: Target, at: Any, how: Quantised | None) -> list[tuple[Any, Any]]:
    """Pairs (array, new rows) that write a target's tokens `at`: the array, and its scales if there are any."""
    x, array, scale, turn = target
    x = x[at]
    if turn is not None:
        cos, sin = turn.cos[at][:, None], turn.sin[at][:, None]
        x = cast(rotated(cast(x, cos.dtype), cos, sin, turn.interleaved), x.dtype)
    return [(array, x)] if how is None else list(zip((array, scale), encode(x, how), strict=True))


def at_least(name: str, size: Any, least: int) -> None:
    """Raise TypeError for a size that is not an integer, ValueError for one below the least."""
    if whole(name, size) < least:
        raise ValueError(f"{name} is {size}; expected at least {least}")


def whole(name: str, number: Any) -> int:
    """The number as an int; raises TypeError for a fraction or a boolean."""
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise TypeError(f"{name} is {number!r}; expected an integer")
