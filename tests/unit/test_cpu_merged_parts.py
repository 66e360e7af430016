"""Parts of a plan are merged by maximum and sum: the lse of large scores has lost the logarithm of its sum."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.backends import cpu
from saccade.problem import Problem, Scores

T = 200
PARTS = masks.window(15, 0) | (masks.causal() & masks.strided(16))


@pytest.mark.parametrize("least", [np.finfo(np.float32).min, -1e9, -1e5, 1e5])
@pytest.mark.parametrize("sink", [None, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_large_scores(dtype, sink, least, rng) -> None:
    problem = Problem(1, T, T, 1, 1, 8, 8, dtype=dtype, mask=PARTS, scores=Scores(scale=1.0, bias=(1, 1, T, T)))
    assert len(cpu.plan(problem).parts) > 1
    q, k, v = (rng.standard_normal((1, T, 1, 8)).astype(dtype) for _ in range(3))
    bias = np.zeros((T, T), dtype)
    bias[150:] = least
    sinks = None if sink is None else np.array([sink], dtype)
    dense = masks.dense(PARTS.evaluate(1, 1, T, T)[0, 0])
    options = {"bias": bias, "sinks": sinks, "return_entropy": True, "return_lse": True}
    calls = (saccade.attention(q, k, v, mask, **options) for mask in (PARTS, dense))
    for x, y in zip(*calls, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
