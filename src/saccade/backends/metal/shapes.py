"""Tile sizes of the kernels for 32 KiB of threadgroup memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

MEMORY = 32768
LARGEST_HEAD = 256
# rows per threadgroup, 8 for each SIMD-group; columns per step; numbers of a row that are loaded at once
ROWS, COLUMNS, CHUNKS = (32, 16, 8), (32, 16, 8), (64, 32, 16, 8)
# threadgroups that should fit in a core at the same time, so that one computes while another loads
RESIDENT = 2


class Tile(NamedTuple):
    """Constants of a tiled kernel: BR rows by BC columns; DC and VC numbers of a row of D and of Dv are loaded at once.

    DP, DVP: D and Dv rounded up to whole chunks. bytes: threadgroup memory. registers: numbers that a lane keeps for
    sums and one tile of scores, counted by hand.
    """

    BR: int
    BC: int
    DC: int
    VC: int
    DP: int
    DVP: int
    bytes: int
    registers: int

    @property
    def constants(self) -> dict[str, int]:
        """Sizes by the names of constants in the texts."""
        sizes = {name: int(getattr(self, name)) for name in ("BR", "BC", "DC", "VC", "DP", "DVP")}
        return sizes | {"SIMDGROUPS": self.BR // 8, "THREADS": 4 * self.BR}

    @property
    def resident(self) -> int:
        """How many threadgroups fit in a core's memory at the same time."""
        return MEMORY // self.bytes


@lru_cache(maxsize=1024)
def shape(D: int, Dv: int, size: int, backward: bool = False, rows: int = 0) -> Tile:
    """The tiles for head sizes up to 256 and numbers of `size` bytes.

    Priorities: first occupancy; then rows, because all rows share each load of the other side; then columns; then the
    size of chunks. rows: the number of rows of the problem, which limits those of the tile; 0 for no limit.
    """
    wanted = max(8, -(-rows // 8) * 8) if rows else max(ROWS)
    shapes = [_shape(D, Dv, size, backward, r, c, n) for r in ROWS if r <= wanted for c in COLUMNS for n in CHUNKS]
    fitting = [s for s in shapes if s.bytes <= MEMORY]
    return max(fitting, key=lambda s: (min(s.resident, RESIDENT), s.BR, s.BC, s.DC))


def _shape(D: int, Dv: int, size: int, backward: bool, rows: int, columns: int, chunk: int) -> Tile:
    DC, DP = _chunks(D, chunk)
    VC, DVP = _chunks(Dv, chunk)
    own = rows * (DP + DVP if backward else DP) * size
    staged = columns * max(DC, VC) * size
    # scores and, in the backward pass, their gradients; at least 64 numbers per SIMD-group
    tiles = (2 if backward else 1) * rows * max(columns, 8) * 4
    small = 4 * (rows // 8) + (0 if backward else 8 * rows)
    total = sum(-(-n // 16) * 16 for n in (own, staged, tiles, small)) + 64
    return Tile(rows, columns, DC, VC, DP, DVP, total, 2 * (max(DP, DVP) // 8 + columns // 8 * (2 if backward else 1)))


def _chunks(n: int, most: int) -> tuple[int, int]:
    """(size, total) of equal chunks for n numbers; the size is a multiple of 8 up to `most`."""
    count = -(-n // most)
    each = -(-n // (8 * count)) * 8
    return each, each * count
