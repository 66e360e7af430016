"""Convert boolean arrays to exact mask expressions: bands or ranges of keys if the array consists of them."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import ArrayOrList
from . import arguments
from .algebra import Mask
from .contents import host
from .forms import INF
from .layouts import columns, dense, ranges
from .lengths import prefix
from .positions import causal, full, window

Ints = NDArray[Any]

__all__ = ["from_dense"]


def from_dense(allowed: ArrayOrList) -> Mask:
    """The mask of a boolean array, in the smallest form found.

    The form is an expression of `causal`, `window`, `prefix` and `full` if there is one; else `ranges` if each row sees
    one range of keys; else `columns` if each key is seen by one range of rows; else `dense`. The mask equals the array
    exactly at the array's sizes. Positions count from the bottom right, so `& keys(stop)` moves them as usual.

    Args:
        allowed: bool [Tq, Tk] or [B, Tq, Tk], True where row t sees key j. It is read now, a tensor on a device by a
            copy to the host; later writes have no effect.

    Raises:
        TypeError: allowed is an array of floats.
        ValueError: allowed has another number of dimensions.

    Examples:
        >>> mask.from_dense(np.tril(np.ones((1024, 1024), bool)))
        causal()
    """
    array = host(arguments.array(allowed, "from_dense", "allowed", (2, 3), np.bool_)) != 0
    if not array.size:
        return dense(array)
    entries = array if array.ndim == 3 else array[None]
    Tk = entries.shape[2]
    of_rows = _runs(entries, 2)
    if of_rows is not None:
        known = _band(*of_rows, Tk)
        known = _causal_or_prefix(*of_rows, Tk) if known is None else known
        return ranges(*map(_squeezed, of_rows)) if known is None else known
    of_keys = _runs(entries, 1)
    return dense(_squeezed(entries)) if of_keys is None else columns(*map(_squeezed, of_keys))


def _runs(flags: NDArray[np.bool_], axis: int) -> tuple[Ints, Ints] | None:
    """Start and end of the only run of True along an axis, int64 [B, n]; None if there are two runs anywhere."""
    begins = flags.copy()
    now, before = begins.swapaxes(1, axis), flags.swapaxes(1, axis)
    now[:, 1:] &= ~before[:, :-1]
    if (begins.sum(axis, dtype=np.int32) > 1).any():
        return None
    count = flags.sum(axis)
    lo = np.zeros_like(count)
    at = np.nonzero(begins)
    lo[at[0], at[3 - axis]] = at[axis]
    hi = lo + count
    # an empty run gets the end of the runs before it, so that ordered runs stay ordered
    so_far = np.maximum.accumulate(np.where(lo < hi, hi, 0), axis=1)
    return np.where(lo < hi, lo, so_far), np.where(lo < hi, hi, so_far)


def _band(lo: Ints, hi: Ints, Tk: int) -> Mask | None:
    """The mask whose rows see lo <= j < hi, [B, Tq], as a band with a key range per batch entry; or None."""
    Tq, some = lo.shape[1], lo < hi
    if not some.any():
        return ~full()
    t = np.arange(Tq)

    def holds(d_lo: Any, d_hi: Any, k_lo: Any, k_hi: Any) -> bool:
        first, last = np.maximum(k_lo[:, None], t - d_hi), np.minimum(k_hi[:, None], t - d_lo + 1)
        return bool(np.where(some, (first == lo) & (last == hi), first >= last).all())

    # if the mask is a band, it is the tightest band around all pairs
    hull: list[Any] = [(t - hi + 1)[some].min(), (t - lo)[some].max()]
    hull += [np.where(some, lo, Tk).min(1) * some.any(1), np.where(some, hi, 0).max(1)]
    if not holds(*hull):
        return None
    for n, left_open in enumerate((-INF, INF, np.zeros_like(hull[2]), np.full_like(hull[3], Tk))):
        opened = [*hull[:n], left_open, *hull[n + 1 :]]
        hull = opened if holds(*opened) else hull
    d_lo, d_hi, k_lo, k_hi = hull
    parts = [] if d_lo == -INF and d_hi == INF else [_diagonal(int(d_lo), int(d_hi), Tk - Tq)]
    parts += [prefix(_squeezed(k_hi))] if (k_hi < Tk).any() else []
    parts += [~prefix(_squeezed(k_lo))] if k_lo.any() else []
    return reduce(and_, parts) if parts else full()


def _diagonal(d_lo: int, d_hi: int, offset: int) -> Mask:
    # d_lo <= t - j <= d_hi, without an explicit offset if row t is at position t + offset
    left, right = d_hi + offset, -d_lo - offset
    if d_hi == INF:
        return causal() if right == 0 else window(None, right) if right > 0 else causal(-d_lo)
    if d_lo == -INF:
        return window(left) if left >= 0 else ~causal() if left == -1 else ~causal(-d_hi - 1)
    return window(left, right) if left >= 0 and right >= 0 else window(d_hi - d_lo, 0, -d_lo)


def _causal_or_prefix(lo: Ints, hi: Ints, Tk: int) -> Mask | None:
    # keys up to a diagonal, and a prefix of keys that every row sees
    t, n = np.arange(lo.shape[1]), hi.min(1)
    beyond = hi > n[:, None]
    if lo.any() or not beyond.any():
        return None
    d_lo = int((t - hi + 1)[beyond].min())
    if (hi != np.minimum(np.maximum(n[:, None], t - d_lo + 1), Tk)).any():
        return None
    return _diagonal(d_lo, INF, Tk - lo.shape[1]) | prefix(_squeezed(n))


def _squeezed(values: Ints) -> Any:
    # the values of one batch entry if all entries are equal, a number if values is [B]
    if (values == values[:1]).all():
        return values[0] if values.ndim > 1 else int(values[0])
    return values
