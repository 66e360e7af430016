"""The dense predicate of a mask, straight from its expression: slow, obvious, the oracle's and the tests' truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .algebra import Mask
from .contents import host

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Scene:
    """Where a node is evaluated: the sizes and the offset of its `&` chain, an int or [B, 1, 1, 1]."""

    B: int
    Hq: int
    Tq: int
    Tk: int
    stop: Any = None

    def offset(self, given: Any = None) -> Any:
        """i - t: what the node says, else bottom-right of the enclosing keys(stop), else of the array."""
        if given is not None:
            return per_batch(given)
        return (self.Tk if self.stop is None else self.stop) - self.Tq

    @property
    def t(self) -> NDArray[np.int64]:
        """Row numbers, [1, 1, Tq, 1]."""
        return np.arange(self.Tq).reshape(1, 1, -1, 1)

    @property
    def j(self) -> NDArray[np.int64]:
        """Key numbers, [1, 1, 1, Tk]."""
        return np.arange(self.Tk).reshape(1, 1, 1, -1)

    def i(self, given: Any = None) -> Any:
        """Positions of the queries, [1|B, 1, Tq, 1]."""
        return self.t + self.offset(given)


def evaluate(mask: Mask, B: int, Hq: int, Tq: int, Tk: int) -> Bools:
    """Allowed pairs of `mask`, bool [B|1, Hq|1, Tq, Tk]. Raises ValueError if arrays do not fit these sizes."""
    from .checks import check_shapes

    check_shapes(mask, B, Tq, Tk, Hq)
    allowed = _node(mask, Scene(B, Hq, Tq, Tk))
    shape = (*allowed.shape[:2], Tq, Tk)
    return np.ascontiguousarray(np.broadcast_to(allowed, shape))


def per_batch(value: Any) -> Any:
    """An integer, or an array [B] as [B, 1, 1, 1]."""
    return value if isinstance(value, int) else host(value).astype(np.int64).reshape(-1, 1, 1, 1)


def _node(mask: Mask, scene: Scene) -> Bools:
    if mask.kind == "and":
        scene = _with_stops(mask, scene)
    children = [_node(c, scene) for c in mask.children] if mask.kind in ("and", "or", "not") else []
    if mask.kind == "and":
        return _fold(np.logical_and, children)
    if mask.kind == "or":
        return _fold(np.logical_or, children)
    if mask.kind == "not":
        return ~children[0]
    if mask.kind == "per_head":
        heads = [np.broadcast_to(_node(c, scene), (scene.B, 1, scene.Tq, scene.Tk)) for c in mask.children]
        return np.concatenate(heads, axis=1)
    return _LEAVES[mask.kind](mask, scene)


def _fold(function: Callable[[Bools, Bools], Bools], terms: list[Bools]) -> Bools:
    result = terms[0]
    for term in terms[1:]:
        result = function(result, term)
    return result


def _with_stops(mask: Mask, scene: Scene) -> Scene:
    # keys(stop) conjuncts say where the last query stands
    stop = scene.stop
    for child in mask.children:
        if child.kind == "keys":
            mine = np.clip(per_batch(child.args[1]), 0, scene.Tk)
            stop = mine if stop is None else np.minimum(stop, mine)
    return Scene(scene.B, scene.Hq, scene.Tq, scene.Tk, stop)


def _full(mask: Mask, scene: Scene) -> Bools:
    return np.ones((1, 1, scene.Tq, scene.Tk), np.bool_)


def _causal(mask: Mask, scene: Scene) -> Bools:
    return scene.j <= scene.i(mask.args[0])


def _window(mask: Mask, scene: Scene) -> Bools:
    left, right, offset = mask.args
    i, j = scene.i(offset), scene.j
    allowed = np.ones_like(j <= i)
    if left is not None:
        allowed &= j >= i - left
    if right is not None:
        allowed &= j <= i + right
    return allowed


def _documents(mask: Mask, scene: Scene) -> Bools:
    ids = _rows_of(mask.args[0])
    if mask.args[1] is not None:
        return ids[:, None, :, None] == _rows_of(mask.args[1])[:, None, None, :]
    return _same_at_position(ids, scene)


def _same_at_position(ids: NDArray[np.int64], scene: Scene) -> Bools:
    # ids [1|B, Tk] of positions; a query whose position is outside the array has no document
    B = np.broadcast_shapes(ids.shape[:1], np.shape(scene.i())[:1])[0]
    i = np.broadcast_to(scene.i(), (B, 1, scene.Tq, 1))[:, 0, :, 0]
    ids = np.broadcast_to(ids, (i.shape[0], scene.Tk))
    if not scene.Tk:
        return np.zeros((i.shape[0], 1, scene.Tq, 0), np.bool_)
    mine = np.take_along_axis(ids, np.clip(i, 0, scene.Tk - 1), axis=1)
    inside = (i >= 0) & (i < scene.Tk)
    return (mine[:, None, :, None] == ids[:, None, None, :]) & inside[:, None, :, None]


def _packed(mask: Mask, scene: Scene) -> Bools:
    cu_q = _rows_of(mask.args[0])
    if mask.args[1] is None:
        return _packed_by_position(mask, cu_q, scene)
    cu_k = _rows_of(mask.args[1])
    B = np.broadcast_shapes(cu_q.shape[:1], cu_k.shape[:1])[0]
    return _each_document(mask, np.broadcast_to(cu_q, (B, cu_q.shape[1])), cu_k, scene)


def _packed_by_position(mask: Mask, cu: NDArray[np.int64], scene: Scene) -> Bools:
    # rows of a document are those whose position falls into it
    offset = np.reshape(scene.offset(), (-1, 1))
    B = np.broadcast_shapes(cu.shape[:1], offset.shape[:1])[0]
    rows = np.clip(cu - offset, 0, scene.Tq)
    return _each_document(mask, np.broadcast_to(rows, (B, cu.shape[1])), cu, scene)


def _each_document(mask: Mask, cu_q: NDArray[np.int64], cu_k: NDArray[np.int64], scene: Scene) -> Bools:
    allowed = np.zeros((cu_q.shape[0], 1, scene.Tq, scene.Tk), np.bool_)
    cu_k = np.broadcast_to(cu_k, cu_q.shape)
    for b in range(cu_q.shape[0]):
        for d in range(cu_q.shape[1] - 1):
            q0, q1, k0, k1 = (int(x) for x in (*cu_q[b, d : d + 2], *cu_k[b, d : d + 2]))
            inner = True
            if mask.children:
                inner = _node(mask.children[0], Scene(1, 1, q1 - q0, k1 - k0))
            allowed[b, 0, q0:q1, k0:k1] = inner
    return allowed


def _keys(mask: Mask, scene: Scene) -> Bools:
    start, stop = mask.args
    allowed = scene.j < per_batch(stop)
    return allowed if start is None else allowed & (scene.j >= per_batch(start))


def _prefix(mask: Mask, scene: Scene) -> Bools:
    return scene.j < per_batch(mask.args[0])


def _global_tokens(mask: Mask, scene: Scene) -> Bools:
    chosen, i, j = mask.args[0], scene.i(), scene.j
    if getattr(chosen, "ndim", 0) == 0:
        return ((i >= 0) & (i < per_batch(chosen))) | (j < per_batch(chosen))
    listed = _rows_of(chosen)[:, None, None, None, :]
    return (i[..., None] == listed).any(-1) | (j[..., None] == listed).any(-1)


def _columns(mask: Mask, scene: Scene) -> Bools:
    start, stop = mask.args
    allowed = np.ones((1, 1, scene.Tq, scene.Tk), np.bool_)
    if start is not None:
        allowed = allowed & (scene.t >= _rows_of(start)[:, None, None])
    return allowed if stop is None else allowed & (scene.t < _rows_of(stop)[:, None, None])


def _strided(mask: Mask, scene: Scene) -> Bools:
    s, phase = mask.args
    return (scene.i() - scene.j) % s == phase


def _dilated(mask: Mask, scene: Scene) -> Bools:
    radius, step = mask.args
    away = scene.i() - scene.j
    return (np.abs(away) <= radius * step) & (away % step == 0)


def _chunked(mask: Mask, scene: Scene) -> Bools:
    return scene.i() // mask.args[0] == scene.j // mask.args[0]


def _tiles(mask: Mask, scene: Scene) -> Bools:
    layout, bq, bk = mask.args
    layout = _grid_of(layout)
    return layout[:, :, (np.arange(scene.Tq) // bq)[:, None], np.arange(scene.Tk) // bk]


def _dense(mask: Mask, scene: Scene) -> Bools:
    return _grid_of(mask.args[0])


def _rows_of(array: Any) -> NDArray[np.int64]:
    return np.atleast_2d(host(array)).astype(np.int64)


def _grid_of(array: Any) -> Bools:
    array = host(array).astype(np.bool_)
    return (array[None] if array.ndim == 2 else array)[:, None]


_LEAVES: dict[str, Callable[[Mask, Scene], Bools]] = {
    "full": _full,
    "causal": _causal,
    "window": _window,
    "documents": _documents,
    "packed": _packed,
    "keys": _keys,
    "prefix": _prefix,
    "global_tokens": _global_tokens,
    "columns": _columns,
    "strided": _strided,
    "dilated": _dilated,
    "chunked": _chunked,
    "tiles": _tiles,
    "dense": _dense,
}
