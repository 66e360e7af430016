"""Tile sizes from a budget of fast memory: the worked table."""

from __future__ import annotations

import pytest

from saccade.tile_sizes import choose_tiles, tile_bytes

BUDGET = [
    (32, 32, 2, False, 44), (16, 32, 2, False, 30), (16, 16, 2, False, 21),
    (32, 32, 2, True, 36), (16, 32, 2, True, 22), (16, 16, 2, True, 17), (16, 64, 2, True, 32),
    (32, 32, 4, False, 68), (16, 32, 4, False, 50), (16, 16, 4, False, 33),
    (32, 32, 4, True, 52), (16, 32, 4, True, 34), (16, 16, 4, True, 25),
]  # fmt: skip


@pytest.mark.parametrize(("q", "k", "size", "shared", "kib"), BUDGET)
def test_tile_bytes(q, k, size, shared, kib) -> None:
    assert tile_bytes(q, k, 128, 128, size, shared_kv=shared) == kib * 1024
    one = {"shared_kv": shared, "candidates": [(q, k)]}
    if kib > 32:
        with pytest.raises(ValueError, match="smallest"):
            choose_tiles(128, 128, size, 32 * 1024, **one)
    else:
        assert choose_tiles(128, 128, size, 32 * 1024, **one) == (q, k, kib * 1024, 32 // kib)


def test_tiles_of_a_narrow_head() -> None:
    assert tile_bytes(8, 32, 64, 64, 4) == 21 * 1024


def test_resident_workgroups_outweigh_the_largest_tile_that_fits() -> None:
    table = [(16, 32), (16, 16), (8, 8)]
    assert choose_tiles(128, 128, 2, 32 * 1024, candidates=table)[:2] == (16, 32)
    # 21 KiB leaves one resident, 8 x 8 tiles leave several
    crowded = choose_tiles(128, 128, 2, 32 * 1024, candidates=table, resident=3)
    assert crowded[:2] == (8, 8)
    assert crowded.resident >= 3
