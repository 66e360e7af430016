"""Tile sizes of the portable kernels by chip, bytes of a number and head size: searched, checked in, and read here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...mask.tiling import fitting
from ...plan import Part, Plan
from ...problem import Problem

# towards what a mask's blocks halve tiles: fewer rows leave the matrix unit of a warpgroup idle
LEAST = 64
# tokens of a page from which a tile of decode lies in two at most
LONG = 64


class Tile(NamedTuple):
    """A kernel's tile: BM queries and BN keys, warps of a program, stages of its pipeline."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int

    def of(self, *, rows: int = 0, keys: int = 0) -> Tile:
        """With so many queries or keys, and as many warps fewer, but 4 that share a product."""
        cut = max(1, self.BM // (rows or self.BM), self.BN // (keys or self.BN))
        warps = min(self.num_warps, max(4, self.num_warps // cut))
        return Tile(rows or self.BM, keys or self.BN, warps, self.num_stages)


@cache
def _table() -> dict[str, dict[str, dict[str, list[int]]]]:
    return json.loads((Path(__file__).parent / "tiles.json").read_text())


@cache
def tile(kernel: str, chip: str, dtype: str, block: int) -> Tile:
    """The tile of a kernel for head sizes padded to `block`, on a chip that the table knows or else on the least.

    A variant, "decode from pages", has its kernel's where the table does not name it.
    """
    table, entry = _table(), f"{4 if dtype == 'float32' else 2} bytes, {block}"
    entries = {**table["sm_80"], **table.get(chip, {})}
    variant = entries.get(kernel, {})
    return Tile(*(variant if entry in variant else entries[kernel.partition(" ")[0]])[entry])


def block(n: int) -> int:
    """A head size padded to what the kernels compute with."""
    return max(16, 1 << (n - 1).bit_length())


def blocks(D: int, Dv: int) -> tuple[int, int]:
    """Both head sizes padded. Rows of 64 bytes beside rows of 128 are mixed up where Triton 3.6 swizzles them."""
    least = min(64, max(block(D), block(Dv)))
    return max(least, block(D)), max(least, block(Dv))


def tile_of(kernel: str, chip: str, problem: Problem) -> Tile:
    """The tile of a kernel for this problem."""
    return tile(kernel, chip, problem.dtype, max(64, block(problem.D), block(problem.Dv)))


def of_plan(kernel: str, chip: str, problem: Problem, plan: Plan, part: Part | None = None) -> Tile:
    """The tile of a kernel whose rows are the plan's, or of one whose keys are cut for `part`, by its masks' blocks."""
    tile = tile_of(kernel, chip, problem)
    if part is None:
        return tile.of(rows=plan.tile_q)
    return tile.of(keys=fitting(tile.BN, LEAST, part.masks, keys=True))


def decode_tile(chip: str, problem: Problem, page: int, range_keys: int) -> Tile:
    """The tile of decode for ranges of keys, in pages where `page` is not 0, or of codes.

    Rows that look up their pages take a step of the pipeline, and more of them a wider tile; a tile in at most two
    pages looks them up once, and its deeper pipeline pays where a range is longer.
    """
    if problem.quantised:
        return tile_of("decode from codes", chip, problem)
    if not page:
        return tile_of("decode", chip, problem)
    if page < LONG:
        return tile_of("decode from pages", chip, problem)
    deep = tile_of("decode from long pages", chip, problem)
    return deep if range_keys >= deep.BN * deep.num_stages else tile_of("decode", chip, problem)
