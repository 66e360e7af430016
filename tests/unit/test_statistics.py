"""Gradients from the statistics of rows."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade.statistics import sinks_gradient, sinks_gradient_of, slopes_gradient, statistics_of

LSE = np.array([[-np.inf, -np.inf], [0.5, 1.0]])
DELTA = np.array([[0.0, 0.0], [0.3, 0.7]])
SINKS = np.array([-np.inf, 0.25])
# the lse of a row that sees only a sink is that sink
LSE[0, 1] = SINKS[1]
WANTED = [0, -0.7 * np.exp(SINKS[1] - 1.0)]


def test_a_sink_of_minus_infinity_has_no_gradient() -> None:
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(sinks_gradient(SINKS, LSE, DELTA), WANTED)
        np.testing.assert_allclose(sinks_gradient(SINKS, LSE * np.log2(np.e), DELTA, log2=True), WANTED)
        np.testing.assert_allclose(sinks_gradient_of(statistics_of(LSE, DELTA), SINKS), WANTED, rtol=1e-6)


def test_tensors_give_the_same() -> None:
    torch = pytest.importorskip("torch")
    found = sinks_gradient(*map(torch.from_numpy, (SINKS, LSE, DELTA)))
    np.testing.assert_allclose(found.numpy(), WANTED)


@pytest.mark.parametrize("rows, B", [(1, 2), (2, 2), (0, 0), (1, 0)])
def test_slopes_of_each_batch_entry_or_of_all(rows: int, B: int) -> None:
    assert slopes_gradient([np.ones(B * 3)], (rows, 3), B).shape == (rows, 3)
    torch = pytest.importorskip("torch")
    slopes = torch.ones(rows, 3, requires_grad=True)
    q = torch.randn(B, 4, 3, 8)
    saccade.attention(q, q, q, bias=saccade.alibi(slopes)).sum().backward()
    assert slopes.grad.shape == (rows, 3)
