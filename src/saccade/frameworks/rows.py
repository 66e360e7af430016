"""New tokens into the arrays of a cache, by a backend's kernel where that has one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from ..arrays import cast, is_torch, namespace
from ..backends import ORDER, load
from ..errors import Unsupported
from ..quantised import Quantised, encode
from ..rope import Turn, rotated


def write(
    x: Any, held: Any, scale: Any, first: Any, second: Any, turn: Turn | None, how: Quantised | None
) -> None:  # fmt: skip
    """Rows x [n, heads, D] to held[first[i], second[i]], none where second[i] is negative; nothing waits for a device.

    turn: cosine and sine [n, D / 2] of the angles by which pairs are turned first. how: the codes that held keeps, and
    scale what they are multiplied with; both int64 arrays, and all others, are of one framework and place.
    """
    place = x.device.type if is_torch(x) else "cpu"
    traced = is_torch(x) and sys.modules["torch"].compiler.is_compiling()
    append = None if traced or not _in_rows(held) else _kernel(place)
    if append is not None:
        given = [x, held, scale, first, second, *((None, None) if turn is None else turn[:2])]
        if is_torch(x) and place == "cpu":
            from .torch_run import lent

            given = [a if a is None else lent(a) for a in given]
        if append(*given, turn is not None and turn.interleaved, how):
            return
    if not len(x):
        return
    keep = second >= 0
    far = traced or place != "cpu"
    at, some = (_repeated(keep), keep.any()) if far else (keep, True)
    # where no row is kept, all write to slot (0, 0) what it holds
    x, first, second = x[at], first[at] * some, second[at] * some
    if turn is not None:
        cos, sin = turn.cos[at][:, None], turn.sin[at][:, None]
        x = cast(rotated(cast(x, cos.dtype), cos, sin, turn.interleaved), x.dtype)
    new = ((held, x),) if how is None else zip((held, scale), encode(x, how), strict=True)
    for rows, given in new:
        rows[first, second] = namespace(x).where(some, given, rows[first, second]) if far else given


def _in_rows(held: Any) -> bool:
    # whether a row's numbers lie side by side, as kernels write them
    step = held.stride(-1) if is_torch(held) else held.strides[-1] // held.itemsize
    return step == 1 or held.shape[-1] == 1


def _repeated(keep: Any) -> Any:
    # of each row itself where it is kept, else the first that is: its place takes the same numbers once more, and how
    # many rows are written does not depend on contents that would have to be waited for
    torch = sys.modules["torch"]
    return torch.where(keep, torch.arange(len(keep), device=keep.device), keep.int().argmax())


@cache
def _kernel(place: str) -> Callable[..., bool] | None:
    # None where the backend of a place has none, or is not built here: what stands above then gives the same
    for name, kinds in ORDER.items():
        if place in kinds:
            try:
                return getattr(load(name), "append", None)
            except Unsupported:
                return None
    return None
