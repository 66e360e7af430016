"""Convert FlashMask's columns, the rows of queries that do not see each key, from and to masks (Wang et al., 2024).

PaddlePaddle's `flashmask_attention` takes them as int32 [B, H, Tk, n], together with `causal`. They name the rows t
that do not see a key, LT in the lower left triangle and UT in the upper right one, from S to E, exclusive:

    causal      n = 1: LTS <= t                   n = 2: LTS <= t < LTE
    not causal  n = 2: LTS <= t, and t < UTE      n = 4: LTS <= t < LTE, and UTS <= t < UTE

With causal the keys after each query are also hidden; the last query is aligned with the last key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import mask as masks
from ..arrays import Array
from ..mask import Mask, columns
from ..mask.contents import host
from ..mask.forms import Lowered
from ..mask.heads import head_count
from ..mask.lowering import lower
from ..mask.segments import segments
from ..mask.strides import classes_of
from ..mask.tiling import FULL, View

Ints = NDArray[np.int32]
# rows per chunk if a mask has no closed form
_CHUNK = 64


def from_flashmask(startend_row_indices: Array, causal: bool = False, *, Hq: int | None = None) -> Mask:
    """The mask that hides the pairs that FlashMask's columns hide (Wang et al., 2024).

    Args:
        startend_row_indices: int32 [B, H, Tk, n], a NumPy array or torch tensor, as in PaddlePaddle's
            `flashmask_attention`. It is copied.
        causal: with True n is 1 or 2, with False 2 or 4.
        Hq: the number of query heads, a multiple of H; None for H.

    Returns:
        A mask, with `per_head` if H > 1.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or H does not divide Hq.

    Examples:
        >>> from saccade.integrations.flashmask import from_flashmask
        >>> start = np.array([2, 2, 5, 5, 5], np.int32)  # rows from start[j] on do not see key j
        >>> print(from_flashmask(start.reshape(1, 1, 5, 1), causal=True).draw(5, 5))
        █····
        ██···
        ··█··
        ··██·
        ··███
    """
    x, counts = host(startend_row_indices), (1, 2) if causal else (2, 4)
    if x.ndim != 4 or x.shape[-1] not in counts or not x.shape[1]:
        raise ValueError(
            f"startend_row_indices has shape {list(x.shape)} and causal is {causal}; expected [B, H, Tk, n], H >= 1, "
            f"n of {counts[0]} or {counts[1]}"
        )
    if x.dtype != np.int32:
        raise TypeError(f"startend_row_indices has dtype {x.dtype}; expected int32")
    H = x.shape[1]
    group, rest = divmod(H if Hq is None else Hq, H)
    if rest or not group:
        raise ValueError(f"startend_row_indices has {H} heads and Hq is {Hq}; expected a multiple of these heads")
    bounds = np.moveaxis(x[0] if len(x) == 1 else x.swapaxes(0, 1), -1, 1)
    parts = [_of_head(list(bounds[h]), causal) for h in range(H)]
    return parts[0] if H == 1 else masks.per_head([mask for mask in parts for _ in range(group)])


def _of_head(bounds: list[Ints], causal: bool) -> Mask:
    # bounds [Tk] or [B, Tk]
    if causal:
        seen = columns(stop=bounds[0]) if len(bounds) == 1 else ~_between(*bounds)
        return masks.causal() & seen
    if len(bounds) == 2:
        return _between(bounds[1], bounds[0])
    return ~_between(*bounds[:2]) & ~_between(*bounds[2:])


def _between(start: Ints, stop: Ints) -> Mask:
    # FlashMask's columns may end before they start, and then contain no row
    return columns(start, np.maximum(start, stop))


def to_flashmask(mask: Mask, B: int, Tq: int, Tk: int) -> tuple[Ints, bool]:
    """FlashMask's columns for a mask, as few as possible (Wang et al., 2024).

    Args:
        mask: the mask.
        B, Tq, Tk: batch size, queries and keys.

    Returns:
        (startend_row_indices, causal): int32 [B, H, Tk, n], where H is 1 or the number of masks in `per_head`, and the
        matching bool.

    Raises:
        ValueError: a key is hidden in more than two runs of rows, for which FlashMask has no columns; or the arrays of
            the mask do not fit these sizes.

    Examples:
        >>> from saccade.integrations.flashmask import to_flashmask
        >>> mask = saccade.mask.causal() & saccade.mask.documents([0, 0, 1, 1, 1])
        >>> startend_row_indices, causal = to_flashmask(mask, 1, 5, 5)
        >>> startend_row_indices[0, 0, :, 0], causal
        (array([2, 2, 5, 5, 5], dtype=int32), True)
    """
    heads = lower(mask, B, head_count(mask), Tq, Tk)
    runs = np.stack([_hidden(low, B, Tq, Tk) for low in heads.masks], 2)[:, :, heads.head]
    # first and second run of every key, [B, H, Tk] each; a missing run starts at Tq
    a0, a1, b0, b1 = runs
    above = np.clip(np.arange(Tk) - (Tk - Tq), 0, Tq)
    # whether the first run hides all rows that causal hides, and whether it hides more
    covers, more = (above == 0) | (a0 == 0) & (a1 >= above), a1 > above
    if (covers & (~more | (b0 == Tq))).all():
        start, stop = np.where(more, (a0, a1), (b0, b1))
        return _indices(start) if (stop == Tq).all() else _indices(start, stop), True
    upper = (a0 == 0) | (b0 < Tq)
    start, stop = np.where(upper, (b0, b1), (a0, a1))
    first, end = np.where(upper, (a0, a1), 0)
    plain = (stop == Tq).all() and not first.any()
    return _indices(start, end) if plain else _indices(start, stop, first, end), False


def _indices(*columns: NDArray[Any]) -> Ints:
    return np.stack(columns, -1).astype(np.int32)


def _hidden(low: Lowered, B: int, Tq: int, Tk: int) -> Ints:
    # (begin, end, begin, end) of the runs of rows that do not see a key, int32 [4, B, Tk], (Tq, Tq) for none
    keys, batch = low.transpose(), low.batch
    counts, seg = segments(keys, View(1, *classes_of(1, 0, Tk, Tq), 1, Tk), batch, _CHUNK)
    key, begin, end = _seen(keys, np.repeat(np.arange(batch * Tk), counts), seg, Tk)
    # one gap before each run of rows that see the key, and one after the last
    at = np.arange(len(key)) + key
    lo, hi = np.zeros(len(key) + batch * Tk, np.int32), np.full(len(key) + batch * Tk, Tq, np.int32)
    hi[at], lo[at + 1] = begin, end
    gaps = np.flatnonzero(lo < hi)
    of = np.repeat(np.arange(batch * Tk), np.bincount(key, minlength=batch * Tk) + 1)[gaps]
    count = np.bincount(of, minlength=batch * Tk)
    if count.max(initial=0) > 2:
        b, j = divmod(int(np.argmax(count > 2)), Tk)
        raise ValueError(
            f"key {j} of batch entry {b} is hidden in {count[b * Tk + j]} runs of rows; FlashMask has columns for two: "
            "give that side a dense mask, mask.evaluate(B, Hq, Tq, Tk)"
        )
    place = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    rows = np.full((2, 2, batch * Tk), Tq, np.int32)
    rows[place, 0, of], rows[place, 1, of] = lo[gaps], hi[gaps]
    return np.broadcast_to(rows.reshape(4, batch, Tk), (4, B, Tk))


def _seen(keys: Lowered, key: NDArray[Any], seg: Ints, Tk: int) -> NDArray[Any]:
    # (key, begin, end) of the runs of rows that see keys, [3, n], sorted; partial segments are tested pair by pair
    full = seg[:, 2] == FULL
    runs = [np.stack([key, seg[:, 0], seg[:, 1]])[:, full]]
    for n in np.flatnonzero(~full):
        begin, end, _ = seg[n].tolist()
        b, j = divmod(int(key[n]), Tk)
        edges = np.flatnonzero(np.diff(keys.test(j, np.arange(begin, end), b), prepend=False, append=False)) + begin
        runs.append(np.stack([np.full(len(edges) // 2, key[n]), edges[::2], edges[1::2]]))
    joined = np.concatenate(runs, 1)
    return joined[:, np.lexsort((joined[1], joined[0]))]
