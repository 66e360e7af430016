"""The lists of a plan on the device, one int32 buffer a part: what `kernels.common.Place` points into.

Not responsible for which keys a tile visits (plan.py).
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...mask.forms import ROWS_OUT, STRIDE, Lowered
from ...plan import Part, Plan, Ranges
from .kernels.common import BAND, GENERAL, ROWS, Place
from .on_device import EVERY_PAIR, Intervals, segments

Int32 = NDArray[np.int32]


class Lists(NamedTuple):
    """The buffer of one part, what the host needs to know of it, and the kind of element test."""

    words: torch.Tensor
    n_tiles: int
    n_classes: int
    mask: int


_kept: weakref.WeakKeyDictionary[Part | Intervals, dict[Any, Lists]] = weakref.WeakKeyDictionary()


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
    words = _upload(_words(part, plan, ranges, n_tiles), device)
    kinds = set(map(_kind, part.masks))
    return Lists(words, n_tiles, len(part.nq), kinds.pop() if len(kinds) == 1 else GENERAL.value)


def _of_intervals(part: Intervals, plan: Plan, device: torch.device, tile_k: int) -> Lists:
    # what does not depend on the intervals comes from the host once for these sizes
    tile, quantum = (tile_k, 1) if tile_k else (plan.tile_q, plan.tile_k)
    ptr, seg, told = segments(part, tile, quantum, of_keys=tile_k > 0)
    n_tiles = told.shape[1]
    head = _head(plan.B, plan.Tq, plan.Tk, plan.Hq, plan.Hk, part.Bm, n_tiles, device)
    words = torch.cat([head, part.lo.flatten(), part.hi.flatten(), ptr, seg.flatten()])
    return Lists(words, n_tiles, 1, ROWS.value)


@lru_cache(maxsize=64)
def _head(B: int, Tq: int, Tk: int, Hq: int, Hk: int, Bm: int, n_tiles: int, device: torch.device) -> torch.Tensor:
    words = _Words()
    words.put(np.zeros(len(Place._fields) - 1))
    bands, uses = words.put(EVERY_PAIR), words.put([1, 0, 0, 0])
    length = words.length + 6 + 4 + 4 + Hq + 1
    stride = Tq if Bm > 1 else 0
    record = words.put([1, 0, 1, 0, bands, uses, length, length + Bm * Tq, stride, 0])
    tables = [words.put([0, 0, Tq, Tk]), words.put(np.zeros(Hq)), words.put([record])]
    ptr = length + 2 * Bm * Tq
    head = [B, Tq, Tk, Hq, Hq // Hk, ptr, ptr + Bm * n_tiles + 1, *tables, 1, 1, n_tiles, Bm, 1]
    words.pieces[0] = np.array(head, np.int32)
    return _upload(np.concatenate(words.pieces), device)


class _Words:
    def __init__(self) -> None:
        self.pieces: list[Int32] = []
        self.length = 0

    def put(self, a: Any) -> int:
        piece = np.ascontiguousarray(a, np.int32).reshape(-1)
        at, self.length = self.length, self.length + len(piece)
        self.pieces.append(piece)
        return at


def _words(part: Part, plan: Plan, ranges: Ranges, n_tiles: int) -> Int32:
    # begins with the fields of `Place` after `words`, in their order
    words = _Words()
    words.put(np.zeros(len(Place._fields) - 1))
    records = [words.put(_record(mask, words)) for mask in part.masks]
    classes = np.stack([part.q_start, part.k_start, part.nq, part.nk], 1)
    tables = [words.put(a) for a in (ranges.ptr, ranges.seg, classes, part.head, records)]
    sizes = plan.B, plan.Tq, plan.Tk, plan.Hq, plan.Hq // plan.Hk
    head = [*sizes, *tables, len(classes), len(part.masks), n_tiles, part.Bm, part.step]
    words.pieces[0] = np.array(head, np.int32)
    return np.concatenate(words.pieces)


def _upload(words: Int32, device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(words)
    # pinned, so that the copy waits for nothing
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _record(mask: Lowered, words: _Words) -> list[int]:
    # read by `kernels.common._in_general`, in this order
    batched = int(mask.bands.shape[0] > 1)
    found = [mask.nb, batched, len(mask.rows), len(mask.grids), words.put(mask.bands), words.put(mask.uses)]
    for rows in mask.rows:
        stride = rows.lo.shape[1] if rows.batch > 1 else 0
        found += [words.put(rows.lo), words.put(rows.hi), stride, int(rows.axis == "k")]
    for grid in mask.grids:
        states = np.zeros(-(-grid.states.size // 4) * 4, np.uint8)
        states[: grid.states.size] = grid.states.reshape(-1)
        row = grid.states.shape[2]
        size = row * grid.states.shape[1] if grid.batch > 1 else 0
        found += [words.put(states.view(np.int32)), grid.block_q, grid.block_k, row, size]
    return found


def _kind(mask: Lowered) -> int:
    if mask.nb != 1 or mask.grids or (np.abs(mask.bands[..., STRIDE]) != 1).any():
        return GENERAL.value if mask.nb else BAND.value
    if not mask.rows:
        return BAND.value
    # inside the one interval of each row
    plain = len(mask.rows) == 1 and mask.rows[0].axis == "q" and not mask.uses[0, ROWS_OUT]
    return ROWS.value if plain else GENERAL.value
