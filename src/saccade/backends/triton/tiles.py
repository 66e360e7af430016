"""Tile sizes of the portable kernels by chip, bytes per number and head size, found by a search: tiles.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...mask.tiling import fitting
from ...plan import Part, Plan
from ...problem import Problem

# tiles are halved to fit a mask's blocks, but not below this: fewer rows leave a warpgroup's matrix unit partly idle
LEAST = 64
# the fewest keys of a range of decode
SPLIT_LEAST = 64
# the largest number of components that one product takes
WIDEST = 512
# the least number of tokens per page for which a tile of decode lies in at most two pages
LONG = 64


class Tile(NamedTuple):
    """A kernel's tile: BM queries and BN keys, warps of a program, stages of its pipeline."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int

    def of(self, *, rows: int = 0, keys: int = 0) -> Tile:
        """The tile with this many queries or keys; warps shrink in proportion, but not below 4."""
        cut = max(1, self.BM // (rows or self.BM), self.BN // (keys or self.BN))
        warps = min(self.num_warps, max(4, self.num_warps // cut))
        return Tile(rows or self.BM, keys or self.BN, warps, self.num_stages)


@cache
def _table() -> dict[str, dict[str, dict[str, list[int]]]]:
    return json.loads((Path(__file__).parent / "tiles.json").read_text())


# chips that have as much shared memory per program as a chip in the table, and use its tiles
_ALIKE = {"sm_89": "sm_86", "sm_120": "sm_86", "sm_121": "sm_86"}


@cache
def tile(kernel: str, chip: str, dtype: str, block: int) -> Tile:
    """The tile of a kernel for head sizes padded to `block`: that of the chip or one like it, otherwise that of sm_80.

    A variant, such as "decode from pages", uses the tile of its kernel if the table has no entry for it.
    """
    table, entry = _table(), f"{4 if dtype == 'float32' else 2} bytes, {block}"
    entries = table.get("gfx942" if chip.startswith("gfx") else _ALIKE.get(chip, chip), {})
    plain = kernel.partition(" ")[0]
    tiles = (kinds[name] for kinds in (entries, table["sm_80"]) for name in (kernel, plain) if name in kinds)
    return Tile(*next(sizes[entry] for sizes in tiles if entry in sizes))


def block(n: int) -> int:
    """A head size padded as the kernels need it."""
    return max(16, 1 << (n - 1).bit_length())


def blocks(D: int, Dv: int) -> tuple[int, int]:
    """Both head sizes padded. Triton 3.6 mixes up swizzled rows of 64 bytes and of 128 bytes in one kernel."""
    least = min(64, max(block(D), block(Dv)))
    return max(least, block(D)), max(least, block(Dv))


class Columns(NamedTuple):
    """How the forward divides rows of q and k.

    BLOCK_D: the numbers of the first product, padded. SHARED: whether v is the same numbers of k.
    """

    BLOCK_D: int
    SHARED: bool


def columns(D: int, Dv: int, shared: bool) -> Columns:
    """The columns of the forward. shared: whether v is a view of the first numbers of k."""
    first, values = blocks(D, Dv)
    first = min(first, values) if shared else min(first, WIDEST)
    return Columns(first, shared and first == values)


def tile_of(kernel: str, chip: str, problem: Problem) -> Tile:
    """The tile of a kernel for this problem."""
    sizes = tile(kernel, chip, problem.dtype, min(WIDEST, max(64, block(problem.D), block(problem.Dv))))
    # rows of more numbers, and their values
    return sizes.of(rows=min(16, sizes.BM)) if problem.D > WIDEST and is_small(chip) else sizes


def of_selected_keys(chip: str, problem: Problem) -> Tile:
    """The tile of "dkdv": a group of rows that selects one block of a tile computes with all of its keys."""
    assert problem.selection is not None
    tile = tile_of("dkdv of selected keys", chip, problem)
    return tile.of(keys=min(tile.BN, max(LEAST, block(problem.selection.block))))


def is_small(chip: str) -> bool:
    """Whether a program has 99 KiB of shared memory or less."""
    return _ALIKE.get(chip, chip) == "sm_86"


def of_plan(kernel: str, chip: str, problem: Problem, plan: Plan, part: Part | None = None) -> Tile:
    """The tile of a kernel, with the plan's rows, or with as many keys as fit the blocks of the masks of `part`."""
    tile = tile_of(kernel, chip, problem)
    if part is None:
        return tile.of(rows=plan.tile_q)
    return tile.of(keys=fitting(tile.BN, LEAST, part.masks, keys=True))


def decode_tile(chip: str, problem: Problem, page: int, range_keys: int) -> Tile:
    """The tile of decode for ranges of `range_keys` keys, in pages if `page` is not 0, or of codes.

    Looking up the pages of rows takes one stage of the pipeline, and looking up more of them needs a wider tile. A tile
    in at most two pages looks them up once; its deeper pipeline pays off for longer ranges.
    """
    if problem.quantised:
        return tile_of("decode from codes", chip, problem)
    if not page:
        return tile_of("decode", chip, problem)
    if page < LONG:
        return tile_of("decode from pages", chip, problem)
    deep = tile_of("decode from long pages", chip, problem)
    return deep if range_keys >= deep.BN * deep.num_stages else tile_of("decode", chip, problem)
