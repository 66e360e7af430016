"""Masks defined by arrays over rows, keys or blocks: columns, ranges, tiles, dense. Row 0 is the first query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import ArrayOrList
from . import arguments
from .algebra import Mask
from .bits import Bits
from .contents import host
from .context import Context
from .forms import Grid
from .rows import between, flat
from .scene import Bools, Scene, plane, table
from .terms import Terms

__all__ = ["columns", "dense", "ranges", "tiles"]


def columns(start: ArrayOrList | None = None, stop: ArrayOrList | None = None) -> Mask:
    """Key j is seen by rows start[j] <= t < stop[j].

    Rows count from the first query. The columns of FlashMask (Wang et al., 2024) are the opposite: they are the rows
    that do not see a key, `~columns(start, stop)`.

    Args:
        start: int [Tk] or [B, Tk], the first row that sees each key; None for 0.
        stop: int [Tk] or [B, Tk], one more than the last row that sees each key; None for Tq. Bounds may exceed the
            rows. start <= stop is checked here for arrays on the host, and for arrays on a device by `Mask.check`.

    Raises:
        TypeError: both are None, or an array is not of integers.
        ValueError: a start is above its stop, or the lengths differ.

    Examples:
        >>> print(mask.columns(start=[0, 0, 2, 2], stop=[2, 4, 4, 4]).draw(4, 4))
        ██··
        ██··
        ·███
        ·███
    """
    return _bounded("columns", start, stop)


def ranges(start: ArrayOrList | None = None, stop: ArrayOrList | None = None) -> Mask:
    """Row t sees keys start[t] <= j < stop[t]; it is `columns` with rows and keys exchanged.

    Args:
        start: int [Tq] or [B, Tq], the first key that each row sees; None for 0.
        stop: int [Tq] or [B, Tq], one more than the last key that each row sees; None for Tk. Bounds may exceed the
            keys. start <= stop is checked here for arrays on the host, and for arrays on a device by `Mask.check`.

    Raises:
        TypeError: both are None, or an array is not of integers.
        ValueError: a start is above its stop, or the lengths differ.

    Examples:
        >>> print(mask.ranges(start=[0, 0, 1, 2], stop=[1, 2, 3, 4]).draw(4, 4))
        █···
        ██··
        ·██·
        ··██
    """
    return _bounded("ranges", start, stop)


def _bounded(kind: str, start: Any, stop: Any) -> Mask:
    if start is None and stop is None:
        T = "Tk" if kind == "columns" else "Tq"
        raise TypeError(f"{kind}: neither start nor stop given, expected an int array [{T}] or [B, {T}]; full() is all")
    bounds = tuple(
        None if bound is None else arguments.array(bound, kind, name, (1, 2))
        for name, bound in (("start", start), ("stop", stop))
    )
    mask = Mask(kind, bounds)
    if all(isinstance(bound, np.ndarray) for bound in bounds):
        bounds_contents(mask)
    return mask


def bounds_contents(mask: Mask, *_: int) -> None:
    if mask.args[0] is None or mask.args[1] is None:
        return
    mine, other = ("key", "row") if mask.kind == "columns" else ("row", "key")
    start, stop = map(host, mask.args)
    try:
        start, stop = np.broadcast_arrays(start, stop)
    except ValueError:
        shapes = f"start has shape {list(start.shape)} and stop {list(stop.shape)}"
        raise ValueError(f"{mask.kind}: {shapes}, expected as many {mine}s in both, and one batch") from None
    wrong = np.argwhere(start > stop)
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(
            f"{mask.kind}: {mine} {at[-1]} is given {other}s from {start[at]} to {stop[at]}, expected start <= stop; "
            f"make them equal if {'no row sees the key' if mine == 'key' else 'the row sees no key'}"
        )


def bounds_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    for name, leaf in zip(("start", "stop"), mask.args, strict=True):
        if leaf is not None:
            arguments.fits(mask.kind, name, leaf, B, Tk if mask.kind == "columns" else Tq)


def bounds_sizes(mask: Mask) -> arguments.Sizes:
    count = int(next(leaf.shape[-1] for leaf in mask.args if leaf is not None))
    return arguments.sizes_of(mask.args, 1, **{"Tk" if mask.kind == "columns" else "Tq": count})


def columns_pairs(mask: Mask, scene: Scene) -> Bools:
    return _inside(scene, scene.t, [None if leaf is None else table(leaf)[:, None, None] for leaf in mask.args])


def ranges_pairs(mask: Mask, scene: Scene) -> Bools:
    return _inside(scene, scene.j, [None if leaf is None else table(leaf)[:, None, :, None] for leaf in mask.args])


def _inside(scene: Scene, x: Any, bounds: list[Any]) -> Bools:
    start, stop = bounds
    allowed = np.ones((1, 1, scene.Tq, scene.Tk), np.bool_)
    if start is not None:
        allowed = allowed & (x >= start)
    return allowed if stop is None else allowed & (x < stop)


def bounds_terms(mask: Mask, context: Context) -> Terms:
    start, stop = (None if leaf is None else flat(host(leaf)).astype(np.int64) for leaf in mask.args)
    Tq, Tk = context.size.Tq, context.size.Tk
    if mask.kind == "columns":
        return [context.part(mask.key, lambda: between(start, stop, Tk, Tq, "k"))]
    return [context.part(mask.key, lambda: between(start, stop, Tq, Tk, "q"))]


def tiles(layout: ArrayOrList, block: int | tuple[int, int]) -> Mask:
    """Blocks of pairs: row t sees key j if layout[t div bq, j div bk] is True.

    Args:
        layout: bool [nq, nk] or [B, nq, nk], with nq = ceil(Tq / bq) and nk = ceil(Tk / bk).
        block: the size of a block in rows and keys, an int or (bq, bk).

    Raises:
        TypeError: layout is an array of floats, or block is not an integer.
        ValueError: layout has another number of dimensions, or block is not positive.

    Examples:
        >>> blocks = mask.tiles(np.eye(8, dtype=bool), 128)  # 8 diagonal blocks of 128 tokens
    """
    pair = block if isinstance(block, tuple) else (block, block)
    if len(pair) != 2:
        raise ValueError(f"tiles: block {block!r} given, expected an integer or a pair (block_q, block_k)")
    sizes = tuple(arguments.positive(b, "tiles", "block") for b in pair)
    return Mask("tiles", (arguments.array(layout, "tiles", "layout", (2, 3), np.bool_), *sizes))


def tiles_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    layout, bq, bk = mask.args
    arguments.fits("tiles", "layout", layout, B, -(-Tq // bq), -(-Tk // bk))


def tiles_sizes(mask: Mask) -> arguments.Sizes:
    layout, bq, bk = mask.args
    return arguments.sizes_of(mask.args, 2, int(layout.shape[-2]) * bq, int(layout.shape[-1]) * bk)


def tiles_text(mask: Mask, write: Callable[[Any], str]) -> list[str]:
    layout, bq, bk = mask.args
    return [write(layout), str(bq if bq == bk else (bq, bk))]


def tiles_pairs(mask: Mask, scene: Scene) -> Bools:
    layout, bq, bk = mask.args
    return plane(layout)[:, :, (np.arange(scene.Tq) // bq)[:, None], np.arange(scene.Tk) // bk]


def tiles_terms(mask: Mask, context: Context) -> Terms:
    return [context.part(mask.key, lambda: _grid(*mask.args))]


def dense(allowed: ArrayOrList) -> Mask:
    """Any boolean array, stored as Tq · Tk bits. `from_dense` looks for a smaller form first.

    Args:
        allowed: bool [Tq, Tk] or [B, Tq, Tk], True where row t sees key j.

    Raises:
        TypeError: allowed is an array of floats.
        ValueError: allowed has another number of dimensions.

    Examples:
        >>> seen = np.random.default_rng(0).random((1024, 1024)) < 0.1
        >>> sparse = mask.causal() & mask.dense(seen)
    """
    return Mask("dense", (arguments.bits(allowed, "dense", "allowed", (2, 3)),))


def dense_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    arguments.fits("dense", "allowed", mask.args[0], B, Tq, Tk)


def dense_sizes(mask: Mask) -> arguments.Sizes:
    Tq, Tk = mask.args[0].shape[-2:]
    return arguments.sizes_of(mask.args, 2, int(Tq), int(Tk))


def dense_pairs(mask: Mask, scene: Scene) -> Bools:
    return plane(mask.args[0])


def dense_terms(mask: Mask, context: Context) -> Terms:
    return [context.part(mask.key, lambda: _grid(mask.args[0], 1, 1))]


def _grid(layout: Any, bq: int, bk: int) -> Grid:
    columns = layout.n if isinstance(layout, Bits) else None
    array: Any = host(layout if columns is None else layout.packed)
    array = array[None] if array.ndim == 2 else array if len(array) else np.zeros((1, *array.shape[1:]), np.uint8)
    return Grid.of(bq, bk, array, columns)
