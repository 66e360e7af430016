"""The simulation of more GPUs than there are: limits in which its answer is known."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCALING = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"))


def speeds(link: float) -> list[dict[str, str]]:
    """Kernels of 1 µs a squared kilotoken, twice that backward, and links of so many bytes a second, as in a file."""
    sizes = {"heads": "16", "key_heads": "16", "head_dim": "128"}
    kernels = [(n, 1e-6 * (n / 1024) ** 2) for n in (1024, 8192)]
    return [
        *(
            {**sizes, "what": "kernel", "tokens": str(n), "forward_s": str(s), "backward_s": str(2 * s)}
            for n, s in kernels
        ),
        *({**sizes, "what": "link", "bytes": str(size), "link_s": str(size / link)} for size in (2**16, 2**28)),
    ]


def rows(found: list[dict[str, Any]], tokens: int) -> dict[int, dict[str, Any]]:
    return {row["gpus"]: row for row in found if row["tokens_a_gpu"] == tokens}


def test_links_that_cost_nothing_lose_nothing() -> None:
    for row in SCALING["simulate"](speeds(1e30), 1e30):
        assert row["efficiency"] == pytest.approx(1)
        assert row["bound"].split() == ["kernel", "kernel"]


def test_links_that_are_slow_are_the_time() -> None:
    found = rows(SCALING["simulate"](speeds(1e9), 1e9), 8192)
    # of a forward: the first step's 64 µs, then 64 MB of keys and values at 1 GB/s for each of the other ranks
    assert found[4]["forward_s"] == pytest.approx(64e-6 + 3 * 8192 * 16 * 256 * 2 / 1e9)
    # of a backward also float32 gradients, and one hop more to bring them home
    hop = 8192 * 16 * 256 * 6 / 1e9
    assert found[4]["backward_s"] == pytest.approx(4 * 128e-6 + 4 * (hop - 128e-6))
    assert found[4]["bound"].split() == ["link", "link"]
    assert found[1]["efficiency"] == 1


def test_machines_are_joined_by_slower_links() -> None:
    found = rows(SCALING["simulate"](speeds(1e30), 1e9), 8192)
    assert found[8]["efficiency"] == pytest.approx(1)
    assert found[16]["efficiency"] < 0.1


def test_times_go_on_with_pairs_beyond_what_was_measured() -> None:
    curve = SCALING["Curve"]([(2, 4.0), (4, 16.0)], 2)
    assert [curve(x) for x in (2, 3, 4, 8)] == pytest.approx([4, 9, 16, 64])


def test_what_rings_took_beyond_their_kernels_is_in_every_step() -> None:
    measured = {"provider": "saccade, zigzag", "world": "2", "tokens": "8192"}
    rings = [
        {**measured, "pass": "forward", "median_ms": str(1e3 * (2 * 64e-6 + 2 * 1e-5))},
        {**measured, "pass": "both", "median_ms": str(1e3 * (6 * 64e-6 + 2 * 1e-5 + 2 * 3e-5))},
        {**measured, "provider": "another", "pass": "both", "median_ms": "9"},
    ]
    found = rows(SCALING["simulate"](speeds(1e30), 1e30, rings), 8192)
    assert found[1]["efficiency"] == pytest.approx(1)
    assert found[4]["forward_s"] == pytest.approx(4 * (64e-6 + 1e-5))
    assert found[4]["backward_s"] == pytest.approx(4 * (128e-6 + 3e-5))
