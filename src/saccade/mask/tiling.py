"""The keys that each tile of query rows visits, PARTIAL or FULL, in closed form from the lowered mask.

Rows and keys are numbered within residue classes: class c has rows q_start[c] + step·a and keys k_start[c] + step·a.
An unstrided problem is one class of step 1. A FULL segment may be reported as PARTIAL, never the other way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .forms import D_HI, D_LO, INF, K_HI, K_LO, Q_HI, Q_LO, STRIDE, Lowered, Rows

PARTIAL, FULL = 1, 2
Ints = NDArray[Any]


@dataclass(frozen=True)
class View:
    """Classes of rows and keys, cut into tiles of `tile` rows. q_start, k_start, nq, nk: int64 [C]."""

    step: int
    q_start: Ints
    k_start: Ints
    nq: Ints
    nk: Ints
    tile: int
    n_tiles: int

    @cached_property
    def plain(self) -> bool:
        """Whether this is the whole problem in one class, which starts at row 0 and key 0."""
        return self.step == 1 and len(self.nq) == 1 and not (self.q_start[0] or self.k_start[0])

    def some(self, chosen: NDArray[np.bool_]) -> View:
        """The chosen classes."""
        q_start, k_start, nq, nk = (a[chosen] for a in (self.q_start, self.k_start, self.nq, self.nk))
        return View(self.step, q_start, k_start, nq, nk, self.tile, self.n_tiles)

    @cached_property
    def rows(self) -> int:
        """One more than the last row of any class."""
        return int((self.q_start + (self.nq - 1) * self.step).max()) + 1

    @cached_property
    def single(self) -> bool:
        """Whether every tile has one row and there is one class, so that "some row" and "every row" are the same."""
        return self.plain and (self.tile == 1 or int(self.nq[0]) == 1)

    @cached_property
    def first(self) -> Ints:
        """First row of each tile, [n_tiles]."""
        return np.arange(0, self.n_tiles * self.tile, self.tile)

    @cached_property
    def last(self) -> Ints:
        """Last row of each tile, [C, 1, n_tiles]; less than the first if a class does not have the tile."""
        return np.minimum(self.first + (self.tile - 1), self.nq.reshape(-1, 1, 1) - 1)

    def key(self, j: Any, c: Any = None) -> Any:
        """The number within each class [C, 1, 1], or within class c, of the first key at or after key j."""
        if self.plain:
            return j
        start = self.k_start.reshape(-1, 1, 1) if c is None else int(self.k_start[c])
        return -((start - j) // self.step)

    def row(self, t: Any, c: Any = None) -> Any:
        """The number within each class, or within class c, of the first row at or after row t."""
        if self.plain:
            return t
        start = self.q_start.reshape(-1, 1, 1) if c is None else int(self.q_start[c])
        return -((start - t) // self.step)


class Reach:
    """The keys of one band per tile: arrays that broadcast to [C, batch, n_tiles], begin inclusive, end exclusive.

    any_lo, any_hi: keys that some row of the tile may see. full_lo, full_hi: keys that every row sees.
    holes: (none_lo, none_hi, part_lo, part_hi) of outside rows: keys that no row sees, keys that some row does not see.
    maps: (Rows or Grid, inside) without a closed form.
    """

    def __init__(self, any_lo: Any, any_hi: Any, full_lo: Any, full_hi: Any) -> None:
        self.any_lo, self.any_hi, self.full_lo, self.full_hi = any_lo, any_hi, full_lo, full_hi
        self.holes: list[tuple[Any, Any, Any, Any]] = []
        self.maps: list[tuple[Any, bool]] = []

    def narrow(self, any_lo: Any, any_hi: Any, full_lo: Any, full_hi: Any) -> None:
        """Intersect with another interval per tile."""
        self.any_lo, self.any_hi = np.maximum(self.any_lo, any_lo), np.minimum(self.any_hi, any_hi)
        self.full_lo, self.full_hi = np.maximum(self.full_lo, full_lo), np.minimum(self.full_hi, full_hi)

    def round(self, q: int, nk: Any) -> None:
        """Round visited keys outward to multiples of q and full keys inward; nk counts as a multiple."""
        lo, hi = self.any_lo // q * q, np.minimum(-(-self.any_hi // q) * q, nk)
        self.any_lo, self.any_hi = lo, np.where(np.less(self.any_lo, self.any_hi), hi, lo)
        self.full_lo = -(-self.full_lo // q) * q
        self.full_hi = np.where(self.full_hi >= nk, nk, self.full_hi // q * q)
        self.holes = [(-(-a // q) * q, b // q * q, c // q * q, -(-d // q) * q) for a, b, c, d in self.holes]


def fitting(tile: int, least: int, masks: Iterable[Lowered], keys: bool = False) -> int:
    """A tile of rows (or keys), halved until it fits the masks' blocks but not below `least`; unchanged if least is 0.

    Blocks smaller than `least` are ignored: such small tiles cost more than visiting pairs that are not allowed.
    """
    blocks = [g.block_k if keys else g.block_q for m in masks for g in m.grids]
    smallest = min((n for n in blocks if n >= least), default=tile) if least else tile
    while tile > smallest and tile // 2 >= least:
        tile //= 2
    return tile


def reaches(lowered: Lowered, view: View, quantum: int = 1) -> list[Reach]:
    """The reach of every band of a mask over the tiles of a view."""
    if lowered.bands.shape[0] == 1:
        least = most = lowered.bands[0].tolist()
    else:
        least, most = lowered.bands.min(0).tolist(), lowered.bands.max(0).tolist()
    uses = lowered.uses.tolist()
    bands: list[Reach] = []
    for n in range(lowered.nb):
        columns: list[Any] = [
            least[n][c] if least[n][c] == most[n][c] else lowered.bands[:, n, c].astype(np.int64).reshape(1, -1, 1)
            for c in range(8)
        ]
        reach = _band(columns, view)
        _factors(reach, lowered, uses[n], view)
        if quantum > 1:
            reach.round(quantum, view.nk.reshape(-1, 1, 1))
        bands.append(reach)
    return bands


def _band(band: list[Any], view: View) -> Reach:
    d_lo, d_hi = band[D_LO], band[D_HI]
    k_lo, k_hi = view.key(band[K_LO]), view.key(band[K_HI])
    first, last = view.first, view.last
    begin, end = first, last
    ints = type(band[Q_LO]) is int and type(band[Q_HI]) is int
    bounded = not ints or band[Q_LO] > 0 or band[Q_HI] < view.rows
    if bounded:
        q_lo, q_hi = view.row(band[Q_LO]), view.row(band[Q_HI])
        begin, end = np.maximum(first, q_lo), np.minimum(last, q_hi - 1)
    any_lo, any_hi, full_lo, full_hi = k_lo, k_hi, k_lo, k_hi
    if type(d_hi) is not int or d_hi < INF:
        away = _difference(d_hi, view, up=False)
        any_lo = np.maximum(k_lo, begin - away)
        full_lo = any_lo if view.single else np.maximum(k_lo, last - away)
    if type(d_lo) is not int or d_lo > -INF:
        away = _difference(d_lo, view, up=True) - 1
        any_hi = np.minimum(k_hi, end - away)
        full_hi = any_hi if view.single else np.minimum(k_hi, first - away)
    if bounded or not view.plain:
        # clip to the rows of the tile that are in the band and in the class
        any_hi = np.where(begin <= end, any_hi, any_lo)
        full_hi = np.where((first == begin) & (last == end) & (first <= last), full_hi, full_lo)
    if type(band[STRIDE]) is not int or band[STRIDE] != 1:
        full_hi = full_lo
    return Reach(any_lo, any_hi, full_lo, full_hi)


def _difference(d: Any, view: View, up: bool) -> Any:
    # a bound of t - j as a bound of the difference of numbers within the class
    if view.plain:
        return d
    d = d - (view.q_start - view.k_start).reshape(-1, 1, 1)
    return -(-d // view.step) if up else d // view.step


def _factors(reach: Reach, lowered: Lowered, use: list[int], view: View) -> None:
    if not any(use):
        return
    for r, rows in enumerate(lowered.rows):
        inside, outside = use[0] >> r & 1, use[1] >> r & 1
        if not (inside or outside):
            continue
        if rows.axis == "k" and not rows.monotone:
            reach.maps += [(rows, flag) for flag, on in ((True, inside), (False, outside)) if on]
            continue
        bounds = _tile_rows(rows, view) if rows.axis == "q" else _tile_columns(rows, view)
        if inside:
            reach.narrow(*bounds)
        if outside:
            any_lo, any_hi, full_lo, full_hi = bounds
            reach.holes.append((full_lo, full_hi, any_lo, any_hi))
    for g, grid in enumerate(lowered.grids):
        reach.maps += [(grid, flag) for n, flag in ((2, True), (3, False)) if use[n] >> g & 1]


def _tile_rows(rows: Rows, view: View) -> tuple[Any, Any, Any, Any]:
    # hull and intersection of the intervals of a tile's rows, each [C, batch, n_tiles]
    if rows.monotone:
        start = view.q_start.reshape(-1, 1)
        top = rows.lo.shape[1] - 1
        begin = np.minimum(start + view.step * view.first, top)
        end = np.maximum(np.minimum(start + view.step * view.last[:, 0], top), 0)
        picked = [
            a[:, at].transpose(1, 0, 2)
            for at, a in ((begin, rows.lo), (end, rows.hi), (end, rows.lo), (begin, rows.hi))
        ]
    else:
        picked = _reduced_rows(rows, view)
    if view.plain:
        return picked[0], picked[1], picked[2], picked[3]
    first, last, inner_lo, inner_hi = (view.key(a.astype(np.int64)) for a in picked)
    return first, last, inner_lo, inner_hi


def _reduced_rows(rows: Rows, view: View) -> list[Ints]:
    C, batch = len(view.nq), rows.batch
    limits = [np.zeros((C, batch, view.n_tiles), np.int64) for _ in range(4)]
    some = rows.lo < rows.hi
    outer_lo, outer_hi = np.where(some, rows.lo, INF), np.where(some, rows.hi, 0)
    for c in range(C):
        mine = slice(int(view.q_start[c]), None, view.step)
        starts = view.first[view.first < view.nq[c]]
        if not len(starts):
            continue
        for out, function, source in (
            (limits[0], np.minimum, outer_lo),
            (limits[1], np.maximum, outer_hi),
            (limits[2], np.maximum, rows.lo),
            (limits[3], np.minimum, rows.hi),
        ):
            out[c, :, : len(starts)] = function.reduceat(source[:, mine], starts, axis=1)
    return limits


def _tile_columns(rows: Rows, view: View) -> tuple[Any, Any, Any, Any]:
    # monotone intervals of rows per key: the keys of a tile are an interval, too
    C, batch = len(view.nq), rows.batch
    positions = np.zeros((4, C, batch, view.n_tiles), np.int64)
    for c in range(C):
        mine = slice(int(view.k_start[c]), None, view.step)
        first, last = view.first, view.last[c, 0]
        for b in range(batch):
            lo, hi = view.row(rows.lo[b, mine], c), view.row(rows.hi[b, mine], c)
            positions[0, c, b] = np.searchsorted(hi, first, "right")
            positions[1, c, b] = np.searchsorted(lo, last, "right")
            positions[2, c, b] = np.searchsorted(hi, last, "right")
            positions[3, c, b] = np.searchsorted(lo, first, "right")
    return positions[0], positions[1], positions[2], positions[3]
