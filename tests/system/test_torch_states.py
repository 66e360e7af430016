"""Rare states of torch: default devices, inference mode, zeros without memory, and legacy batches."""

from __future__ import annotations

from typing import Any

import pytest

import saccade
from saccade import mask as masks

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def same_numbers(seed: int) -> None:
    torch.manual_seed(seed)


def tokens() -> list[Any]:
    return list(torch.randn(3, 2, 6, 4, 8))


@pytest.mark.parametrize("traced", [False, True])
def test_a_seed_is_drawn_where_its_number_can_be_read(traced: bool) -> None:
    q, k, v = tokens()

    def attend(q: Any) -> Any:
        return saccade.attention(q, k, v, dropout=0.5)

    with torch.device("meta"):
        o = torch.func.vmap(attend, randomness="same")(q[None]) if traced else attend(q)
    assert o.is_cpu
    assert torch.isfinite(o).all()


@pytest.mark.parametrize("name", ["table", "log_f", "bias", "slopes", "sinks"])
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_without_autograd_in_inference_mode(name: str, inside: bool) -> None:
    q, k, v = tokens()
    x = {"table": torch.rand(4, 11), "log_f": -torch.rand(2, 6, 4), "bias": torch.rand(6, 6)}.get(name, torch.rand(4))

    def gradients(x: Any) -> Any:
        bias = {"table": lambda: saccade.relative(x, 5), "log_f": lambda: saccade.gates(x), "bias": lambda: x}
        bias["slopes"] = lambda: saccade.alibi(x)
        options: Any = {"sinks": x} if name == "sinks" else {"bias": bias[name]()}
        o, lse = saccade.attention(q, k, v, masks.causal(), return_lse=True, **options)
        *first, more = saccade.attention_backward(torch.ones_like(o), q, k, v, o, lse, masks.causal(), **options)
        return *first, more[name]

    expected = gradients(x)
    with torch.inference_mode():
        # one that is made inside of the mode has other restrictions
        got = gradients(x * 1 if inside else x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("at", range(4))
def test_a_zero_without_memory_is_refused(at: int) -> None:
    arrays = [*tokens(), torch.rand(2, 4, 6, 6)]
    arrays[at] = torch._efficientzerotensor(arrays[at].shape)
    q, k, v, bias = arrays
    with pytest.raises(TypeError, match=r"a zero without memory; expected a dense tensor: pass torch\.zeros_like"):
        saccade.attention(q, k, v, bias=bias)


@pytest.mark.parametrize("again", [False, True])
def test_gradients_may_be_zeros_without_memory(again: bool) -> None:
    q, k, v = tokens()
    q.requires_grad_()
    results = saccade.attention(q, k, v, return_lse=True, return_entropy=True)
    zeros = [torch._efficientzerotensor(x.shape) for x in results]
    (dq,) = torch.autograd.grad(results, q, zeros, create_graph=again)
    assert torch.equal(dq, torch.zeros_like(q))


def test_forward_mode_with_vectorize_names_what_computes_it() -> None:
    q, k, v = tokens()

    def attend(q: Any) -> Any:
        return saccade.attention(q, k[:1], v[:1])

    with pytest.raises(saccade.Unsupported, match=r"vectorize is not computed in forward mode: call torch\.func\.jacf"):
        torch.autograd.functional.jacobian(attend, q[:1, :1], vectorize=True, strategy="forward-mode")
    assert torch.func.jacfwd(attend)(q[:1, :1]).shape == (1, 1, 4, 8, 1, 1, 4, 8)
