"""What a tiled kernel reads besides its arrays: the numbers of a call, and one int32 buffer with the plan's lists.

Not responsible for which keys a tile visits (plan.py) nor for the kernels' text (tiled.py).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .mask.forms import GRIDS_IN, GRIDS_OUT, ROWS_IN, ROWS_OUT, STRIDE, Lowered
from .plan import Part
from .problem import Problem

if TYPE_CHECKING:
    from .backends import Extras

Int32 = NDArray[np.int32]

# struct Dims of the WGSL and Metal kernels, in its order
WORDS = [
    "B", "Tq", "Tk", "Hq", "Hk", "G", "step", "n_masks", "mask_batches", "n_tiles", "t_tiles", "first_tile",
    "o_classes", "o_heads", "o_ptr", "o_seg", "o_tptr", "o_tseg", "o_sinks", "o_slopes", "slopes_stride", "o_offset",
    "offset_stride", "o_masks", "k_lo", "k_hi", "tile_count", "classes", "q_lo", "q_hi", "k_base", "q_base",
    "first_batch", "chunks", "rows", "drop_below", "seed_low", "seed_high", "chunk_keys", "o_table", "table_stride",
    "page_size",
]  # fmt: skip
NUMBERS = ["scale", "softcap", "keep_scale", "minus_inf"]
STRIDES = ["bias_b", "bias_h", "bias_t", "bias_j"]


class Use(NamedTuple):
    """A row interval or a grid that a band is and-ed with: where its entries start, and whether inside or outside."""

    dir: int
    inside: bool
    on_keys: bool = False


class Band(NamedTuple):
    strided: bool
    rows: tuple[Use, ...]
    grids: tuple[Use, ...]


class Form(NamedTuple):
    """What the text of the element test depends on; integers and arrays stay in the buffer. dir: its first entry."""

    dir: int
    bands: tuple[Band, ...]

    @property
    def one_band(self) -> bool:
        """Whether six comparisons are the whole test."""
        return len(self.bands) == 1 and self.bands[0] == Band(False, (), ())


class Side(NamedTuple):
    """words: the buffer. at: offsets and sizes by the names of `WORDS`. forms: one a mask."""

    words: Int32
    at: dict[str, int]
    forms: tuple[Form, ...]


_kept: weakref.WeakKeyDictionary[Part, dict[int, Side]] = weakref.WeakKeyDictionary()


class _Words:
    def __init__(self) -> None:
        self.pieces: list[Int32] = []
        self.length = 0

    def put(self, a: Any) -> int:
        piece = np.ascontiguousarray(a).reshape(-1)
        piece = piece.view(np.int32) if piece.dtype == np.float32 else piece.astype(np.int32, copy=False)
        at, self.length = self.length, self.length + len(piece)
        self.pieces.append(piece)
        return at


def of_part(part: Part, tile_k: int, transposed: bool) -> Side:
    """The lists of a part; with `transposed` those of key tiles too, of tile_k keys."""
    kept = _kept.setdefault(part, {})
    found = kept.get(tile_k * transposed)
    if found is None:
        found = kept[tile_k * transposed] = _of_part(part, tile_k, transposed)
    return found


def _of_part(part: Part, tile_k: int, transposed: bool) -> Side:
    words = _Words()
    entries = [_entries(mask) for mask in part.masks]
    # the directory comes first: its entries stand at places that the text knows
    directory = np.zeros(sum(len(e) for e, _ in entries), np.int32)
    at = {"o_masks": words.put(directory)}
    forms: list[Form] = []
    first = 0
    for mask, (arrays, _) in zip(part.masks, entries, strict=True):
        directory[first : first + len(arrays)] = [words.put(a) if isinstance(a, np.ndarray) else a for a in arrays]
        forms.append(_form(mask, first))
        first += len(arrays)
    words.pieces[0] = directory
    classes = np.stack([part.q_start, part.k_start, part.nq, part.nk], 1)
    at |= {"o_classes": words.put(classes), "o_heads": words.put(part.head), "classes": len(classes)}
    at |= {"o_ptr": words.put(part.ranges.ptr), "o_seg": words.put(part.ranges.seg), "n_tiles": part.n_tiles}
    at |= {
        "step": part.step,
        "n_masks": len(part.masks),
        "mask_batches": part.Bm,
        "t_tiles": 0,
        "o_tptr": 0,
        "o_tseg": 0,
    }
    if transposed:
        ranges = part.transposed(tile_k)
        at |= {"o_tptr": words.put(ranges.ptr), "o_tseg": words.put(ranges.seg)}
        at["t_tiles"] = -(-int(part.nk.max()) // tile_k)
    return Side(np.concatenate(words.pieces), at, tuple(forms))


def _entries(mask: Lowered) -> tuple[list[Any], int]:
    # the directory of one mask: arrays stand for where they will lie
    found: list[Any] = [mask.bands, int(mask.bands.shape[0] > 1)]
    for rows in mask.rows:
        found += [rows.lo, rows.hi, rows.lo.shape[1] if rows.batch > 1 else 0]
    for grid in mask.grids:
        states = np.zeros(-(-grid.states.size // 4) * 4, np.uint8)
        states[: grid.states.size] = grid.states.reshape(-1)
        row = grid.states.shape[2]
        found += [states.view(np.int32), grid.block_q, grid.block_k, row]
        found.append(row * grid.states.shape[1] if grid.batch > 1 else 0)
    return found, len(found)


def _form(mask: Lowered, first: int) -> Form:
    bands: list[Band] = []
    for n in range(mask.nb):
        use = [int(u) for u in mask.uses[n]]
        rows = [
            Use(2 + 3 * r, inside, mask.rows[r].axis == "k")
            for r in range(len(mask.rows))
            for inside, bit in ((True, ROWS_IN), (False, ROWS_OUT))
            if use[bit] >> r & 1
        ]
        grids = [
            Use(2 + 3 * len(mask.rows) + 5 * g, inside)
            for g in range(len(mask.grids))
            for inside, bit in ((True, GRIDS_IN), (False, GRIDS_OUT))
            if use[bit] >> g & 1
        ]
        strided = bool((np.abs(mask.bands[:, n, STRIDE]) != 1).any())
        bands.append(Band(strided, tuple(rows), tuple(grids)))
    return Form(first, tuple(bands))


def with_scores(side: Side, problem: Problem, extras: Extras) -> Side:
    """The same lists with this call's sinks, slopes, position offsets and block table behind them."""
    words = _Words()
    words.put(side.words)
    at = dict(side.at)
    if extras.sinks is not None:
        at["o_sinks"] = words.put(np.asarray(extras.sinks, np.float32))
    if extras.slopes is not None:
        slopes = np.asarray(extras.slopes, np.float32)
        at |= {"o_slopes": words.put(slopes), "slopes_stride": problem.Hq if slopes.shape[0] > 1 else 0}
        offset = positions(problem)
        at |= {"o_offset": words.put(offset), "offset_stride": int(len(offset) > 1)}
    if extras.block_table is not None:
        table = np.asarray(extras.block_table, np.int32)
        at |= {"o_table": words.put(table), "table_stride": table.shape[1], "page_size": extras.page_size}
    return side if len(words.pieces) == 1 else Side(np.concatenate(words.pieces), at, side.forms)


def positions(problem: Problem) -> Int32:
    """[1 | B]: the position of query row 0."""
    if problem.mask is None:
        return np.array([problem.Tk - problem.Tq], np.int32)
    return np.asarray(problem.mask.offset(problem.B, problem.Tq, problem.Tk), np.int32).reshape(-1)


def dims(problem: Problem, at: dict[str, int], extras: Extras, **more: int) -> bytes:
    """The uniform block of one launch."""
    p = problem
    words = {
        "B": p.B, "Tq": p.Tq, "Tk": p.Tk, "Hq": p.Hq, "Hk": p.Hk, "G": p.G, "k_hi": p.Tk, "q_hi": p.Tq,
        "rows": p.G * p.Tq, "drop_below": int(p.scores.dropout * 4294967296.0), "seed_low": extras.seed & 0xFFFFFFFF,
        "seed_high": extras.seed >> 32, "tile_count": at["n_tiles"], **at, **more,
    }  # fmt: skip
    numbers = [p.scores.scale, p.scores.softcap, 1.0 / (1.0 - p.scores.dropout), -np.inf]
    strides = [0] * 4
    shape = p.scores.bias
    if shape:
        whole = [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1]
        strides = [s if n > 1 else 0 for s, n in zip(whole, shape, strict=True)]
    return b"".join(
        (
            np.array([words.get(name, 0) for name in WORDS], np.uint32).tobytes(),
            np.array(numbers, np.float32).tobytes(),
            np.array(strides, np.uint32).tobytes(),
        )
    )
