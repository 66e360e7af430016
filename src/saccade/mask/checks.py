"""Checks of a mask's arrays against a problem's sizes: shapes (which reads nothing) and contents."""

from __future__ import annotations

from typing import Any

from . import arguments
from .algebra import Mask, is_array
from .kinds import KINDS


def check_sizes(where: str, **sizes: Any) -> None:
    """Raises TypeError for a size that is not an integer, ValueError for a negative one."""
    for name, size in sizes.items():
        arguments.natural(size, where, name)


def check_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None = None) -> None:
    """Raises ValueError if an array or a per_head list of `mask` does not fit these sizes. Reads no array."""
    # a mask inside documents has no arrays
    if mask.kind != "packed":
        for child in mask.children:
            check_shapes(child, B, Tq, Tk, Hq)
    kind = KINDS.get(mask.kind)
    if kind is not None and kind.shapes is not None:
        kind.shapes(mask, B, Tq, Tk, Hq)


def check(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None = None) -> None:
    """Raises ValueError if an array of `mask` has the wrong shape or contents for these sizes. Reads arrays."""
    check_sizes("check", B=B, Tq=Tq, Tk=Tk, Hq=Hq or 0)
    check_shapes(mask, B, Tq, Tk, Hq)
    _check_contents(mask, Tq, Tk)


def _check_contents(mask: Mask, Tq: int, Tk: int) -> None:
    # the integers of a mask inside documents may lie beyond a short one
    if mask.kind != "packed":
        for child in mask.children:
            _check_contents(child, Tq, Tk)
    kind = KINDS.get(mask.kind)
    if kind is None:
        return
    for name, leaf in zip(kind.leaves, mask.args, strict=True):
        if is_array(leaf):
            arguments.signed(mask.kind, name, leaf)
    if kind.contents is not None:
        kind.contents(mask, Tq, Tk)
