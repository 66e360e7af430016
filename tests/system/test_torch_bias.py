"""A bias of fewer than four dimensions gives what it gives with leading dimensions of 1, in every way of calling."""

from __future__ import annotations

from typing import Any

import pytest

import saccade
from saccade.mask import causal

torch: Any = pytest.importorskip("torch")

B, T, H, D = 2, 5, 3, 8
SHAPES = [(T,), (T, T), (1, T), (H, T, T), (H, 1, T)]


@pytest.fixture(params=SHAPES, ids=str)
def bias(request: pytest.FixtureRequest) -> Any:
    return torch.randn(request.param, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def arrays() -> Any:
    return torch.randn(4, B, T, H, D, generator=torch.Generator().manual_seed(2))


def four(bias: Any) -> Any:
    return bias[(None,) * (4 - bias.dim())]


def test_results_and_transforms(bias, arrays) -> None:
    q, k, v, _ = arrays

    def attend(q: Any, bias: Any) -> Any:
        return saccade.attention(q, k, v, causal(), bias=bias)

    o = attend(q, four(bias))
    assert torch.equal(attend(q, bias), o)
    torch.testing.assert_close(saccade.attention(q[0], k[0], v[0], causal(), bias=bias), o[0])
    torch.testing.assert_close(torch.compile(attend, fullgraph=True)(q, bias), o)
    torch.testing.assert_close(torch.func.vmap(lambda q: attend(q, bias))(torch.stack([q, 2 * q]))[0], o)
    torch.testing.assert_close(torch.func.vmap(lambda bias: attend(q, bias))(torch.stack([bias, 2 * bias]))[0], o)


def test_gradients_have_the_shape_of_the_bias(bias, arrays) -> None:
    q, k, v, do = arrays
    wanted = four(bias).requires_grad_()
    saccade.attention(q, k, v, causal(), bias=wanted).backward(do)
    shaped = wanted.grad.reshape(bias.shape)
    torch.testing.assert_close(
        torch.func.grad(lambda bias: (saccade.attention(q, k, v, causal(), bias=bias) * do).sum())(bias), shaped
    )
    o, lse = saccade.attention(q, k, v, causal(), bias=bias, return_lse=True)
    more = saccade.attention_backward(do, q, k, v, o, lse, causal(), bias=bias)[3]
    torch.testing.assert_close(more["bias"], shaped)
    leaf = bias.clone().requires_grad_()
    saccade.attention(q, k, v, causal(), bias=leaf).backward(do)
    torch.testing.assert_close(leaf.grad, shaped)


@pytest.mark.parametrize("page", [0, 2])
def test_decode(bias, arrays, page: int) -> None:
    q, k, v, _ = arrays
    if page:
        pool = saccade.PagedKVCache(2 * B * T, page, H, D, dtype=torch.float32)
        sequences = [pool.add() for _ in range(B)]
        pool.append(sequences, k.reshape(B * T, H, D), v.reshape(B * T, H, D))
        cache: Any = pool.view(sequences)
    else:
        cache = saccade.KVCache(B, T, H, D, dtype=torch.float32)
        cache.append(k, v)
    assert torch.equal(saccade.decode(q, cache, bias=bias), saccade.decode(q, cache, bias=four(bias)))
