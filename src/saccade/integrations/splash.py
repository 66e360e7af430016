"""Convert masks from and to those of JAX's splash attention, the classes of its splash_attention_mask.

They are read by the names of their classes and attributes, without JAX; only `to_splash` imports it.
"""

from __future__ import annotations

import functools
import importlib
import operator
from typing import Any

import numpy as np

from ..errors import Unsupported
from ..mask import Mask, causal, chunked, dense, documents, full, per_head, window
from ..mask import forms as f
from ..mask.heads import head_count
from ..mask.lowering import lower
from ..mask.rows import chunks

MODULE = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask"
# rows of a NumpyMask that are filled at once
_ROWS = 256


def from_splash(mask: Any) -> Mask:
    """The mask that equals a splash mask; JAX is not needed.

    Args:
        mask: a splash mask of shape [Tq, Tk], or a MultiHeadMask [Hq, Tq, Tk]. A NumpyMask stays a T×T array;
            other classes need no such array.

    Returns:
        A mask for these sizes, with `per_head` for a MultiHeadMask.

    Raises:
        Unsupported: another class, or rows in another order (`q_sequence`).

    Examples:
        >>> from jax.experimental.pallas.ops.tpu.splash_attention import CausalMask
        >>> from saccade.integrations.splash import from_splash
        >>> from_splash(CausalMask((1024, 1024)))
        causal(0)
    """
    name = type(mask).__name__
    if name not in _READERS:
        known = ", ".join(_READERS)
        raise Unsupported("splash", [f"a mask of class {name}; expected {known}; give NumpyMask(mask[:, :]) instead"])
    rows = getattr(mask, "q_sequence", None)
    if rows is not None and not np.array_equal(rows, np.arange(mask.shape[0])):
        raise Unsupported("splash", [f"{name} with another q_sequence; expected rows in order, 0 to Tq - 1"])
    return _READERS[name](mask)


def to_splash(mask: Mask, Tq: int, Tk: int) -> Any:
    """A mask as a splash mask of JAX.

    One diagonal band becomes a FullMask, CausalMask or LocalMask, and causal chunks a ChunkedCausalMask, for which
    splash attention has kernels. Unions of bands stay lazy, and any other mask becomes a T×T NumpyMask. It is better
    to pass documents to splash attention as SegmentIds than in the mask.

    Args:
        mask: the mask, the same for all batch entries.
        Tq, Tk: queries and keys.

    Returns:
        A splash mask of shape [Tq, Tk], or a MultiHeadMask [Hq, Tq, Tk] if the mask has `per_head`.

    Raises:
        Unsupported: JAX is not installed.
        ValueError: the mask differs between batch entries.

    Examples:
        >>> from saccade.integrations.splash import to_splash
        >>> splash = to_splash(saccade.mask.window(255, 0), 1024, 1024)
        >>> type(splash).__name__, splash.shape
        ('LocalMask', (1024, 1024))
    """
    try:
        classes = importlib.import_module(MODULE)
    except ImportError as error:
        raise Unsupported("splash", [f"its masks come from JAX, and: {error}; pip install jax"]) from error
    heads = lower(mask, 1, head_count(mask), Tq, Tk)
    parts = [_written(low, Tq, Tk, classes) for low in heads.masks]
    return parts[0] if len(heads.head) == 1 else classes.MultiHeadMask([parts[h] for h in heads.head])


def _local(mask: Any) -> Mask:
    (left, right), offset = mask.window_size, mask.offset
    if min(left or 0, right or 0) >= 0:
        return window(left, right, offset)
    # a negative side excludes the diagonal
    below = full() if right is None else causal(offset + right)
    return below if left is None else below & ~causal(offset - left - 1)


def _chunks(mask: Any) -> Mask:
    # splash counts chunks and the diagonal from the first row
    (Tq, Tk), size = mask.shape, mask.chunk_size
    same = chunked(size) if Tq == Tk else documents(np.arange(Tq) // size, np.arange(Tk) // size)
    return same & causal(0)


_READERS = {
    "FullMask": lambda mask: full(),
    "CausalMask": lambda mask: causal(mask.offset),
    "LocalMask": _local,
    "ChunkedCausalMask": _chunks,
    "NumpyMask": lambda mask: dense(mask.array),
    "LogicalOr": lambda mask: from_splash(mask.left) | from_splash(mask.right),
    "LogicalAnd": lambda mask: from_splash(mask.left) & from_splash(mask.right),
    "MultiHeadMask": lambda mask: per_head([from_splash(one) for one in mask.masks]),
}


def _written(low: f.Lowered, Tq: int, Tk: int, classes: Any) -> Any:
    bands = low.bands[0].tolist()
    plain = [band[f.K_LO :] == [0, Tk, 0, Tq, 1, 0] for band in bands]
    if bands and all(plain) and not low.uses.any():
        return functools.reduce(operator.or_, [_band(band, (Tq, Tk), classes) for band in bands])
    size = _chunk_size(low, Tq, Tk)
    if size:
        return classes.ChunkedCausalMask((Tq, Tk), size)
    pairs = np.empty((Tq, Tk), np.bool_)
    for start in range(0, Tq, _ROWS):
        pairs[start : start + _ROWS] = low.test(np.arange(start, min(start + _ROWS, Tq))[:, None], np.arange(Tk))
    return classes.NumpyMask(pairs)


def _band(band: list[int], shape: tuple[int, int], classes: Any) -> Any:
    # d_lo <= t - j <= d_hi
    d_lo, d_hi = band[: f.K_LO]
    if d_lo <= -f.INF and d_hi >= f.INF:
        return classes.FullMask(shape)
    if d_hi >= f.INF:
        return classes.CausalMask(shape, -d_lo)
    offset = shape[1] - shape[0]
    return classes.LocalMask(shape, (d_hi + offset, None if d_lo <= -f.INF else -d_lo - offset), offset)


def _chunk_size(low: f.Lowered, Tq: int, Tk: int) -> int:
    # the size of chunks with a causal diagonal through the first row and key; 0 for any other mask
    if low.bands.tolist() != [[[0, f.INF, 0, Tk, 0, Tq, 1, 0]]] or low.uses.tolist() != [[1, 0, 0, 0]]:
        return 0
    rows = low.rows[0]
    size = int(rows.hi[0, 0])
    like = chunks(size, 0, Tq, Tk) if size and rows.axis == "q" else None
    return size if like and np.array_equal(rows.lo, like.lo) and np.array_equal(rows.hi, like.hi) else 0
