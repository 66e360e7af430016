"""Weights that are not numbers of a softmax: rows beyond the last query, and rows whose lse has lost its sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import saccade
from saccade import mask as masks

if TYPE_CHECKING:
    from saccade.backends.webgpu.device import Gpu


def test_slopes_below_zero(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v, do = (rng.standard_normal((1, 200, 2, 16), np.float32) for _ in range(4))
    slopes = []
    for backend in ("webgpu", "cpu"):
        bias = saccade.alibi(np.array([-0.5, 0.5], np.float32))
        o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
        *_, more = saccade.attention_backward(do, q, k, v, o, lse, bias=bias, backend=backend)
        slopes.append(more["slopes"])
    np.testing.assert_allclose(*slopes, rtol=1e-4)


def test_rows_of_lowest_biases(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v, do = (rng.standard_normal((1, 70, 1, 4), np.float32) for _ in range(4))
    bias = np.zeros((1, 1, 70, 70), np.float32)
    bias[:, :, :2] = np.finfo(np.float32).min
    do[:, :2] = 0
    o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True, backend="webgpu")
    _, *gradients, _ = saccade.attention_backward(do, q, k, v, o, lse, bias=bias, backend="webgpu")
    plain = saccade.attention(q, k, v, bias=bias, return_lse=True, backend="cpu")
    _, *expected, _ = saccade.attention_backward(do, q, k, v, *plain, bias=bias, backend="cpu")
    for x, y in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_rows_of_low_biases_through_several_launches(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, 40, 1, 4), np.float32) for _ in range(3))
    bias = np.zeros((1, 1, 40, 40), np.float32)
    bias[:, :, 20] = -1e9
    mask = masks.strided(4) | masks.window(3, 0)
    o = saccade.attention(q, k, v, mask, bias=bias, backend="webgpu")
    # the weights of both launches add up to 1, however the row's lse divides them
    ones = saccade.attention(q, k, np.ones_like(v), mask, bias=bias, backend="webgpu")
    np.testing.assert_allclose(ones, 1, atol=1e-6)
    np.testing.assert_allclose(o[:, 21:], saccade.attention(q, k, v, mask, bias=bias)[:, 21:], atol=1e-5)


def test_a_call_after_an_interrupted_one(gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    q = rng.standard_normal((1, 64, 1, 16), np.float32)
    expected = saccade.attention(q, q, q, backend="webgpu")
    staging = gpu._memory._staging

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(staging), "map_async", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saccade.attention(q, q, q, backend="webgpu")
    np.testing.assert_array_equal(saccade.attention(q, q, q, backend="webgpu"), expected)
