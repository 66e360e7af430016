"""The lists of a plan on the device, one int32 buffer a part: what `kernels.masks.Place` points into.

Not responsible for which keys a tile visits (plan.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...mask.forms import GRIDS_IN, GRIDS_OUT, ROWS_IN, ROWS_OUT, STRIDE, Grid, Lowered, Rows
from ...plan import Part, Plan, Ranges
from .chip import upload
from .kernels.masks import BAND, GENERAL, ROWS, UNION, Place
from .on_device import EVERY_PAIR, Intervals, segments

Int32 = NDArray[np.int32]


# the keys of a tile, at most 128, then lie in 32 blocks
LEAST_BLOCK = 8
EVERYWHERE = Grid(1 << 30, 1 << 30, np.ones((1, 1, 1), np.uint8))


class Lists(NamedTuple):
    """The buffer of one part, what the host needs to know of it, and the kind of element test."""

    words: torch.Tensor
    n_tiles: int
    n_classes: int
    mask: int


class Order(NamedTuple):
    """Keys in the order of a plan, int32 [Tk] each: where each comes from, and where each of the caller's went."""

    there: torch.Tensor
    back: torch.Tensor


_kept: weakref.WeakKeyDictionary[Part | Intervals, dict[Any, Lists]] = weakref.WeakKeyDictionary()
_orders: weakref.WeakKeyDictionary[Plan, dict[torch.device, Order]] = weakref.WeakKeyDictionary()


def order_of(plan: Plan, device: torch.device) -> Order | None:
    """The order of a plan's keys on the device, None where it is the caller's."""
    if plan.order is None:
        return None
    kept = _orders.setdefault(plan, {})
    if device not in kept:
        kept[device] = Order(*(upload(x, device) for x in (plan.order, np.argsort(plan.order).astype(np.int32))))
    return kept[device]


def of_part(part: Part | Intervals, plan: Plan, device: torch.device, tile_k: int = 0) -> Lists:
    """The lists of a part; with tile_k those of key tiles of that many keys, over rows."""
    kept = _kept.setdefault(part, {})
    key = device, tile_k
    if key not in kept:
        make = _of_intervals if isinstance(part, Intervals) else _of_host
        kept[key] = make(part, plan, device, tile_k)  # pyright: ignore[reportArgumentType]
    return kept[key]


def _of_host(part: Part, plan: Plan, device: torch.device, tile_k: int) -> Lists:
    ranges = part.transposed(tile_k) if tile_k else part.ranges
    n_tiles = -(-int(part.nk.max()) // tile_k) if tile_k else part.n_tiles
    kind = _kind_of(part.masks, part.step)
    words = _words(part, plan, ranges, _order(ranges, n_tiles, last_first=not tile_k), n_tiles, kind)
    return Lists(upload(words, device), n_tiles, len(part.nq), kind)


def _of_intervals(part: Intervals, plan: Plan, device: torch.device, tile_k: int) -> Lists:
    # what does not depend on the intervals comes from the host once for these sizes
    tile, quantum = (tile_k, 1) if tile_k else (plan.tile_q, plan.tile_k)
    ptr, seg, told = segments(part, tile, quantum, of_keys=tile_k > 0)
    n_tiles = told.shape[1]
    head = _head(plan.B, plan.Tq, plan.Tk, plan.Hq, plan.Hk, part.Bm, n_tiles, tile_k > 0, device)
    words = torch.cat([head, part.lo.flatten(), part.hi.flatten(), ptr, seg.flatten()])
    return Lists(words, n_tiles, 1, ROWS.value)


@lru_cache(maxsize=64)
def _head(
    B: int, Tq: int, Tk: int, Hq: int, Hk: int, Bm: int, n_tiles: int, of_keys: bool, device: torch.device
) -> torch.Tensor:  # fmt: skip
    words = _Words()
    words.put(np.zeros(len(Place._fields) - 1))
    bands, uses = words.put(EVERY_PAIR), words.put([1, 0, 0, 0])
    length = words.length + 6 + 4 + 4 + Hq + 1 + Bm * n_tiles
    stride = Tq if Bm > 1 else 0
    record = words.put([1, 0, 1, 0, bands, uses, length, length + Bm * Tq, stride, 0])
    # under a causal mask the last tiles of rows and the first ones of keys are the longest
    order = np.tile(np.arange(n_tiles) if of_keys else np.arange(n_tiles)[::-1], Bm)
    tables = [words.put(a) for a in ([0, 0, Tq, Tk], np.zeros(Hq), [record], order)]
    ptr = length + 2 * Bm * Tq
    head = [B, Tq, Tk, Hq, Hq // Hk, ptr, ptr + Bm * n_tiles + 1, *tables, 1, 1, n_tiles, Bm, 1]
    words.pieces[0] = np.array(head, np.int32)
    return upload(np.concatenate(words.pieces), device)


class _Words:
    def __init__(self) -> None:
        self.pieces: list[Int32] = []
        self.length = 0

    def put(self, a: Any) -> int:
        piece = np.ascontiguousarray(a, np.int32).reshape(-1)
        at, self.length = self.length, self.length + len(piece)
        self.pieces.append(piece)
        return at


def _words(part: Part, plan: Plan, ranges: Ranges, order: Int32, n_tiles: int, kind: int) -> Int32:
    # begins with the fields of `Place` after `words`, in their order
    words = _Words()
    words.put(np.zeros(len(Place._fields) - 1))
    records = [_union(mask, words, kind) if kind >= UNION else words.put(_record(mask, words)) for mask in part.masks]
    classes = np.stack([part.q_start, part.k_start, part.nq, part.nk], 1)
    tables = [words.put(a) for a in (ranges.ptr, ranges.seg, classes, part.head, records, order)]
    sizes = plan.B, plan.Tq, plan.Tk, plan.Hq, plan.Hq // plan.Hk
    head = [*sizes, *tables, len(classes), len(part.masks), n_tiles, part.Bm, part.step]
    words.pieces[0] = np.array(head, np.int32)
    return np.concatenate(words.pieces)


def _order(ranges: Ranges, n_tiles: int, last_first: bool) -> Int32:
    # the tiles of each list by the keys or rows that they visit, most first; where it is as many the last or the first
    total = np.concatenate([[0], np.cumsum(ranges.seg[:, 1] - ranges.seg[:, 0], dtype=np.int64)])
    visited = np.diff(total[ranges.ptr]).reshape(-1, max(n_tiles, 1))
    if not last_first:
        return np.argsort(-visited, axis=1, kind="stable").astype(np.int32)
    return (n_tiles - 1 - np.argsort(-visited[:, ::-1], axis=1, kind="stable")).astype(np.int32)


def _record(mask: Lowered, words: _Words) -> list[int]:
    # read by `kernels.masks._in_general`, in this order
    batched = int(mask.bands.shape[0] > 1)
    found = [mask.nb, batched, len(mask.rows), len(mask.grids), words.put(mask.bands), words.put(mask.uses)]
    found += [n for rows in mask.rows for n in _interval(rows, words)]
    return found + [n for grid in mask.grids for n in _grid(grid, words)]


def _interval(rows: Rows, words: _Words) -> list[int]:
    stride = rows.lo.shape[1] if rows.batch > 1 else 0
    return [words.put(rows.lo), words.put(rows.hi), stride, int(rows.axis == "k")]


def _grid(grid: Grid, words: _Words, bits: bool = False) -> list[int]:
    # a byte for each block, by keys; or a bit, by queries, with a word more that a tile may read
    states = grid.states
    if bits:
        states = np.packbits(states.transpose(0, 2, 1) != 0, axis=2, bitorder="little")
        states = np.pad(states, [(0, 0), (0, 0), (0, -states.shape[2] % 4 + 4)])
    whole = np.zeros(-(-states.size // 4) * 4, np.uint8)
    whole[: states.size] = states.reshape(-1)
    row = states.shape[2] // (4 if bits else 1)
    size = row * states.shape[1] if grid.batch > 1 else 0
    return [words.put(whole.view(np.int32)), *_over(grid.block_q), *_over(grid.block_k), row, size]


def _over(n: int) -> tuple[int, int]:
    # read by `kernels.masks._over`: x // n = x factor // 2^(31 + shift), exact for x below 2^31; the factor as int32
    shift = (n - 1).bit_length()
    return -(-(1 << 31 + shift) // n) - (1 << 32), shift


def _union(mask: Lowered, words: _Words, kind: int) -> int:
    # read by `kernels.masks._in_union`: bands up to a power of two, the last of them empty; where the intervals of
    # rows, of keys and the grid of each stand, 0 for no interval; a band without a grid has one of a block
    bands = np.zeros((mask.bands.shape[0], (kind - UNION.value) // 8 + 1, 8), np.int32)
    bands[:, : mask.nb] = mask.bands
    at: dict[Any, int] = {rows: words.put(_interval(rows, words)) for rows in mask.rows}
    at |= {grid: words.put(_grid(grid, words, bits=True)) for grid in mask.grids}
    factors = np.zeros((bands.shape[1], 3), np.int32)
    factors[:, 2] = words.put(_grid(EVERYWHERE, words, bits=True))
    for n, use in enumerate(mask.uses):
        for part in _used(mask, use):
            factors[n, 2 if isinstance(part, Grid) else "qk".index(part.axis)] = at[part]
    return words.put([0, int(len(bands) > 1), 0, 0, words.put(bands), words.put(factors)])


def _used(mask: Lowered, use: Int32) -> list[Rows | Grid]:
    # what a band is inside of
    rows = [rows for r, rows in enumerate(mask.rows) if use[ROWS_IN] >> r & 1]
    return rows + [grid for g, grid in enumerate(mask.grids) if use[GRIDS_IN] >> g & 1]


def _kind_of(masks: Sequence[Lowered], step: int) -> int:
    # one for all heads
    kinds = {_kind(mask, step) for mask in masks}
    if len(kinds) == 1:
        return kinds.pop()
    kinds = {_kind_of_union(mask, step) - UNION.value for mask in masks}
    if min(kinds) < 0:
        return GENERAL.value
    return UNION.value + max(kind // 8 * 8 for kind in kinds) + reduce(or_, (kind % 8 for kind in kinds))


def _kind(mask: Lowered, step: int) -> int:
    plain = (np.abs(mask.bands[..., STRIDE]) == 1).all() and not mask.uses[:, [ROWS_OUT, GRIDS_IN, GRIDS_OUT]].any()
    if mask.nb <= 1 and plain and not mask.uses.any():
        return BAND.value
    # inside the one interval of each row
    if mask.nb == 1 and plain and len(mask.rows) == 1 and mask.rows[0].axis == "q":
        return ROWS.value
    return _kind_of_union(mask, step)


def _kind_of_union(mask: Lowered, step: int) -> int:
    if (np.abs(mask.bands[..., STRIDE]) != 1).any() or mask.uses[:, [ROWS_OUT, GRIDS_OUT]].any():
        return GENERAL.value
    if any(grid.block_k < LEAST_BLOCK * step for grid in mask.grids):
        return GENERAL.value
    factors: set[str] = set()
    for use in mask.uses:
        used = ["grid" if isinstance(part, Grid) else part.axis for part in _used(mask, use)]
        if len(set(used)) < len(used):
            return GENERAL.value
        factors.update(used)
    # few numbers of bands, for each is compiled
    bands = 1 << (max(mask.nb, 1) - 1).bit_length()
    return UNION.value + 8 * (bands - 1) + ("q" in factors) + 2 * ("k" in factors) + 4 * ("grid" in factors)
