"""Tiles for 32 KiB over the planner's whole range, and the memory that kernels really use."""

from __future__ import annotations

import pytest

import saccade
from saccade.backends.metal.shapes import MEMORY, shape
from saccade.testing import cases
from saccade.testing.inputs import make


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_every_plan_fits(size, backward) -> None:
    for D in range(1, 257):
        for Dv in (1, 8, 40, 64, 96, 128, 200, 256, D):
            for rows in (0, 1, 9):
                s = shape(D, Dv, size, backward, rows)
                assert s.bytes <= MEMORY
                assert s.DP % s.DC == s.DVP % s.VC == s.DC % 8 == s.VC % 8 == 0
                assert D <= s.DP < D + 8 * (s.DP // s.DC)
                assert Dv <= s.DVP < Dv + 8 * (s.DVP // s.VC)
                assert s.registers <= 80


@pytest.mark.sample(1)
@pytest.mark.parametrize("D", [24, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_counted_right(emulator, D, dtype) -> None:
    made = emulator()
    x = make(cases.by_name(f"D{D}"), dtype)
    size = 4 if dtype == "float32" else 2
    o, lse = saccade.attention(x.q, x.k, x.v, x.mask, return_lse=True, backend="metal")
    counted = shape(D, D, size).bytes
    assert counted - 256 <= made.bytes <= counted
    made.bytes = 0
    saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, x.mask, backend="metal")
    counted = shape(D, D, size, backward=True).bytes
    assert counted - 256 <= made.bytes <= counted
