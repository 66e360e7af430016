"""Partial results of attention merged into the whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from saccade import merge, reference, rope

B, T, H, D = 2, 6, 3, 4


def parts_of(rng: np.random.Generator, cuts: list[int], dtype=np.float64, sinks=None):
    q, k, v = (rng.standard_normal((B, n, H, D)) for n in (T, cuts[-1], cuts[-1]))
    parts = [reference.forward(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(cuts)]
    return [(o.astype(dtype), lse.astype(dtype)) for o, lse in parts], reference.forward(q, k, v, sinks=sinks)


@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 9], [0, 0, 1, 8, 9, 9], [0, 2, 4, 6, 8]])
def test_parts_make_the_whole(cuts: list[int], rng: np.random.Generator) -> None:
    parts, (o, lse) = parts_of(rng, cuts)
    got = merge(parts)
    np.testing.assert_allclose(got[0], o, atol=1e-14)
    np.testing.assert_allclose(got[1], lse, atol=1e-14)


def test_sinks_are_added_once(rng: np.random.Generator) -> None:
    sinks = rng.standard_normal(H) * 3
    parts, (o, lse) = parts_of(rng, [0, 4, 9], sinks=sinks)
    got = merge(parts, sinks=sinks)
    np.testing.assert_allclose(got[0], o, atol=1e-14)
    np.testing.assert_allclose(got[1], lse, atol=1e-14)
    np.testing.assert_allclose(merge([(np.zeros((1, H, D)), np.full((1, H), -np.inf))], sinks=sinks)[1][0], sinks)


def test_empty_parts_are_not_read(rng: np.random.Generator) -> None:
    parts, (_, lse) = parts_of(rng, [0, 4, 9])
    nothing = (np.full((B, T, H, D), np.nan), np.full((B, T, H), -np.inf))
    np.testing.assert_array_equal(merge([nothing, *parts])[0], merge(parts)[0])
    np.testing.assert_allclose(merge([*parts, nothing])[1], lse)
    got = merge([nothing, nothing])
    assert not got[0].any()
    assert (got[1] == -np.inf).all()


def test_large_scores_do_not_overflow(rng: np.random.Generator) -> None:
    parts, (o, lse) = parts_of(rng, [0, 4, 9])
    got = merge([(o, lse + 5000) for o, lse in parts])
    np.testing.assert_allclose(got[0], o, atol=1e-12)
    np.testing.assert_allclose(got[1], lse + 5000)


def test_same_bits_in_float32_sums(rng: np.random.Generator) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    parts, (o, _) = parts_of(rng, [0, 2, 4, 6, 8], np.float32)
    low = [(x.astype(ml_dtypes.bfloat16), lse) for x, lse in parts]
    got = merge(low)
    assert [x.dtype for x in got] == [ml_dtypes.bfloat16, np.float32]
    assert merge(low)[0].tobytes() == got[0].tobytes()
    assert abs(got[0].astype(np.float64) - o).max() < 0.02


def test_bad_parts(rng: np.random.Generator) -> None:
    parts, _ = parts_of(rng, [0, 4, 9])
    with pytest.raises(ValueError, match="no parts"):
        merge([])
    with pytest.raises(ValueError, match="part 1 has o"):
        merge([parts[0], (parts[1][0][:, 1:], parts[1][1][:, 1:])])
    with pytest.raises(ValueError, match="sinks has shape"):
        merge(parts, sinks=np.zeros(H + 1))


def test_torch_agrees_and_differentiates(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    parts, _ = parts_of(rng, [0, 4, 9])
    parts[0][1][0, 0, 0] = -np.inf
    parts[0][0][0, 0, 0] = 0
    sinks = rng.standard_normal(H)
    want = merge(parts, sinks=sinks)
    tensors = [torch.tensor(x, requires_grad=True) for pair in parts for x in pair]
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
    got = merge(pairs, sinks=torch.tensor(sinks))
    np.testing.assert_allclose(got[0].detach(), want[0], atol=1e-14)
    np.testing.assert_allclose(got[1].detach(), want[1], atol=1e-14)
    (got[0].sum() + got[1].sum()).backward()
    assert all(torch.isfinite(x.grad).all() for x in tensors)
    with pytest.raises(TypeError, match="mixes"):
        merge([pairs[0], parts[1]])

    def whole(o1, l1, o2, l2):
        return merge([(o1, l1), (o2, l2)])

    small = [torch.tensor(rng.standard_normal(s), requires_grad=True) for s in ((2, 1, 2), (2, 1)) * 2]
    assert torch.autograd.gradcheck(whole, small)


def test_arrays_of_another_library_are_refused() -> None:
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match=r"an array is a jaxlib\..*; expected a NumPy array or torch tensor"):
        merge([(jnp.zeros((2, 1, 4)), jnp.zeros((2, 1)))])
    with pytest.raises(TypeError, match="expected a NumPy array or torch tensor"):
        rope(jnp.zeros((1, 2, 1, 4)), np.arange(2))
