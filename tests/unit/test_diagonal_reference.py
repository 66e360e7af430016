"""The oracle of diagonal states: by hand, and its gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from saccade.recurrent import diagonal_reference as reference
from saccade.testing import diagonal as catalogue
from saccade.testing import recurrent as run
from saccade.testing.recurrent import Sizes

OPS = [pytest.param(op, id=op.name) for op in catalogue.OPS]


def test_a_scan_by_hand() -> None:
    half = np.log([[0.5]])
    one, ones = np.ones(1), np.ones((1, 3, 1))
    u = np.array([[[1.0], [2.0], [4.0]]])
    y, h = reference.selective_scan(u, ones, half, one, one)
    np.testing.assert_allclose(y[0, :, 0], [1, 2.5, 5.25])
    np.testing.assert_allclose(h[0, 0], [5.25])
    y, h = reference.selective_scan(u, 2 * ones, half, one, 3 * one, D=one, initial_state=np.array([[[4.0]]]))
    # h: 4/4 + 2 u, and so on
    np.testing.assert_allclose(y[0, :, 0], [3 * 3 + 1, 3 * 4.75 + 2, 3 * 9.1875 + 4])


def test_a_gated_unit_by_hand() -> None:
    x, zeros = np.array([[[2.0], [4.0]]]), np.zeros((1, 2, 1))
    # softplus(a_param) = ln 2 / 4: both gates are 1/2, so a = 1/2
    a_param = np.log(np.expm1([np.log(2) / 4]))
    y, _ = reference.rg_lru(x, zeros, zeros, a_param)
    np.testing.assert_allclose(y[0, :, 0], [1, 0.5 + np.sqrt(0.75) * 2])


def test_a_convolution_by_hand() -> None:
    x, weight = np.array([[[1.0], [10.0], [100.0]]]), np.array([[3.0, 2.0, 1.0]])
    y, state = reference.causal_conv1d(x, weight, initial_state=np.array([[[1000.0, 10000.0]]]))
    np.testing.assert_allclose(y[0, :, 0], [23001, 30012, 123])
    np.testing.assert_allclose(state[0, 0], [10, 100])


@pytest.mark.parametrize("borders", [None, (0, 2, 2, 5)])
@pytest.mark.parametrize("op", OPS)
def test_gradients_by_finite_differences(op, borders) -> None:
    arrays = run.make(op, Sizes(B=1, T=5, H=2, Hk=2, K=3, V=2, borders=borders), "float64")
    if "a_param" in arrays:
        # below, the slope of the root is not its own
        arrays["a_param"] = arrays["a_param"].clip(-2, 1)
    dy, dfinal = run.cotangents(run.expected(op, arrays), "float64")

    def loss(given):
        out = run.expected(op, given)
        return (out["o"] * dy).sum() + (out["state"] * dfinal).sum()

    gradients = run.expected(op, arrays, cotangents=(dy, dfinal))
    rng, step = np.random.default_rng(1), 1e-5
    for name in (name for name, x in arrays.items() if x.dtype.kind == "f" and x.size):
        way = rng.standard_normal(arrays[name].shape)
        ahead, behind = ({**arrays, name: arrays[name] + sign * step * way} for sign in (1, -1))
        slope = (loss(ahead) - loss(behind)) / (2 * step)
        np.testing.assert_allclose((gradients[f"d{name}"] * way).sum(), slope, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("op", OPS)
def test_orders_of_sums_change_roundings_alone(op) -> None:
    arrays = run.make(op, Sizes(T=6), "float64")
    ref = run.expected(op, arrays)
    given = run.cotangents(ref, "float64")
    for name, x in run.expected(op, arrays, cotangents=given).items():
        got = catalogue.in_order(3, op, arrays, np.float64, given)[name]
        np.testing.assert_allclose(got, x, rtol=1e-10, atol=1e-12, err_msg=name)
