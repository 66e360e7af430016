"""Maximum and entropy of tensors: gradients, torch.compile, vmap, the operator, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import saccade
from saccade import mask as masks

torch = pytest.importorskip("torch")
testing = pytest.importorskip("torch._dynamo.testing")
op = pytest.importorskip("saccade.frameworks.torch_op")
torch_arguments = pytest.importorskip("saccade.frameworks.torch_arguments")

BOTH = {"return_max": True, "return_entropy": True}


@pytest.fixture(autouse=True)
def same_numbers(seed: int) -> None:
    torch.manual_seed(seed)
    torch._dynamo.reset()


def leaves(dtype: Any = torch.float64) -> tuple[torch.Tensor, ...]:
    shapes = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3)
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def dense(
    q: torch.Tensor, k: torch.Tensor, softcap: float = 0.0, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum and the entropy of causal rows, by torch's own operations."""
    s = torch.einsum("bthd,bjhd->bthj", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) / q.shape[-1] ** 0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    seen = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]).bool()[:, None]
    s = s.masked_fill(~seen, -torch.inf)
    more = [] if sinks is None else [sinks[:, None].expand(*s.shape[:-1], 1)]
    logs = torch.cat([s, *more], -1).log_softmax(-1)
    return s.amax(-1).detach(), -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(-1)


@pytest.mark.parametrize("lse", [False, True])
def test_gradients_are_those_of_dense_formulas(lse: bool) -> None:
    q, k, v = leaves()
    o, *rows = saccade.attention(q, k, v, masks.causal(), softcap=2.0, return_lse=lse, **BOTH)
    assert len(rows) == 2 + lse
    top, entropy = dense(q, k, 2.0)
    assert not rows[-2].requires_grad
    torch.testing.assert_close(rows[-2:], [top, entropy])
    weight = torch.randn_like(entropy)
    # o takes part, so that all gradients exist
    got = torch.autograd.grad((rows[-1] * weight).sum() + 0 * o.sum(), (q, k, v))
    expected = torch.autograd.grad((entropy * weight).sum(), (q, k))
    torch.testing.assert_close(got[:2], expected)
    assert not got[2].any()


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"dropout": 0.4, "seed": 11}])
def test_gradcheck(options: dict[str, Any]) -> None:
    q, k, v = leaves()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, slopes: torch.Tensor) -> Any:
        more = {"sinks": sinks, "bias": saccade.alibi(slopes), **options}
        return saccade.attention(q, k, v, masks.causal(), return_lse=True, return_entropy=True, **more)

    assert torch.autograd.gradcheck(f, (q, k, v, sinks, slopes), fast_mode=True)


def test_one_graph_with_the_numbers_of_the_eager_call() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o, top, entropy = saccade.attention(q, k, v, masks.causal(), **BOTH)
        return o.sum(-1) + top + entropy

    counter = testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    x = leaves(torch.float32)
    got, expected = compiled(*x), f(*x)
    torch.testing.assert_close(got, expected)
    pair = [torch.autograd.grad(y.square().sum(), x) for y in (got, expected)]
    torch.testing.assert_close(*pair)
    assert counter.frame_count == 1


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True)])
def test_opcheck(flags: tuple[bool, bool]) -> None:
    x = leaves(torch.float32)
    rest = torch_arguments.arguments(saccade.operands.Request(masks.causal()))
    torch.library.opcheck(torch.ops.saccade.forward_more.default, (*x, *rest, False, *flags))
    o, lse, _, entropy = (y.detach() for y in torch.ops.saccade.forward_more.default(*x, *rest, False, *flags))
    if flags[1]:
        cotangents = torch.randn_like(o), torch.randn_like(lse), torch.randn_like(lse)
        x = tuple(y.detach() for y in x)
        grads = [False] * 5
        args = (*cotangents, *x, o, lse, entropy, *rest, grads)
        torch.library.opcheck(torch.ops.saccade.backward.default, args)


def test_vmap_and_gradients_of_functions() -> None:
    q, k, v = (torch.randn(3, *x.shape) for x in leaves())

    def entropy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return saccade.attention(q, k, v, masks.causal(), **BOTH)[2]

    got = torch.func.vmap(entropy)(q, k, v)
    torch.testing.assert_close(got, torch.stack([entropy(*x) for x in zip(q, k, v, strict=True)]))
    gradients = torch.func.vmap(torch.func.grad(lambda *x: entropy(*x).sum()))(q, k, v)
    each = []
    for x in zip(q, k, v, strict=True):
        leaf = x[0].clone().requires_grad_()
        each += torch.autograd.grad(entropy(leaf, *x[1:]).sum(), leaf)
    torch.testing.assert_close(gradients, torch.stack(each))


def test_second_derivatives_of_the_entropy_are_refused() -> None:
    q, k, v = leaves()
    o, top, entropy = saccade.attention(q, k, v, masks.causal(), **BOTH)
    (dq,) = torch.autograd.grad(entropy.sum(), q, create_graph=True)
    with pytest.raises(saccade.Unsupported, match="second derivatives of the entropy"):
        dq.sum().backward()
    # those of o remain
    (dq,) = torch.autograd.grad((o * top[..., None]).sum(), q, create_graph=True)
    dq.square().sum().backward()


def test_a_call_under_autocast_and_without_gradients() -> None:
    q, k, v = leaves(torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        o, top, entropy = saccade.attention(q, k, v, masks.causal(), **BOTH)
    assert (o.dtype, top.dtype, entropy.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    torch.testing.assert_close([top, entropy], [*dense(q, k)], atol=0.05, rtol=0.05)


def test_the_entropy_with_sinks_of_minus_infinity() -> None:
    """A sink of -inf has no weight: gradients are finite, and its own is 0."""
    q, k, v = leaves()
    sinks = torch.tensor([-torch.inf, 0.5, -torch.inf, -1.0], dtype=torch.float64, requires_grad=True)
    o, entropy = saccade.attention(q, k, v, masks.causal(), sinks=sinks, return_entropy=True)
    weight = torch.randn_like(entropy)
    got = torch.autograd.grad((entropy * weight).sum() + 0 * o.sum(), (q, k, sinks))
    expected = torch.autograd.grad((dense(q, k, sinks=sinks)[1] * weight).sum(), (q, k, sinks))
    torch.testing.assert_close(got, expected)
    assert not got[2][[0, 2]].any()
