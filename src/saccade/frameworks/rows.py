"""New tokens into the arrays of a cache, by a backend's kernel where that has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..arrays import cast, is_torch
from ..backends import ORDER, load
from ..errors import Unsupported
from ..quantised import Quantised, encode
from ..rope import Turn, rotated


def write(
    x: Any, held: Any, scale: Any, first: Any, second: Any, turn: Turn | None, how: Quantised | None
) -> None:  # fmt: skip
    """Rows x [n, heads, D] to held[first[i], second[i]], none where second[i] is negative.

    turn: cosine and sine [n, D / 2] of the angles by which pairs are turned first. how: the codes that held keeps, and
    scale what they are multiplied with; both int64 arrays, and all others, are of one framework and place.
    """
    place = x.device.type if is_torch(x) else "cpu"
    append = _kernel(place)
    if append is not None:
        given = [x, held, scale, first, second, *((None, None) if turn is None else turn[:2])]
        if is_torch(x) and place == "cpu":
            from .torch_run import lent

            given = [a if a is None else lent(a) for a in given]
        if append(*given, turn is not None and turn.interleaved, how):
            return
    keep = second >= 0
    x, first, second = x[keep], first[keep], second[keep]
    if turn is not None:
        cos, sin = turn.cos[keep][:, None], turn.sin[keep][:, None]
        x = cast(rotated(cast(x, cos.dtype), cos, sin, turn.interleaved), x.dtype)
    if how is None:
        held[first, second] = x
    else:
        held[first, second], scale[first, second] = encode(x, how)


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
