"""Arrays that stay on the device, from rotations to decode: what is uploaded and downloaded, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.backends import webgpu
from saccade.backends.webgpu.device import Gpu

T, HQ, HK, D = 40, 4, 2, 8


class Traffic:
    """Sizes in bytes of the uploads and downloads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.up: list[int] = []
        self.down: list[int] = []
        upload, call = Gpu.upload, Gpu.call

        def counted_upload(gpu: Gpu, a: Any) -> Any:
            self.up.append(a.nbytes)
            return upload(gpu, a)

        def counted_call(gpu: Gpu, steps: Sequence[Any], reads: Sequence[Any] = (), **more: Any) -> Any:
            found = call(gpu, steps, reads, **more)
            self.down += [a.nbytes for a in found[0]]
            return found

        monkeypatch.setattr(Gpu, "upload", counted_upload)
        monkeypatch.setattr(Gpu, "call", counted_call)


@pytest.fixture
def traffic(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    # each device is tested once, by its own kernel
    assert gpu.shuffle
    return Traffic(monkeypatch)


def arrays(rng: np.random.Generator, *heads: int, T: int = T, B: int = 1) -> list[Any]:
    return [rng.standard_normal((B, T, h, D), dtype=np.float32) for h in heads]


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * max(1, float(abs(expected).max())))


def test_one_upload_and_one_download(traffic: Traffic, rng: np.random.Generator):
    q, k, v, do = arrays(rng, HQ, HK, HK, HQ)
    new = arrays(rng, HQ, HK, HK, T=1)
    q_, k_, v_, do_, *new_ = map(webgpu.array, (q, k, v, do, *new))
    assert traffic.up == [x.nbytes for x in (q, k, v, do, *new)]
    traffic.up.clear()
    webgpu.run("rope_q", Q=q_.reshape(T, HQ, D), interleaved=False)
    webgpu.run("rope_k", K=k_.reshape(T, HK, D), interleaved=False)
    webgpu.run("rope_q", Q=new_[0].reshape(1, HQ, D), pos_offset=T, interleaved=False)
    webgpu.run("rope_k", K=new_[1].reshape(1, HK, D), pos_offset=T, interleaved=False)
    mask = masks.causal() & masks.window(20, 0)
    o_, lse_ = saccade.attention(q_, k_, v_, mask, return_lse=True)
    grads_ = saccade.attention_backward(do_, q_, k_, v_, o_, lse_, mask)[:3]
    webgpu.run("rope_q_backward", dQ=grads_[0].reshape(T, HQ, D), interleaved=False)
    cache = saccade.KVCache(1, T + 3, HK, D, device="webgpu")
    cache.append(k_, v_)
    cache.append(*new_[1:])
    last_ = saccade.decode(new_[0], cache)
    # only the lists of a mask are uploaded, and they are shorter than the arrays
    assert sum(traffic.up) < min(x.nbytes for x in (q, k, v))
    assert not traffic.down
    found = last_.numpy()
    assert traffic.down == [found.nbytes]

    positions, next_one = np.arange(T), np.array([T])
    q, k = saccade.rope(q, positions), saccade.rope(k, positions)
    o, lse = saccade.attention(q, k, v, mask, return_lse=True)
    dq, dk, dv, _ = saccade.attention_backward(do, q, k, v, o, lse, mask)
    grown = [np.concatenate(pair, 1) for pair in ((k, saccade.rope(new[1], next_one)), (v, new[2]))]
    close(found, saccade.attention(saccade.rope(new[0], next_one), *grown))
    dq = saccade.rope(dq, positions, inverse=True)
    for got, e in zip((o_, lse_, *grads_), (o, lse, dq, dk, dv), strict=True):
        assert isinstance(got, webgpu.GpuArray)
        assert got.shape == e.shape
        close(got.numpy(), e)


@pytest.mark.parametrize("lengths", [[160], [160, 90], [100]])
def test_decode_of_the_keys_in_use(lengths: list[int], rng: np.random.Generator):
    B, stops = len(lengths), np.array(lengths, np.int32)
    k, v = arrays(rng, HK, HK, T=160, B=B)
    q = arrays(rng, HQ, T=1, B=B)[0]
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = np.nan
    found = saccade.decode(webgpu.array(q), _cache(webgpu.array, k, v, stops), return_lse=True)
    expected = saccade.decode(q, _cache(lambda x: x, k, v, stops), return_lse=True)
    for got, e in zip(found, expected, strict=True):
        close(got.numpy(), e)


def _cache(put: Any, k: Any, v: Any, lengths: Any) -> saccade.KVCache:
    B, n = k.shape[:2]
    place = None if put(k) is k else "webgpu"
    cache = saccade.KVCache(B, n, HK, D, dtype=k.dtype, device=place, fill=np.nan)
    cache.append(put(k), put(v), lengths)
    return cache


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_cache_that_grows_on_the_device(dtype: Any, traffic: Traffic, rng: np.random.Generator):
    here, there = (saccade.KVCache(3, 9, HK, D, dtype=dtype, device=x, fill=np.nan) for x in (None, "webgpu"))
    traffic.up.clear()
    for taken in ([4, 0, 2], [0, 3, 3], [1, 1, 1]):
        k, v = (x.astype(dtype) for x in arrays(rng, HK, HK, T=4, B=3))
        here.append(k, v, taken)
        there.append(webgpu.array(k), webgpu.array(v), taken)
    assert len(traffic.up) == 6
    assert not traffic.down
    assert there.lengths.tolist() == [5, 4, 6]
    np.testing.assert_array_equal(there.k.numpy(), here.k)
    np.testing.assert_array_equal(there.v.numpy(), here.v)
    with pytest.raises(ValueError, match="sequence 2 holds 6 tokens and would take 4 more; expected at most 9"):
        there.append(webgpu.array(k), webgpu.array(v))
    with pytest.raises(TypeError, match=r"k is ndarray of float.*; expected GpuArray of float"):
        there.append(k, v)
    there.reset()
    assert there.lengths.tolist() == [0, 0, 0]


def test_caches_that_the_device_cannot_hold(rng: np.random.Generator):
    with pytest.raises(TypeError, match="dtype is float64; expected one of float32, float16"):
        saccade.KVCache(1, 4, 1, 4, dtype="float64", device="webgpu")
    with pytest.raises(ValueError, match="there is no device webgpu:1000"):
        saccade.KVCache(1, 4, 1, 4, device="webgpu:1000")
    with pytest.raises(ValueError, match=r"a token's \[1, 3\] of float16 do not fill whole words"):
        saccade.KVCache(1, 4, 1, 3, dtype="float16", device="webgpu")


def test_what_fits_is_asked_of_the_device_of_the_arrays(gpu: Gpu, rng: np.random.Generator):
    other = Gpu(gpu.adapter)
    other.limits = {**gpu.limits, "max-storage-buffers-per-shader-stage": 8}
    bias = np.zeros((1, 1, T, T), np.float32)
    for device, fits in ((gpu, True), (other, False)):
        q, k, v = (webgpu.array(x, device) for x in arrays(rng, HQ, HK, HK))
        o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True)
        assert o.gpu is device
        if fits and gpu.limits["max-storage-buffers-per-shader-stage"] >= 10:
            saccade.attention_backward(o, q, k, v, o, lse, bias=bias)
        else:
            with pytest.raises(saccade.Unsupported, match="a bias with gradients binds 10 storage buffers"):
                saccade.attention_backward(o, q, k, v, o, lse, bias=bias)
    cache = saccade.KVCache(1, 4, HK, D, device=other.place)
    assert cache.k.gpu is other
    with pytest.raises(ValueError, match=f"k lives on {gpu.place}; expected {other.place}, where the cache lives"):
        cache.append(*(webgpu.array(x, gpu) for x in arrays(rng, HK, HK, T=2)))


def test_halves_without_a_batch(rng: np.random.Generator):
    q, k, v, do = (x[0].astype(np.float16) for x in arrays(rng, HQ, HK, HK, HQ))
    sinks = rng.standard_normal(HQ).astype(np.float32)
    o, lse = saccade.attention(q, k, v, return_lse=True, sinks=sinks)
    dq, *_, more = saccade.attention_backward(do, q, k, v, o, lse, sinks=sinks)
    q_, k_, v_, do_ = map(webgpu.array, (q, k, v, do))
    o_, lse_ = saccade.attention(q_, k_, v_, return_lse=True, sinks=sinks, backend="webgpu")
    dq_, *_, more_ = saccade.attention_backward(do_, q_, k_, v_, o_, lse_, sinks=sinks)
    for got, e in ((o_.numpy(), o), (dq_.numpy(), dq), (more_["sinks"], more["sinks"])):
        assert got.dtype == np.float32
        assert got.shape == e.shape
        np.testing.assert_allclose(got, e, rtol=0, atol=4e-3)


def test_refusals(rng: np.random.Generator):
    q, k, v = arrays(rng, HQ, HK, HK)
    q_, k_, v_ = map(webgpu.array, (q, k, v))
    with pytest.raises(TypeError, match=r"k is ndarray; expected a GpuArray, as q is one: put it there by"):
        saccade.attention(q_, k, v_)
    with pytest.raises(TypeError, match="sinks is GpuArray; expected a NumPy array, also where q is on the device"):
        saccade.attention(q_, k_, v_, sinks=webgpu.array(np.ones(HQ, np.float32)))
    with pytest.raises(saccade.Unsupported, match="its arrays live on webgpu"):
        saccade.attention(q_, k_, v_, backend="cpu")
    odd = webgpu.array(q[..., :6]), webgpu.array(k[..., :6]), webgpu.array(v[..., :6])
    with pytest.raises(ValueError, match=r"expected float32 with a last dimension that divides by 4"):
        saccade.attention(*odd)
    half = [webgpu.array(x.astype(np.float16)) for x in (q, k, v)]
    lse = saccade.attention(*half, return_lse=True)[1]
    with pytest.raises(TypeError, match="o has dtype float16; expected float32, as a forward on the device returns it"):
        saccade.attention_backward(half[0], *half, half[0], lse)
