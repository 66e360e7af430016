"""From a mask's expression to its lowered form: a union of at most 8 bands with their rows and grids."""

from __future__ import annotations

from typing import Any

import numpy as np

from .algebra import Mask
from .checks import check_shapes
from .context import Context, Parts, number
from .forms import D_HI, INF, MAX_BANDS, MAX_GRIDS, MAX_ROWS, Grid, Lowered, LoweredHeads, Rows
from .heads import of_head
from .kinds import KINDS
from .memo import Memo
from .rows import intersection
from .size import Size, TooManyBands
from .terms import BITS, Term, Terms, both, high, low, negated, term, tidy

_MEMO = Memo()


def lower(mask: Mask | None, B: int, Hq: int, Tq: int, Tk: int) -> LoweredHeads:
    """The lowered forms of `mask` for these sizes, one per distinct head mask; cached with the mask.

    Raises ValueError if an array does not fit the sizes, or for more than 8 bands after simplification.
    """
    key, heads = _MEMO.get(mask, (B, Hq, Tq, Tk))
    if heads is None:
        heads = _lower_heads(None if mask is None else mask.snapshot(), B, Hq, Tq, Tk)
        _MEMO.put(mask, key, heads)
    return heads


def offset_of(mask: Mask | None, Tq: int, Tk: int) -> Any:
    """The default i - t: Tk - Tq, or stop - Tq if the mask has keys(stop); an int or int64 [B]."""
    stop = None if mask is None else _stop(mask, None, Tk)
    return (Tk if stop is None else stop) - Tq


def _lower_heads(mask: Mask | None, B: int, Hq: int, Tq: int, Tk: int) -> LoweredHeads:
    if mask is None:
        mask = Mask("full")
    check_shapes(mask, B, Tq, Tk, Hq)
    # all heads share the rows and grids
    parts: Parts = [], [], {}
    if "per_head(" not in mask.flatten()[0]:
        return LoweredHeads((_lower(mask, Size(Tq, Tk), parts),), np.zeros(Hq, np.int32))
    numbers: dict[Any, int] = {}
    masks: list[Lowered] = []
    head = np.zeros(Hq, np.int32)
    for h in range(Hq):
        own = of_head(mask, h)
        if own.key not in numbers:
            numbers[own.key] = len(masks)
            masks.append(_lower(own, Size(Tq, Tk), parts))
        head[h] = numbers[own.key]
    return LoweredHeads(tuple(masks), head)


def _lower(mask: Mask, size: Size, parts: Parts) -> Lowered:
    return finish(tidy(_union(mask, Context(_union, size, parts), False), size), parts[0], parts[1])


def _union(mask: Mask, context: Context, negate: bool) -> Terms:
    # the terms of the mask, or of its complement
    if mask.kind == "not":
        return _union(mask.children[0], context, not negate)
    if mask.kind not in ("and", "or"):
        terms = KINDS[mask.kind].lowering(mask, context)
        return _complement(terms, context.size) if negate else terms
    if mask.kind == "and":
        stop = _stop(mask, context.stop, context.size.Tk)
        if stop is not context.stop:
            context = Context(_union, context.size, context.parts, stop, context.inside)
    size = context.size
    result = _union(mask.children[0], context, negate)
    settled = 0
    for child in mask.children[1:]:
        terms = _union(child, context, negate)
        if (mask.kind == "and") != negate:
            result = both(result, terms, size)
        else:
            result = tidy(result + terms, size, settled)
            settled = len(result)
    return result


def _complement(terms: Terms, size: Size) -> Terms:
    # the complement of a union
    result: Terms | None = None
    for one in terms:
        others = negated(one)
        result = others if result is None else both(result, others, size)
    return [term()] if result is None else result


def _stop(mask: Mask, stop: Any, Tk: Any) -> Any:
    # keys(stop) in an & chain sets the position of the last query; the smallest stop wins
    for child in mask.children if mask.kind == "and" else (mask,):
        if child.kind == "keys":
            own = low(high(number(child.args[1]), 0), Tk)
            stop = own if stop is None else low(stop, own)
    return stop


def finish(terms: Terms, rows: list[Rows] | tuple[Rows, ...], grids: list[Grid] | tuple[Grid, ...]) -> Lowered:
    """The lowered form of simplified terms over these tables; several rows inside one term are intersected."""
    if len(terms) > MAX_BANDS:
        raise TooManyBands(
            f"the mask needs {len(terms)} bands after simplification, expected at most {MAX_BANDS}; "
            "split it into fewer intervals, or give it as blocks with saccade.mask.tiles(layout, block)"
        )
    if not any(bit for t in terms for bit in t[BITS:]):
        return Lowered(_bands(terms), np.zeros((len(terms), 4), np.int32))
    terms, rows = _merge_rows([list(t) for t in terms], list(rows))
    used_rows, used_grids = _used(terms, BITS), _used(terms, BITS + 2)
    if len(used_rows) > MAX_ROWS or len(used_grids) > MAX_GRIDS:
        raise TooManyBands(
            f"the mask's bands use {len(used_rows)} row tables and {len(used_grids)} grids, expected at most "
            f"{MAX_ROWS} and {MAX_GRIDS}; join them into one documents(...), or give blocks with "
            "saccade.mask.tiles(layout, block)"
        )
    uses = np.zeros((len(terms), 4), np.int32)
    for n, t in enumerate(terms):
        for column, used in enumerate((used_rows, used_rows, used_grids, used_grids)):
            uses[n, column] = sum(1 << new for new, old in enumerate(used) if t[BITS + column] >> old & 1)
    return Lowered(_bands(terms), uses, tuple(rows[r] for r in used_rows), tuple(grids[g] for g in used_grids))


def _used(terms: Terms, column: int) -> list[int]:
    bits = 0
    for t in terms:
        bits |= t[column] | t[column + 1]
    return [n for n in range(bits.bit_length()) if bits >> n & 1]


def _merge_rows(terms: Terms, rows: list[Rows]) -> tuple[Terms, list[Rows]]:
    # replace several rows inside one term by their intersection
    merged: dict[tuple[int, ...], int] = {}
    for t in terms:
        for axis in "qk":
            inside = tuple(n for n in range(len(rows)) if t[BITS] >> n & 1 and rows[n].axis == axis)
            if len(inside) < 2:
                continue
            if inside not in merged:
                part = rows[inside[0]]
                for n in inside[1:]:
                    part = intersection(part, rows[n])
                merged[inside] = len(rows)
                rows.append(part)
            t[BITS] = t[BITS] & ~sum(1 << n for n in inside) | 1 << merged[inside]
    return terms, rows


def _bands(terms: Terms) -> Any:
    batch = 1
    for t in terms:
        for value in t[:BITS]:
            if type(value) is not int:
                batch = max(batch, len(value))
    bands = np.empty((batch, len(terms), 8), np.int32)
    for n, t in enumerate(terms):
        for column in range(8):
            value = t[column]
            if type(value) is int:
                bands[:, n, column] = max(-INF, min(INF, value))
            elif column <= D_HI:
                bands[:, n, column] = np.minimum(np.maximum(value, -INF), INF)
            else:
                # `fit` has clipped it to the sizes
                bands[:, n, column] = value
    return bands


def terms_of(lowered: Lowered) -> Terms:
    """The terms of a lowered form, the inverse of `finish`; bits refer to its rows and grids."""
    bands = lowered.bands.astype(np.int64)
    terms: Terms = []
    for n in range(lowered.nb):
        t: Term = [int(c[0]) if len(c) == 1 or (c == c[0]).all() else c for c in bands[:, n].T]
        terms.append(t + [int(u) for u in lowered.uses[n]])
    return terms
