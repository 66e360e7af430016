"""Build Rows of the lowered form, intervals of keys per query row, from runs, without a search per element."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .forms import INF, Rows

Ints = NDArray[Any]


def flat(array: Ints) -> Ints:
    """An array [n] or [B, n] as [1 | B, n]; an empty batch as one entry of zeros."""
    if array.ndim == 1:
        return array[None]
    return array if len(array) else np.zeros((1, array.shape[1]), array.dtype)


def stacked(parts: list[tuple[Ints, Ints]]) -> Rows:
    """Monotone query rows from one (lo, hi) per batch entry."""
    lo = np.stack([p[0] for p in parts]) if len(parts) > 1 else parts[0][0][None]
    hi = np.stack([p[1] for p in parts]) if len(parts) > 1 else parts[0][1][None]
    return Rows("q", lo.astype(np.int32, copy=False), hi.astype(np.int32, copy=False), True)


def run_starts(ids: Ints) -> Ints:
    """The index at which each run of equal numbers starts, int64 [runs]."""
    if not ids.size:
        return np.zeros(0, np.int64)
    changes = np.flatnonzero(ids[1:] != ids[:-1])
    starts = np.zeros(len(changes) + 1, np.int64)
    np.add(changes, 1, out=starts[1:])
    return starts


def run_of(flags: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """(first index, last index + 1) of True in each row [..., n], int64 [...]; equal if there is none."""
    n = flags.shape[-1]
    if not n:
        return np.zeros(flags.shape[:-1], np.int64), np.zeros(flags.shape[:-1], np.int64)
    start = flags.argmax(-1)
    return start, np.where(flags[..., 0] | (start > 0), n - flags[..., ::-1].argmax(-1), start)


def by_position(ids: Ints, offset: Any, Tq: int) -> Rows:
    """Documents by ids of positions, [1 | B, Tk]: row t sees the run that contains its position t + offset."""
    Tk = ids.shape[1]
    bounds: list[Ints] = []
    for row in ids:
        starts = run_starts(row)
        bounds.append(np.append(starts, Tk) if Tk else np.zeros(1, np.int64))
    return packed_by_position(bounds, offset, Tq, Tk)


def packed_by_position(bounds: list[Ints], offset: Any, Tq: int, Tk: int) -> Rows:
    """Documents with positions [bounds[d], bounds[d + 1]); one list of bounds per batch entry or one for all."""
    offsets = [offset] if type(offset) is int else [int(o) for o in offset]
    count = max(len(bounds), len(offsets))
    parts: list[tuple[Ints, Ints]] = []
    for b in range(count):
        cu = np.clip(bounds[b % len(bounds)], 0, Tk)
        parts.append(packed_row(np.clip(cu - offsets[b % len(offsets)], 0, Tq), cu, Tq))
    return stacked(parts)


def packed_row(cu_q: Ints, cu_k: Ints, Tq: int) -> tuple[Ints, Ints]:
    """(lo, hi), int32 [Tq]: rows cu_q[d] <= t < cu_q[d + 1] see keys cu_k[d] <= j < cu_k[d + 1], others none."""
    n = len(cu_q)
    counts = np.empty(n + 1, np.int64)
    counts[0], counts[n] = cu_q[0], Tq - cu_q[-1]
    np.subtract(cu_q[1:], cu_q[:-1], out=counts[1:n])
    # before the first and after the last document the interval is empty
    edges = np.empty(n + 2, np.int32)
    edges[1:-1], edges[0], edges[-1] = cu_k, cu_k[0], cu_k[-1]
    return np.repeat(edges[:-1], counts), np.repeat(edges[1:], counts)


def matching(ids_q: Ints, ids_k: Ints) -> Rows:
    """Documents by ids of rows [1 | B, Tq] and of keys [1 | B, Tk]."""
    if ids_q.dtype != ids_k.dtype:
        # of int64 and uint64, NumPy would compare rounded numbers
        ids_q, ids_k = ids_q.astype(np.int64), ids_k.astype(np.int64)
    parts: list[tuple[Ints, Ints]] = []
    for b in range(max(len(ids_q), len(ids_k))):
        mine, theirs = ids_q[b % len(ids_q)], ids_k[b % len(ids_k)]
        starts = run_starts(mine)
        counts = np.diff(np.append(starts, len(mine)))
        lo = np.searchsorted(theirs, mine[starts], "left").astype(np.int32)
        hi = np.searchsorted(theirs, mine[starts], "right").astype(np.int32)
        parts.append((np.repeat(lo, counts), np.repeat(hi, counts)))
    return stacked(parts)


def chunks(size: int, offset: Any, Tq: int, Tk: int) -> Rows:
    """Row t sees the chunk of `size` keys that contains its position t + offset."""
    first = (np.arange(Tq) + np.reshape(offset, (-1, 1))) // size * size
    lo, hi = np.clip(first, 0, Tk), np.clip(first + size, 0, Tk)
    return Rows("q", lo.astype(np.int32), hi.astype(np.int32), True)


def listed(positions: Ints, size: int, other: int, axis: str, offset: Any = 0) -> Rows:
    """The whole other axis (length `other`) at the listed positions [1 | B, m] of an axis of length `size`."""
    at = positions - np.reshape(offset, (-1, 1))
    lo = np.zeros((at.shape[0], size), np.int32)
    hi = np.zeros_like(lo)
    b, m = np.nonzero((at >= 0) & (at < size))
    hi[b, at[b, m]] = other
    return Rows(axis, lo, hi)


def between(start: Ints | None, stop: Ints | None, size: int, other: int, axis: str) -> Rows:
    """Intervals start <= x < stop of the other axis (length `other`) for each index of an axis of length `size`.

    start, stop: [1 | B, size]; None for 0 and `other`.
    """
    lo = np.zeros((1, size), np.int32) if start is None else np.clip(start, 0, other)
    hi = np.full((1, size), other, np.int32) if stop is None else np.clip(stop, 0, other)
    lo, hi = (np.ascontiguousarray(x, np.int32) for x in np.broadcast_arrays(lo, hi))
    return Rows(axis, lo, hi, ordered(lo, hi))


def ordered(lo: Ints, hi: Ints) -> bool:
    """Whether both ends of intervals [batch, n] never decrease."""
    return bool((lo[:, 1:] >= lo[:, :-1]).all() and (hi[:, 1:] >= hi[:, :-1]).all())


def intersection(one: Rows, two: Rows) -> Rows:
    """The intersection of two Rows of the same axis."""
    lo, hi = np.maximum(one.lo, two.lo), np.minimum(one.hi, two.hi)
    return Rows(one.axis, lo, hi, one.monotone and two.monotone)


class Documents:
    """The documents of a packed mask, flat over (batch entry, document).

    qs, ks: the first row and key of each; nq, nk: numbers of rows and keys; all int64 [batch * n]. Documents take the
    place of the batch while the mask inside each is lowered.
    """

    def __init__(self, cu_q: Ints, cu_k: Ints, Tq: int, Tk: int) -> None:
        self.Tq, self.Tk = Tq, Tk
        self.batch = max(len(cu_q), len(cu_k))
        shape = (self.batch, cu_q.shape[1])
        self.cu_q = np.broadcast_to(np.clip(cu_q, 0, Tq), shape)
        self.cu_k = np.broadcast_to(np.clip(cu_k, 0, Tk), shape)
        self.qs, self.ks = self.cu_q[:, :-1].reshape(-1), self.cu_k[:, :-1].reshape(-1)
        self.nq, self.nk = np.diff(self.cu_q).reshape(-1), np.diff(self.cu_k).reshape(-1)

    def spread(self, values: Any, outside: int = 0) -> Ints:
        """A number per document as int32 [batch, Tq], a number per row; `outside` for rows of no document."""
        n = self.cu_q.shape[1] - 1
        full = np.full((self.batch, n + 2), outside, np.int32)
        full[:, 1:-1] = np.clip(np.broadcast_to(values, self.qs.shape), -INF, INF).reshape(self.batch, n)
        counts = np.empty((self.batch, n + 2), np.int64)
        counts[:, 0], counts[:, -1] = self.cu_q[:, 0], self.Tq - self.cu_q[:, -1]
        counts[:, 1:-1] = self.nq.reshape(self.batch, n)
        return np.repeat(full.reshape(-1), counts.reshape(-1)).reshape(self.batch, self.Tq)

    def rows(self, lo: Ints, hi: Ints) -> Rows:
        """Query rows from key bounds [batch, Tq], clipped to the document of each row."""
        first, last = self.spread(self.ks), self.spread(self.ks + self.nk)
        lo = np.minimum(np.maximum(lo, first), last)
        hi = np.minimum(np.maximum(hi, lo), last)
        return Rows("q", lo.astype(np.int32, copy=False), hi.astype(np.int32, copy=False), ordered(lo, hi))

    def chunks(self, size: int, offset: Any) -> Rows:
        """Chunks of `size` inside each document; offset [batch * n]: position minus row, within each document."""
        place = np.arange(self.Tq, dtype=np.int32) + self.spread(offset - self.qs)
        first = place // size * size
        start = self.spread(self.ks)
        return self.rows(start + np.maximum(first, 0), start + first + size)
