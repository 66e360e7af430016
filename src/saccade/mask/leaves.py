"""The terms of every constructor of the mask algebra, in row numbers t and key numbers j."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import rows as made
from .algebra import Mask
from .contents import host
from .forms import D_HI, D_LO, INF, K_HI, K_LO, MAX_ROWS, PHASE, Q_HI, Q_LO, STRIDE, Grid, Rows
from .size import Size, TooManyBands
from .terms import BITS, Term, Terms, fit, same, term

if TYPE_CHECKING:
    from .lowering import Context

# a list of global tokens with at most this many runs becomes bands
_RUNS = 2
# rows and keys of a block that is transposed at once
_TURNED = 512


def _number(leaf: Any) -> Any:
    from .lowering import number

    return number(leaf)


def _offset(given: Any, context: Context) -> Any:
    return context.offset if given is None else _number(given)


def _full(mask: Any, context: Context) -> Terms:
    return [term()]


def _causal(mask: Mask, context: Context) -> Terms:
    return [term(d_lo=-_offset(mask.args[0], context))]


def _window(mask: Mask, context: Context) -> Terms:
    left, right, given = mask.args
    if left is None and right is None:
        return [term()]
    offset = _offset(given, context)
    made_term = term()
    if left is not None:
        made_term[D_HI] = left - offset
    if right is not None:
        made_term[D_LO] = -right - offset
    return [made_term]


def _keys(mask: Mask, context: Context) -> Terms:
    start, stop = mask.args
    return [term(k_hi=_number(stop))] if start is None else [term(k_lo=_number(start), k_hi=_number(stop))]


def _prefix(mask: Mask, context: Context) -> Terms:
    return [term(k_hi=_number(mask.args[0]))]


def _strided(mask: Mask, context: Context) -> Terms:
    s, phase = mask.args
    return [term()] if s == 1 else [term(stride=s, phase=(phase - context.offset) % s)]


def _dilated(mask: Mask, context: Context) -> Terms:
    radius, step = mask.args
    offset = context.offset
    made_term = term(d_lo=-radius * step - offset, d_hi=radius * step - offset)
    if step > 1:
        made_term[STRIDE], made_term[PHASE] = step, -offset % step
    return [made_term]


def _global_tokens(mask: Mask, context: Context) -> Terms:
    chosen = mask.args[0]
    offset = context.offset
    if getattr(chosen, "ndim", 0) == 0:
        n = _number(chosen)
        return [term(k_lo=0, k_hi=n), term(q_lo=-offset, q_hi=n - offset)]
    positions = made.flat(host(chosen)).astype(np.int64)
    runs = _runs(positions, context.Tk)
    if runs is not None:
        found: Terms = []
        for start, stop in runs:
            found.append(term(k_lo=start, k_hi=stop))
            found.append(term(q_lo=start - offset, q_hi=stop - offset))
        return found
    Tq, Tk = context.Tq, context.Tk
    where = (mask.key, _label(offset))
    positions = np.where((positions >= 0) & (positions < Tk), positions, -INF)
    columns = context.add((where, "k"), lambda: made.listed(positions, Tk, Tq, "k"))
    chosen_rows = context.add((where, "q"), lambda: made.listed(positions, Tq, Tk, "q", offset))
    return [_with_bit(0, columns), _with_bit(0, chosen_rows)]


def _columns(mask: Mask, context: Context) -> Terms:
    start, stop = (None if leaf is None else made.flat(host(leaf)).astype(np.int64) for leaf in mask.args)
    return [_with_bit(0, context.add(mask.key, lambda: made.of_keys(start, stop, context.Tq, context.Tk)))]


def _runs(positions: Any, Tk: int) -> list[tuple[Any, Any]] | None:
    # runs of consecutive positions, the same number in every batch entry (empty ones added)
    each: list[list[tuple[int, int]]] = []
    for row in positions:
        row = np.unique(row[(row >= 0) & (row < Tk)])
        breaks = np.flatnonzero(np.diff(row) != 1) + 1
        if len(breaks) >= _RUNS:
            return None
        each.append([(int(p[0]), int(p[-1]) + 1) for p in np.split(row, breaks) if len(p)])
    count = max(len(runs) for runs in each)
    padded = [runs + [(0, 0)] * (count - len(runs)) for runs in each]
    if len(padded) == 1:
        return list(padded[0])
    table = np.array(padded, np.int64).reshape(len(padded), count, 2)
    return [(table[:, n, 0], table[:, n, 1]) for n in range(count)]


def _chunked(mask: Mask, context: Context) -> Terms:
    size, offset = mask.args[0], context.offset
    if context.inside is not None:
        inside = context.inside
        key = ("chunked", size, id(inside), _label(offset))
        return [_with_bit(0, context.add(key, lambda: inside.chunks(size, offset)))]
    key = ("chunked", size, _label(offset))
    return [_with_bit(0, context.add(key, lambda: made.chunks(size, offset, context.Tq, context.Tk)))]


def _documents(mask: Mask, context: Context) -> Terms:
    first, second = mask.args

    def build() -> Rows:
        ids = made.flat(host(first))
        if second is not None:
            return made.matching(ids, made.flat(host(second)))
        return made.by_position(ids, context.offset, context.Tq)

    label = _label(context.offset) if second is None else None
    return [_with_bit(0, context.add((mask.key, label), build))]


def _packed(mask: Mask, context: Context) -> Terms:
    first, second = mask.args
    Tq, Tk, offset = context.Tq, context.Tk, context.offset
    cu = made.flat(host(first)).astype(np.int64)
    if mask.children:
        if second is None:
            rows, keys = np.clip(cu - np.reshape(offset, (-1, 1)), 0, Tq), cu
        else:
            rows, keys = cu, made.flat(host(second)).astype(np.int64)
        return _each(mask.children[0], made.Documents(rows, keys, Tq, Tk), context)

    def build() -> Rows:
        if second is None:
            return made.packed_by_position(list(cu), offset, Tq, Tk)
        other = made.flat(host(second)).astype(np.int64)
        count = max(len(cu), len(other))
        pairs = [(np.clip(cu[b % len(cu)], 0, Tq), np.clip(other[b % len(other)], 0, Tk)) for b in range(count)]
        return made.stacked([made.packed_row(q, k, Tq) for q, k in pairs])

    return [_with_bit(0, context.add((mask.key, None if second is not None else _label(offset)), build))]


def _each(child: Mask, documents: made.Documents, outer: Context) -> Terms:
    # the documents stand for the batch while the inner mask is lowered
    from .lowering import Context, union

    inner = Context(outer.tables, Size(documents.nq, documents.nk, outer.size), None, documents)
    found: Terms = []
    for n, local in enumerate(union(child, inner, False)):
        fitted = fit(local, inner.size)
        if fitted is not None:
            found += _spread(fitted, documents, outer, (id(documents), n))
    # the tables know the documents by id, so they must live as long
    outer.tables.known[documents] = 0
    return found


def _spread(local: Term, documents: made.Documents, outer: Context, name: Any) -> Terms:
    # a term with document numbers -> terms over rows, one for each residue that the stride takes
    s = abs(local[STRIDE])
    away = documents.qs - documents.ks
    residues = (local[PHASE] + away) % s
    used = np.unique(residues[(documents.nq > 0) & (documents.nk > 0)])
    if len(used) > MAX_ROWS:
        raise TooManyBands(
            f"a stride of {s} inside documents meets {len(used)} places in it, expected at most {MAX_ROWS}: "
            "let the documents start at multiples of the stride"
        )
    found: Terms = []
    for residue in used:
        one = term(stride=local[STRIDE], phase=int(residue)) if s > 1 else term()
        one[BITS:] = local[BITS:]
        kept = None if len(used) == 1 else residues == residue
        one[BITS] |= outer.add((name, int(residue)), lambda kept=kept: _document_rows(local, documents, kept))
        found.append(one)
    return found


def _document_rows(local: Term, documents: made.Documents, kept: Any) -> Rows:
    t = np.arange(documents.Tq, dtype=np.int32)
    shift = documents.ks - documents.qs
    lo = documents.spread(documents.ks + np.maximum(local[K_LO], 0))
    hi = documents.spread(documents.ks + np.minimum(local[K_HI], documents.nk))
    if not same(local[D_HI], INF):
        lo = np.maximum(lo, t + documents.spread(shift - local[D_HI]))
    if not same(local[D_LO], -INF):
        hi = np.minimum(hi, t + 1 + documents.spread(shift - local[D_LO]))
    if not (same(local[Q_LO], 0) and same(local[Q_HI], documents.nq)):
        row = t - documents.spread(documents.qs)
        hi = np.where((row >= documents.spread(local[Q_LO])) & (row < documents.spread(local[Q_HI])), hi, lo)
    if kept is not None:
        hi = np.where(documents.spread(kept), hi, lo)
    return documents.rows(lo, hi)


def _tiles(mask: Mask, context: Context) -> Terms:
    layout, bq, bk = mask.args
    return [_with_bit(2, context.add(mask.key, lambda: _grid(layout, bq, bk)))]


def _dense(mask: Mask, context: Context) -> Terms:
    return [_with_bit(2, context.add(mask.key, lambda: _grid(mask.args[0], 1, 1)))]


def _grid(layout: Any, bq: int, bk: int) -> Grid:
    array: Any = host(layout)
    array = (array if array.dtype == np.bool_ else array != 0).view(np.uint8)
    array = array[None] if array.ndim == 2 else array if len(array) else np.zeros((1, *array.shape[1:]), np.uint8)
    # by blocks that the first caches hold: a large array is turned four times as fast
    states = np.empty((len(array), array.shape[2], array.shape[1]), np.uint8)
    for t in range(0, array.shape[1], _TURNED):
        for j in range(0, array.shape[2], _TURNED):
            block = array[:, t : t + _TURNED, j : j + _TURNED]
            states[:, j : j + _TURNED, t : t + _TURNED] = block.transpose(0, 2, 1)
    return Grid(bq, bk, states)


def _with_bit(column: int, bit: int) -> Term:
    made_term = term()
    made_term[BITS + column] = bit
    return made_term


def _label(offset: Any) -> Any:
    return offset if type(offset) is int else offset.tobytes()


LEAVES: dict[str, Callable[[Any, Context], Terms]] = {
    "full": _full,
    "causal": _causal,
    "window": _window,
    "documents": _documents,
    "packed": _packed,
    "keys": _keys,
    "prefix": _prefix,
    "global_tokens": _global_tokens,
    "columns": _columns,
    "strided": _strided,
    "dilated": _dilated,
    "chunked": _chunked,
    "tiles": _tiles,
    "dense": _dense,
}
