"""Masks whose arrays are on the device: torch operations compute the keys of every row, kernels the lists of tiles.

Nothing is read back, so no call waits. Such a mask is an AND of full, causal, window, documents, keys, prefix and
padding: a row sees one interval of keys, whose ends never decrease from row to row. The host lowers all other masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import triton

from ...mask import Mask
from ...mask.forms import INF
from ...mask.kinds import KINDS
from ...problem import Problem
from .chip import interpreted, on, upload
from .kernels import lists as kernels
from .launches import PLAIN

# a band that allows every pair: only the rows' intervals restrict them
EVERY_PAIR = (-INF, INF, 0, INF, 0, INF, 1, 0)
INSIDE = {"full", "causal", "window"}


@dataclass(frozen=True, eq=False)
class Intervals:
    """A part of a plan (as plan.Part) whose rows t see keys lo[b, t] <= j < hi[b, t], int32 [Bm, Tq] on the device.

    Both ends never decrease along t. offset: int64 [Bm, 1], position of row 0. whole: whether it follows from the
    mask's structure that every row sees a key and every key is seen.
    """

    lo: Tensor
    hi: Tensor
    offset: Tensor
    Tk: int
    whole: bool
    n_tiles: int
    step: int = 1
    masks: tuple[Any, ...] = ()

    @property
    def Bm(self) -> int:
        """1 or the batch size."""
        return self.lo.shape[0]

    @cached_property
    def rows_of_keys(self) -> tuple[Tensor, Tensor]:
        """The rows [lo, hi) that see each key, int32 [Bm, Tk]."""
        (Bm, Tq), Tk = self.lo.shape, self.Tk
        lo, hi = (self.lo.new_empty((Bm, Tk)) for _ in range(2))
        rows, keys = kernels.Intervals(self.lo, self.hi), kernels.Intervals(lo, hi)
        with on(self.lo):
            PLAIN.run(kernels.rows_of_keys, (-(-Tk // 256) * Bm,), rows, keys, Tq, Tk, BLOCK=256)
        return lo, hi

    @property
    def nq(self) -> Any:
        """Rows of the only class."""
        return np.array([self.lo.shape[1]], np.int32)


def part_of(p: Problem, tile_q: int) -> Intervals | None:
    """The part of a problem whose mask has arrays on the device, or None where the host lowers the mask."""
    mask = p.others
    if mask is None or not mask.has_data or not p.Tq or not p.Tk or not p.B:
        return None
    leaves = mask.children if mask.kind == "and" else (mask,)
    if not any(_here(a, p.device) for a in mask.flatten()[2]):
        return None
    if not all(leaf.kind in INTERVALS and all(_inside(c) for c in leaf.children) for leaf in leaves):
        return None
    whole, n_tiles = _whole(p, leaves), -(-p.Tq // tile_q)
    if whole and sum(leaf.kind == "documents" for leaf in leaves) == 1:
        return Intervals(*_by_ids(p, leaves), p.Tk, True, n_tiles)
    rows = _Rows(p, leaves)
    lo, hi = rows.interval(leaves)
    return Intervals(lo, hi, rows.offset, p.Tk, whole, n_tiles)


def _here(a: Any, device: str) -> bool:
    # in the interpreter the device is the host
    return isinstance(a, Tensor) and (a.is_cuda or interpreted()) and str(a.device) == device


def _inside(mask: Mask) -> bool:
    return mask.kind in INSIDE or (mask.kind == "and" and all(c.kind in INSIDE for c in mask.children))


def _whole(p: Problem, leaves: tuple[Mask, ...]) -> bool:
    # Here every query sees itself. Documents given by ids contain every position; documents given by bounds may not.
    if p.Tq != p.Tk:
        return False
    return all(
        leaf.kind == "full"
        or (leaf.kind in ("causal", "window") and leaf.args[-1] is None)
        or (leaf.kind == "documents" and leaf.args[1] is None)
        for leaf in leaves
    )


def _by_ids(p: Problem, leaves: tuple[Mask, ...]) -> tuple[Tensor, Tensor, Tensor]:
    # lo, hi and offset of one array of ids with causal masks and windows around the diagonal, by one kernel
    left = right = INF
    ids: Any = None
    for leaf in leaves:
        if leaf.kind == "causal":
            right = min(right, 0)
        elif leaf.kind == "window":
            reach = (INF if n is None else n for n in leaf.args[:2])
            left, right = map(min, (left, right), reach)
        elif leaf.kind == "documents":
            ids = torch.as_tensor(leaf.args[0]).to(p.device, non_blocking=True).reshape(-1, p.Tk).contiguous()
    B, T = ids.shape
    lo, hi = (torch.empty((B, T), dtype=torch.int32, device=ids.device) for _ in range(2))
    with on(ids):
        grid, ends = (-(-T // 256) * B,), kernels.Intervals(lo, hi)
        PLAIN.run(kernels.rows_of_ids, grid, ids, T, ends, T, left, right, BLOCK=256)
    return lo, hi, torch.zeros((1, 1), dtype=torch.int64, device=ids.device)


class _Rows:
    """The rows of a problem, [1, Tq], and the intervals that leaves of its mask give them, [Bm, Tq] int64."""

    def __init__(self, p: Problem, leaves: tuple[Mask, ...]) -> None:
        self.Tq, self.Tk, self.device = p.Tq, p.Tk, torch.device(p.device)
        self.t = torch.arange(p.Tq, device=self.device)[None]
        stop = self.column(p.Tk)
        for leaf in leaves:
            if leaf.kind == "keys":
                # the number of keys determines the position of the last query
                stop = torch.minimum(stop, self.column(leaf.args[1]).clamp(0, p.Tk))
        self.offset = stop - p.Tq

    def column(self, leaf: Any) -> Tensor:
        """A number, or one number per batch entry, as [1 | B, 1]."""
        return self.array(leaf).reshape(-1, 1)

    def array(self, leaf: Any) -> Tensor:
        """A leaf as int64 on the device; copied only if it is on the host."""
        if isinstance(leaf, int):
            return torch.full((), leaf, device=self.device)
        return torch.as_tensor(leaf).to(self.device, torch.int64, non_blocking=True)

    def table(self, leaf: Any) -> Tensor:
        """Sorted numbers, [1 | B, n]."""
        return self.array(leaf).reshape(-1, leaf.shape[-1])

    def interval(self, leaves: tuple[Mask, ...]) -> tuple[Tensor, Tensor]:
        """The keys that all leaves let rows see, int32 [Bm, Tq]; lo = hi for rows without keys."""
        lo, hi = torch.zeros_like(self.t), torch.full_like(self.t, self.Tk)
        for leaf in leaves:
            low, high = INTERVALS[leaf.kind](self, leaf)
            lo = lo if low is None else torch.maximum(lo, low)
            hi = hi if high is None else torch.minimum(hi, high)
        lo = lo.clamp(0, self.Tk)
        lo, hi = torch.broadcast_tensors(lo, torch.maximum(hi, lo).clamp(0, self.Tk))
        return lo.to(torch.int32).contiguous(), hi.to(torch.int32).contiguous()

    def full(self, leaf: Mask) -> Any:
        return None, None

    def causal(self, leaf: Mask, i: Any = None) -> Any:
        return None, self.position(leaf, i) + 1

    def window(self, leaf: Mask, i: Any = None) -> Any:
        left, right, _ = leaf.args
        i = self.position(leaf, i)
        return None if left is None else i - left, None if right is None else i + right + 1

    def position(self, leaf: Mask, i: Any) -> Tensor:
        """Positions of rows for a causal mask or a window; inside documents the last query is at the last key."""
        offset = leaf.args[-1]
        if i is not None:
            row, last = i
            return row + (last if offset is None else offset)
        return self.t + (self.offset if offset is None else self.column(offset))

    def keys(self, leaf: Mask) -> Any:
        start, stop = leaf.args
        return None if start is None else self.column(start), self.column(stop)

    def prefix(self, leaf: Mask) -> Any:
        return None, self.column(leaf.args[0])

    def padding(self, leaf: Mask) -> Any:
        tokens = (self.table(leaf.args[0]) != 0).int()
        start = tokens.argmax(1, keepdim=True)
        return start, start + tokens.sum(1, keepdim=True)

    def documents(self, leaf: Mask) -> Any:
        first, second = leaf.args
        ids = self.table(first)
        if second is not None:
            return self.around(self.table(second), ids)
        i = self.t + self.offset
        ids, i = (x.expand(max(len(ids), len(i)), -1) for x in (ids, i))
        lo, hi = self.around(ids, ids.gather(1, i.clamp(0, self.Tk - 1)))
        return self.between(lo, hi, i < 0, i >= self.Tk)

    def around(self, table: Tensor, x: Tensor) -> Any:
        """Where the numbers equal to x start and end in a sorted table."""
        count = max(len(table), len(x))
        table, x = (a.expand(count, -1).contiguous() for a in (table, x))
        return torch.searchsorted(table, x), torch.searchsorted(table, x, right=True)

    def packed(self, leaf: Mask) -> Any:
        first, second = leaf.args
        bounds = self.table(first)
        if second is None:
            rows, keys = (bounds - self.offset).clamp(0, self.Tq), bounds
        else:
            rows, keys = bounds, self.table(second)
        count, last = max(len(rows), len(keys)), rows.shape[1] - 1
        rows, keys = (a.expand(count, -1).contiguous() for a in (rows, keys.clamp(0, self.Tk)))
        if last < 1:
            return torch.zeros_like(self.t), torch.zeros_like(self.t)
        t = self.t.expand(count, -1).contiguous()
        d = torch.searchsorted(rows, t, right=True) - 1
        at = d.clamp(0, last - 1)
        lo, hi = keys.gather(1, at), keys.gather(1, at + 1)
        for child in leaf.children:
            q0, q1 = rows.gather(1, at), rows.gather(1, at + 1)
            begin, end = lo, hi
            for one in child.children if child.kind == "and" else (child,):
                if one.kind != "full":
                    low, high = getattr(self, one.kind)(one, (t - q0, (end - begin) - (q1 - q0)))
                    lo = lo if low is None else torch.minimum(torch.maximum(lo, begin + low), end)
                    hi = hi if high is None else torch.maximum(torch.minimum(hi, begin + high), begin)
        return self.between(lo, hi, d < 0, d >= last)

    def between(self, lo: Tensor, hi: Tensor, before: Tensor, behind: Tensor) -> Any:
        """(lo, hi), with no keys for rows before and after all documents."""
        ends = (torch.where(before, 0, torch.where(behind, self.Tk, x)) for x in (lo, hi))
        return tuple(ends)


# the method of every kind whose intervals are computed here; a kind without a method is an error at import
INTERVALS = {name: getattr(_Rows, name) for name, kind in KINDS.items() if kind.on_device}


class Segments(NamedTuple):
    """Lists of tiles: ptr int32 [Bm n_tiles + 1] into seg int32 [.., 3] of (begin, end, kind); no segment is empty.

    extent int32 [Bm, n_tiles]: for row tiles the number of keys that each visits, last tile first; for key tiles the
    end of each.
    """

    ptr: Tensor
    seg: Tensor
    extent: Tensor


def segments(part: Intervals, tile: int, quantum: int, *, from_first: bool = False, of_keys: bool = False) -> Segments:
    """The keys that tiles of rows visit, rounded to multiples of quantum, and which of them are FULL.

    from_first: multiples from the first key that a tile sees. of_keys: the rows that tiles of keys visit, in units of
    quantum rows.
    """
    (Bm, Tq), Tk, new = part.lo.shape, part.Tk, part.lo.new_empty
    rows, n = (Tk, Tq) if of_keys else (Tq, Tk)
    n_tiles = -(-rows // tile)
    cells = Bm * n_tiles
    count, extent, spread, seg, ptr = new(cells), new(Bm, n_tiles), new(cells, 3, 3), new(3 * cells, 3), new(cells + 1)
    config = kernels.Config(tile, min(1024, triton.next_power_of_2(tile)), quantum, from_first, of_keys)
    intervals = kernels.Intervals(*part.rows_of_keys if of_keys else (part.lo, part.hi))
    out = kernels.Lists(count, spread, extent)
    with on(part.lo):
        PLAIN.run(kernels.segments, (n_tiles * Bm,), intervals, out, rows, n, n_tiles, config)
        PLAIN.run(kernels.pack, (1,), count, spread, ptr, seg, cells, BLOCK=256)
    return Segments(ptr, seg, extent)


@lru_cache(maxsize=64)
def every_pair(device: torch.device) -> Tensor:
    """EVERY_PAIR on a device, int32 [1, 1, 8]."""
    return upload([[EVERY_PAIR]], device)
