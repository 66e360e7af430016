"""A plan's words on the device: one int32 buffer per part, which starts with the numbers of `kernels.masks.Place`.

plan.py decides which keys a tile visits; plan_encoding.py defines the tables.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch

from ...captures import keep_captured
from ...mask.forms import GRIDS_IN, GRIDS_OUT, ROWS_IN, ROWS_OUT, STRIDE, Grid, Lowered, Rows
from ...mask.tiling import PARTIAL
from ...plan import Part, Plan
from .. import plan_encoding
from ..plan_encoding import INTERVAL, RECORD, Int32, Words, longest_first
from .chip import upload
from .kernels.masks import BAND, GENERAL, ROWS, UNION, Place
from .on_device import EVERY_PAIR, Intervals, segments

# the numbers at the head of the words
NUMBERS = Place._fields[1:]
# with blocks of at least 8 keys, the keys of a tile, at most 128, lie in at most 32 blocks
LEAST_BLOCK = 8
EVERYWHERE = Grid.of(1 << 30, 1 << 30, np.ones((1, 1, 1), np.uint8))


class Lists(NamedTuple):
    """The buffer of one part, the sizes that the host needs, and the kind of element test."""

    words: torch.Tensor
    n_tiles: int
    n_classes: int
    mask: int


class Order(NamedTuple):
    """A plan's order of keys, int32 [Tk] each: the caller's index of each reordered key, and the inverse."""

    there: torch.Tensor
    back: torch.Tensor


_lists: weakref.WeakKeyDictionary[Part | Intervals, dict[Any, Lists]] = weakref.WeakKeyDictionary()
_orders: weakref.WeakKeyDictionary[Plan, dict[torch.device, Order]] = weakref.WeakKeyDictionary()


def order_of(plan: Plan, device: torch.device) -> Order | None:
    """The order of a plan's keys on the device, None where it is the caller's order."""
    if plan.order is None:
        return None
    orders = _orders.setdefault(plan, {})
    if device not in orders:
        orders[device] = Order(*(upload(x, device) for x in (plan.order, np.argsort(plan.order).astype(np.int32))))
    return keep_captured(orders[device], device)


def of_part(
    part: Part | Intervals, plan: Plan, device: torch.device, tile_k: int = 0, *, scattered: bool = False, rows: int = 0
) -> Lists:
    """The lists of a part's row tiles, or with tile_k the lists of its tiles of tile_k keys.

    scattered: the keys of a tile are not next to each other, so that no word has the blocks of all of them. rows: the
    lists of key tiles start at multiples of so many rows and have no FULL segment; 0 for lists as short as possible.
    """
    mine = _lists.setdefault(part, {})
    key = device, tile_k, scattered, rows
    if key not in mine:
        if isinstance(part, Intervals):
            mine[key] = _of_intervals(part, plan, device, tile_k)
        else:
            mine[key] = _of_host(part, plan, device, tile_k, scattered, rows)
    return keep_captured(mine[key], device)


def _of_host(part: Part, plan: Plan, device: torch.device, tile_k: int, scattered: bool, rows: int) -> Lists:
    ranges = part.transposed(tile_k, quantum=max(1, rows)) if tile_k else part.ranges
    if rows:
        ranges.seg[:, 2] = PARTIAL
    n_tiles = -(-int(part.nk.max()) // tile_k) if tile_k else part.n_tiles
    kind = _kind_of(part.masks, part.step)
    if scattered and kind >= UNION.value and any(mask.grids for mask in part.masks):
        kind = GENERAL.value
    words = Words()
    _, head = words.reserve(len(NUMBERS))
    if kind >= UNION:
        records = [_put_union(words, mask, kind) for mask in part.masks]
    else:
        records = plan_encoding.put_masks(words, part.masks)
    order = longest_first(ranges.keys().reshape(-1, max(n_tiles, 1)), last=not tile_k)
    numbers = plan_encoding.put_part(words, part) | {"o_ptr": words.put(ranges.ptr), "o_seg": words.put(ranges.seg)}
    numbers |= {"o_masks": words.put(records), "o_order": words.put(order), "n_tiles": n_tiles}
    numbers |= {"B": plan.B, "Tq": plan.Tq, "Tk": plan.Tk, "Hq": plan.Hq, "G": plan.Hq // plan.Hk}
    head[:] = [numbers[name] for name in NUMBERS]
    return Lists(upload(words.joined(), device), n_tiles, len(part.nq), kind)


def _of_intervals(part: Intervals, plan: Plan, device: torch.device, tile_k: int) -> Lists:
    # the words that do not depend on the intervals are uploaded once per set of sizes
    tile, quantum = (tile_k, 1) if tile_k else (plan.tile_q, plan.tile_k)
    ptr, seg, extent = segments(part, tile, quantum, of_keys=tile_k > 0)
    n_tiles = extent.shape[1]
    sizes = {"B": plan.B, "Tq": plan.Tq, "Tk": plan.Tk, "Hq": plan.Hq, "G": plan.Hq // plan.Hk}
    head = _head(tuple(sizes.items()), part.Bm, n_tiles, tile_k > 0, device)
    words = torch.cat([head, part.lo.flatten(), part.hi.flatten(), ptr, seg.flatten()])
    return Lists(words, n_tiles, 1, ROWS.value)


@lru_cache(maxsize=64)
def _head(
    sizes: tuple[tuple[str, int], ...], Bm: int, n_tiles: int, of_keys: bool, device: torch.device
) -> torch.Tensor:
    _, Tq, Tk, Hq, _ = (n for _, n in sizes)
    words = Words()
    _, head = words.reserve(len(NUMBERS))
    start, record = words.reserve(RECORD + INTERVAL)
    bands, uses = words.put(EVERY_PAIR), words.put([1, 0, 0, 0])
    # under a causal mask the last tiles of rows and the first tiles of keys are the longest
    order = np.tile(np.arange(n_tiles) if of_keys else np.arange(n_tiles)[::-1], Bm)
    numbers = {"o_classes": words.put([0, 0, Tq, Tk]), "o_heads": words.put(np.zeros(Hq))}
    numbers |= {"o_masks": words.put([start]), "o_order": words.put(order)}
    # the tables that the device fills come next: lows and highs of the intervals, ptr, seg
    lo, size = words.length, Bm * Tq
    record[:] = [1, 0, 1, 0, bands, uses, lo, lo + size, Tq if Bm > 1 else 0, 0]
    numbers |= {"o_ptr": lo + 2 * size, "o_seg": lo + 2 * size + Bm * n_tiles + 1, "n_classes": 1, "n_masks": 1}
    numbers |= {"n_tiles": n_tiles, "mask_batches": Bm, "step": 1, **dict(sizes)}
    head[:] = [numbers[name] for name in NUMBERS]
    return upload(words.joined(), device)


def _put_union(words: Words, mask: Lowered, kind: int) -> int:
    # The record that `kernels.masks._in_union` reads: bands, padded with empty ones to a power of two, and for each
    # band the places of its interval of rows, its interval of keys and its grid. A place of 0 means no interval; a
    # band without a grid has a grid of one block.
    bands = np.zeros((mask.bands.shape[0], (kind - UNION.value) // 8 + 1, 8), np.int32)
    bands[:, : mask.nb] = mask.bands
    at: dict[Any, int] = {rows: words.put(plan_encoding.put_interval(words, rows)) for rows in mask.rows}
    at |= {grid: words.put(plan_encoding.put_grid(words, grid, bits=True)) for grid in mask.grids}
    factors = np.zeros((bands.shape[1], 3), np.int32)
    factors[:, 2] = words.put(plan_encoding.put_grid(words, EVERYWHERE, bits=True))
    for n, use in enumerate(mask.uses):
        for part in _used(mask, use):
            factors[n, 2 if isinstance(part, Grid) else "qk".index(part.axis)] = at[part]
    return words.put([0, int(len(bands) > 1), 0, 0, words.put(bands), words.put(factors)])


def _used(mask: Lowered, use: Int32) -> list[Rows | Grid]:
    # the intervals and grids that a band is restricted to
    rows = [rows for r, rows in enumerate(mask.rows) if use[ROWS_IN] >> r & 1]
    return rows + [grid for g, grid in enumerate(mask.grids) if use[GRIDS_IN] >> g & 1]


def _kind_of(masks: Sequence[Lowered], step: int) -> int:
    # one kind for all heads
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
    # one interval of keys per row restricts the only band
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
    # rounded up to a power of two, because each number of bands compiles a kernel
    bands = 1 << (max(mask.nb, 1) - 1).bit_length()
    return UNION.value + 8 * (bands - 1) + ("q" in factors) + 2 * ("k" in factors) + 4 * ("grid" in factors)
