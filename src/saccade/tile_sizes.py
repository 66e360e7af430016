"""Choose tile sizes for a budget of fast memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# candidate numbers of queries and of keys
_SIZES = (8, 16, 32, 64, 128)


class Tiles(NamedTuple):
    """Tile sizes: queries, keys, bytes of fast memory, and how many workgroups fit a core at once."""

    tile_q: int
    tile_k: int
    bytes: int
    resident: int


def tile_bytes(tile_q: int, tile_k: int, D: int, Dv: int, dtype_bytes: int, *, shared_kv: bool = False) -> int:
    """Bytes of a tile: q, k, v in the input dtype, scores and output in float32; shared_kv: k and v share memory."""
    keys, values = tile_k * D, tile_k * Dv
    tile = max(keys, values) if shared_kv else keys + values
    return (tile_q * D + tile) * dtype_bytes + (tile_q * tile_k + tile_q * Dv) * 4


def choose_tiles(
    D: int,
    Dv: int,
    dtype_bytes: int,
    memory: int,
    *,
    shared_kv: bool = False,
    resident: int = 1,
    candidates: Sequence[tuple[int, int]] | None = None,
) -> Tiles:
    """The best tile sizes for `memory` bytes per core.

    Candidates are ranked by occupancy first: the number of resident workgroups, floor(memory / bytes), up to
    `resident`. Next come the most queries (each load of k and v serves them all), then the most keys. Raises
    ValueError if no candidate fits.
    """
    sizes = candidates or [(q, k) for q in _SIZES for k in _SIZES]
    tiles = [
        Tiles(q, k, b, memory // b)
        for q, k in sizes
        for b in [tile_bytes(q, k, D, Dv, dtype_bytes, shared_kv=shared_kv)]
    ]
    fitting = [t for t in tiles if t.resident]
    if not fitting:
        least = min(t.bytes for t in tiles)
        raise ValueError(
            f"no tile fits {memory} bytes at D = {D}, Dv = {Dv} and {dtype_bytes} bytes per number: the smallest of "
            f"the candidates takes {least}; give smaller candidates, or shared_kv=True"
        )
    return max(fitting, key=lambda t: (min(t.resident, resident), t.tile_q, t.tile_k))
