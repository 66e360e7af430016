"""The dense predicate of a mask, computed directly from its expression: slow, simple, the reference of all tests."""

from __future__ import annotations

from functools import reduce

import numpy as np

from .algebra import Mask
from .checks import check_shapes, check_sizes
from .kinds import KINDS
from .scene import Bools, Scene


def evaluate(mask: Mask, B: int, Hq: int, Tq: int, Tk: int) -> Bools:
    """Allowed pairs of `mask`, bool [B|1, Hq|1, Tq, Tk]. Raises ValueError if arrays do not fit these sizes."""
    check_sizes("evaluate", B=B, Hq=Hq, Tq=Tq, Tk=Tk)
    check_shapes(mask, B, Tq, Tk, Hq)
    allowed = _node(mask, Scene(_node, B, Hq, Tq, Tk))
    return np.ascontiguousarray(np.broadcast_to(allowed, (*allowed.shape[:2], Tq, Tk)))


def _node(mask: Mask, scene: Scene) -> Bools:
    if mask.kind == "not":
        return ~_node(mask.children[0], scene)
    if mask.kind == "and":
        scene = scene.with_stops(mask)
        return reduce(np.logical_and, [_node(c, scene) for c in mask.children])
    if mask.kind == "or":
        return reduce(np.logical_or, [_node(c, scene) for c in mask.children])
    return KINDS[mask.kind].predicate(mask, scene)
