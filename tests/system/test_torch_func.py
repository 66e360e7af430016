"""torch.func: grad, vmap (folded into the batch, or one call after another), and what they make together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import saccade
from saccade import mask as masks

torch = pytest.importorskip("torch")

IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2])
N, B = 3, 2


@pytest.fixture(autouse=True)
def same_numbers(seed: int) -> None:
    torch.manual_seed(seed)


def qkv(*lead: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(*lead, 5, 4, 8), torch.randn(*lead, 7, 2, 8), torch.randn(*lead, 7, 2, 6)


def options() -> dict[str, dict[str, Any]]:
    return {
        "nothing": {},
        "bands": {"mask": masks.causal() & masks.window(3, 0)},
        "heads": {"mask": masks.per_head([masks.causal(), None, masks.prefix(2), None])},
        "documents": {"mask": masks.causal() & masks.documents(IDS)},
        "lengths": {"mask": masks.keys(torch.tensor([7, 4]))},
        "sinks": {"sinks": torch.randn(4), "softcap": 2.0},
        "bias": {"bias": torch.randn(2, 1, 5, 7)},
        "slopes": {"bias": saccade.alibi(torch.rand(4))},
        "slopes of a batch": {"bias": saccade.alibi(torch.rand(2, 4))},
        "dropout": {"dropout": 0.5, "seed": 3},
    }


def with_options(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    chosen = options()[name]
    return lambda q, k, v: saccade.attention(q, k, v, return_lse=True, **chosen)


def loss(f: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def g(*x: torch.Tensor) -> torch.Tensor:
        o, lse = f(*x)
        return o.sin().sum() + lse.cos().sum()

    return g


@pytest.mark.parametrize("name", options())
def test_vmap(name: str) -> None:
    f, x = with_options(name), qkv(N, B)
    got = torch.vmap(f)(*x)
    each = [torch.stack(y) for y in zip(*(f(*(y[n] for y in x)) for n in range(N)), strict=True)]
    for a, b in zip(got, each, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", options())
def test_gradients_of_every_sample(name: str) -> None:
    g, x = loss(with_options(name)), qkv(N, B)
    got = torch.vmap(torch.func.grad(g, argnums=(0, 1, 2)))(*x)
    for n in range(N):
        leaves = [y[n].clone().requires_grad_() for y in x]
        for a, b in zip(got, torch.autograd.grad(g(*leaves), leaves), strict=True):
            torch.testing.assert_close(a[n], b)


@pytest.mark.parametrize("name", options())
def test_grad(name: str) -> None:
    g, x = loss(with_options(name)), qkv(B)
    leaves = [y.clone().requires_grad_() for y in x]
    got = torch.func.grad(g, argnums=(0, 1, 2))(*x)
    for a, b in zip(got, torch.autograd.grad(g(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


def test_vmap_over_some_arguments_and_other_axes() -> None:
    f, (q, k, v) = with_options("bands"), qkv(N, B)
    got = torch.vmap(f, in_dims=(1, None, 0), out_dims=2)(q.transpose(0, 1), k[0], v)
    for n in range(N):
        for a, b in zip(got, f(q[n], k[0], v[n]), strict=True):
            torch.testing.assert_close(a.select(2, n), b)


def test_vmap_over_three_axes_inputs() -> None:
    f, x = with_options("bands"), qkv(N)
    for a, b in zip(torch.vmap(f)(*x), f(*x), strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_within_vmap() -> None:
    f, x = with_options("bands"), qkv(2, N, B)
    got = torch.vmap(torch.vmap(f))(*x)
    for a, b in zip(got, torch.vmap(f)(*(y.flatten(0, 1) for y in x)), strict=True):
        torch.testing.assert_close(a.flatten(0, 1), b)


def test_vmap_over_what_is_learned() -> None:
    x, sinks, slopes, bias = qkv(B), torch.randn(N, 4), torch.rand(N, 4), torch.randn(N, 1, 4, 5, 7)

    def g(sinks: torch.Tensor, slopes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        one = saccade.attention(*x, sinks=sinks, bias=saccade.alibi(slopes))
        return one.sin().sum() + saccade.attention(*x, bias=bias).sin().sum()

    got = torch.vmap(torch.func.grad(g, argnums=(0, 1, 2)))(sinks, slopes, bias)
    for n in range(N):
        for a, b in zip(got, torch.func.grad(g, argnums=(0, 1, 2))(sinks[n], slopes[n], bias[n]), strict=True):
            torch.testing.assert_close(a[n], b)


def test_vmap_over_arrays_of_a_mask() -> None:
    x, ids = qkv(N, B), torch.stack([IDS, IDS // 2, IDS * 0])
    got = torch.vmap(lambda q, k, v, i: saccade.attention(q, k, v, masks.documents(i)))(*x, ids)
    for n in range(N):
        torch.testing.assert_close(got[n], saccade.attention(*(y[n] for y in x), masks.documents(ids[n])))


def test_the_fold_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.backends import cpu
    from saccade.frameworks import call

    calls: list[int] = []
    monkeypatch.setattr(call, "_calls", {})
    monkeypatch.setattr(cpu, "direct", lambda p, *_: lambda *_: calls.append(p.B))
    torch.vmap(with_options("bands"))(*qkv(N, B))
    assert calls == [N * B]


def test_jacobian_and_hessian() -> None:
    q, k, v = (x[:, :2].double() for x in qkv(1))

    def f(q: torch.Tensor) -> torch.Tensor:
        return saccade.attention(q, k, v, masks.causal()).sin().sum()

    leaf = q.clone().requires_grad_()
    hessian = torch.func.jacrev(torch.func.jacrev(f))(q)
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(f, leaf))
    n = q.numel()
    torch.testing.assert_close(hessian.reshape(n, n), hessian.reshape(n, n).T)


def test_functional_call_of_a_module() -> None:
    layer, x = torch.nn.Linear(8, 8), torch.randn(N, 1, 6, 2, 8)
    weights = dict(layer.named_parameters())

    def g(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = torch.func.functional_call(layer, weights, (x,))
        return saccade.attention(y, y, y, masks.causal()).square().sum()

    got = torch.vmap(torch.func.grad(g), in_dims=(None, 0))(weights, x)
    for n in range(N):
        layer.zero_grad()
        g(weights, x[n]).backward()
        torch.testing.assert_close(got["weight"][n], layer.weight.grad)


@pytest.mark.parametrize("name", options())
def test_batches_of_gradients_by_vmap(name: str) -> None:
    """vmap around autograd.grad gives the gradient of each entry of a batch of cotangents."""
    leaves = [y.requires_grad_() for y in qkv(B)]
    results = with_options(name)(*leaves)
    cotangents = [torch.randn(N, *y.shape) for y in results]

    def back(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(results, leaves, rows, retain_graph=True)

    got = torch.vmap(back)(*cotangents)
    for n in range(N):
        for a, b in zip(got, back(*(y[n] for y in cotangents)), strict=True):
            torch.testing.assert_close(a[n], b)


def test_batches_of_gradients_by_torchs_older_vmap_are_refused() -> None:
    """is_grads_batched and vectorize name what computes them."""
    q, k, v = (y.requires_grad_() for y in qkv(B))
    o = saccade.attention(q, k, v, masks.causal())
    with pytest.raises(saccade.Unsupported, match=r"is_grads_batched .* call torch\.vmap around torch\.autograd\.grad"):
        torch.autograd.grad(o, q, torch.ones(N, *o.shape), is_grads_batched=True)
    with pytest.raises(saccade.Unsupported, match="vectorize are not computed"):
        torch.autograd.functional.jacobian(lambda q: saccade.attention(q, k, v), q, vectorize=True)


@pytest.mark.parametrize("wrong", [torch.tensor(1.0), torch.tensor([1, 2])], ids=["float", "two"])
def test_a_seed_that_is_no_integer_is_refused(wrong: torch.Tensor) -> None:
    """Under vmap as outside of it, the seed of dropout is one integer."""
    q = torch.randn(N, B, 5, 2, 8)

    def f(q: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return saccade.attention(q, q, q, dropout=0.5, seed=seed)

    with pytest.raises(TypeError, match="expected an integer or a 0-d integer array"):
        f(q[0], wrong)
    with pytest.raises(TypeError, match=r"seed is torch\..*; expected an integer or a 0-d integer tensor"):
        torch.vmap(f, in_dims=(0, None))(q, wrong)
    with pytest.raises(TypeError, match=r"seed is torch\.float32 \[\]; expected an integer"):
        torch.vmap(f)(q, torch.arange(N).float())
