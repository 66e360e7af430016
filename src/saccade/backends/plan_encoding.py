"""The encoding of a plan for all GPUs: a part's tables as int32 words, and numbers that say where each table starts.

The kernels of WebGPU and Metal get these numbers as `struct Dims`, whose text is generated here. Triton's kernels read
them from the head of the words (triton/encoding.py). plan.py decides which keys a tile visits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..mask.forms import GRIDS_IN, GRIDS_OUT, ROWS_IN, ROWS_OUT, STRIDE, Grid, Lowered, Rows
from ..philox import drop_words
from ..plan import Part, Plan, positions
from ..problem import Problem

if TYPE_CHECKING:
    from . import Extras

Int32 = NDArray[np.int32]

# The fields of `struct Dims` with their types and comments. An o_ is the word at which a table starts. A stride is the
# distance between batch entries of a table, 0 if they share one.
DIMS = (
    ("sizes of the problem", "int", "B Tq Tk Hq Hk G"),
    ("the part: stride; numbers of classes, of masks and of batch entries with own lists; query tiles and key tiles",
     "int", "step n_classes n_masks mask_batches n_tiles t_tiles"),
    ("[n_classes, 4] first row, first key, rows, keys; [Hq] masks of heads; lists of query tiles and of key tiles",
     "int", "o_classes o_heads o_ptr o_seg o_tptr o_tseg"),
    ("records of the masks, and programs of their element tests", "int", "o_records o_programs"),
    ("sinks [Hq], slopes [1 | B, Hq], position of row 0 [1 | B], block table [B, pages]",
     "int", "o_sinks o_slopes slopes_stride o_offset offset_stride o_table table_stride page_size"),
    ("biases by distance [1 | B, Hq, n], from distance 0; running sums of gates [B, Hq, Tk], in two floats each",
     "int", "o_distances distances_stride distances_row o_gates"),
    ("what a launch computes: batch entries and tiles from the first on, keys and rows between bounds",
     "int", "first_batch first_tile tile_count k_lo k_hi q_lo q_hi"),
    ("rows at which the bound arrays start; queries of a group, or items of a launch; ranges of keys of a split decode",
     "int", "q_base k_base rows chunks chunk_keys"),
    ("steps along each axis of the bias, 0 where it is broadcast", "int", "bias_b bias_h bias_t bias_j"),
    ("dropout drops a weight whose random word is below drop_below; the seed", "uint", "drop_below seed_low seed_high"),
    ("scores; keep_scale is the factor of weights that dropout keeps", "float", "scale softcap keep_scale minus_inf"),
)  # fmt: skip
# the options of scores that the texts of kernels depend on
TERMS = ("softcap", "bias", "alibi", "relative", "gates", "dropout")
INTEGERS = [name for _, kind, names in DIMS for name in names.split() if kind != "float"]
FLOATS = [name for _, kind, names in DIMS for name in names.split() if kind == "float"]


def struct(language: str) -> str:
    """The text of `struct Dims` in "wgsl" or "metal"."""
    lines: list[str] = []
    for comment, kind, names in DIMS:
        if language == "wgsl":
            line = " ".join(f"{name}: {'f32' if kind == 'float' else 'u32'}," for name in names.split())
        else:
            line = f"{kind} {', '.join(names.split())};"
        lines += [f"  // {comment}", f"  {line}"]
    return "\n".join(["struct Dims {", *lines, "}" if language == "wgsl" else "};"])


class Words:
    """A growing list of int32 words."""

    def __init__(self) -> None:
        self.pieces: list[Int32] = []
        self.length = 0

    def put(self, numbers: Any) -> int:
        """Append integers, or float32 by their bits; returns where they start."""
        piece = np.ascontiguousarray(numbers).reshape(-1)
        piece = piece.view(np.int32) if piece.dtype == np.float32 else piece.astype(np.int32, copy=False)
        start, self.length = self.length, self.length + len(piece)
        self.pieces.append(piece)
        return start

    def reserve(self, n: int) -> tuple[int, Int32]:
        """Append n words to be filled later; returns their start and the words."""
        words = np.zeros(n, np.int32)
        return self.put(words), words

    def joined(self) -> Int32:
        """All words as one array."""
        return np.concatenate(self.pieces)


# lengths in words of a mask's record, of an interval and of a grid
RECORD, INTERVAL, GRID = 6, 4, 9


def put_masks(words: Words, masks: Sequence[Lowered]) -> list[int]:
    """Append masks; returns where each one's record starts. Records precede all arrays, at places that texts know.

    A record has the number of bands, whether they differ over the batch, the numbers of intervals and grids, and where
    the bands and their uses start, followed by `put_interval` of each interval and `put_grid` of each grid.
    """
    records = [words.reserve(RECORD + INTERVAL * len(m.rows) + GRID * len(m.grids)) for m in masks]
    for mask, (_, record) in zip(masks, records, strict=True):
        bands = [mask.nb, int(mask.bands.shape[0] > 1), len(mask.rows), len(mask.grids)]
        intervals = [n for rows in mask.rows for n in put_interval(words, rows)]
        grids = [n for grid in mask.grids for n in put_grid(words, grid)]
        record[:] = [*bands, words.put(mask.bands), words.put(mask.uses), *intervals, *grids]
    return [start for start, _ in records]


def put_interval(words: Words, rows: Rows) -> list[int]:
    """The words of an interval: where its lows and highs start, their batch stride, and whether it is per key."""
    stride = rows.lo.shape[1] if rows.batch > 1 else 0
    return [words.put(rows.lo), words.put(rows.hi), stride, int(rows.axis == "k")]


def put_grid(words: Words, grid: Grid, *, bits: bool = False) -> list[int]:
    """The words of a grid: where its states start, two words that divide by block_q (`division`), two by block_k, the
    steps between rows of blocks and between batch entries, block_q, and block_k.

    States are bytes ordered by keys, or with `bits` bits ordered by queries, so that a tile can read its next 32 states
    as one word; steps then count words.
    """
    if bits:
        states = grid.transpose().bits[..., :-3]
        states = np.pad(states, [(0, 0), (0, 0), (0, -states.shape[2] % 4 + 4)])
    else:
        states = grid.states
    whole = np.zeros(-(-states.size // 4) * 4, np.uint8)
    whole[: states.size] = states.reshape(-1)
    row = states.shape[2] // (4 if bits else 1)
    stride, sizes = row * states.shape[1] if grid.batch > 1 else 0, (grid.block_q, grid.block_k)
    return [words.put(whole.view(np.int32)), *division(sizes[0]), *division(sizes[1]), row, stride, *sizes]


def division(n: int) -> tuple[int, int]:
    """Two words (factor - 2^32, shift) by which x // n = x · factor // 2^(31 + shift), exact for 0 <= x < 2^31."""
    shift = (n - 1).bit_length()
    return -(-(1 << 31 + shift) // n) - (1 << 32), shift


def put_part(words: Words, part: Part) -> dict[str, int]:
    """Append classes and heads; returns the part's numbers, except those of its masks and lists."""
    classes = np.stack([part.q_start, part.k_start, part.nq, part.nk], 1)
    tables = {"o_classes": words.put(classes), "o_heads": words.put(part.head)}
    sizes = {"n_classes": len(classes), "n_masks": len(part.masks), "mask_batches": part.Bm, "step": part.step}
    return tables | sizes


def longest_first(keys: NDArray[Any], *, last: bool = True) -> Int32:
    """The tiles of each list in descending order of length, int32 [lists, n_tiles].

    keys: the number of keys (or rows) that each tile visits, [lists, n_tiles]. Tiles of equal length are in descending
    order if `last`, else in ascending order.
    """
    if not last:
        return np.argsort(-keys, axis=1, kind="stable").astype(np.int32)
    return (keys.shape[1] - 1 - np.argsort(-keys[:, ::-1], axis=1, kind="stable")).astype(np.int32)


class Factor(NamedTuple):
    """An interval or a grid that restricts a band: its place in the mask's record, and which side of it counts."""

    place: int
    inside: bool
    grid: bool
    of_keys: bool


class Band(NamedTuple):
    strided: bool
    factors: tuple[Factor, ...]


class Form(NamedTuple):
    """The structure of a mask, which determines the text of its element test, and where the mask's record starts."""

    record: int
    bands: tuple[Band, ...]

    @property
    def one_band(self) -> bool:
        """Whether the test consists of six comparisons."""
        return self.bands == (Band(False, ()),)


def _form(mask: Lowered, record: int) -> Form:
    strided = (np.abs(mask.bands[..., STRIDE]) != 1).any(0).tolist()
    factors = [tuple(_factors(mask, use)) for use in mask.uses.tolist()]
    return Form(record, tuple(map(Band, strided, factors)))


def _factors(mask: Lowered, use: list[int]) -> Iterator[Factor]:
    for n, rows in enumerate(mask.rows):
        for column in (ROWS_IN, ROWS_OUT):
            if use[column] >> n & 1:
                yield Factor(RECORD + INTERVAL * n, column == ROWS_IN, False, rows.axis == "k")
    for n in range(len(mask.grids)):
        for column in (GRIDS_IN, GRIDS_OUT):
            if use[column] >> n & 1:
                yield Factor(RECORD + INTERVAL * len(mask.rows) + GRID * n, column == GRIDS_IN, True, False)


class Encoded(NamedTuple):
    """A part of a plan for kernels that read `struct Dims`: its words, numbers by field name, and a form per mask."""

    words: Int32
    numbers: dict[str, int]
    forms: tuple[Form, ...]


_encoded: weakref.WeakKeyDictionary[Part, dict[int, Encoded]] = weakref.WeakKeyDictionary()


def of_part(part: Part, tile_k: int, transposed: bool) -> Encoded:
    """The part with the lists of its query tiles and, if `transposed`, those of its tiles of tile_k keys."""
    mine = _encoded.setdefault(part, {})
    key = tile_k * transposed
    if key not in mine:
        mine[key] = _of_part(part, key)
    return mine[key]


def _of_part(part: Part, tile_k: int) -> Encoded:
    words = Words()
    records = put_masks(words, part.masks)
    numbers = put_part(words, part) | {"o_ptr": words.put(part.ranges.ptr), "o_seg": words.put(part.ranges.seg)}
    numbers |= {"n_tiles": part.n_tiles}
    if tile_k:
        ranges = part.transposed(tile_k)
        numbers |= {"o_tptr": words.put(ranges.ptr), "o_tseg": words.put(ranges.seg)}
        numbers |= {"t_tiles": -(-int(part.nk.max()) // tile_k)}
    return Encoded(words.joined(), numbers, tuple(map(_form, part.masks, records)))


def with_call(part: Encoded, problem: Problem, extras: Extras) -> Encoded:
    """The part, followed by a call's sinks, its score terms that depend on positions, and its block table."""
    by_position = not (extras.slopes is extras.distances is extras.gates is None)
    if not by_position and extras.sinks is extras.block_table is None:
        return part
    words, numbers = Words(), dict(part.numbers)
    words.put(part.words)
    if extras.sinks is not None:
        numbers |= {"o_sinks": words.put(np.asarray(extras.sinks, np.float32))}
    if extras.slopes is not None:
        slopes = np.asarray(extras.slopes, np.float32)
        numbers |= {"o_slopes": words.put(slopes), "slopes_stride": problem.Hq if slopes.shape[0] > 1 else 0}
    if by_position:
        offset = positions(problem)
        numbers |= {"o_offset": words.put(offset), "offset_stride": int(len(offset) > 1)}
    if extras.distances is not None:
        distances = np.asarray(extras.distances, np.float32)
        entries, heads, n = distances.shape
        numbers |= {"o_distances": words.put(distances) + n - problem.Tk, "distances_row": n}
        numbers |= {"distances_stride": heads * n if entries > 1 else 0}
    if extras.gates is not None:
        sums = np.asarray(extras.gates, np.float64).swapaxes(1, 2)
        high = sums.astype(np.float32)
        numbers |= {"o_gates": words.put(np.stack([high, (sums - high).astype(np.float32)], -1))}
    if extras.block_table is not None:
        table = np.asarray(extras.block_table, np.int32)
        numbers |= {"o_table": words.put(table), "table_stride": table.shape[1], "page_size": extras.page_size}
    return Encoded(words.joined(), numbers, part.forms)


def dims(problem: Problem, numbers: dict[str, int], extras: Extras, **more: int) -> Int32:
    """The words of `struct Dims` for one launch."""
    p = problem
    values: dict[str, Any] = dict.fromkeys(INTEGERS, 0)
    values |= {"B": p.B, "Tq": p.Tq, "Tk": p.Tk, "Hq": p.Hq, "Hk": p.Hk, "G": p.G, "rows": p.G * p.Tq}
    values |= {"k_hi": p.Tk, "q_hi": p.Tq, "tile_count": numbers["n_tiles"], "minus_inf": -np.inf}
    values |= zip(("drop_below", "seed_low", "seed_high"), drop_words(p.scores.dropout, extras.seed), strict=True)
    values |= {"scale": p.scores.scale, "softcap": p.scores.softcap, "keep_scale": 1.0 / (1.0 - p.scores.dropout)}
    if shape := p.scores.bias:
        whole = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        values |= {f"bias_{x}": s for x, s, n in zip("bhtj", whole, shape, strict=True) if n > 1}
    values |= numbers | more
    integers = np.array(itemgetter(*INTEGERS)(values), np.uint32)
    floats = np.array(itemgetter(*FLOATS)(values), np.float32)
    return np.concatenate([integers.view(np.int32), floats.view(np.int32)])


def splits(problem: Problem, plan: Plan) -> bool:
    """Whether the split-decode kernels compute this problem; they do not support dropout."""
    return plan.split_keys > 0 and not problem.scores.dropout


def far_from_zero(problem: Problem) -> bool:
    """Whether scores, as with biases of -1e9, may be so far from 0 that a rounded lse loses the logarithm of a sum."""
    return problem.scores.bias is not None or problem.scores.relative is not None
