"""Pages of keys on the device: the same tokens, forks and results as with NumPy's pages."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade import PagedKVCache, Unsupported, paged_attention
from saccade.backends import webgpu

pytest.importorskip("wgpu")


def filled(rng, page: int, dtype: str, **more) -> tuple[list[PagedKVCache], list[int]]:
    """A cache with NumPy arrays and one on the device: a sequence, a fork whose last page is copied, and another."""
    made = {"v_dim": 12, "dtype": dtype, "fill": np.nan, **more}
    caches = [PagedKVCache(60 // page + 9, page, 2, 8, device=where, **made) for where in (None, "webgpu")]
    chosen: list[int] = []

    def append(sequences, counts) -> None:
        cu = np.cumsum([0, *counts])
        k, v = (rng.standard_normal((cu[-1], 2, n), np.float32).astype(dtype) for n in (8, 12))
        for cache, give in zip(caches, (lambda x: x, webgpu.array), strict=True):
            cache.append(sequences, give(k), give(v), cu)

    for cache in caches:
        chosen = [cache.add(), cache.add()]
    append(chosen, [19, 7])
    for cache in caches:
        chosen = [*chosen[:2], cache.fork(chosen[0], 18)]
    append(chosen, [2, 1, 9])
    return caches, chosen


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", [{}, {"quantised": "int8"}, {"quantised": "int4", "group": 4}])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_pages_on_the_device_are_those_of_memory(gpu, rng, page, dtype, how) -> None:
    (here, there), chosen = filled(rng, page, dtype, **how)
    assert here.free_pages == there.free_pages
    for a, b in zip(here.numbers(), there.numbers(), strict=True):
        np.testing.assert_array_equal(a, b if how else b.numpy())
    counts = [3, 1, 3]
    q = rng.standard_normal((sum(counts), 4, 8), np.float32).astype(dtype)
    cu = np.cumsum([0, *counts])
    o, lse = paged_attention(webgpu.array(q), there.view(chosen), cu, return_lse=True)
    assert isinstance(o, webgpu.GpuArray)
    wanted = paged_attention(q, here.view(chosen), cu, return_lse=True, backend="cpu")
    near = {"rtol": 0, "atol": 4e-6 if dtype == "float32" else 2e-3}
    np.testing.assert_allclose(o.numpy(), wanted[0], **near)
    np.testing.assert_allclose(lse.numpy(), wanted[1], **near)
    one = there.view(chosen[:1])
    alone = saccade.decode(webgpu.array(q[:1, None]), one), paged_attention(webgpu.array(q[:1]), one)
    np.testing.assert_array_equal(alone[0].numpy()[0], alone[1].numpy())


def test_what_is_refused(gpu) -> None:
    cache = PagedKVCache(4, 8, 2, 16, device="webgpu")
    s = cache.add()
    x = webgpu.array(np.ones((3, 2, 16), np.float32))
    with pytest.raises(Unsupported, match="rotation of a cache on its device"):
        cache.append([s], x, x, rotation={"base": 1e4})
    cache.append([s], x, x)
    with pytest.raises(Unsupported, match="evict of a cache on its device"):
        cache.evict(s, 0, 1)
    with pytest.raises(TypeError, match="expected GpuArray of float32, as the cache holds"):
        cache.append([s], x.numpy(), x.numpy())
    with pytest.raises(ValueError, match=r"a token's \[1, 17\] of float16 do not fill whole words"):
        PagedKVCache(4, 8, 1, 17, dtype="float16", device="webgpu")
    assert [len(cache.view([1]).block_table[0]), cache.length(1)] == [1, 3]
