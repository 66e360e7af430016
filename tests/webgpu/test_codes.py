"""Keys and values as codes on a device: every code, layouts of rows, arrays in pieces, pages, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade import KVCache, backends
from saccade.backends import Extras, Inputs, webgpu
from saccade.backends.webgpu import codes
from saccade.plan import make_plan
from saccade.problem import Problem
from saccade.quantised import Quantised, decode, encode, quantised

LIMIT = "max-storage-buffer-binding-size"
KINDS = ["int8", "int4", "fp8"]


def cached(rng, kind: str, lengths: list[int], D: int, Dv: int, group: int | None = None) -> KVCache:
    """Caches of two key heads, with NaN in unused rows."""
    cache = KVCache(len(lengths), max(lengths) + 3, 2, D, v_dim=Dv, fill=np.nan, quantised=kind, group=group)
    k, v = (rng.standard_normal((len(lengths), max(lengths), 2, n), np.float32) for n in (D, Dv))
    cache.append(k, v, np.array(lengths))
    return cache


def numbers(cache: KVCache) -> KVCache:
    """The same cache with float32 numbers."""
    same = KVCache(len(cache.lengths), cache.capacity, 2, cache.sizes[0], v_dim=cache.sizes[1])
    (same.k, same.v), same.lengths = cache.numbers(), cache.lengths
    return same


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_the_number_it_stands_for(gpu, kind) -> None:
    # with a single key the result is its value
    how = Quantised(kind, 64)
    v = np.arange(256, dtype=np.uint8)[None, None, None, : how.width(256)]
    v = v.view(np.int8) if kind == "int8" else v
    scale = np.array([0x3F80, 0xBF00, 0x4049, 0x0180], np.uint16)[None, None, None]
    p = Problem(1, 1, 1, 1, 1, 256, 256, quantised=how)
    extras = Extras(k_scale=np.zeros_like(scale), v_scale=scale)
    inputs = Inputs(np.ones((1, 1, 1, 256), np.float32), v * 0, v, extras)
    o, _ = webgpu.forward(p, make_plan(p, webgpu.limits(p)), inputs)
    np.testing.assert_array_equal(o, decode(v, scale, how))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, group", [(2, 1), (6, 4), (10, 3), (12, 20), (40, 32)])
def test_rows_hold_the_codes_and_the_scales(rng, kind, n, group) -> None:
    how = quantised(kind, group, n)
    given = rng.integers(0, 256, (2, 3, how.width(n)), np.uint8)
    scales = rng.integers(0, 1 << 16, (2, 3, how.scales(n))).astype(np.uint16)
    row = codes.row_of(how, n)
    found = codes.joined(given, scales, how)
    assert found.shape == (2, 3, row.size)
    held = found.view(np.uint8)[..., : 4 * row.words]
    each = np.concatenate([held & 15, held >> 4], -1)[..., :n] if kind == "int4" else held[..., :n]
    np.testing.assert_array_equal(each, np.concatenate([given & 15, given >> 4], -1) if kind == "int4" else given)
    np.testing.assert_array_equal(found.view(np.uint16)[..., 2 * row.words :][..., : row.scales], scales)


@pytest.mark.parametrize("kind, group", [("int8", None), ("int4", 8), ("fp8", 6)])
def test_keys_longer_than_a_binding_and_without_shuffles(gpu, monkeypatch, rng, kind, group) -> None:
    cache = cached(rng, kind, [1500, 1403], 16, 24, group)
    q = rng.standard_normal((2, 1, 4, 16), np.float32)
    wanted = saccade.decode(q, numbers(cache), backend="cpu")
    for limit, shuffle in ((gpu.limits[LIMIT], gpu.shuffle), (1 << 15, gpu.shuffle), (gpu.limits[LIMIT], 1)):
        monkeypatch.setitem(gpu.limits, LIMIT, limit)
        monkeypatch.setattr(gpu, "shuffle", shuffle)
        np.testing.assert_allclose(saccade.decode(q, cache, backend="webgpu"), wanted, atol=4e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("Tq", [1, 70])
def test_pages_give_the_bits_of_contiguous_codes(gpu, rng, kind, Tq) -> None:
    cache = cached(rng, kind, [150, 113], 24, 40)
    q = rng.standard_normal((2, Tq, 4, 24), np.float32)
    mask = saccade.mask.keys(np.array([150, 113]))
    p = Problem(2, Tq, 150, 4, 2, 24, 40, mask=mask, quantised=cache.quantised)
    table = rng.permutation(20).astype(np.int32).reshape(2, -1)
    pages = [np.zeros((20, 16, *x.shape[2:]), x.dtype) for x in cache.arrays]
    for b, j in np.ndindex(2, 150):
        for paged, x in zip(pages, cache.arrays, strict=True):
            paged[table[b, j // 16], j % 16] = x[b, j]
    plan = make_plan(p, webgpu.limits(p))
    k, v, k_scale, v_scale = (x[:, :150] for x in cache.arrays)
    for verb in (webgpu.forward, webgpu.decode):
        o, lse = verb(p, plan, Inputs(q, k, v, Extras(k_scale=k_scale, v_scale=v_scale)))
        paged = Extras(block_table=table, page_size=16, k_scale=pages[2], v_scale=pages[3])
        same = verb(p, plan, Inputs(q, *pages[:2], paged))
        np.testing.assert_array_equal(same[0], o)
        np.testing.assert_array_equal(same[1], lse)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_torch(gpu, rng, kind) -> None:
    torch = pytest.importorskip("torch")
    cache = KVCache(2, 90, 2, 16, dtype=torch.bfloat16, quantised=kind)
    cache.append(*(torch.from_numpy(rng.standard_normal((2, 80, 2, 16), np.float32)).bfloat16() for _ in "kv"))
    q = torch.from_numpy(rng.standard_normal((2, 1, 4, 16), np.float32)).bfloat16()
    ours, cpu = (saccade.decode(q, cache, backend=name) for name in ("webgpu", "cpu"))
    torch.testing.assert_close(ours, cpu, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind, n, group", [("int8", 24, None), ("int8", 5, 2), ("int4", 36, 32), ("int4", 8, 3),
                                            ("fp8", 6, 4), ("fp8", 40, None)])  # fmt: skip
def test_codes_made_on_the_device_are_those_of_memory(gpu, rng, kind, n, group, dtype) -> None:
    how = quantised(kind, group, n)
    x = (rng.standard_normal((2, 6, 3, n)) * 10.0 ** rng.integers(-4, 4, (2, 6, 3, 1))).astype(dtype)
    x[0, 0] = 0
    x[0, 1, :, :2] = [[1, -1], [np.inf, 1], [1, np.nan]]
    x[0, 2], x[0, 3] = np.finfo(dtype).max, -np.finfo(dtype).tiny
    rows = codes.encoded(webgpu.array(x), how).numpy()
    made = encode(x, how)
    np.testing.assert_array_equal(rows, codes.joined(*made, how))
    for got, wanted in zip(codes.parted(rows, how, n), made, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind, group", [("int8", None), ("int4", 8), ("fp8", 6)])
@pytest.mark.parametrize("lengths", [[160], [160, 90], [100]])
def test_a_cache_of_codes_on_the_device(gpu, rng, kind, group, lengths) -> None:
    B, made = len(lengths), {"v_dim": 12, "fill": np.nan, "quantised": kind, "group": group}
    here, there = (KVCache(B, 170, 2, 8, device=x, **made) for x in (None, "webgpu"))
    k, v = (rng.standard_normal((B, 160, 2, n), np.float32) for n in (8, 12))
    here.append(k, v, lengths)
    there.append(webgpu.array(k), webgpu.array(v), lengths)
    for a, b in zip(here.numbers(), there.numbers(), strict=True):
        np.testing.assert_array_equal(a, b)
    for Tq in (1, 70):
        q = rng.standard_normal((B, Tq, 4, 8), np.float32)
        o, lse = saccade.decode(webgpu.array(q), there, return_lse=True)
        wanted = saccade.decode(q, here, return_lse=True, backend="cpu")
        np.testing.assert_allclose(o.numpy(), wanted[0], rtol=0, atol=4e-6)
        np.testing.assert_allclose(lse.numpy(), wanted[1], rtol=0, atol=4e-6)


def test_what_is_refused(gpu) -> None:
    p = Problem(1, 1, 9, 4, 2, 16, 16, quantised=Quantised("int8", 16))
    assert not webgpu.unsupported(p)
    assert webgpu.explain(p, webgpu.plan(p))[1]["arrays"] == "float32; keys and values as int8"
    reasons = backends.refusals(webgpu, replace(p, needs_grad=True))
    assert reasons == ["backward with keys and values as codes is not computed here: detach its arrays"]
    cache = KVCache(1, 8, 2, 16, device="webgpu", quantised="int8")
    cache.append(*[webgpu.array(np.ones((1, 8, 2, 16), np.float32))] * 2)
    with pytest.raises(TypeError, match="dtype is int32; expected float32 or float16"):
        codes.encoded(webgpu.array(np.ones((1, 4), np.int32)), Quantised("int8", 4))
    cache.v = webgpu.array(np.ones((1, 8, 2, 16), np.float32))
    with pytest.raises(ValueError, match=r"are float32 \[1, 8, 2, 16\]; expected uint32 \[..., 5\]"):
        saccade.decode(webgpu.array(np.ones((1, 1, 2, 16), np.float32)), cache)
