"""Numbers near the ends of the dtype's range: a finite bias is a score like any other."""

from __future__ import annotations

import numpy as np
import pytest

import saccade

LOWEST = float(np.finfo(np.float32).min)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("Tq", [1, 5, 70])
@pytest.mark.parametrize("low", [-1e30, -1e38, LOWEST])
def test_a_row_of_equal_low_biases_is_a_mean(backend: str, Tq: int, low: float) -> None:
    q, k, v = numbers(1, Tq, 2, 16), numbers(1, 90, 2, 16), numbers(1, 90, 2, 16)
    bias = np.zeros((1, 1, Tq, 90), np.float32)
    bias[:, :, 0] = low
    # -inf excludes a pair
    bias[:, :, 0, 50:] = -np.inf
    o = saccade.attention(q, k, v, bias=bias, backend=backend)
    with_lse, lse = saccade.attention(q, k, v, bias=bias, backend=backend, return_lse=True)
    for found in (o, with_lse):
        np.testing.assert_allclose(found[0, 0], v[0, :50].mean(0), rtol=0, atol=1e-6)
    assert np.isfinite(lse).all()
    bias[:, :, 0] = -np.inf
    o, lse = saccade.attention(q, k, v, bias=bias, backend=backend, return_lse=True)
    assert (o[0, 0] == 0).all()
    assert (lse[0, 0] == -np.inf).all()
