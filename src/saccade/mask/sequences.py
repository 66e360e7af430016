"""Where the sequences of a mask start: documents, and the tokens between padding."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .algebra import Mask, contains
from .forms import K_LO
from .lowering import lower

Int32 = NDArray[np.int32]
# nodes that say which keys belong to the sequence of a query
_KINDS = ("documents", "packed", "padding", "keys")


class Sequences(NamedTuple):
    """Runs of rows that belong to one sequence: rows q_start to q_start + nq see keys from k_start to k_start + nk.

    Each is int32 [n]; every row is in exactly one run. entry: the batch entry of a run, None if all entries have all
    runs.
    """

    entry: Int32 | None
    q_start: Int32
    k_start: Int32
    nq: Int32
    nk: Int32

    @property
    def apart(self) -> bool:
        """Whether all batch entries have the same runs, which see keys in ascending order and none twice."""
        some = self.nk > 0
        return self.entry is None and bool((self.k_start[some][1:] >= (self.k_start + self.nk)[some][:-1]).all())


def sequences(mask: Mask | None, B: int, Tq: int, Tk: int) -> Sequences:
    """The sequences of a mask, by those of its members joined by `&` that name documents, padding or ranges of keys.

    Rows before the first token of a padded sequence are a run of their own, so that no run starts at a place that
    depends on the amount of padding.
    """
    nodes = [node for node in _members(mask) if node.kind in _KINDS]
    own = reduce(and_, (Mask(node.kind, node.args) for node in nodes)) if nodes else None
    lowered = lower(own, B, 1, Tq, Tk).masks[0]
    if own is None or not Tq or not lowered.nb:
        return _runs(np.array([[[0]], [[Tk]]]), Tq)
    t = np.arange(Tq)
    lo, hi = lowered.keys_of(0, t)
    lo, hi = np.where(lo < hi, lo, 0), np.where(lo < hi, hi, 0)
    packed = any(node.kind in ("documents", "packed") for node in nodes)
    if not packed and not lo.any():
        # lengths: each row sees keys from the first one on
        return _runs(np.array([[[0]], [[Tk]]]), Tq)
    before = np.zeros((1, 1), np.int64)
    if all(node.kind in ("padding", "keys") or node.args[1] is None for node in nodes):
        before = t + np.reshape(own.offset(B, Tq, Tk), (-1, 1)) < lowered.bands[:, 0, K_LO, None]
    return _runs(np.stack(np.broadcast_arrays(lo, hi, before)), Tq)


def hidden(mask: Mask | None) -> str | None:
    """The kind of a node that starts sequences but is not joined by `&` to the whole mask, None if there is none."""
    inside = [child for node in _members(mask) if node.kind not in _KINDS for child in node.children]
    return next((kind for kind in _KINDS[:3] for child in inside if contains(child, kind)), None)


def _members(mask: Mask | None) -> list[Mask]:
    if mask is None:
        return []
    return [x for child in mask.children for x in _members(child)] if mask.kind == "and" else [mask]


def _runs(bounds: NDArray[Any], Tq: int) -> Sequences:
    # bounds: [2 or 3, 1 | B, Tq or 1], numbers per row that are equal within a run; the first two are its keys
    entries = bounds.shape[1]
    fresh = np.ones(bounds.shape[1:], np.bool_)
    fresh[:, 1:] = (bounds[:, :, 1:] != bounds[:, :, :-1]).any(0)
    b, start = np.nonzero(fresh)
    stop = np.append(start[1:], 0)
    stop = np.where(stop > start, stop, Tq)
    lo, hi = bounds[:2, b, start]
    arrays = [a.astype(np.int32) for a in (start, lo, stop - start, hi - lo)]
    return Sequences(b.astype(np.int32) if entries > 1 else None, *arrays)
