"""The contiguous cache: appends, ragged and whole, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import KVCache


def made(kind: str, *sizes: int, **options):
    if kind == "torch":
        torch = pytest.importorskip("torch")
        return KVCache(*sizes, dtype=torch.float32, **options), lambda x: torch.tensor(x)
    return KVCache(*sizes, dtype=np.float32, **options), lambda x: x


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_appends_follow_one_another(kind: str, rng: np.random.Generator) -> None:
    cache, put = made(kind, 2, 9, 3, 4, v_dim=5, fill=np.nan)
    k, v = rng.standard_normal((2, 8, 3, 4), np.float32), rng.standard_normal((2, 8, 3, 5), np.float32)
    for a, b in ((0, 5), (5, 5), (5, 6), (6, 8)):
        cache.append(put(k[:, a:b]), put(v[:, a:b]))
    assert np.asarray(cache.lengths).tolist() == [8, 8]
    assert str(cache.lengths.dtype).endswith("int32")
    np.testing.assert_array_equal(cache.k[:, :8], k)
    np.testing.assert_array_equal(cache.v[:, :8], v)
    assert np.isnan(np.asarray(cache.k[:, 8:])).all()
    assert np.isnan(np.asarray(cache.v[:, 8:])).all()
    assert cache.capacity == 9


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_ragged_appends(kind: str, rng: np.random.Generator) -> None:
    cache, put = made(kind, 3, 6, 2, 4, fill=np.nan)
    want: list[list[np.ndarray]] = [[], [], []]
    for taken in ([3, 0, 1], [0, 2, 2], [3, 1, 0]):
        k = rng.standard_normal((3, 3, 2, 4), np.float32)
        cache.append(put(k), put(k + 1), put(np.array(taken)))
        for b, n in enumerate(taken):
            want[b] += list(k[b, :n])
    assert np.asarray(cache.lengths).tolist() == [6, 3, 3]
    for b, tokens in enumerate(want):
        np.testing.assert_array_equal(cache.k[b, : len(tokens)], np.array(tokens))
        np.testing.assert_array_equal(cache.v[b, : len(tokens)], np.array(tokens) + 1)
        assert np.isnan(np.asarray(cache.k[b, len(tokens) :])).all()
    with pytest.raises(ValueError, match="sequence 0 holds 6 tokens and would take 1 more; expected at most 6"):
        cache.append(put(k[:, :1]), put(k[:, :1]))
    cache.append(put(k), put(k), [0, 3, 3])
    assert np.asarray(cache.lengths).tolist() == [6, 6, 6]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_overflow_writes_nothing(kind: str) -> None:
    cache, put = made(kind, 1, 4, 1, 2)
    ones = np.ones((1, 3, 1, 2), np.float32)
    cache.append(put(ones), put(ones))
    with pytest.raises(ValueError, match="capacity"):
        cache.append(put(ones * 2), put(ones * 2))
    assert np.asarray(cache.k)[0, :, 0, 0].tolist() == [1, 1, 1, 0]
    assert int(cache.lengths[0]) == 3
    cache.append(put(ones[:, :1]), put(ones[:, :1]))
    cache.reset()
    cache.append(put(ones), put(ones))
    assert int(cache.lengths[0]) == 3


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="head_dim is 0"):
        KVCache(1, 4, 1, 0)
    with pytest.raises(ValueError, match="capacity is -1"):
        KVCache(1, -1, 1, 2)
    cache = KVCache(2, 4, 1, 2)
    good = np.ones((2, 1, 1, 2), np.float32)
    with pytest.raises(TypeError, match="float64"):
        cache.append(good.astype(np.float64), good)
    with pytest.raises(ValueError, match=r"expected \[2, T, 1, 2\]"):
        cache.append(good[:1], good)
    with pytest.raises(ValueError, match="expected the same number"):
        cache.append(good, good[:, :0])
    with pytest.raises(ValueError, match="from 0 to 1"):
        cache.append(good, good, [2, 0])
    with pytest.raises(ValueError, match="from 0 to 1"):
        cache.append(good, good, [-1, 0])


def test_dtypes_and_devices() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert KVCache(1, 2, 1, 4, dtype="bfloat16").k.dtype == ml_dtypes.bfloat16
    assert isinstance(KVCache(0, 2, 1, 4, device="cpu").k, np.ndarray)
    torch = pytest.importorskip("torch")
    assert KVCache(1, 2, 1, 4, dtype=torch.bfloat16).k.dtype == torch.bfloat16
    assert KVCache(1, 2, 1, 4, dtype="float16", device=torch.device("cpu")).v.dtype == torch.float16
    cache = KVCache(1, 2, 1, 4, dtype=torch.float32)
    cache.append(torch.ones(1, 1, 1, 4, requires_grad=True), torch.ones(1, 1, 1, 4))
    assert not cache.k.requires_grad
    with pytest.raises(TypeError, match="Tensor"):
        cache.append(np.ones((1, 1, 1, 4), np.float32), torch.ones(1, 1, 1, 4))
