"""Parts of a plan: classes of rows and keys, and the segments of keys that each tile of rows visits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .mask.forms import Lowered, LoweredHeads
from .mask.segments import segments
from .mask.sequences import sequences
from .mask.strides import Cut, classes_of
from .mask.tiling import FULL, PARTIAL, View

if TYPE_CHECKING:
    from .problem import Problem

Int32, Int64 = NDArray[np.int32], NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """What a device requires of a plan.

    tile_q, tile_k: tile sizes in queries and keys. least_q: the smallest tile_q that blocks in a mask may lead to, 0 if
    tile_q is fixed. memory: bytes of fast memory per core. quantum: ranges of visited keys are rounded outward to its
    multiples, ranges of full ones inward. gathers: the backend can read keys in an order given by the plan. tests_all:
    no segment is FULL where bits must not depend on the batch, because kernels round pairs that they test differently.
    Decode splits the keys of one query, or of up to few_queries over at least split_from keys, into about `lanes` work
    items of at least split_least keys. A backward has about `owners` work items, at most most_owners per key head,
    whose sums of key gradients take at most owner_bytes. stage: tiles of queries in one stage of a backward, a multiple
    of 4; 0 if the device has no stages.
    """

    name: str
    tile_q: int = 64
    tile_k: int = 64
    memory: int = 32 * 1024
    quantum: int = 1
    least_q: int = 0
    gathers: bool = False
    tests_all: bool = False
    few_queries: int = 8
    split_from: int = 128
    lanes: int = 64
    split_least: int = 256
    owners: int = 16
    most_owners: int = 8
    owner_bytes: int = 1 << 28
    stage: int = 0


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

    Of plans whose results do not depend on the batch, the classes are the sequences, of step 1; entry, int32 [C], is
    the batch entry of each, None if all entries have all classes. Every row is in exactly one class. masks take (t, j)
    of the whole problem and no longer contain the stride, which is constant within a class. head: int32 [Hq], the mask
    of each query head. Bm: 1 or B. n_tiles: tiles of the longest class.

    stages: int32 [n, 3], None for one stage of everything. A backward computes the tiles from stages[i, 0] to
    stages[i + 1, 0] in stage i. They see no key from stages[i, 2] on, and neither they nor later tiles see a key before
    stages[i, 1].
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
    entry: Int32 | None = None
    stages: Int32 | None = None

    def tiled(self, tile_q: int, chunk: int, quantum: int) -> Ranges:
        """Keys that each tile of `tile_q` rows visits, for kernels whose tiles differ from the plan's."""
        view = _view(self.step, self.q_start, self.k_start, self.nq, self.nk, tile_q)
        return _ranges(self.masks, view, self.Bm, chunk, quantum, self.entry)

    def transposed(self, tile_k: int, chunk: int = 64, quantum: int = 1) -> Ranges:
        """Rows that visit each tile of `tile_k` keys; ceil(max nk / tile_k) tiles per class."""
        masks = tuple(m.transpose() for m in self.masks)
        view = _view(self.step, self.k_start, self.q_start, self.nk, self.nq, tile_k)
        return _ranges(masks, view, self.Bm, chunk, quantum, self.entry)

    def in_stages(self, Tk: int, size: int) -> Part:
        """The same part with stages of `size` tiles, if those of each stage see at most half of the keys of a call."""
        whole = self.step > 1 or len(self.nq) > 1 or self.entry is not None or self.q_start[0] or self.k_start[0]
        if whole or not len(self.ranges.seg):
            return self
        ptr, seg = self.ranges.ptr.astype(np.int64), self.ranges.seg
        none = ptr[1:] == ptr[:-1]
        first = np.where(none, Tk, seg[np.minimum(ptr[:-1], len(seg) - 1), 0]).reshape(-1, self.n_tiles).min(0)
        last = np.where(none, 0, seg[ptr[1:] - 1, 1]).reshape(-1, self.n_tiles).max(0)
        first, last = np.minimum.accumulate(first[::-1])[::-1], np.maximum.accumulate(last)
        tiles = np.arange(0, self.n_tiles, size)
        ends = np.maximum(last[np.minimum(tiles + size, self.n_tiles) - 1], first[tiles])
        stages = np.stack([tiles, first[tiles], ends], 1).astype(np.int32)
        return self if 2 * _rows(stages) > Tk else replace(self, stages=stages)

    def rows_of_sums(self, Tk: int) -> int:
        """How many keys have sums of gradients at one time."""
        return Tk if self.stages is None else _rows(self.stages)

    def total(self, numbers: Int64, B: int) -> int:
        """The sum, over the batch and all query heads, of a number per tile in order of `ranges.ptr`."""
        heads = np.bincount(self.head, minlength=len(self.masks)) * (B if self.Bm == 1 and self.entry is None else 1)
        each = numbers.reshape(len(self.nq), len(heads), numbers.size // (len(self.nq) * len(heads)))
        return int((each * heads.reshape(1, -1, 1)).sum())

    def pairs(self, keys: Int64, tile_q: int, B: int) -> int:
        """The number of pairs of tiles of `tile_q` rows (fewer at the end of a class) with `keys` keys each."""
        rows = np.clip(self.nq.reshape(-1, 1).astype(np.int64) - np.arange(0, int(self.nq.max()), tile_q), 0, tile_q)
        shape = len(self.nq), len(self.masks) * self.Bm, rows.shape[1]
        return self.total(keys.reshape(shape) * rows[:, None], B)


def _rows(stages: Int32) -> int:
    return int((stages[:, 2] - stages[:, 1]).max())


def part_of_cut(c: Cut, heads: LoweredHeads, p: Problem, limits: Limits, tile_q: int) -> Part:
    """The part of a mask whose rows and keys have one stride."""
    view, (q_start, k_start, nq, nk) = _classes(c.step, c.phase, p.Tq, p.Tk, tile_q)
    batch = max(m.batch for m in heads.masks)
    ranges = _ranges(c.masks, view, batch, limits.tile_k, limits.quantum)
    return Part(c.step, q_start, k_start, nq, nk, c.masks, heads.head, ranges, view.n_tiles, batch)


def part_of_sequences(heads: LoweredHeads, p: Problem, limits: Limits, tile_q: int) -> Part:
    """The whole mask, with tiles that start where sequences start."""
    entry, q_start, k_start, nq, nk = sequences(p.mask, p.B, p.Tq, p.Tk)
    view = _view(1, q_start, k_start, nq, nk, tile_q)
    batch = 1 if entry is not None else max(m.batch for m in heads.masks)
    ranges = _ranges(heads.masks, view, batch, limits.tile_k, limits.quantum, entry)
    if limits.tests_all:
        ranges.seg[:, 2] = PARTIAL
    return Part(1, q_start, k_start, nq, nk, heads.masks, heads.head, ranges, view.n_tiles, batch, entry)


@lru_cache(maxsize=256)
def _classes(step: int, phase: int, Tq: int, Tk: int, tile: int) -> tuple[View, list[Int32]]:
    classes = classes_of(step, phase, Tq, Tk)
    return _view(step, *classes, tile), [a.astype(np.int32) for a in classes]


def _view(step: int, q_start: Any, k_start: Any, nq: Any, nk: Any, tile: int) -> View:
    n_tiles = -(-int(nq.max()) // tile)
    q_start, k_start, nq, nk = (a.astype(np.int64, copy=False) for a in (q_start, k_start, nq, nk))
    return View(step, q_start, k_start, nq, nk, tile, n_tiles)


def _ranges(
    masks: Sequence[Lowered], view: View, batch: int, chunk: int, quantum: int, entry: Int32 | None = None
) -> Ranges:
    if entry is not None:
        return _joined(
            [
                _ranges([m.entry(b) for m in masks], view.some(entry == b), 1, chunk, quantum)
                for b in range(entry[-1] + 1)
            ]
        )
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


def _joined(parts: Sequence[Ranges]) -> Ranges:
    counts = np.concatenate([np.diff(part.ptr) for part in parts])
    return Ranges(np.append(0, np.cumsum(counts)).astype(np.int32), np.concatenate([part.seg for part in parts]))
