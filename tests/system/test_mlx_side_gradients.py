"""Gradients of biases, slopes, tables, gates and sinks that are MLX arrays, on the CPU and through Metal's kernels."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.backends import metal
from saccade.testing.metal.runtime import Emulator

mx = pytest.importorskip("mlx.core")
pytestmark = pytest.mark.timeout(900)  # kernels compile slowly on a busy machine

B, T, HQ, HK, D = 2, 9, 4, 2, 8
MASK = masks.causal() & masks.window(5, 0)
RNG = np.random.default_rng(0)


def rand(*shape: int):
    return RNG.standard_normal(shape).astype(np.float32)


ARRAYS = q, k, v = rand(B, T, HQ, D), rand(B, T, HK, D), rand(B, T, HK, D)
DO, DLSE = rand(B, T, HQ, D), rand(B, T, HQ)
SIDE = {
    "bias": (rand(1, HQ, T, T), lambda x: {"bias": x}),
    "slopes": (abs(rand(HQ)), lambda x: {"bias": saccade.alibi(x)}),
    "table": (rand(HQ, 5), lambda x: {"bias": saccade.relative(x, 2)}),
    "log_f": (-abs(rand(B, T, HQ)), lambda x: {"bias": saccade.gates(x)}),
    "sinks": (rand(HQ), lambda x: {"sinks": x}),
}


class OnMlx(Emulator):
    """The emulator with MLX's arrays, as on an Apple GPU."""

    def array(self, x, dtype):
        return super().array(np.array(x), dtype)

    def numpy(self, x):
        return np.array(x)

    def run(self, kernel, inputs, outputs, grid, threadgroup):
        given = {name: self.array(x, "") for name, x in inputs.items()}
        return {name: mx.array(x) for name, x in super().run(kernel, given, outputs, grid, threadgroup).items()}


@pytest.fixture
def device():
    before = metal.install(OnMlx())
    yield
    metal.install(before)


def loss(*arrays, **options):
    o, lse = saccade.attention(*arrays, MASK, return_lse=True, **options)
    return (o * mx.array(DO)).sum() + (lse * mx.array(DLSE)).sum()


@pytest.mark.parametrize("backend", ["cpu", "metal"])
@pytest.mark.parametrize("name", SIDE)
def test_gradients(name, backend, device) -> None:
    x, options = SIDE[name]
    o, lse = saccade.attention(*ARRAYS, MASK, return_lse=True, **options(x))
    dq, _, _, more = saccade.attention_backward(DO, *ARRAYS, o, lse, MASK, dlse=DLSE, **options(x))
    there = [mx.array(y) for y in ARRAYS]
    for kind in (mx.float32, mx.float16):
        first, own = mx.grad(lambda q, x: loss(q, *there[1:], backend=backend, **options(x)), argnums=(0, 1))(
            there[0], mx.array(x).astype(kind)
        )
        assert own.dtype == kind
        atol = 2e-5 if kind == mx.float32 else 2e-2
        np.testing.assert_allclose(np.array(own), more[name], atol=atol)
        np.testing.assert_allclose(np.array(first), dq, atol=atol)
    outputs = (mx.array(y) for y in (o, lse))
    found = saccade.attention_backward(
        mx.array(DO), *there, *outputs, MASK, dlse=mx.array(DLSE), backend=backend, **options(mx.array(x))
    )
    np.testing.assert_allclose(found[3][name], more[name], atol=2e-5)


def test_terms_of_one_sum_and_the_decode_of_a_cache() -> None:
    there, names = [mx.array(y) for y in ARRAYS], ("bias", "slopes")
    given = [SIDE[name][0] for name in names]

    def both(bias, slopes):
        return loss(*there, bias=saccade.alibi(slopes) + bias)

    o, lse = saccade.attention(*ARRAYS, MASK, return_lse=True, bias=given[0] + saccade.alibi(given[1]))
    more = saccade.attention_backward(
        DO, *ARRAYS, o, lse, MASK, dlse=DLSE, bias=given[0] + saccade.alibi(given[1])
    )[3]  # fmt: skip
    for name, found in zip(names, mx.grad(both, argnums=(0, 1))(*map(mx.array, given)), strict=True):
        np.testing.assert_allclose(np.array(found), more[name], atol=2e-5)

    class Cache:
        k, v, lengths = there[1], there[2], np.array([T, 4])

    def last(sinks):
        return (saccade.decode(there[0][:, -1:], Cache(), sinks=sinks) * mx.array(DO[:, -1:])).sum()

    sinks = mx.array(SIDE["sinks"][0])
    moved = mx.array([0, 0, 1e-2, 0])
    slope = (last(sinks + moved) - last(sinks - moved)).item() / 2e-2
    assert abs(mx.grad(last)(sinks)[2].item() - slope) < 1e-3


def test_a_bias_without_a_gradient_may_be_fixed() -> None:
    """Such a gradient is computed only if it is asked for, and nothing keeps its arrays."""
    there, bias = [mx.array(y) for y in ARRAYS], mx.array(rand(1, HQ, T, 1))
    before = None
    for _ in range(3):
        mx.eval(mx.grad(lambda q, s: loss(q, *there[1:], bias=bias, sinks=s), argnums=(0, 1))(there[0], mx.zeros(HQ)))
        gc.collect()
        assert before in (None, mx.get_active_memory())
        before = mx.get_active_memory()
    with pytest.raises(ValueError, match=r"bias of shape \[1, 4, 9, 1\] needs a gradient"):
        mx.grad(lambda x: loss(*there, bias=x))(bias)


def test_second_derivatives_are_refused() -> None:
    """They were 0, because MLX takes numbers of the CPU core for constants."""
    there, sinks = [mx.array(y) for y in ARRAYS], mx.array(SIDE["sinks"][0])

    def sum_of_one(n, *arrays):
        return (mx.grad(lambda *a: loss(*a[:3], sinks=a[3]), argnums=n)(*arrays) ** 2).sum()

    for n in (0, 3):
        for m in range(4):
            with pytest.raises(saccade.Unsupported, match="second derivatives are not supported for MLX arrays"):
                mx.grad(lambda *a, n=n: sum_of_one(n, *a), argnums=m)(*there, sinks)

    def recurrence(k):
        return saccade.recurrent.linear_attention(there[1], k, there[2]).sum()

    with pytest.raises(saccade.Unsupported, match="second derivatives are not supported for MLX arrays"):
        mx.grad(lambda k: (mx.grad(recurrence)(k) ** 2).sum())(there[1])


def test_the_bits_do_not_depend_on_the_kind_of_the_side_arrays() -> None:
    there = [mx.array(y) for y in ARRAYS]
    for x, options in SIDE.values():
        found = [np.array(saccade.attention(*there, MASK, **options(y))) for y in (x, mx.array(x))]
        np.testing.assert_array_equal(*(y.view(np.uint32) for y in found))
