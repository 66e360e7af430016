"""Plans: which tiles of keys each tile of queries visits, and how keys are split. A plan is data without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .mask.forms import D_LO, K_HI, Q_LO, Lowered, LoweredHeads
from .mask.gathering import gathered
from .mask.lowering import lower
from .mask.memo import Memo
from .mask.segments import segments
from .mask.strides import Cut, classes_of, cut
from .mask.tiling import FULL, PARTIAL, View, fitting

if TYPE_CHECKING:
    from .problem import Problem

Int32, Int64 = NDArray[np.int32], NDArray[np.int64]
_PLANS = Memo()
# keys are copied into another order if that reduces the number of visited tiles by at least this factor
GATHERED = 2


@dataclass(frozen=True)
class Limits:
    """What a device requires of a plan.

    tile_q, tile_k: tile sizes in queries and keys. least_q: the smallest tile_q that blocks in a mask may lead to, 0 if
    tile_q is fixed. memory: bytes of fast memory per core. quantum: ranges of visited keys are rounded outward to its
    multiples, ranges of full ones inward. gathers: the backend can read keys in an order given by the plan.
    Decode splits the keys of one query, or of up to few_queries over at least split_from keys, into about `lanes` work
    items of at least split_least keys. A backward has about `owners` work items, at most most_owners per key head,
    whose sums of key gradients take at most owner_bytes.
    """

    name: str
    tile_q: int = 64
    tile_k: int = 64
    memory: int = 32 * 1024
    quantum: int = 1
    least_q: int = 0
    gathers: bool = False
    few_queries: int = 8
    split_from: int = 128
    lanes: int = 64
    split_least: int = 256
    owners: int = 16
    most_owners: int = 8
    owner_bytes: int = 1 << 28


@dataclass(frozen=True, eq=False)
class Ranges:
    """Keys that each tile visits.

    ptr: int32 [C * M * Bm * n_tiles + 1]. Tile ((c * M + m) * Bm + b) * n_tiles + n has seg[ptr[tile]:ptr[tile + 1]].
    seg: int32 [n, 3], (begin, end, kind): sorted, disjoint ranges of keys of a class; kind is 1 PARTIAL or 2 FULL.
    """

    ptr: Int32
    seg: Int32

    def keys(self, kind: int = 0) -> Int64:
        """How many keys each tile visits, in order of `ptr`; with `kind`, only in its segments of that kind."""
        width = (self.seg[:, 1] - self.seg[:, 0]).astype(np.int64)
        return self._sums(width * (self.seg[:, 2] == kind) if kind else width)

    def tiles(self, tile_k: int) -> Int64:
        """How many tiles of `tile_k` keys each tile visits; a tile of keys in two segments counts once."""
        first, last = self.seg[:, 0] // tile_k, -(-self.seg[:, 1] // tile_k)
        cell, before = np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr)), np.zeros_like(last)
        before[1:] = np.where(cell[1:] == cell[:-1], last[:-1], 0)
        return self._sums(np.maximum(last - np.maximum(first, before), 0))

    def full_tiles(self, tile_k: int) -> Int64:
        """How many tiles of `tile_k` keys each tile visits that lie in FULL segments."""
        inside = self.seg[:, 1] // tile_k - -(-self.seg[:, 0] // tile_k)
        return self._sums(np.maximum(inside, 0) * (self.seg[:, 2] == FULL))

    def _sums(self, numbers: NDArray[Any]) -> Int64:
        # a number per segment, summed for each tile
        total = np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])
        return total[self.ptr[1:]] - total[self.ptr[:-1]]


@dataclass(frozen=True, eq=False)
class Part:
    """Residue classes of one stride: class c has the rows q_start[c] + step·a, a < nq[c], and keys likewise.

    Every row is in exactly one class. masks take (t, j) of the whole problem and no longer contain the stride, which is
    constant within a class. head: int32 [Hq], the mask of each query head. Bm: 1 or B. n_tiles: tiles of the longest
    class.
    """

    step: int
    q_start: Int32
    k_start: Int32
    nq: Int32
    nk: Int32
    masks: tuple[Lowered, ...]
    head: Int32
    ranges: Ranges
    n_tiles: int
    Bm: int

    def tiled(self, tile_q: int, chunk: int, quantum: int) -> Ranges:
        """Keys that each tile of `tile_q` rows visits, for kernels whose tiles differ from the plan's."""
        view = _view(self.step, self.q_start, self.k_start, self.nq, self.nk, tile_q)
        return _ranges(self.masks, view, self.Bm, chunk, quantum)

    def transposed(self, tile_k: int, chunk: int = 64) -> Ranges:
        """Rows that visit each tile of `tile_k` keys; ceil(max nk / tile_k) tiles per class."""
        masks = tuple(m.transpose() for m in self.masks)
        view = _view(self.step, self.k_start, self.q_start, self.nk, self.nq, tile_k)
        return _ranges(masks, view, self.Bm, chunk, 1)

    def total(self, numbers: Int64, B: int) -> int:
        """The sum, over the batch and all query heads, of a number per tile in order of `ranges.ptr`."""
        heads = np.bincount(self.head, minlength=len(self.masks)) * (B if self.Bm == 1 else 1)
        each = numbers.reshape(len(self.nq), len(heads), numbers.size // (len(self.nq) * len(heads)))
        return int((each * heads.reshape(1, -1, 1)).sum())

    def pairs(self, keys: Int64, tile_q: int, B: int) -> int:
        """The number of pairs of tiles of `tile_q` rows (fewer at the end of a class) with `keys` keys each."""
        rows = np.clip(self.nq.reshape(-1, 1).astype(np.int64) - np.arange(0, int(self.nq.max()), tile_q), 0, tile_q)
        shape = len(self.nq), len(self.masks) * self.Bm, rows.shape[1]
        return self.total(keys.reshape(shape) * rows[:, None], B)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a backend runs: parts whose partial results are merged by lse, and a split of the keys for few queries.

    parts: at most 4, disjoint in (t, j). num_splits, split_keys: number and size of the ranges of keys that decode
    processes in parallel; split_keys is 0 if it does not split. owners: work items that share the gradient of one key
    head. All these depend only on the shapes, never on the number of threads, so results have the same bits with any
    number of threads. order: int32 [Tk] or None; key j of the plan is key order[j] of the call.
    """

    tile_q: int
    tile_k: int
    parts: tuple[Part, ...]
    num_splits: int
    split_keys: int
    owners: int
    B: int
    Hq: int
    Hk: int
    Tq: int
    Tk: int
    order: Int32 | None = None

    @cached_property
    def visited_pairs(self) -> int:
        """(query, key) pairs in visited segments, over the batch and all query heads."""
        return sum(part.pairs(part.ranges.keys(), self.tile_q, self.B) for part in self.parts)

    @cached_property
    def full_pairs(self) -> int:
        """The visited pairs that need no element test."""
        return sum(part.pairs(part.ranges.keys(FULL), self.tile_q, self.B) for part in self.parts)

    @cached_property
    def visited_tiles(self) -> int:
        """Tiles of tile_q × tile_k that are visited, over the batch and all query heads."""
        return sum(part.total(part.ranges.tiles(self.tile_k), self.B) for part in self.parts)

    @cached_property
    def allowed_upper(self) -> int:
        """Upper bound of the allowed pairs: pairs that one-row tiles visit; exact without grids and element strides."""
        return sum(part.pairs(part.tiled(1, 1, 1).keys(), 1, self.B) for part in self.parts)

    def __str__(self) -> str:
        pairs = self.B * self.Hq * self.Tq * self.Tk
        share = 1 - self.visited_pairs / pairs if pairs else 0.0
        skipped = f"{share:.1%} of the pairs skipped" if share else "no pair skipped"
        lines = [f"tiles of {self.tile_q} queries × {self.tile_k} keys, {skipped}"]
        if self.order is not None:
            lines.append("  keys copied into another order: those that few rows see, then the columns of the mask")
        for part in self.parts:
            kind = part.ranges.seg[:, 2]
            where = f"stride {part.step}, {len(part.nq)} classes" if part.step > 1 else "all rows and keys"
            bands = ", ".join(str(m.nb) for m in part.masks)
            lines.append(
                f"  {where}: bands {bands} · {part.n_tiles} query tile{'s' * (part.n_tiles != 1)} · "
                f"{int((kind == FULL).sum())} full and {int((kind == PARTIAL).sum())} partial segments"
            )
        if self.num_splits > 1:
            lines.append(f"  keys in {self.num_splits} splits of {self.split_keys}")
        return "\n".join(lines)


def make_plan(problem: Problem, limits: Limits, parts: tuple[Part, ...] | LoweredHeads | None = None) -> Plan:
    """The plan of a problem on a device with these limits, cached by the mask's structure, integers and arrays.

    parts: given by a backend that lowers the mask on the device of its arrays; or a lowered mask that replaces the
    problem's. Raises ValueError if the mask's arrays do not fit, or for more than 8 bands after simplification.
    """
    p = problem
    sizes = p.B, p.Hq, p.Hk, p.Tq, p.Tk, p.D, p.Dv
    # the rows of a list of selected keys are not divided by strides
    whole = p.selection is not None
    key, plan = (None, None) if parts else _PLANS.get(p.others, (*sizes, p.accumulator, limits, whole))
    if plan is None:
        heads = lower(p.others, p.B, p.Hq, p.Tq, p.Tk) if parts is None else parts
        plan = _plan(p, limits, heads)
        moved = None
        if limits.gathers and isinstance(heads, LoweredHeads):
            moved = gathered(heads, p.Tq, p.Tk, limits.tile_k)
        if moved is not None:
            other = _plan(p, limits, moved.heads, moved.order)
            plan = other if GATHERED * other.visited_tiles <= plan.visited_tiles else plan
        _PLANS.put(p.others, key, plan)
    return plan


def _plan(p: Problem, limits: Limits, parts: tuple[Part, ...] | LoweredHeads, order: Int32 | None = None) -> Plan:
    tile_q = limits.tile_q
    if isinstance(parts, LoweredHeads):
        heads, tile_q = parts, fitting(tile_q, limits.least_q, parts.masks)
        cuts = [Cut(1, 0, heads.masks)] if p.selection is not None else cut(heads, p.Tq, p.Tk)
        parts = tuple(_part(c, heads, p, limits, tile_q) for c in cuts)
    sizes = p.B, p.Hq, p.Hk, p.Tq, p.Tk
    return Plan(tile_q, limits.tile_k, parts, *_split(p, limits, parts), _owners(p, limits, parts), *sizes, order)


def _part(c: Cut, heads: LoweredHeads, p: Problem, limits: Limits, tile_q: int) -> Part:
    view, (q_start, k_start, nq, nk) = _classes(c.step, c.phase, p.Tq, p.Tk, tile_q)
    batch = max(m.batch for m in heads.masks)
    ranges = _ranges(c.masks, view, batch, limits.tile_k, limits.quantum)
    return Part(c.step, q_start, k_start, nq, nk, c.masks, heads.head, ranges, view.n_tiles, batch)


@lru_cache(maxsize=256)
def _classes(step: int, phase: int, Tq: int, Tk: int, tile: int) -> tuple[View, list[Int32]]:
    classes = classes_of(step, phase, Tq, Tk)
    return _view(step, *classes, tile), [a.astype(np.int32) for a in classes]


def _view(step: int, q_start: Any, k_start: Any, nq: Any, nk: Any, tile: int) -> View:
    n_tiles = -(-int(nq.max()) // tile)
    q_start, k_start, nq, nk = (a.astype(np.int64, copy=False) for a in (q_start, k_start, nq, nk))
    return View(step, q_start, k_start, nq, nk, tile, n_tiles)


def _ranges(masks: Sequence[Lowered], view: View, batch: int, chunk: int, quantum: int) -> Ranges:
    lists = [segments(m, view, batch, chunk, quantum) for m in masks]
    counts, seg = lists[0]
    if len(lists) > 1:
        # within each class, the tiles are grouped by mask
        C = len(view.nq)
        table = np.stack([f[0].reshape(C, -1) for f in lists], axis=1)
        cells = np.arange(table.size).reshape(table.shape)
        where = [np.repeat(cells[:, m].reshape(-1), f[0]) for m, f in enumerate(lists)]
        order = np.argsort(np.concatenate(where), kind="stable")
        counts, seg = table.reshape(-1), np.concatenate([f[1] for f in lists])[order]
    ptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=ptr[1:])
    return Ranges(ptr, seg)


def _split(p: Problem, limits: Limits, parts: Sequence[Part]) -> tuple[int, int]:
    if p.Tq > limits.few_queries or (p.Tq > 1 and p.Tk < limits.split_from):
        return 1, 0
    if len(parts) > 1 or parts[0].step > 1 or len(parts[0].masks) > 1:
        # kernels that split the keys read one list of keys for all heads
        return 1, 0
    wanted = max(1, limits.lanes // max(1, p.B * p.Hk))
    keys = max(limits.split_least, -(-p.Tk // wanted // 64) * 64)
    return max(1, -(-p.Tk // keys)), keys


def _owners(p: Problem, limits: Limits, parts: Sequence[Part]) -> int:
    heads = max(1, p.B * p.Hk)
    sums = heads * p.Tk * (p.D + p.Dv + 32) * np.dtype(p.accumulator).itemsize
    tiles = max(part.n_tiles for part in parts) // 8
    return max(1, min(limits.owners // heads, limits.most_owners, tiles, limits.owner_bytes // max(1, sums)))


def positions(p: Problem) -> Int32:
    """[1 | B]: the position of query row 0."""
    offset = p.Tk - p.Tq if p.mask is None else p.mask.offset(p.B, p.Tq, p.Tk)
    return np.ascontiguousarray(offset, np.int32).reshape(-1)


def sees_later_keys(p: Problem) -> bool:
    """Whether some row may see a key after its own position, judged by the bounds of the mask's bands."""
    offset = positions(p)[:, None]
    for mask in lower(p.others, p.B, p.Hq, p.Tq, p.Tk).masks:
        bands = mask.bands.astype(np.int64)
        nearest = np.maximum(bands[..., Q_LO], 0) - (np.minimum(bands[..., K_HI], p.Tk) - 1)
        if (np.maximum(bands[..., D_LO], nearest) + offset < 0).any():
            return True
    return False
