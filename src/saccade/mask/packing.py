"""Documents of a packed sequence, given by the document of every position or by their bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import ArrayOrList
from . import arguments
from .algebra import Mask, contains
from .contents import at_once, host
from .context import Context, label
from .forms import D_HI, D_LO, INF, K_HI, K_LO, MAX_ROWS, PHASE, Q_HI, Q_LO, STRIDE, Rows
from .rows import Documents, by_position, flat, matching, packed_by_position, packed_row, stacked
from .scene import Bools, Scene, table
from .size import Size, TooManyBands
from .terms import BITS, Term, Terms, fit, same, term

__all__ = ["documents"]


def documents(
    ids_q: ArrayOrList | None = None,
    ids_k: ArrayOrList | None = None,
    *,
    position_ids: ArrayOrList | None = None,
    cu_seqlens: ArrayOrList | None = None,
    cu_q: ArrayOrList | None = None,
    cu_k: ArrayOrList | None = None,
    each: Mask | None = None,
) -> Mask:
    """Keys of the query's own document in a packed sequence.

    Give `ids_q`, or `ids_q` and `ids_k`, or `position_ids`, or `cu_seqlens`, or `cu_q` and `cu_k`. Ids and bounds must
    not decrease: arrays on the host are checked here, arrays on a device are trusted until `Mask.check`. Give padding
    after the documents the highest id; it then sees only padding, or nothing with `& padding(tokens)`.

    Args:
        ids_q: int [Tk] or [B, Tk], the document of every position; a query has the id of its position i. Together with
            ids_k: int [Tq] or [B, Tq], the document of every query row.
        ids_k: int [Tk] or [B, Tk], the document of every key.
        position_ids: int [Tk] or [B, Tk], the position of every token in its document: it counts up by one and
            restarts at 0, as in transformers' packing. A padding token at position 0 is a document of its own. Ids are
            computed now, so later writes to a tensor have no effect. Positions on a device are never checked.
        cu_seqlens: int [n + 1] or [B, n + 1]; document d has the positions cu_seqlens[d] <= i < cu_seqlens[d + 1].
            Positions after the last document see nothing.
        cu_q, cu_k: the same for query rows and for keys.
        each: a mask inside every document, only with cu_seqlens or cu_q and cu_k. Its i and j count from the start of
            the document, and the last query of the document is aligned with its last key.

    Raises:
        TypeError: the arguments are none of these combinations.
        ValueError: ids or bounds decrease, there is no bound, or position_ids jump.

    Examples:
        >>> packed = mask.causal() & mask.documents(cu_seqlens=[0, 300, 1024])  # documents of 300 and 724 tokens
        >>> chunks = mask.documents(cu_seqlens=[0, 300, 1024], each=mask.chunked(64))
    """
    by_ids = ids_q is not None or position_ids is not None
    ways = (ids_q is not None, position_ids is not None, cu_seqlens is not None, cu_q is not None)
    if sum(ways) != 1 or (ids_k is not None and ids_q is None) or ((cu_q is None) != (cu_k is None)):
        raise TypeError(
            "documents takes one of: documents(ids), documents(ids_q, ids_k), documents(position_ids=...), "
            "documents(cu_seqlens=...), documents(cu_q=..., cu_k=...)"
        )
    if by_ids:
        if each is not None:
            raise TypeError("documents(ids, each=...) is not defined; give cu_seqlens, or cu_q and cu_k, with each")
        second = None if ids_k is None else arguments.ascending(ids_k, "documents", "ids_k")
        ids = ids_q if position_ids is None else _ids_of(position_ids)
        return Mask("documents", (arguments.ascending(ids, "documents", "ids"), second))
    if each is not None:
        _check_inside(each)
    first = arguments.ascending(cu_q if cu_seqlens is None else cu_seqlens, "documents", "cu_seqlens")
    second = None if cu_k is None else arguments.ascending(cu_k, "documents", "cu_k")
    if not first.shape[-1]:
        raise ValueError(f"documents: cu_seqlens has shape {list(first.shape)}, expected n + 1 bounds; [0] for none")
    return Mask("packed", (first, second), () if each is None else (each,))


def _ids_of(position_ids: Any) -> Any:
    # the ids of documents, which start where a position is 0; an array of the same kind
    positions = arguments.array(position_ids, "documents", "position_ids", (1, 2))
    values = at_once(positions)
    if values is not None:
        before = np.concatenate([values[..., :1] - 1, values[..., :-1]], -1)
        wrong = np.argwhere((values != 0) & (values != before + 1) | (values < 0))
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise ValueError(
                f"documents: position_ids has {values[at]} at index {list(at)}, expected 0 or one more than before; "
                "positions count up by one and restart at 0 for each document, and padding may have position 0"
            )
    return (positions == 0).cumsum(-1)


def _check_inside(mask: Any) -> None:
    # masks that count absolute rows or read arrays have no meaning inside each document
    if not isinstance(mask, Mask):
        raise TypeError(f"documents: each is a mask, got {type(mask).__name__}")
    for kind in ("documents", "packed", "tiles", "dense", "per_head", "select"):
        if contains(mask, kind):
            raise ValueError(f"documents: {kind} cannot be inside each; combine it outside with &")
    if mask.has_data:
        raise ValueError("documents: masks inside each take integers only, not arrays")


def documents_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    ids_q, ids_k = mask.args
    if ids_k is None:
        arguments.fits("documents", "ids", ids_q, B, Tk)
    else:
        arguments.fits("documents", "ids_q", ids_q, B, Tq)
        arguments.fits("documents", "ids_k", ids_k, B, Tk)


def documents_sizes(mask: Mask) -> arguments.Sizes:
    first, second = mask.args
    Tq, Tk = (None, first) if second is None else (int(first.shape[-1]), second)
    return arguments.sizes_of(mask.args, 1, Tq, int(Tk.shape[-1]))


def documents_contents(mask: Mask, Tq: int, Tk: int) -> None:
    for leaf in mask.args:
        if leaf is not None:
            arguments.still_ascending("documents", "ids", leaf)


def documents_pairs(mask: Mask, scene: Scene) -> Bools:
    ids = table(mask.args[0])
    if mask.args[1] is not None:
        return ids[:, None, :, None] == table(mask.args[1])[:, None, None, :]
    # a query whose position is outside the array has no document
    B = np.broadcast_shapes(ids.shape[:1], np.shape(scene.i())[:1])[0]
    i = np.broadcast_to(scene.i(), (B, 1, scene.Tq, 1))[:, 0, :, 0]
    ids = np.broadcast_to(ids, (i.shape[0], scene.Tk))
    if not scene.Tk:
        return np.zeros((i.shape[0], 1, scene.Tq, 0), np.bool_)
    own = np.take_along_axis(ids, np.clip(i, 0, scene.Tk - 1), axis=1)
    inside = (i >= 0) & (i < scene.Tk)
    return (own[:, None, :, None] == ids[:, None, None, :]) & inside[:, None, :, None]


def documents_terms(mask: Mask, context: Context) -> Terms:
    first, second = mask.args
    offset = context.offset()

    def build() -> Rows:
        ids = flat(host(first))
        return by_position(ids, offset, context.size.Tq) if second is None else matching(ids, flat(host(second)))

    return [context.part((mask.key, label(offset) if second is None else None), build)]


def packed_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    first, second = mask.args
    for leaf in mask.args:
        if leaf is not None:
            arguments.fits("documents", "cu_seqlens", leaf, B, int(leaf.shape[-1]))
    if second is not None and first.shape[-1] != second.shape[-1]:
        expected = f"as many bounds as cu_q, {int(first.shape[-1])}"
        raise ValueError(f"documents: cu_k has shape {list(second.shape)}, expected {expected} for this problem")


def packed_sizes(mask: Mask) -> arguments.Sizes:
    # the sequence may continue after the last document; take its end
    *Tq, Tk = (int(host(leaf).max(initial=0)) for leaf in mask.args if leaf is not None)
    return arguments.sizes_of(mask.args, 1, Tq[0] if Tq else None, Tk)


def packed_contents(mask: Mask, Tq: int, Tk: int) -> None:
    sizes = (Tk if mask.args[1] is None else Tq, Tk)
    for leaf, size in zip(mask.args, sizes, strict=True):
        if leaf is not None:
            arguments.still_ascending("documents", "cu_seqlens", leaf)
            arguments.within("documents", "cu_seqlens", leaf, 0, size)


def packed_text(mask: Mask, write: Callable[[Any], str]) -> list[str]:
    first, second = mask.args
    bounds = {"cu_seqlens": first} if second is None else {"cu_q": first, "cu_k": second}
    return [f"{name}={write(leaf)}" for name, leaf in bounds.items()] + [f"each={write(c)}" for c in mask.children]


def packed_pairs(mask: Mask, scene: Scene) -> Bools:
    cu_q = table(mask.args[0])
    if mask.args[1] is None:
        # a row belongs to the document that contains its position
        cu_k, cu_q = cu_q, np.clip(cu_q - np.reshape(scene.offset(), (-1, 1)), 0, scene.Tq)
    else:
        cu_k = table(mask.args[1])
    shape = (np.broadcast_shapes(cu_q.shape[:1], cu_k.shape[:1])[0], cu_q.shape[1])
    cu_q, cu_k = np.broadcast_to(cu_q, shape), np.broadcast_to(cu_k, shape)
    allowed = np.zeros((shape[0], 1, scene.Tq, scene.Tk), np.bool_)
    for b in range(shape[0]):
        for d in range(shape[1] - 1):
            q0, q1, k0, k1 = (int(x) for x in (*cu_q[b, d : d + 2], *cu_k[b, d : d + 2]))
            inner = Scene(scene.predicate, 1, 1, q1 - q0, k1 - k0)
            allowed[b, 0, q0:q1, k0:k1] = scene.predicate(mask.children[0], inner) if mask.children else True
    return allowed


def packed_terms(mask: Mask, context: Context) -> Terms:
    first, second = mask.args
    Tq, Tk, offset = context.size.Tq, context.size.Tk, context.offset()
    cu = flat(host(first)).astype(np.int64)
    other = None if second is None else flat(host(second)).astype(np.int64)
    if mask.children:
        rows, keys = (np.clip(cu - np.reshape(offset, (-1, 1)), 0, Tq), cu) if other is None else (cu, other)
        return _each(mask.children[0], Documents(rows, keys, Tq, Tk), context)

    def build() -> Rows:
        if other is None:
            return packed_by_position(list(cu), offset, Tq, Tk)
        count = max(len(cu), len(other))
        pairs = [(np.clip(cu[b % len(cu)], 0, Tq), np.clip(other[b % len(other)], 0, Tk)) for b in range(count)]
        return stacked([packed_row(q, k, Tq) for q, k in pairs])

    return [context.part((mask.key, None if second is not None else label(offset)), build)]


def _each(child: Mask, inside: Documents, outer: Context) -> Terms:
    # documents take the place of the batch while the inner mask is lowered
    size = Size(inside.nq, inside.nk, outer.size)
    terms: Terms = []
    for n, local in enumerate(outer.union(child, Context(outer.union, size, outer.parts, None, inside), False)):
        fitted = fit(local, size)
        if fitted is not None:
            terms += _spread(fitted, inside, outer, n)
    return terms


def _spread(local: Term, inside: Documents, outer: Context, n: int) -> Terms:
    # a term over documents -> terms over rows, one per residue of the stride
    s = abs(local[STRIDE])
    residues = (local[PHASE] + inside.qs - inside.ks) % s
    used = np.unique(residues[(inside.nq > 0) & (inside.nk > 0)])
    if len(used) > MAX_ROWS:
        raise TooManyBands(
            f"a stride of {s} inside documents has {len(used)} phases, expected at most {MAX_ROWS}: "
            "let the documents start at multiples of the stride"
        )
    terms: Terms = []
    for residue in used:
        one = term(stride=local[STRIDE], phase=int(residue)) if s > 1 else term()
        one[BITS:] = local[BITS:]
        chosen = None if len(used) == 1 else residues == residue
        part = outer.part((inside, n, int(residue)), lambda chosen=chosen: _rows(local, inside, chosen))
        one[BITS] |= part[BITS]
        terms.append(one)
    return terms


def _rows(local: Term, inside: Documents, chosen: NDArray[np.bool_] | None) -> Rows:
    # the intervals of a term in the chosen documents, None for all
    t = np.arange(inside.Tq, dtype=np.int32)
    shift = inside.ks - inside.qs
    lo = inside.spread(inside.ks + np.maximum(local[K_LO], 0))
    hi = inside.spread(inside.ks + np.minimum(local[K_HI], inside.nk))
    if not same(local[D_HI], INF):
        lo = np.maximum(lo, t + inside.spread(shift - local[D_HI]))
    if not same(local[D_LO], -INF):
        hi = np.minimum(hi, t + 1 + inside.spread(shift - local[D_LO]))
    if not (same(local[Q_LO], 0) and same(local[Q_HI], inside.nq)):
        row = t - inside.spread(inside.qs)
        hi = np.where((row >= inside.spread(local[Q_LO])) & (row < inside.spread(local[Q_HI])), hi, lo)
    if chosen is not None:
        hi = np.where(inside.spread(chosen), hi, lo)
    return inside.rows(lo, hi)
