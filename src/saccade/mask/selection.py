"""Selected keys: a list of key blocks for each group of rows and each key head, new at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import ArrayOrList
from . import arguments
from .algebra import Mask, selected
from .contents import host
from .context import Context
from .scene import Bools, Scene
from .terms import Terms

__all__ = ["select"]


def select(indices: ArrayOrList, block: int = 1, rows: int = 1) -> Mask:
    """The keys in a list of blocks, one list for each group of rows and each key head.

    Row t sees key j if j div block is in indices[b, h, t div rows], where h is the key head of a query head. Native
    Sparse Attention (Yuan et al., 2025), Mixture of Block Attention (Lu et al., 2025) and DeepSeek Sparse Attention
    (2025) choose such lists. The work follows the number of entries, and no list is read on the host if it is on a GPU.

    Args:
        indices: integers [B, Hk, ceil(Tq / rows), n], or [1, ...] for all batch entries. A list is a set: order and
            repetitions do not matter, and -1 is no block.
        block: keys per block; the last block may be short.
        rows: rows t (indices in the array of queries, not positions) that share a list; the last group may be short.

    Returns:
        A mask; it may be combined with other masks by `&`, not by `|` or `~`.

    Raises:
        TypeError: indices is an array of floats or booleans, or block or rows is not an integer.
        ValueError: indices has another number of dimensions, or block or rows is not positive; at the call, if the
            shape does not fit or an index is out of range.

    Examples:
        >>> scores = torch.randn(2, 4, 1024, 16)  # [B, Hk, Tq, blocks] of 64 keys
        >>> best = scores.topk(4).indices
        >>> chosen = mask.causal() & mask.select(best, block=64)
    """
    sizes = arguments.positive(block, "select", "block"), arguments.positive(rows, "select", "rows")
    return Mask("select", (arguments.array(indices, "select", "indices", (4,)), *sizes))


def select_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    indices, _, rows = mask.args
    batch, heads, groups, _ = (int(n) for n in indices.shape)
    if batch not in (1, B) or groups != -(-Tq // rows) or heads < 1 or (Hq is not None and Hq % heads):
        raise ValueError(
            f"select: indices has shape {list(indices.shape)}, expected [B, Hk, ceil(Tq / rows), n] = "
            f"[{B}, Hk, {-(-Tq // rows)}, n] for this problem"
        )


def select_contents(mask: Mask, Tq: int, Tk: int) -> None:
    indices, block, _ = mask.args
    arguments.within("select", "indices", indices, -1, -(-Tk // block) - 1)


def select_sizes(mask: Mask) -> arguments.Sizes:
    return arguments.sizes_of((), 0) if mask.args[0].shape[0] == 1 else (int(mask.args[0].shape[0]), None, None)


def select_text(mask: Mask, write: Callable[[Any], str]) -> list[str]:
    return [write(mask.args[0]), *map(str, mask.args[1:])]


def select_pairs(mask: Mask, scene: Scene) -> Bools:
    indices, block, rows = mask.args
    select_contents(mask, scene.Tq, scene.Tk)
    lists = host(indices)
    blocks = -(-scene.Tk // block)
    # the last column takes entries of -1
    chosen = np.zeros((*lists.shape[:3], blocks + 1), np.bool_)
    np.put_along_axis(chosen, np.where(lists < 0, blocks, lists), True, axis=3)
    pairs = chosen[:, :, (np.arange(scene.Tq) // rows)[:, None], np.arange(scene.Tk) // block]
    return np.repeat(pairs, scene.Hq // lists.shape[1], axis=1)


def select_terms(mask: Mask, context: Context) -> Terms:
    raise ValueError(
        "select(...) is not a union of intervals; only attention, attention_backward, decode and paged_attention "
        "compute it. Elsewhere give the same pairs as tiles(layout, block) or dense(allowed)"
    )


def others(mask: Mask | None) -> Mask | None:
    """A mask without its `select`; None if nothing is left."""
    if mask is None or selected(mask) is None:
        return mask
    left = tuple(child for child in mask.children if child.kind != "select")
    return left[0] if len(left) == 1 else Mask("and", (), left) if left else None
