"""The constructors of the mask algebra.

i is the position of a query and j that of a key. Positions are counted so that the last query meets the last key
(bottom-right): i = t + Tk - Tq for row t of the queries, or t + stop[b] - Tq where `keys(stop)` stands in the
enclosing ``&`` chain (the smallest stop if several do), unless ``offset`` says otherwise: i = t + offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .algebra import Leaf, Mask, is_array
from .checks import check_columns
from .contents import freeze, is_tensor


def full() -> Mask:
    """Every key; the same as no mask."""
    return Mask("full")


def causal(offset: int | None = None) -> Mask:
    """Keys j <= i (row S5). `offset`: i = t + offset instead of bottom-right, an int or [B]."""
    return Mask("causal", (_optional(offset, "causal", "offset"),))


def window(left: int | None = None, right: int | None = None, offset: int | None = None) -> Mask:
    """Keys i - left <= j <= i + right, both inclusive, None unbounded (rows S28; flash-attn's convention).

    `left`, `right`: integers >= 0 or None. `offset`: as in `causal`. Raises ValueError for negative sides.
    """
    return Mask(
        "window",
        (
            _side(left, "left"),
            _side(right, "right"),
            _optional(offset, "window", "offset"),
        ),
    )


def documents(
    ids_q: Any = None,
    ids_k: Any = None,
    *,
    cu_seqlens: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    each: Mask | None = None,
) -> Mask:
    """Keys of the query's own document in a packed sequence (row S6).

    Give one of

    - `ids_q` alone: int [Tk] or [B, Tk], the document of every position; a query has the id at its position i.
    - `ids_q` [Tq] and `ids_k` [Tk] (or [B, ..]): the document of every query row and of every key.
    - `cu_seqlens`: int [n + 1] or [B, n + 1], document d holds positions cu[d] <= i < cu[d + 1]; what lies beyond
      the last belongs to no document and sees nothing.
    - `cu_q`, `cu_k`: likewise for query rows and for keys.

    Ids never decrease and bounds never decrease: host arrays are checked here, device arrays are trusted until
    `Mask.check`. `each`: a mask inside every document (with cu only), i and j counted from the document's start and
    the document's last query meeting its last key.
    Raises ValueError for ids that decrease, TypeError for a wrong choice of arguments.
    """
    by_ids = ids_q is not None
    given = (by_ids, cu_seqlens is not None, cu_q is not None)
    if sum(given) != 1 or (ids_k is not None and not by_ids) or ((cu_q is None) != (cu_k is None)):
        raise TypeError(
            "documents takes one of: documents(ids), documents(ids_q, ids_k), documents(cu_seqlens=...), "
            "documents(cu_q=..., cu_k=...)"
        )
    if by_ids:
        if each is not None:
            raise TypeError("documents(ids, each=...) is not defined; give cu_seqlens, or cu_q and cu_k, with each")
        second = None if ids_k is None else _monotone(ids_k, "documents", "ids_k")
        return Mask("documents", (_monotone(ids_q, "documents", "ids"), second))
    if each is not None and not isinstance(each, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"documents: each is a mask, got {type(each).__name__}")
    if each is not None:
        _only_inside(each)
    first = _monotone(cu_q if cu_seqlens is None else cu_seqlens, "documents", "cu_seqlens")
    second = None if cu_k is None else _monotone(cu_k, "documents", "cu_k")
    return Mask("packed", (first, second), () if each is None else (each,))


def keys(start: Any, stop: Any = None) -> Mask:
    """Keys j < stop, as ``keys(stop)``, or start <= j < stop, as ``keys(start, stop)``: ints or int arrays [B].

    As a direct member of an ``&`` chain it also sets positions: bottom-right then means stop[b] (ragged caches).
    """
    if stop is None:
        return Mask("keys", (None, _count(start, "keys", "stop")))
    return Mask("keys", (_count(start, "keys", "start"), _count(stop, "keys", "stop")))


def prefix(n: Any) -> Mask:
    """Keys j < n, seen by every query: an int or an int array [B]."""
    return Mask("prefix", (_count(n, "prefix", "n"),))


def global_tokens(n: Any) -> Mask:
    """Rows and columns of chosen positions (row S30): positions below `n`, or those listed, int [m] or [B, m].

    A chosen query sees every key, and a chosen key is seen by every query. A [B, m] list may repeat an index.
    """
    if isinstance(n, (list, tuple)) or getattr(n, "ndim", 0) > 0:
        return Mask("global_tokens", (_array(n, "global_tokens", "indices", (1, 2)),))
    if is_tensor(n):
        raise TypeError("global_tokens: n is a tensor of no dimensions, expected an integer or indices [m]; use int(n)")
    return Mask("global_tokens", (_count(n, "global_tokens", "n"),))


def columns(start: Any = None, stop: Any = None) -> Mask:
    """Key j is seen by rows start[j] <= t < stop[j]: int arrays [Tk] or [B, Tk], None for a side left open.

    Rows count from the first query, as in `tiles`; bounds may lie beyond them. After FlashMask (Wang et al. 2024),
    whose columns name the rows that a key is hidden from, ``~columns(start, stop)``.
    No start is above its stop: host arrays are checked here, device arrays are trusted until `Mask.check`.
    Raises ValueError where one is, or for arrays of different lengths, TypeError for no array or one of floats.
    """
    if start is None and stop is None:
        raise TypeError("columns: neither start nor stop given, expected an int array [Tk] or [B, Tk]; full() is all")
    bounds = tuple(
        None if rows is None else _array(rows, "columns", name, (1, 2))
        for name, rows in (("start", start), ("stop", stop))
    )
    if all(isinstance(rows, np.ndarray) for rows in bounds):
        check_columns(*bounds)
    return Mask("columns", bounds)


def strided(s: int, phase: int = 0) -> Mask:
    """Keys with (i - j) mod s = phase (row S29). Raises ValueError unless s >= 1 and 0 <= phase < s."""
    s, phase = _positive(s, "strided", "s"), _integer(phase, "strided", "phase")
    if isinstance(phase, int) and isinstance(s, int) and not 0 <= phase < s:
        raise ValueError(f"strided: phase {phase} given, expected 0 <= phase < s = {s}; use phase % s")
    return Mask("strided", (s, phase))


def dilated(radius: int, step: int) -> Mask:
    """A window with gaps: keys j = i + n·step with |n| <= radius, so 2·radius + 1 keys at most."""
    radius = _integer(radius, "dilated", "radius")
    if isinstance(radius, int) and radius < 0:
        raise ValueError(f"dilated: radius {radius} given, expected an integer >= 0")
    return Mask("dilated", (radius, _positive(step, "dilated", "step")))


def chunked(size: int) -> Mask:
    """Keys of the query's own chunk: i div size = j div size."""
    return Mask("chunked", (_positive(size, "chunked", "size"),))


def tiles(layout: Any, block: int | tuple[int, int]) -> Mask:
    """Keys whose tile is set in `layout`, bool [nq, nk] or [B, nq, nk]; row t, key j is in tile (t div bq, j div bk).

    `block`: the tile's size in queries and keys, an int or (bq, bk). Rows and keys count from the array's start.
    """
    pair = block if isinstance(block, tuple) else (block, block)
    if len(pair) != 2:
        raise ValueError(f"tiles: block {block!r} given, expected an integer or a pair (block_q, block_k)")
    sizes = tuple(_positive(b, "tiles", "block") for b in pair)
    return Mask("tiles", (_array(layout, "tiles", "layout", (2, 3), np.bool_), *sizes))


def dense(allowed: Any) -> Mask:
    """Any boolean array [Tq, Tk] or [B, Tq, Tk], True where the key is seen; holds T×T."""
    return Mask("dense", (_array(allowed, "dense", "allowed", (2, 3), np.bool_),))


def per_head(masks: Sequence[Mask | None]) -> Mask:
    """One mask for each query head, [Hq] of them (None: no mask). Stands at the top level or under &, | and ~."""
    children = tuple(full() if m is None else m for m in masks)
    for child in children:
        if not isinstance(child, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"per_head takes a list of masks, one a query head; got a {type(child).__name__} in it")
        if contains(child, "per_head"):
            raise ValueError("per_head inside per_head is not defined; give one flat list with a mask a query head")
    if not children:
        raise ValueError("per_head takes one mask for each query head; got an empty list")
    return Mask("per_head", (), children)


def contains(mask: Mask, kind: str) -> bool:
    """Whether a node of this kind occurs in the expression."""
    return mask.kind == kind or any(contains(c, kind) for c in mask.children)


def head_count(mask: Mask) -> int:
    """Number of query heads that the expression tells apart, 1 where all have the same mask."""
    if mask.kind == "per_head":
        return len(mask.children)
    return max((head_count(c) for c in mask.children), default=1)


# checks of single arguments; torch's symbolic integers pass unread


def _integer(value: Any, where: str, name: str) -> Any:
    if isinstance(value, np.integer):
        return int(value)
    if is_array(value):
        raise TypeError(f"{where}: {name} is an integer, got an array of shape {tuple(value.shape)}")
    if isinstance(value, bool) or not (isinstance(value, int) or type(value).__name__ == "SymInt"):
        raise TypeError(f"{where}: {name} is an integer, got {value!r}")
    return value


def _positive(value: Any, where: str, name: str) -> Any:
    value = _integer(value, where, name)
    if isinstance(value, int) and not 1 <= value < 1 << 30:
        raise ValueError(f"{where}: {name} {value} given, expected an integer >= 1 and below 2**30")
    return value


def _side(value: Any, name: str) -> Any:
    if value is None:
        return None
    value = _integer(value, "window", name)
    if isinstance(value, int) and value < 0:
        raise ValueError(f"window: {name} {value} given, expected an integer >= 0, or None for unbounded")
    return value


def _optional(value: Any, where: str, name: str) -> Leaf:
    if value is None:
        return None
    if isinstance(value, (list, tuple)) or is_array(value):
        return _array(value, where, name, (0, 1))
    return _integer(value, where, name)


def _count(value: Any, where: str, name: str) -> Leaf:
    if isinstance(value, (list, tuple)) or is_array(value):
        return _array(value, where, name, (0, 1))
    value = _integer(value, where, name)
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{where}: {name} {value} given, expected an integer >= 0 or an int array [B]")
    return value


def _array(value: Any, where: str, name: str, ndims: tuple[int, ...], dtype: Any = None) -> Leaf:
    # torch tensors are kept by reference and unread, of no dimensions as [1]; all else becomes a read-only copy
    kind = "an integer" if dtype is None else "a boolean"
    if is_tensor(value):
        given = value.dtype
        wrong = given.is_floating_point or given.is_complex or (dtype is None and str(given) == "torch.bool")
        value = value.reshape(1) if value.ndim == 0 and 0 in ndims and not wrong else value
    else:
        value = freeze(value) if isinstance(value, np.ndarray) else _from_list(value, where, name)
        given = value.dtype
        wrong = bool(value.size) and given.kind not in ("iu" if dtype is None else "biu")
    if wrong:
        raise TypeError(f"{where}: {name} is {kind} array, got dtype {given}")
    if isinstance(value, np.ndarray):
        if value.ndim == 0 and 0 in ndims:
            return int(value)
        if dtype is not None or not value.size:
            value = value.astype(dtype or np.int64)
        value.flags.writeable = False
    if value.ndim not in ndims:
        ranks = " or ".join(str(n) for n in ndims)
        raise ValueError(f"{where}: {name} has shape {tuple(value.shape)}, expected {ranks} dimensions")
    return value


def _from_list(value: Any, where: str, name: str) -> Any:
    try:
        return np.array(value)
    except ValueError:
        raise ValueError(f"{where}: {name} has rows of different lengths, expected an array") from None


def _monotone(value: Any, where: str, name: str) -> Leaf:
    if isinstance(value, (list, tuple)):
        value = _from_list(value, where, name)
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "iu" and value.size:
        below = value[..., 1:] < value[..., :-1]
        if below.any():
            at = int(np.argmax(below.reshape(-1))) % (value.shape[-1] - 1)
            raise ValueError(f"{where}: {name} decreases after index {at}; sort the documents so that it never does")
        # numbers that never decrease are small if their ends are; half the memory is half the time
        if value.dtype != np.int32 and value[..., 0].min() >= -(1 << 31) and value[..., -1].max() < 1 << 31:
            value = value.astype(np.int32)
            value.flags.writeable = False
    return _array(value, where, name, (1, 2))


def _only_inside(mask: Mask) -> None:
    # masks that count absolute rows or read arrays have no meaning inside each document
    for kind in ("documents", "packed", "tiles", "dense", "per_head"):
        if contains(mask, kind):
            raise ValueError(f"documents: {kind} cannot stand inside each; combine it outside with &")
    if mask.has_data:
        raise ValueError("documents: masks inside each take integers only, not arrays")
