"""Cut a mask into disjoint parts by stride; the residue classes of a stride are strided views of the arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .forms import MAX_BANDS, PHASE, STRIDE, Lowered, LoweredHeads
from .lowering import finish, terms_of
from .size import Size, TooManyBands
from .terms import Terms, both, negated, tidy

MOST_PARTS = 4


class Cut(NamedTuple):
    """One part: rows and keys with (t - j) mod step = phase, and each distinct mask restricted to them."""

    step: int
    phase: int
    masks: tuple[Lowered, ...]


def cut(heads: LoweredHeads, Tq: int, Tk: int) -> list[Cut]:
    """At most 4 disjoint parts that cover the masks, the unstrided one first.

    Within the classes of a stride the test of that stride is constant, so its bands omit it. Any other stride remains
    a test of elements, which is correct but slower.
    """
    whole = [Cut(1, 0, heads.masks)]
    if all(int(m.bands[..., STRIDE].max(initial=1)) <= 1 for m in heads.masks):
        return whole
    terms = [terms_of(m) for m in heads.masks]
    classes = _classes(terms, Tk)
    if classes == [(1, 0)]:
        return whole
    try:
        return _disjoint(heads, terms, classes, Size(Tq, Tk)) or whole
    except TooManyBands:
        return whole


def _class_of(t: list[object], Tk: int) -> tuple[int, int]:
    s, phase = t[STRIDE], t[PHASE]
    if isinstance(s, int) and isinstance(phase, int) and s > 1 and 2 * s <= Tk:
        return s, phase
    return 1, 0


def _classes(terms: list[Terms], Tk: int) -> list[tuple[int, int]]:
    # the strides that become parts, the largest ones if there are too many
    classes = sorted({_class_of(t, Tk) for of in terms for t in of})
    if len(classes) > MOST_PARTS:
        classes = [(1, 0), *classes[1 - MOST_PARTS :]]
    return classes


def _disjoint(heads: LoweredHeads, terms: list[Terms], classes: list[tuple[int, int]], size: Size) -> list[Cut]:
    parts: list[Cut] = []
    earlier: list[Terms] = [[] for _ in terms]
    for step, phase in classes:
        masks: list[Lowered] = []
        for m, of in enumerate(terms):
            mine = [t for t in of if _home(t, classes, size.Tk) == (step, phase)]
            left = mine
            for other in earlier[m]:
                left = both(left, negated(other), size)
                if len(left) > 2 * MAX_BANDS:
                    raise TooManyBands(f"cutting by strides takes {len(left)} bands")
            earlier[m] = earlier[m] + mine
            left = [_inside(t, step) for t in tidy(left, size)]
            masks.append(finish(left, heads.masks[m].rows, heads.masks[m].grids))
        if any(m.nb for m in masks):
            parts.append(Cut(step, phase, tuple(masks)))
    return parts


def _home(t: list[object], classes: list[tuple[int, int]], Tk: int) -> tuple[int, int]:
    home = _class_of(t, Tk)
    return home if home in classes else (1, 0)


def _inside(t: list[object], step: int) -> list[object]:
    if t[STRIDE] == step:
        t = list(t)
        t[STRIDE], t[PHASE] = 1, 0
    return t


def classes_of(step: int, phase: int, Tq: int, Tk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(q_start, k_start, nq, nk) int64 [C] of the residue classes; C = min(step, Tq), at least 1."""
    q_start = np.arange(max(1, min(step, Tq)))
    k_start = (q_start - phase) % step
    nq = np.maximum(0, -(-(Tq - q_start) // step))
    return q_start, k_start, nq, np.maximum(0, -(-(Tk - k_start) // step))
