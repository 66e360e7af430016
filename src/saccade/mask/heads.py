"""A mask for each query head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .algebra import Mask, contains
from .context import Context
from .positions import full
from .scene import Bools, Scene
from .terms import Terms

__all__ = ["per_head"]


def per_head(masks: Sequence[Mask | None]) -> Mask:
    """One mask per query head.

    Args:
        masks: Hq masks; None for a head that sees all keys.

    Returns:
        A mask; it may be combined with `&`, `|` and `~`, but not used inside `per_head` or `documents(each=...)`.

    Raises:
        TypeError: an entry is not a mask.
        ValueError: the list is empty, or contains `per_head`.

    Examples:
        >>> heads = mask.per_head([mask.causal() & mask.window(255, 0)] * 6 + [mask.causal()] * 2)  # 8 heads
    """
    if isinstance(masks, Mask) or not isinstance(masks, Iterable):
        raise TypeError(f"per_head takes a list of masks, one per query head; got a {type(masks).__name__}")
    children = tuple(full() if m is None else m for m in masks)
    for child in children:
        if not isinstance(child, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"per_head takes a list of masks, one per query head; got a {type(child).__name__} in it")
        if contains(child, "select"):
            raise ValueError("select(...) inside per_head is not defined; its lists already differ by key head")
        if contains(child, "per_head"):
            raise ValueError("per_head inside per_head is not defined; give one flat list with a mask per query head")
    if not children:
        raise ValueError("per_head takes one mask per query head; got an empty list")
    return Mask("per_head", (), children)


def per_head_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    if Hq is not None and len(mask.children) != Hq:
        raise ValueError(f"per_head has {len(mask.children)} masks, expected one for each of the {Hq} query heads")


def per_head_text(mask: Mask, write: Callable[[Any], str]) -> list[str]:
    return [f"[{', '.join(write(child) for child in mask.children)}]"]


def per_head_pairs(mask: Mask, scene: Scene) -> Bools:
    shape = (scene.B, 1, scene.Tq, scene.Tk)
    return np.concatenate([np.broadcast_to(scene.predicate(c, scene), shape) for c in mask.children], axis=1)


def per_head_terms(mask: Mask, context: Context) -> Terms:
    raise TypeError("per_head has no terms of its own; each head's mask is lowered alone, see `of_head`")


def head_count(mask: Mask) -> int:
    """The number of masks in `per_head` or of key heads in `select`, 1 if all heads have the same mask."""
    if mask.kind == "per_head":
        return len(mask.children)
    if mask.kind == "select":
        return int(mask.args[0].shape[1])
    return max((head_count(c) for c in mask.children), default=1)


def of_head(mask: Mask, h: int) -> Mask:
    """The mask of query head h, without per_head."""
    if mask.kind == "per_head":
        # keys(stop) of one head must not become a member of the chain around per_head
        child = mask.children[h]
        return Mask("or", (), (child,)) if child.kind == "keys" else child
    if not contains(mask, "per_head"):
        return mask
    return Mask(mask.kind, mask.args, tuple(of_head(c, h) for c in mask.children))
