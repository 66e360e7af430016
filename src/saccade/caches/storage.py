"""Arrays of keys and values, as they are or as codes and scales: what both caches hold."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import quantised as codes
from ..arrays import is_torch, numpy_dtype
from ..errors import Unsupported
from ..rope import Turn

Shape = tuple[int, ...]


class Storage:
    """k [*rows, kv_heads, head_dim] and v [*rows, kv_heads, v_dim], in dtype or quantised.

    Quantised, k and v hold codes, and k_scale and v_scale [*rows, kv_heads, groups] what they are multiplied with, as
    `saccade.quantised` says; tokens are given in dtype all the same. The arrays are NumPy's, unless dtype is a torch
    dtype or device is one of torch's; for device "webgpu", or the place of a device open there, device arrays, whose
    codes are uint32 rows with the scales in them (`saccade.backends.webgpu.codes`).
    """

    def __init__(
        self, rows: Shape, kv_heads: int, sizes: tuple[int, int | None], dtype: Any, device: Any, fill: float,
        quantised: str | None, group: int | None,
    ) -> None:  # fmt: skip
        self.k: Any
        self.v: Any
        self.k_scale: Any = None
        self.v_scale: Any = None
        D, Dv = sizes[0], sizes[0] if sizes[1] is None else sizes[1]
        for name, size in {"kv_heads": kv_heads, "head_dim": D, "v_dim": Dv}.items():
            at_least(name, size, 1)
        if group is not None and quantised is None:
            raise ValueError(f"group is {group} and quantised None; expected a kind of codes beside a group")
        self.kv_heads, self.sizes = kv_heads, (D, Dv)
        self.quantised = None if quantised is None else codes.quantised(quantised, group, D, Dv)
        shapes = [(*rows, kv_heads, n) for n in (D, Dv)]
        if _webgpu(device):
            self.k, self.v, self._like = _on_webgpu(str(device), shapes, numpy_dtype(dtype), fill, self.quantised)
            return
        self._like = _filled((0, 1), dtype, device, fill)
        if self.quantised is None:
            self.k, self.v = (_filled(shape, dtype, device, fill) for shape in shapes)
        else:
            made = [_coded(shape, dtype, device, fill, self.quantised) for shape in shapes]
            (self.k, self.k_scale), (self.v, self.v_scale) = made

    @property
    def arrays(self) -> list[Any]:
        """k and v, and what their codes are multiplied with."""
        return [self.k, self.v] if self.k_scale is None else [self.k, self.v, self.k_scale, self.v_scale]

    def numbers(self) -> tuple[Any, Any]:
        """k and v as numbers: the arrays themselves, or float32 what their codes stand for, of a device's in memory."""
        if self.quantised is None:
            return self.k, self.v
        pairs = [(self.k, self.k_scale), (self.v, self.v_scale)]
        if _kind(self.k) == "webgpu":
            from ..backends.webgpu.codes import parted

            pairs = [parted(x.numpy(), self.quantised, n) for x, n in zip((self.k, self.v), self.sizes, strict=True)]
        return tuple(codes.decode(*x, self.quantised) for x in pairs)

    def stored(self, k: Any, v: Any) -> list[Any]:
        """Given keys and values as `arrays` hold them."""
        k, v = (x.detach() if is_torch(x) else x for x in (k, v))
        if self.quantised is None:
            return [k, v]
        if _kind(k) == "webgpu":
            from ..backends.webgpu.codes import encoded

            return [encoded(x, self.quantised) for x in (k, v)]
        return [x for pair in zip(*(codes.encode(x, self.quantised) for x in (k, v)), strict=True) for x in pair]

    def write(self, k: Any, v: Any, first: Any, second: Any, turn: Turn | None) -> None:
        """Tokens k and v [n, kv_heads, size] to rows (first[i], second[i]), int64, none where second is negative.

        turn: of k, whose tokens may be of a batch.
        """
        from ..frameworks.rows import write

        if _kind(self.k) == "webgpu":
            from ..backends.webgpu.arrays import write_slots

            for held, given in zip(self.arrays, self.stored(k, v), strict=True):
                write_slots(held, given, first * held.shape[1] + second)
            return
        if turn is not None:
            turn = Turn(turn.cos.reshape(len(k), -1), turn.sin.reshape(len(k), -1), turn.interleaved)
        k, v = (x.detach() if is_torch(x) else x for x in (k, v))
        write(k, self.k, self.k_scale, first, second, turn, self.quantised)
        write(v, self.v, self.v_scale, first, second, None, self.quantised)

    def copy_block(self, old: int, new: int) -> None:
        """Block `old` of the rows to block `new`."""
        for held in self.arrays:
            if _kind(held) == "webgpu":
                from ..backends.webgpu.arrays import copy_block

                copy_block(held, old, new)
            else:
                held[new] = held[old]

    def shown(self, **more: Any) -> str:
        """The `repr` of a cache: its class, these arguments, and those that all caches have."""
        kind = str(self.k.device) if is_torch(self.k) else "webgpu" if _kind(self.k) == "webgpu" else None
        dtype = self._like.dtype if is_torch(self.k) else str(self._like.dtype)
        given = {"kv_heads": self.kv_heads, "head_dim": self.sizes[0], "v_dim": self.sizes[1], "dtype": dtype}
        if kind is not None:
            given["device"] = kind
        if self.quantised is not None:
            given["quantised"], given["group"] = self.quantised.kind, self.quantised.group
        return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in {**more, **given}.items())})"

    def in_memory(self, what: str) -> None:
        """Unsupported for arrays on a WebGPU device, in which `what` is not done."""
        if _kind(self.k) == "webgpu":
            raise Unsupported("webgpu", [f"{what} of a cache there: turn keys by rope first, or keep them in memory"])

    def check_tokens(self, k: Any, v: Any, rows: str, lead: Shape) -> None:
        """Raise unless k and v are [*lead, n, kv_heads, size] of one n, of the framework and dtype that are given.

        rows: how a message calls all but the last two dimensions.
        """
        for name, given, n in (("k", k, self.sizes[0]), ("v", v, self.sizes[1])):
            self._check_kind(name, given)
            shape = tuple(given.shape)
            if len(shape) != len(lead) + 3 or (*shape[: len(lead)], *shape[-2:]) != (*lead, self.kv_heads, n):
                raise ValueError(f"{name} has shape {list(shape)}; expected [{rows}, {self.kv_heads}, {n}]")
        n, m = int(k.shape[len(lead)]), int(v.shape[len(lead)])
        if n != m:
            raise ValueError(f"k has {n} tokens and v {m}; expected the same number")

    def _check_kind(self, name: str, given: Any) -> None:
        # framework, dtype, place and layout, which writing would find out too late
        like = self._like
        kind = _kind(like)
        if (type(given) is not type(like) and _kind(given) != kind) or getattr(given, "dtype", None) != like.dtype:
            kinds = [f"{type(x).__name__} of {getattr(x, 'dtype', 'no dtype')}" for x in (given, like)]
            dtype = given.dtype if is_torch(given) else repr(str(getattr(given, "dtype", "float32")))
            raise TypeError(
                f"{name} is {kinds[0]}; expected {kinds[1]}, as the cache holds: convert {name}, or make the cache "
                f"with dtype={dtype}"
            )
        if kind == "webgpu" and given.gpu is not like.gpu:
            raise ValueError(f"{name} lives on {given.gpu.place}; expected {like.gpu.place}, where the cache lives")
        if kind != "torch":
            return
        if given.device != like.device or given.layout != like.layout:
            places = [f"{x.layout} on {x.device}" for x in (given, like)]
            raise ValueError(f"{name} is {places[0]}; expected {places[1]}, as the cache lies")
        if given.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise Unsupported(
                "torch",
                [f"{name} requires grad, and no gradient runs through a cache: append {name}.detach(), or call under "
                 "torch.no_grad()"],
            )  # fmt: skip

    def check_turning(self, rotation: Any) -> None:
        """Refuse to turn keys that are here already where that would code them anew."""
        if rotation is not None and self.quantised is not None:
            kind = self.quantised.kind
            raise Unsupported(
                kind, ["keys in codes would be coded anew at every turn: leave rotation out, and positions count on"]
            )


def _coded(shape: Shape, dtype: Any, device: Any, fill: float, how: codes.Quantised) -> list[Any]:
    # [codes, scales] of the fill everywhere
    one = codes.encode(_filled((1,) * (len(shape) - 1) + shape[-1:], dtype, device, fill), how)
    return [_repeated(x, (*shape[:-1], x.shape[-1])) for x in one]


def _repeated(x: Any, shape: Shape) -> Any:
    return x.expand(shape).contiguous() if is_torch(x) else np.broadcast_to(x, shape).copy()


def _filled(shape: Shape, dtype: Any, device: Any, fill: float) -> Any:
    # NumPy's, unless dtype is a torch dtype or device one of torch's
    if is_torch(dtype) or is_torch(device) or (device is not None and str(device) != "cpu"):
        import torch

        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return torch.full(shape, fill, dtype=dtype, device=device)
    return np.full(shape, fill, numpy_dtype(dtype))


def _kind(x: Any) -> str:
    return "torch" if is_torch(x) else "webgpu" if hasattr(x, "gpu") else "numpy"


def _webgpu(device: Any) -> bool:
    return str(device).partition(":")[0] == "webgpu"


def _on_webgpu(
    place: str, shapes: list[Shape], dtype: Any, fill: float, how: codes.Quantised | None
) -> list[Any]:  # fmt: skip
    # k, v, and an empty array like the tokens that they take
    from ..backends import load

    load("webgpu")
    from ..backends.webgpu.arrays import array, empty
    from ..backends.webgpu.codes import joined
    from ..backends.webgpu.device import at

    gpu = at(place)
    rows = [np.full((1,) * (len(shape) - 1) + shape[-1:], fill, dtype) for shape in shapes]
    if how is not None:
        rows = [joined(*codes.encode(x, how), how) for x in rows]
    found: list[Any] = []
    for row, shape in zip(rows, shapes, strict=True):
        whole = (*shape[:-1], row.shape[-1])
        if shape[-2] * row[0].nbytes % 4:
            raise ValueError(f"a token's {list(whole[-2:])} of {row.dtype} are no whole words; expected an even number")
        # zeros are made there
        found.append(array(np.broadcast_to(row, whole), gpu) if row.any() else empty(whole, row.dtype, gpu))
    return [*found, empty((0, 1), dtype, gpu)]


def at_least(name: str, size: Any, least: int) -> None:
    """TypeError for a size that is no integer, ValueError for one below the least."""
    if whole(name, size) < least:
        raise ValueError(f"{name} is {size}; expected at least {least}")


def whole(name: str, number: Any) -> int:
    """The number as an int; TypeError for a fraction or a boolean."""
    try:
        if not isinstance(number, bool):
            return operator.index(number)
    except TypeError:
        pass
    raise TypeError(f"{name} is {number!r}; expected an integer")


def bounds_of(what: str, name: str, cu: Any, rows: int, tokens: int) -> NDArray[np.int64]:
    """cu, or equal shares, as int64 [rows + 1] from 0 to `tokens` and never down; ValueError if it is not."""
    if cu is None:
        if tokens % max(rows, 1) or (tokens and not rows):
            raise ValueError(f"{what} has {tokens} tokens for {rows} sequences: say by {name} whose they are")
        return np.arange(rows + 1) * (tokens // max(rows, 1))
    bounds = np.asarray(cu.cpu() if is_torch(cu) else cu)
    if bounds.dtype.kind not in "iu" or bounds.shape != (rows + 1,):
        raise ValueError(f"{name} is {bounds.dtype} {list(bounds.shape)}; expected integers [{rows + 1}]")
    bounds = bounds.astype(np.int64)
    if bounds[0] or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise ValueError(f"{name} is {bounds.tolist()}; expected numbers from 0 to {tokens}, the tokens, never down")
    return bounds
