"""Masks defined by integers and positions: causal masks, windows, strides and chunks.

i is the position of a query and j that of a key. The last query is aligned with the last key: i = t + Tk - Tq for row t
of the queries, or t + stop[b] - Tq with `keys(stop)` or `keys(start, stop)` in the enclosing `&` chain (the smallest
stop of several). With `offset` i = t + offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import arguments
from .algebra import Mask
from .contents import FAR
from .context import Context, label
from .forms import D_HI, D_LO, PHASE, STRIDE
from .rows import chunks
from .scene import Bools, Scene
from .terms import Terms, term

__all__ = ["causal", "chunked", "dilated", "full", "strided", "window"]


def full() -> Mask:
    """All keys; the same as no mask.

    Examples:
        >>> mask.full() & mask.causal()
        full() & causal()
    """
    return Mask("full")


def full_pairs(mask: Mask, scene: Scene) -> Bools:
    return np.ones((1, 1, scene.Tq, scene.Tk), np.bool_)


def full_terms(mask: Mask, context: Context) -> Terms:
    return [term()]


def causal(offset: int | None = None) -> Mask:
    """Keys j <= i: no query sees a later key.

    Args:
        offset: an int or [B]; row t of the queries is at position i = t + offset. None: the last query is
            aligned with the last key.

    Raises:
        ValueError: offset is beyond ±2**61.

    Examples:
        >>> print(mask.causal().draw(2, 4))  # the last query is aligned with the last key
        ███·
        ████
    """
    return Mask("causal", (arguments.offset(offset, "causal"),))


def causal_pairs(mask: Mask, scene: Scene) -> Bools:
    return scene.j <= scene.i(mask.args[0])


def offset_contents(mask: Mask, *_: int) -> None:
    offset = mask.args[-1]
    if offset is not None:
        arguments.near(mask.kind, offset)


def causal_terms(mask: Mask, context: Context) -> Terms:
    return [term(d_lo=-context.offset(mask.args[0]))]


def window(left: int | None = None, right: int | None = None, offset: int | None = None) -> Mask:
    """Keys i - left <= j <= i + right, both inclusive, as in flash-attn.

    Args:
        left: how many keys before its own position a query sees, an integer >= 0; None for all.
        right: how many keys after its own position it sees, an integer >= 0; None for all.
        offset: as in `causal`.

    Raises:
        ValueError: left or right is negative, or offset is beyond ±2**61.

    Examples:
        >>> print(mask.window(1, 0).draw(4, 4))  # causal, the last 2 keys
        █···
        ██··
        ·██·
        ··██
    """
    otherwise = ", or None for unbounded"
    left = None if left is None else arguments.natural(left, "window", "left", otherwise)
    right = None if right is None else arguments.natural(right, "window", "right", otherwise)
    return Mask("window", (left, right, arguments.offset(offset, "window")))


def window_pairs(mask: Mask, scene: Scene) -> Bools:
    left, right, offset = mask.args
    i, j = scene.i(offset), scene.j
    allowed = np.ones_like(j <= i)
    if left is not None:
        allowed &= j >= i - min(left, FAR)
    if right is not None:
        allowed &= j <= i + min(right, FAR)
    return allowed


def window_terms(mask: Mask, context: Context) -> Terms:
    left, right, offset = mask.args
    band = term()
    if left is None and right is None:
        return [band]
    offset = context.offset(offset)
    if left is not None:
        band[D_HI] = min(left, FAR) - offset
    if right is not None:
        band[D_LO] = -min(right, FAR) - offset
    return [band]


def strided(s: int, phase: int = 0) -> Mask:
    """Keys with (i - j) mod s = phase.

    Raises:
        ValueError: unless s >= 1 and 0 <= phase < s.

    Examples:
        >>> print(mask.strided(3).draw(6, 6))
        █··█··
        ·█··█·
        ··█··█
        █··█··
        ·█··█·
        ··█··█
    """
    s, phase = arguments.positive(s, "strided", "s"), arguments.integer(phase, "strided", "phase")
    if isinstance(phase, int) and isinstance(s, int) and not 0 <= phase < s:
        raise ValueError(f"strided: phase {phase} given, expected 0 <= phase < s = {s}; use phase % s")
    return Mask("strided", (s, phase))


def strided_text(mask: Mask, write: Callable[[Any], str]) -> list[str]:
    s, phase = mask.args
    return [write(s)] if phase == 0 else [write(s), write(phase)]


def strided_pairs(mask: Mask, scene: Scene) -> Bools:
    s, phase = mask.args
    return (scene.i() - scene.j) % s == phase


def strided_terms(mask: Mask, context: Context) -> Terms:
    s, phase = mask.args
    return [term()] if s == 1 else [term(stride=s, phase=(phase - context.offset()) % s)]


def dilated(radius: int, step: int) -> Mask:
    """A dilated window: keys j = i + n · step with -radius <= n <= radius, at most 2 · radius + 1 keys.

    Examples:
        >>> print(mask.dilated(1, 2).draw(6, 6))
        █·█···
        ·█·█··
        █·█·█·
        ·█·█·█
        ··█·█·
        ···█·█
    """
    radius = arguments.natural(radius, "dilated", "radius")
    return Mask("dilated", (radius, arguments.positive(step, "dilated", "step")))


def dilated_pairs(mask: Mask, scene: Scene) -> Bools:
    radius, step = mask.args
    distance = scene.i() - scene.j
    return (np.abs(distance) <= min(radius * step, FAR)) & (distance % step == 0)


def dilated_terms(mask: Mask, context: Context) -> Terms:
    radius, step = mask.args
    offset = context.offset()
    reach = min(radius * step, FAR)
    band = term(d_lo=-reach - offset, d_hi=reach - offset)
    if step > 1:
        band[STRIDE], band[PHASE] = step, -offset % step
    return [band]


def chunked(size: int) -> Mask:
    """Keys in the query's own chunk of `size` positions: i div size = j div size.

    Examples:
        >>> print(mask.chunked(2).draw(4, 4))
        ██··
        ██··
        ··██
        ··██
    """
    return Mask("chunked", (arguments.positive(size, "chunked", "size"),))


def chunked_pairs(mask: Mask, scene: Scene) -> Bools:
    return scene.i() // mask.args[0] == scene.j // mask.args[0]


def chunked_terms(mask: Mask, context: Context) -> Terms:
    size, offset, inside, whole = mask.args[0], context.offset(), context.inside, context.size
    if inside is not None:
        return [context.part(("chunked", size, inside, label(offset)), lambda: inside.chunks(size, offset))]
    return [context.part(("chunked", size, label(offset)), lambda: chunks(size, offset, whole.Tq, whole.Tk))]
