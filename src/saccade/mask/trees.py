"""Trees of draft tokens: several continuations of one text, which a model reads in one call.

Sources: SpecInfer (Miao et al., 2024) and Medusa (Cai et al., 2024).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import ArrayOrList
from . import arguments
from .algebra import Mask
from .contents import host
from .context import Context, label
from .forms import Grid, Rows
from .rows import flat
from .scene import Bools, Scene, table
from .terms import Terms

__all__ = ["tree"]

Ints = NDArray[np.int64]
# trees in which each node's descendants are at most this many runs of nodes are lowered to intervals
_RUNS = 3


def tree(parents: ArrayOrList) -> Mask:
    """A tree of continuations of one text: a query sees the prefix, its ancestors and itself.

    The n nodes are the last n keys; with `& keys(stop)`, the last n before stop. The keys before them are the prefix.
    The last n queries are the queries of the nodes, and queries before them see only the prefix. Rotate the query and
    the key of a node to the position of its depth: the length of the prefix plus `saccade.mask.trees.depths(parents)`.

    Windows and strides in the same mask count keys, not depths. A tree in depth-first order takes memory for Tk
    numbers, as does any tree in which the descendants of each node are at most 3 runs of nodes. Others take Tq · Tk
    bits.

    Args:
        parents: int [n] or [B, n], the parent of each node; it is listed before the node. −1 for a child of the prefix.
            NumPy arrays are checked here, arrays on a device when they are read.

    Raises:
        TypeError: parents is not an array of integers.
        ValueError: a parent is below −1, or is not listed before its child, as in a cycle.

    Examples:
        >>> draft = mask.tree([-1, 0, 0, 1])  # node 0 has children 1 and 2, node 1 has child 3
        >>> print(draft.draw(4, 6))  # after a prefix of 2 tokens
        ███···
        ████··
        ███·█·
        ████·█
    """
    mask = Mask("tree", (arguments.array(parents, "tree", "parents", (1, 2)),))
    if isinstance(mask.args[0], np.ndarray):
        tree_contents(mask)
    return mask


def depths(parents: Any) -> Ints:
    """The ancestors of each node, int64 in the shape of parents, [n] or [B, n]; as `tree`, which describes parents."""
    mask = tree(parents)
    tree_contents(mask)
    rows = table(mask.args[0])
    depth = np.zeros_like(rows)
    every = np.arange(len(rows))
    for t in range(rows.shape[1]):
        depth[:, t] = np.where(rows[:, t] < 0, 0, depth[every, rows[:, t]] + 1)
    return depth.reshape(np.shape(host(parents)))


def tree_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    n = int(mask.args[0].shape[-1])
    arguments.fits("tree", "parents", mask.args[0], B, n)
    if n > Tk:
        raise ValueError(f"tree: parents has {n} nodes and there are {Tk} keys, expected at most one node for each key")


def tree_contents(mask: Mask, *_: int) -> None:
    parents = host(mask.args[0])
    wrong = np.argwhere((parents < -1) | (parents >= np.arange(parents.shape[-1])))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        expected = f"-1 or a node from 0 to {at[-1] - 1}" if at[-1] else "-1"
        raise ValueError(
            f"tree: the parent of node {at[-1]} is {parents[at]}, expected {expected}; list parents before children"
        )


def tree_sizes(mask: Mask) -> arguments.Sizes:
    return arguments.sizes_of(mask.args, 1, Tq=int(mask.args[0].shape[-1]))


def tree_pairs(mask: Mask, scene: Scene) -> Bools:
    # from each query up to the prefix; a cycle would have no end
    tree_contents(mask)
    parents = table(mask.args[0])
    n = parents.shape[1]
    key = scene.j - scene.offset() - scene.Tq + n
    node = scene.t - scene.Tq + n + np.zeros((len(parents), 1, 1, 1), np.int64)
    allowed = key < 0
    while (node >= 0).any():
        allowed = allowed | (key == node) & (node >= 0)
        above = np.take_along_axis(parents, node.reshape(len(parents), -1).clip(0), 1).reshape(node.shape)
        node = np.where(node >= 0, above, -1)
    return allowed


def tree_terms(mask: Mask, context: Context) -> Terms:
    tree_contents(mask)
    parents, (Tq, Tk) = flat(host(mask.args[0])).astype(np.int64), (context.size.Tq, context.size.Tk)
    offset = context.offset()
    start, key = offset + Tq - parents.shape[1], (mask.key, label(offset))
    seen = _seen(parents, Tq)
    # each node is seen by runs of rows
    begins = seen & ~np.pad(seen, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    number = begins.cumsum(-1) * seen
    runs = max(1, int(number.max(initial=0)))
    if runs > _RUNS:
        return [context.part((key, "grid"), lambda: _grid(_placed(seen, start, Tk, 1)))]
    # every row sees the keys of the prefix, which are in the first table
    rows = [_rows(number == run, start, Tk, Tq * (run == 1)) for run in range(1, runs + 1)]
    return [context.part((key, run), partial(rows.__getitem__, run)) for run in range(runs)]


def _seen(parents: Ints, Tq: int) -> Bools:
    # the rows that see each node, [1 | B, n, Tq]
    batch, n = parents.shape
    seen = np.zeros((batch, n, n), np.bool_)
    every = np.arange(batch)
    for t in range(n):
        seen[:, :, t] = seen[every, :, parents[:, t]] & (parents[:, t] >= 0)[:, None]
        seen[:, t, t] = True
    return np.pad(seen, ((0, 0), (0, 0), (max(0, Tq - n), 0)))[..., max(0, n - Tq) :]


def _rows(seen: Bools, start: Any, Tk: int, prefix: int) -> Rows:
    # one run of rows for each node, and the first `prefix` rows for keys of the prefix
    lo = seen.argmax(-1) if seen.shape[-1] else np.zeros(seen.shape[:-1], np.int64)
    hi = _placed((lo + seen.sum(-1)).astype(np.int32), start, Tk, prefix)
    return Rows("k", _placed(lo.astype(np.int32), start, Tk, 0), hi)


def _grid(keys: Bools) -> Grid:
    return Grid.of(1, 1, keys.transpose(0, 2, 1))


def _placed(nodes: NDArray[Any], start: Any, Tk: int, prefix: int) -> NDArray[Any]:
    # nodes [1 | B, n, ...] as keys [1 | B, Tk, ...] from `start` on, after keys of the prefix and before keys with 0
    starts, n = np.reshape(start, (-1, 1)), nodes.shape[1]
    batch = max(len(nodes), len(starts))
    keys = np.zeros((batch, Tk, *nodes.shape[2:]), nodes.dtype)
    keys[np.broadcast_to(np.arange(Tk) < starts, (batch, Tk))] = prefix
    at = np.broadcast_to(starts + np.arange(n), (batch, n))
    b, node = np.nonzero((at >= 0) & (at < Tk))
    keys[b, at[b, node]] = np.broadcast_to(nodes, (batch, *nodes.shape[1:]))[b, node]
    return keys
