"""Rotary positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from saccade import KVCache, PagedKVCache, rope


def by_hand(x: np.ndarray, positions: np.ndarray, base: float, interleaved: bool) -> np.ndarray:
    y, D = np.array(x, np.float64), x.shape[-1]
    for b, t, h, i in np.ndindex(*x.shape[:3], D // 2):
        n = positions[b, t] if positions.ndim == 2 else positions[t]
        c, s = np.cos(n * base ** (-2 * i / D)), np.sin(n * base ** (-2 * i / D))
        at = (2 * i, 2 * i + 1) if interleaved else (i, i + D // 2)
        x0, x1 = x[b, t, h, at[0]], x[b, t, h, at[1]]
        y[b, t, h, at[0]], y[b, t, h, at[1]] = x0 * c - x1 * s, x0 * s + x1 * c
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_rotation_by_its_formula(interleaved: bool, per_batch: bool, base: float, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 5, 3, 8))
    positions = rng.integers(0, 5000, (2, 5) if per_batch else (5,))
    want = by_hand(x, positions, base, interleaved)
    np.testing.assert_allclose(rope(x, positions, base=base, interleaved=interleaved), want, atol=1e-12)
    single = rope(x.astype(np.float32), positions, base=base, interleaved=interleaved)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, want, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_is_identity_and_gradient(interleaved: bool, rng: np.random.Generator) -> None:
    x, y, positions = rng.standard_normal((2, 5, 3, 8)), rng.standard_normal((2, 5, 3, 8)), np.arange(131067, 131072)
    turned = rope(x, positions, interleaved=interleaved)
    np.testing.assert_allclose(rope(turned, positions, interleaved=interleaved, inverse=True), x, atol=1e-12)
    back = rope(y, positions, interleaved=interleaved, inverse=True)
    np.testing.assert_allclose((turned * y).sum(), (x * back).sum())


def test_scores_follow_distance_alone(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((2, 1, 1, 1, 16))
    near = (rope(q, [7]) * rope(k, [3])).sum()
    far = (rope(q, [100007]) * rope(k, [100003])).sum()
    np.testing.assert_allclose(near, far, atol=1e-9)


def test_three_axes_and_no_tokens(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 3, 8))
    np.testing.assert_array_equal(rope(x, np.arange(5)), rope(x[None], np.arange(5))[0])
    assert rope(x[:0], np.arange(0)).shape == (0, 3, 8)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="D even"):
        rope(np.ones((1, 2, 1, 7)), np.arange(2))
    with pytest.raises(ValueError, match="D even"):
        rope(np.ones((2, 8)), np.arange(2))
    with pytest.raises(ValueError, match="positions has shape"):
        rope(np.ones((3, 2, 1, 8)), np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"base": -1e4}, ValueError, "base is -10000.0; expected a finite number above 0"),
        ({"base": np.nan}, ValueError, "base is nan; expected a finite number above 0"),
        ({"base": "1e4"}, TypeError, r"base is '1e4' \(str\); expected a finite number"),
        ({"factor": None}, TypeError, "factor is None"),
        ({"interleaved": "half"}, TypeError, "interleaved is 'half'; expected True or False"),
        ({"inverse": 1}, TypeError, "inverse is 1; expected True or False"),
        ({"frequencies": [1.0] * 4}, TypeError, r"frequencies is a list; expected an array \[D / 2\]"),
        ({"theta": 1e4}, TypeError, "rotation has theta; expected options of rope: base, interleaved"),
    ],
)
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_bad_options(options: dict[str, Any], error: type[Exception], words: str, kind: str) -> None:
    k = np.ones((1, 5, 1, 8), np.float32)
    if "theta" not in options:
        with pytest.raises(error, match=words):
            rope(k, np.arange(5), **options)
    cache: Any = KVCache(1, 20, 1, 8) if kind == "contiguous" else PagedKVCache(2, 16, 1, 8)
    tokens = (k, k) if kind == "contiguous" else ([cache.add()], k[0], k[0])
    with pytest.raises(error, match=words):
        cache.append(*tokens, rotation=options)


@pytest.mark.parametrize("interleaved", [False, True])
def test_torch_agrees(interleaved: bool, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x, positions = rng.standard_normal((2, 5, 3, 8)), rng.integers(0, 5000, (2, 5))
    want = rope(x, positions, interleaved=interleaved)
    for given in (positions, torch.tensor(positions)):
        got = rope(torch.tensor(x), given, interleaved=interleaved)
        np.testing.assert_allclose(got, want, atol=1e-14)
    assert rope(torch.tensor(x).bfloat16(), positions).dtype == torch.bfloat16
    leaf = torch.tensor(x, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: rope(y, positions, interleaved=interleaved), [leaf])
    with pytest.raises(TypeError, match="torch tensor"):
        rope(x, torch.tensor(positions))
