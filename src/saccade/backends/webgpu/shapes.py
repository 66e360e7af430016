"""Tile sizes, from the head sizes and the device, and the pieces of arrays that fit a binding."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

ROWS = 64
# workgroups along x; workgroups are numbered along x, then along y
LINE = 32768
PORTABLE_MEMORY = 16384
# for split decode without barriers: invocations per workgroup, and loads of keys in flight per invocation
FREE, LOADS = 64, 8


class Tile(NamedTuple):
    """Constants of the products' text; those whose names end in 4 count vectors of four numbers.

    A tile is ROWS by 4 CG, and each thread computes RT rows by 4 columns of it. DC numbers of a row are loaded at once,
    then KC rows of values. Of a row of D or Dv numbers, a thread has NK or NV vectors. A loop's body unrolls
    MULTIPLY_BY or ADD_BY steps of the two products; rolled: nothing else is unrolled.
    """

    WG: int
    ROWS: int
    CG: int
    RT: int
    DC: int
    KC: int
    NK: int
    NV: int
    VALUES: int
    SHARED: int
    D4: int
    DV4: int
    MULTIPLY_BY: int
    ADD_BY: int
    rolled: bool


@lru_cache(maxsize=256)
def shape(D: int, Dv: int, memory: int, software: bool) -> Tile:
    """The tile for head sizes on a device with `memory` bytes of workgroup memory.

    A thread has four rows by four columns, because eight rows spill registers. Loop bodies fit the instruction cache.
    On a software adapter they are as short as possible, because compiling a text takes it seconds.
    """
    D4, DV4 = vectors(D), vectors(Dv)
    large = memory >= 2 * PORTABLE_MEMORY and not software
    CG = 16 if large else 8
    WG = 256 if large or software else 128
    common = gcd(D4, DV4)
    DC4 = max(n for n in (1, 2, 4, 8) if common % n == 0 and n <= CG // 2)
    NK, NV = -(-D4 // CG), -(-DV4 // CG)
    KC = next(n for n in (16, 8, 4) if n * max(NK, NV) <= 32 or n == 4)
    VALUES = max(ROWS * DC4 + 4 * DC4 * CG, ROWS * CG)
    by = 1 if software else 4
    SHARED = VALUES + KC * max(NK, NV) * CG
    return Tile(WG, ROWS, CG, ROWS * CG // WG, 4 * DC4, KC, NK, NV, VALUES, SHARED, D4, DV4, by, by, software)


def line(groups: int) -> tuple[int, int, int]:
    """The grid of `groups` workgroups, numbered along x, then along y."""
    return min(groups, LINE), -(-groups // LINE), 1


def vectors(D: int) -> int:
    """The number of vectors of four for a row of D numbers."""
    return max(1, -(-D // 4))


def decode_shape(D: int, Dv: int, rows: int, kind: str, shuffle: int, software: bool) -> dict[str, int]:
    """Constants of the split decode of `rows` queries per key head: R rows, PER lanes per key, LANES lanes per value.

    kind: how keys and values are stored. shuffle: consecutive invocations that exchange numbers without workgroup
    memory (`Gpu.shuffle`).
    """
    D4, DV4 = vectors(D), vectors(Dv)
    eights = kind == "packed" and D4 % 2 == DV4 % 2 == 0
    DU, DVU = (D4 // 2, DV4 // 2) if eights else (D4, DV4)
    lanes = next(n for n in (4, 8, 16) if n >= (max(DU, DVU) if shuffle > 1 else DVU) or n == 16)
    if shuffle > 1:
        lanes = min(lanes, shuffle)
        # without barriers, small workgroups merge their results faster
        threads, per, loads = FREE, lanes, -(-max(DU, DVU) // lanes)
        keys = threads // lanes * max(1, (2 if software else LOADS) // loads)
    else:
        threads = 256
        keys, per = {4: (256, 2), 8: (128, 4), 16: (128 if DVU <= 32 else 64, 4)}[lanes]
    sizes = {"WG": threads, "KEYS": keys, "PER": per, "OWN": keys * per // threads, "NK": -(-DU // per)}
    sizes |= {"LANES": lanes, "SETS": threads // lanes, "EACH": keys * lanes // threads, "NV": -(-DVU // lanes)}
    sizes |= {"D4": D4, "DV4": DV4}
    R = next(r for r in (1, 2, 4) if r >= min(2 if software else 4, rows))
    return sizes | {"R": R, "rolled": software, "shuffle": shuffle > 1, "eights": eights}


def combine_shape(Dv: int) -> dict[str, int]:
    """Constants of the kernel that combines ranges: TEAMS teams of LANES invocations each."""
    return {"DV4": vectors(Dv), "LANES": 8, "TEAMS": 32}


class Span(NamedTuple):
    """A piece of an array [B, T, ...] that fits one binding: entries b0 .. b1, rows t0 .. t1 of each."""

    b0: int
    b1: int
    t0: int
    t1: int


def spans(limit: int, B: int, T: int, row_bytes: int, multiple: int = ROWS) -> list[Span]:
    """Pieces that fit a binding of `limit` bytes: the whole array, or ranges of rows of one entry each."""
    if B * T * row_bytes <= limit:
        return [Span(0, B, 0, T)]
    # a binding starts at a multiple of 256 bytes, so up to 64 rows before the first row needed
    step = max(1, (limit - 64 * row_bytes) // (row_bytes * multiple)) * multiple
    return [Span(b, b + 1, t, min(T, t + step)) for b in range(B) for t in range(0, T, step)]
