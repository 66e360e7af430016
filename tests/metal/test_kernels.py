"""The tiled kernels in every schedule and dtype, clean under both sanitizers, and the same bits each time."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade.testing import run
from saccade.testing.compare import require
from saccade.testing.inputs import make
from saccade.testing.metal import SCHEDULES

from .mutants import PROBLEMS


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_schedule(emulator, problem, dtype) -> None:
    """Other places of matrix elements in lanes each time too."""
    x = make(PROBLEMS[problem], dtype, seed=2)
    first: list[np.ndarray] = []
    for n, schedule in enumerate(SCHEDULES):
        emulator(schedule=schedule, seed=n)
        require(run.verify(x, "metal"), f"{problem} {dtype} {schedule}")
        o = saccade.attention(x.q, x.k, x.v, x.mask, sinks=x.sinks, backend="metal", **x.scores)
        first.append(o.view(np.uint16) if dtype == "bfloat16" else o)
    for o in first[1:]:
        np.testing.assert_array_equal(o, first[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("problem", ["small", "decode", "union", "bias", "scores"])
def test_sanitized(emulator, problem, sanitizer) -> None:
    emulator(sanitizer=sanitizer)
    require(run.verify(make(PROBLEMS[problem], "float32", seed=2), "metal"), f"{problem} {sanitizer}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sanitized_in_16_bits(emulator, dtype) -> None:
    emulator(sanitizer="thread")
    require(run.verify(make(PROBLEMS["small"], dtype, seed=2), "metal", backward=False), dtype)
