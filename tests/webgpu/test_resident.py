"""Arrays that stay on the device: from rotations to decode, what goes up once and what comes down once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.backends import webgpu
from saccade.backends.webgpu.device import Gpu

T, HQ, HK, D = 40, 4, 2, 8


class Traffic:
    """Sizes in bytes of what went up and came down."""

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
    return Traffic(monkeypatch)


def arrays(rng: np.random.Generator, *heads: int, T: int = T, B: int = 1) -> list[Any]:
    return [rng.standard_normal((B, T, h, D), dtype=np.float32) for h in heads]


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * max(1, float(abs(expected).max())))


def test_one_upload_and_one_download(traffic: Traffic, rng: np.random.Generator):
    q, k, v, do = arrays(rng, HQ, HK, HK, HQ)
    new = arrays(rng, HQ, T=1)[0]
    q_, k_, v_, do_, new_ = map(webgpu.array, (q, k, v, do, new))
    assert traffic.up == [x.nbytes for x in (q, k, v, do, new)]
    traffic.up.clear()
    webgpu.run("rope_q", Q=q_.reshape(T, HQ, D), interleaved=False)
    webgpu.run("rope_k", K=k_.reshape(T, HK, D), interleaved=False)
    webgpu.run("rope_q", Q=new_.reshape(1, HQ, D), pos_offset=T - 1, interleaved=False)
    mask = masks.causal() & masks.window(20, 0)
    o_, lse_ = saccade.attention(q_, k_, v_, mask, return_lse=True)
    grads_ = saccade.attention_backward(do_, q_, k_, v_, o_, lse_, mask)[:3]
    webgpu.run("rope_q_backward", dQ=grads_[0].reshape(T, HQ, D), interleaved=False)
    last_ = saccade.decode(new_, SimpleNamespace(k=k_, v=v_, lengths=np.array([T], np.int32)))
    # the lists of a mask, none as long as the arrays
    assert sum(traffic.up) < min(x.nbytes for x in (q, k, v))
    assert not traffic.down
    found = last_.numpy()
    assert traffic.down == [found.nbytes]

    positions = np.arange(T)
    q, k = saccade.rope(q, positions), saccade.rope(k, positions)
    o, lse = saccade.attention(q, k, v, mask, return_lse=True)
    dq, dk, dv, _ = saccade.attention_backward(do, q, k, v, o, lse, mask)
    expected = saccade.attention(saccade.rope(new, positions[-1:]), k, v)
    close(found, expected)
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
    found = saccade.decode(*_cache(webgpu.array, q, k, v, stops), return_lse=True)
    expected = saccade.decode(*_cache(lambda x: x, q, k, v, stops), return_lse=True)
    for got, e in zip(found, expected, strict=True):
        close(got.numpy(), e)


def _cache(put: Any, q: Any, k: Any, v: Any, lengths: Any) -> tuple[Any, Any]:
    return put(q), SimpleNamespace(k=put(k), v=put(v), lengths=lengths)


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
