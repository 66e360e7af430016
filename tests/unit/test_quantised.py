"""Codes of keys and values: their numbers, their errors, and that each token is quantised only once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import saccade
from saccade.quantised import decode, encode, quantised
from saccade.testing.compare import coded

KINDS = ("int8", "int4", "fp8")


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_errors_are_bounded(kind: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40)) * 2
    group = data.draw(st.none() | st.integers(1, 100))
    wide = st.floats(-3.0000000054977558e38, 3.0000000054977558e38, width=32)
    x = data.draw(arrays(np.float32, (2, n), elements=wide))
    how = quantised(kind, group, n)
    codes, scales = encode(x, how)
    assert (codes.shape, scales.shape) == ((2, how.width(n)), (2, how.scales(n)))
    assert (np.abs(decode(codes, scales, how).astype(np.float64) - x) <= coded(x, how)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bit_floats_and_the_rest_are_those_of_torch(kind: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = (rng.standard_normal((4, 3, 96)) * np.exp(rng.uniform(-9, 9, (4, 3, 1)))).astype(np.float32)
    how = quantised(kind, None, 96)
    codes, scales = encode(x, how)
    there = encode(torch.from_numpy(x), how)
    np.testing.assert_array_equal(codes, there[0].numpy())
    np.testing.assert_array_equal(decode(codes, scales, how), decode(*there, how).numpy())
    if kind == "fp8":
        numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        np.testing.assert_array_equal(decode(codes, scales, how), numbers * there[1].float().numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_without_a_finite_top_is_nan(kind: str) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.nan, np.inf
    y = decode(*encode(x, quantised(kind, 32, 64)), quantised(kind, 32, 64))
    np.testing.assert_array_equal(np.isnan(y), np.repeat([[True, False], [False, True]], 32, -1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("paged", [False, True])
def test_no_token_is_coded_twice(kind: str, paged: bool, rng: np.random.Generator) -> None:
    k, v = rng.standard_normal((2, 1, 30, 2, 16), np.float32)
    want = [decode(*encode(x[0], quantised(kind, None, 16)), quantised(kind, None, 16)) for x in (k, v)]
    if not paged:
        cache = saccade.KVCache(1, 30, 2, 16, quantised=kind)
        for a, b in ((0, 7), (7, 8), (8, 30)):
            cache.append(k[:, a:b], v[:, a:b])
        held = [x[0] for x in cache.numbers()]
        cache.evict(3, 9)
        kept = [x[0, :12] for x in cache.numbers()]
    else:
        pages = saccade.PagedKVCache(12, 5, 2, 16, quantised=kind)
        root = pages.add()
        pages.append([root], k[0, :8], v[0, :8])
        fork = pages.fork(root)
        pages.append([fork], k[0, 8:], v[0, 8:])
        (table,), (n,) = pages.view([fork]).block_table, pages.view([fork]).lengths
        held = [x[table].reshape(-1, 2, 16)[:n] for x in pages.numbers()]
        pages.evict(fork, 3, 9)
        (table,) = pages.view([fork]).block_table
        kept = [x[table].reshape(-1, 2, 16)[:12] for x in pages.numbers()]
    for got, left, numbers in zip(held, kept, want, strict=True):
        np.testing.assert_array_equal(got, numbers)
        np.testing.assert_array_equal(left, np.concatenate([numbers[:3], numbers[-9:]]))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="quantised is 'int2'; expected None or one of int8, int4, fp8"):
        saccade.KVCache(1, 4, 1, 8, quantised="int2")
    with pytest.raises(ValueError, match="group is 0; expected at least 1"):
        saccade.KVCache(1, 4, 1, 8, quantised="int8", group=0)
    with pytest.raises(ValueError, match="group is 8 and quantised None"):
        saccade.KVCache(1, 4, 1, 8, group=8)
    with pytest.raises(ValueError, match=r"head sizes are \[7, 8\]; expected even ones for int4"):
        saccade.PagedKVCache(1, 4, 1, 7, v_dim=8, quantised="int4")
    cache = saccade.KVCache(1, 4, 1, 8, quantised="int8")
    with pytest.raises(TypeError, match="k is ndarray of float64; expected ndarray of float32"):
        cache.append(np.ones((1, 1, 1, 8)), np.ones((1, 1, 1, 8)))
    with pytest.raises(saccade.Unsupported, match="leave rotation out"):
        cache.evict(1, 2, rotation={})
    held = saccade.PagedKVCache(2, 4, 1, 8, quantised="int8").view([])
    with pytest.raises(
        ValueError, match=r"k_scale is \[2, 4, 1, 2\]; expected an array \[2, 4, 1, 1\], because k is int8"
    ):
        saccade.decode(np.ones((0, 1, 1, 8), np.float32), held._replace(k_scale=np.ones((2, 4, 1, 2), np.uint16)))
