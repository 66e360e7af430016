"""The CPU core near the ends of the dtype's range: large values, large scores, and options beyond it."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade import reference

LARGEST = np.finfo(np.float32).max


def zeros(T: int, H: int = 2, D: int = 16) -> np.ndarray:
    return np.zeros((1, T, H, D), np.float32)


@pytest.mark.parametrize("keys", [8, 300, 9000])
@pytest.mark.parametrize("Tq", [1, 70])
def test_the_mean_of_large_values_is_finite(Tq: int, keys: int) -> None:
    v = np.full((1, keys, 2, 16), 1e38, np.float32)
    v[:, :, 1] = np.random.default_rng(0).standard_normal((keys, 16))
    small = v.copy()
    small[:, :, 0] = 1
    for call in (
        lambda v: saccade.attention(zeros(Tq), zeros(keys), v),
        lambda v: saccade.attention(zeros(Tq), zeros(keys), v, return_lse=True)[0],
        lambda v: saccade.attention(zeros(Tq), zeros(keys), v, masks.causal() | masks.strided(3)),
    ):
        o = call(v)
        np.testing.assert_allclose(o[:, :, 0], 1e38, rtol=1e-5)
        # rows without an overflow keep their bits
        assert np.array_equal(o[:, :, 1], call(small)[:, :, 1])


def test_values_of_both_signs_cancel() -> None:
    v = np.full((1, 64, 2, 16), 3e38, np.float32)
    v[:, 32:] *= -1
    o = saccade.attention(zeros(4), zeros(64), v)
    np.testing.assert_allclose(o, 0, atol=1e33)


def test_an_infinite_value_stays_infinite() -> None:
    v = np.full((1, 64, 2, 16), 1e38, np.float32)
    v[0, 5, 0, 3] = np.inf
    o = saccade.attention(zeros(4), zeros(64), v)
    assert (o[:, :, 0, 3] == np.inf).all()
    np.testing.assert_allclose(o[:, :, 1], 1e38, rtol=1e-5)


def test_large_biases_keep_their_order() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 70, 1, 16), dtype=np.float32) for _ in range(3))
    for sign in (-1, 1):
        bias = np.full((1, 1, 70, 70), -LARGEST, np.float32)
        bias[..., 7] = sign * np.float32(2.5e38)
        bias[..., 9] = sign * np.float32(2.6e38)
        o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True)
        winner = 7 if sign < 0 else 9
        assert np.array_equal(o, np.broadcast_to(v[:, winner : winner + 1], o.shape))
        np.testing.assert_array_equal(lse, bias[0, 0, 0, winner])


def test_gradients_of_rows_of_lowest_biases_are_finite() -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 90, 1, 16), dtype=np.float32) for _ in range(4))
    bias = np.zeros((1, 1, 90, 90), np.float32)
    bias[:, :, 3] = -LARGEST
    o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True)
    do[:, 3] = 0
    padded = saccade.attention_backward(do, q, k, v, o, lse, bias=bias)
    bias[:, :, 3] = 0
    o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True)
    plain = saccade.attention_backward(do, q, k, v, o, lse, bias=bias)
    for a, b in zip(padded[:3], plain[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("low", [-1e10, -1e20, -1e38, -LARGEST])
@pytest.mark.parametrize("T", [16, 90, 300])
def test_rows_far_below_zero_have_the_gradients_of_their_weights(T: int, low: float) -> None:
    # scores of a row are equal there, and its lse has no room for the logarithm of their number
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, T, 1, 16), dtype=np.float32) for _ in range(4))
    bias = np.zeros((1, 1, T, T), np.float32)
    bias[:, :, 3] = low
    o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True)
    found = saccade.attention_backward(do, q, k, v, o, lse, bias=bias)[:3]

    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    row = do[:, 3].copy()
    do[:, 3] = 0
    wanted = reference.backward(do, q, k, v)[:3]
    dp = v[0, :, 0] @ row[0, 0]
    ds = (dp - dp.mean()) / T / 4
    wanted[0][0, 3, 0] = ds @ k[0, :, 0]
    wanted[1][0, :, 0] += np.outer(ds, q[0, 3, 0])
    wanted[2][0, :, 0] += row[0, 0] / T
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("softcap", [1e39, 1e-46])
def test_a_softcap_beyond_the_scores_range_is_refused(softcap: float) -> None:
    x = zeros(4)
    with pytest.raises(ValueError, match=r"softcap is 1e.*range of float32 scores"):
        saccade.attention(x, x, x, softcap=softcap)
    wide = x.astype(np.float64)
    assert np.isfinite(saccade.attention(wide, wide, wide, softcap=softcap)).all()


def test_a_scale_beyond_the_scores_range_is_refused() -> None:
    x = zeros(4)
    with pytest.raises(ValueError, match=r"scale is -1e\+39; expected at most 3.403e\+38 in size"):
        saccade.attention(x, x, x, scale=-1e39)
    with pytest.raises(ValueError, match="scale is nan"):
        saccade.attention(x, x, x, scale=float("nan"))
    with pytest.raises(ValueError, match="dropout is nan"):
        saccade.attention(x, x, x, dropout=float("nan"))
