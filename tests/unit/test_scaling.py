"""The simulation of more GPUs than there are: limits in which its answer is known."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from saccade.cli.bench.rows import Row

SCALING = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"))


def row(kind: str, case: str, shape: str, seconds: float, provider: str = "saccade") -> Row:
    return Row("", "", "", case, provider, kind, shape=shape, median=seconds)


def speeds(link: float) -> list[Row]:
    """Kernels of 1 µs a squared kilotoken, twice that backward, and links of so many bytes a second, as in a file."""
    kernels = [(n, 1e-6 * (n / 1024) ** 2) for n in (1024, 8192)]
    return [
        *(row("forward", "", f"1x{n}x{n}x16x16x128", s) for n, s in kernels),
        *(row("backward", "", f"1x{n}x{n}x16x16x128", 2 * s) for n, s in kernels),
        *(row("link", "", str(size), size / link) for size in (2**16, 2**28)),
    ]


def by_gpus(rings: list[Any], tokens: int) -> dict[int, Any]:
    return {ring.gpus: ring for ring in rings if ring.tokens == tokens}


def test_links_that_cost_nothing_lose_nothing() -> None:
    for ring in SCALING["simulate"](speeds(1e30), 1e30):
        assert ring.efficiency == pytest.approx(1)
        assert ring.bound.split() == ["kernel", "kernel"]


def test_links_that_are_slow_are_the_time() -> None:
    rings = by_gpus(SCALING["simulate"](speeds(1e9), 1e9), 8192)
    # of a forward: the first step's 64 µs, then 64 MB of keys and values at 1 GB/s for each of the other ranks
    assert rings[4].forward == pytest.approx(64e-6 + 3 * 8192 * 16 * 256 * 2 / 1e9)
    # of a backward also float32 gradients, and one hop more to bring them home
    hop = 8192 * 16 * 256 * 6 / 1e9
    assert rings[4].backward == pytest.approx(4 * 128e-6 + 4 * (hop - 128e-6))
    assert rings[4].bound.split() == ["link", "link"]
    assert rings[1].efficiency == 1


def test_machines_are_joined_by_slower_links() -> None:
    rings = by_gpus(SCALING["simulate"](speeds(1e30), 1e9), 8192)
    assert rings[8].efficiency == pytest.approx(1)
    assert rings[16].efficiency < 0.1


def test_times_go_on_with_pairs_beyond_what_was_measured() -> None:
    curve = SCALING["Curve"]([(2, 4.0), (4, 16.0)], 2)
    assert [curve(x) for x in (2, 3, 4, 8)] == pytest.approx([4, 9, 16, 64])


def test_what_rings_took_beyond_their_kernels_is_in_every_step() -> None:
    zigzag = "saccade, zigzag"
    measured = [
        row("forward", "ring-2x8192", "", 2 * 64e-6 + 2 * 1e-5, zigzag),
        row("both", "ring-2x8192", "", 6 * 64e-6 + 2 * 1e-5 + 2 * 3e-5, zigzag),
        row("both", "ring-2x8192", "", 9e-3, "another"),
    ]
    rings = by_gpus(SCALING["simulate"](speeds(1e30), 1e30, measured), 8192)
    assert rings[1].efficiency == pytest.approx(1)
    assert rings[4].forward == pytest.approx(4 * (64e-6 + 1e-5))
    assert rings[4].backward == pytest.approx(4 * (128e-6 + 3e-5))


def test_what_was_simulated_is_in_its_rows() -> None:
    rings = SCALING["simulate"](speeds(1e9), 1e9)
    table = [ring.row(("a commit", "a GPU", "a driver")) for ring in rings]
    assert [SCALING["sizes_of"](line) for line in table] == [(ring.gpus, ring.tokens) for ring in rings]
    assert table[-1].notes["bound"] == rings[-1].bound
