"""Checks of a mask's arrays against a problem's sizes: shapes (read nothing) and contents."""

from __future__ import annotations

from typing import Any

import numpy as np

from .algebra import Mask
from .contents import host


def check_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None = None) -> None:
    """Raises ValueError if an array or a per_head list of `mask` does not fit these sizes. Reads no array."""
    for child in mask.children:
        if mask.kind != "packed":
            check_shapes(child, B, Tq, Tk, Hq)
    kind, args = mask.kind, mask.args
    if kind in ("causal", "window", "keys", "prefix"):
        for leaf in args:
            if hasattr(leaf, "shape") and tuple(leaf.shape) not in ((B,), (1,), ()):
                _refuse(kind, "array", leaf, f"[B] = [{B}]")
    elif kind == "documents":
        q_size = Tk if args[1] is None else Tq
        _last(kind, "ids" if args[1] is None else "ids_q", args[0], B, q_size)
        if args[1] is not None:
            _last(kind, "ids_k", args[1], B, Tk)
    elif kind == "packed":
        for leaf in args:
            if leaf is not None:
                _last(kind, "cu_seqlens", leaf, B, int(leaf.shape[-1]))
        if args[1] is not None and args[0].shape[-1] != args[1].shape[-1]:
            _refuse("documents", "cu_k", args[1], f"as many bounds as cu_q, {int(args[0].shape[-1])}")
    elif kind == "global_tokens":
        if hasattr(args[0], "shape"):
            _last(kind, "indices", args[0], B, int(args[0].shape[-1]) if len(args[0].shape) else 1)
    elif kind == "columns":
        for name, leaf in zip(("start", "stop"), args, strict=True):
            if leaf is not None:
                _last(kind, name, leaf, B, Tk)
    elif kind == "tiles":
        _plane(kind, "layout", args[0], B, -(-Tq // args[1]), -(-Tk // args[2]))
    elif kind == "dense":
        _plane(kind, "allowed", args[0], B, Tq, Tk)
    elif kind == "per_head" and Hq is not None and len(mask.children) != Hq:
        raise ValueError(f"per_head has {len(mask.children)} masks, expected one for each of the {Hq} query heads")


def check(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None = None) -> None:
    """Raises ValueError if an array of `mask` has the wrong shape or contents for these sizes. Reads arrays."""
    check_shapes(mask, B, Tq, Tk, Hq)
    _contents(mask, Tq, Tk)


def check_columns(start: Any, stop: Any) -> None:
    """Raises ValueError where a key's rows end before they start, or the arrays are of different lengths."""
    start, stop = host(start), host(stop)
    try:
        start, stop = np.broadcast_arrays(start, stop)
    except ValueError:
        shapes = f"start has shape {list(start.shape)} and stop {list(stop.shape)}"
        raise ValueError(f"columns: {shapes}, expected as many keys in both, and one batch") from None
    wrong = np.argwhere(start > stop)
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(
            f"columns: key {at[-1]} is given rows from {start[at]} to {stop[at]}, expected start <= stop; "
            "give them equal where no row sees the key"
        )


def _contents(mask: Mask, Tq: int, Tk: int) -> None:
    for child in mask.children:
        if mask.kind != "packed":
            _contents(child, Tq, Tk)
    kind, args = mask.kind, mask.args
    if kind == "keys":
        for name, leaf in zip(("start", "stop"), args, strict=True):
            if leaf is not None:
                _within(kind, name, leaf, 0, Tk)
    elif kind in ("prefix", "global_tokens") and isinstance(args[0], int):
        # a bound that is part of the pattern may lie beyond a short sequence
        pass
    elif kind == "prefix":
        _within(kind, "n", args[0], 0, Tk)
    elif kind == "documents":
        for leaf in args:
            if leaf is not None:
                _sorted(kind, "ids", leaf)
    elif kind == "packed":
        sizes = (Tk if args[1] is None else Tq, Tk)
        for leaf, size in zip(args, sizes, strict=True):
            if leaf is not None:
                _sorted("documents", "cu_seqlens", leaf)
                _within("documents", "cu_seqlens", leaf, 0, size)
    elif kind == "columns":
        if args[0] is not None and args[1] is not None:
            check_columns(*args)
    elif kind == "global_tokens":
        _within(kind, "positions", args[0], 0, Tk - 1 if len(args[0].shape) else Tk)


def _sorted(kind: str, name: str, leaf: Any) -> None:
    array = host(leaf)
    below = array[..., 1:] < array[..., :-1]
    if below.any():
        where = tuple(int(x) for x in np.argwhere(below)[0])
        raise ValueError(
            f"{kind}: {name} decreases after index {list(where)}; sort the documents so that it never does"
        )


def _within(kind: str, name: str, leaf: Any, low: int, high: int) -> None:
    array = np.asarray(leaf if isinstance(leaf, int) else host(leaf))
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        raise ValueError(f"{kind}: {name} runs from {array.min()} to {array.max()}, expected {low} to {high}")


def _last(kind: str, name: str, leaf: Any, B: int, size: int) -> None:
    if tuple(leaf.shape) not in ((size,), (B, size), (1, size)):
        _refuse(kind, name, leaf, f"[{size}] or [{B}, {size}]")


def _plane(kind: str, name: str, leaf: Any, B: int, rows: int, columns: int) -> None:
    if tuple(leaf.shape) not in ((rows, columns), (B, rows, columns), (1, rows, columns)):
        _refuse(kind, name, leaf, f"[{rows}, {columns}] or [{B}, {rows}, {columns}]")


def _refuse(kind: str, name: str, leaf: Any, expected: str) -> None:
    raise ValueError(f"{kind}: {name} has shape {list(leaf.shape)}, expected {expected} for this problem")
