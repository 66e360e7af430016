"""Arrays that the CPU core must not misread: foreign pages, other dtypes, views of a cache, numbers that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import saccade
from saccade import KVCache, PagedKeys, attention, decode, mask, merge, reference, relative, rope
from saccade.arrays import widened

Q = np.ones((1, 1, 2, 8), np.float32)


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("pages", [(1, 4), (3, 2)])
def test_pages_of_keys_and_values_are_the_same(pages: tuple[int, int]) -> None:
    k, v = numbers(3, 4, 2, 8), numbers(*pages, 2, 8)
    keys = PagedKeys(k, v, np.array([[2, 1]], np.int32), np.array([5], np.int32))
    with pytest.raises(ValueError, match=r"k and v start with shapes \[3, 4, 2\] and .*; expected the same slots"):
        decode(Q, keys)


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "uint16"])
def test_caches_hold_floats(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"dtype is {dtype}; expected one of float32, bfloat16"):
        KVCache(1, 4, 2, 8, dtype=dtype)
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=f"dtype is {dtype}; expected one of float32, bfloat16"):
        KVCache(1, 4, 2, 8, dtype=getattr(torch, dtype))


def coded() -> KVCache:
    cache = KVCache(1, 6, 2, 8, quantised="int8", group=4)
    cache.append(numbers(1, 6, 2, 8), numbers(1, 6, 2, 8))
    return cache


@pytest.mark.parametrize("name", ["k", "v", "k_scale", "v_scale"])
def test_codes_and_scales_have_their_dtypes(name: str) -> None:
    cache = coded()
    wide = widened(getattr(cache, name)) if "scale" in name else getattr(cache, name).astype(np.int64)
    setattr(cache, name, wide)
    with pytest.raises(TypeError, match="expected int8 and bfloat16 or uint16"):
        decode(Q, cache)


def test_scales_have_any_strides() -> None:
    cache = coded()
    wanted = decode(Q, cache)
    cache.k_scale, cache.v_scale = (
        np.ascontiguousarray(x[..., ::-1])[..., ::-1] for x in (cache.k_scale, cache.v_scale)
    )
    np.testing.assert_array_equal(decode(Q, cache), wanted)


def test_a_view_of_the_cache_is_appended() -> None:
    cache, kept = KVCache(1, 400, 1, 8), numbers(1, 300, 1, 8)
    cache.append(kept, kept)
    cache.accept(300, [[0, 1]])
    cache.append(cache.k[:, :300], cache.v[:, :300], rotation={"frequencies": np.zeros(4)})
    np.testing.assert_array_equal(cache.k[:, 2:302], kept)


def test_a_cache_that_cannot_be_written() -> None:
    cache = KVCache(1, 4, 2, 8)
    cache.k.setflags(write=False)
    with pytest.raises(ValueError, match="an array of the cache is read-only"):
        cache.append(numbers(1, 2, 2, 8), numbers(1, 2, 2, 8), rotation={})


def test_a_cache_with_bytes_of_others() -> None:
    cache = KVCache(1, 4, 2, 8)
    cache.k = np.zeros(cache.k.shape, np.int8)
    with pytest.raises(TypeError, match="a dtype that the core does not compute"):
        cache.append(numbers(1, 2, 2, 8), numbers(1, 2, 2, 8), rotation={})
    assert not cache.k.any()


def test_factors_of_any_float() -> None:
    cache, k = KVCache(1, 3, 2, 8), numbers(1, 3, 2, 8)
    cache.append(k, k, rotation={"factor": np.float64(1.5)})
    wanted = rope(k, np.arange(3), factor=1.5)
    assert wanted.dtype == rope(k, np.arange(3), factor=np.float64(1.5)).dtype == np.float32
    np.testing.assert_allclose(cache.k, wanted, rtol=1e-5, atol=1e-6)


def test_no_merge_loses_a_nan() -> None:
    """A row whose keys are in several parts of a plan, or that has sinks without weight."""
    q, k, v = (numbers(1, 64, 1, 16) for _ in range(3))
    k[0, 0] = np.nan
    late = mask.ranges(np.where(np.arange(64) < 32, 64, 0), np.full(64, 64))
    parts = (mask.window(0, 0) & late) | mask.strided(4) | mask.strided(6)
    light = np.full(1, -np.inf, np.float32)
    for which, sinks in ((parts, None), (None, light)):
        o, lse = attention(q, k, v, which, return_lse=True, sinks=sinks)
        wanted = reference.forward(q, k, v, which, sinks=sinks)
        np.testing.assert_array_equal(np.isnan(o), np.isnan(wanted[0]))
        np.testing.assert_array_equal(np.isnan(lse), np.isnan(wanted[1]))
    o, lse = attention(q, k, v, return_lse=True, sinks=light)
    assert np.isnan(merge([(o, lse), (np.ones_like(o), np.zeros_like(lse))])[0]).all()


def test_more_threads_than_any_machine_has() -> None:
    before, q = saccade.get_num_threads(), numbers(1, 300, 2, 16)
    wanted = attention(q, q, q)
    try:
        for number in (1 << 30, 1 << 31, 1 << 70):
            saccade.set_num_threads(number)
            assert saccade.get_num_threads() == 4096
        saccade.set_num_threads(5)
        np.testing.assert_array_equal(attention(q, q, q), wanted)
    finally:
        saccade.set_num_threads(before)


def test_relative_of_nothing() -> None:
    nothing = np.zeros((1, 0, 2, 8), np.float32)
    assert attention(nothing, nothing, nothing, bias=relative(np.zeros((2, 3), np.float32), 1)).shape == (1, 0, 2, 8)
