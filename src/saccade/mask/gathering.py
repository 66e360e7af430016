"""Reorder the keys so that scattered columns, which many rows see, become adjacent.

If 8 of every 128 keys are seen by all later rows, every tile of keys contains a few of them and every row visits every
tile. Moved after the other keys they fill tiles of their own, and each row sees an interval of each of the two groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .forms import ROWS_IN, ROWS_OUT, STRIDE, Int32, Lowered, LoweredHeads, Rows
from .lowering import finish
from .rows import ordered
from .size import TooManyBands
from .terms import BITS, Terms, term

Ints = NDArray[Any]


class Gathered(NamedTuple):
    """Masks over reordered keys: their key j is key order[j] of the call. order: int32 [Tk]."""

    order: Int32
    heads: LoweredHeads


def gathered(heads: LoweredHeads, Tq: int, Tk: int, tile: int) -> Gathered | None:
    """The masks with their columns moved after all other keys.

    Columns are keys with an interval of rows each, in Rows that are not monotone. Returns None if there are no columns,
    if they already fill tiles of `tile` keys, or if the masks have a batch, strides, rows outside or grids.
    """
    named = [rows for mask in heads.masks for rows in mask.rows if rows.axis == "k" and not rows.monotone]
    if not named or not all(_intervals_alone(m) for m in heads.masks):
        return None
    columns = np.any([rows.lo[0] < rows.hi[0] for rows in named], axis=0)
    at = np.flatnonzero(columns)
    if len(np.unique(at // tile)) <= -(-len(at) // tile):
        return None
    groups = np.flatnonzero(~columns), at
    try:
        masks = tuple(_reordered(m, groups, Tq, Tk) for m in heads.masks)
    except TooManyBands:
        return None
    return Gathered(np.concatenate(groups).astype(np.int32), LoweredHeads(masks, heads.head))


def _intervals_alone(mask: Lowered) -> bool:
    return mask.batch == 1 and not (mask.bands[..., STRIDE] != 1).any() and not mask.uses[:, ROWS_OUT:].any()


class _Piece(NamedTuple):
    # keys lo <= j < hi of each row, in the new order; and-ed with the rows of each key if there are any
    lo: Ints
    hi: Ints
    keys: Rows | None


def _reordered(mask: Lowered, groups: tuple[Ints, Ints], Tq: int, Tk: int) -> Lowered:
    rows: list[Rows] = []
    terms: Terms = []
    first = 0
    for keys in groups:
        pieces: list[_Piece] = []
        for n in range(mask.nb):
            _add(pieces, _piece(mask, n, keys, first, Tq, Tk))
        for piece in pieces:
            band = term(k_lo=0, k_hi=Tk, q_lo=0, q_hi=Tq)
            lo, hi = piece.lo[None].astype(np.int32), piece.hi[None].astype(np.int32)
            for part in (Rows("q", lo, hi, ordered(lo, hi)), piece.keys):
                if part is not None:
                    band[BITS] |= 1 << len(rows)
                    rows.append(part)
            terms.append(band)
        first += len(keys)
    return finish(terms, rows, ())


def _piece(mask: Lowered, n: int, keys: Ints, first: int, Tq: int, Tk: int) -> _Piece:
    # the keys in `keys`, in the new order from `first` on, that band n allows
    t = np.arange(Tq)
    lo, hi = (first + np.searchsorted(keys, bound[0]) for bound in mask.keys_of(n, t))
    by_key = [rows for r, rows in enumerate(mask.rows) if rows.axis == "k" and mask.uses[n, ROWS_IN] >> r & 1]
    if not by_key:
        return _Piece(lo, hi, None)
    # a band has at most one Rows per axis
    end = by_key[0].hi[0, keys]
    begin = np.minimum(by_key[0].lo[0, keys], end)
    if ordered(begin[None], end[None]):
        # in this case the keys of a row are an interval
        lo = np.maximum(lo, first + np.searchsorted(end, t, "right"))
        hi = np.minimum(hi, first + np.searchsorted(begin, t, "right"))
        return _Piece(lo, np.maximum(lo, hi), None)
    spread = np.zeros((2, 1, Tk), np.int32)
    spread[0, 0, first : first + len(keys)], spread[1, 0, first : first + len(keys)] = begin, end
    return _Piece(lo, hi, Rows("k", spread[0], spread[1]))


def _add(pieces: list[_Piece], new: _Piece) -> None:
    # join `new` with another piece if each row sees one interval of both together
    if not (new.lo < new.hi).any() or (new.keys and not (new.keys.lo < new.keys.hi).any()):
        return
    for n, old in enumerate(pieces):
        if old.keys is new.keys is None:
            empty = (old.lo == old.hi), (new.lo == new.hi)
            if (empty[0] | empty[1] | ((old.lo <= new.hi) & (new.lo <= old.hi))).all():
                lo = np.where(empty[0], new.lo, np.where(empty[1], old.lo, np.minimum(old.lo, new.lo)))
                hi = np.where(empty[0], new.hi, np.where(empty[1], old.hi, np.maximum(old.hi, new.hi)))
                pieces[n] = _Piece(lo, hi, None)
                return
    pieces.append(new)
