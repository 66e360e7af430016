"""Torch's CPU tensors on WebGPU: values, gradients and operators, compared with the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest

import saccade
from saccade import mask as masks

torch = pytest.importorskip("torch")

DTYPES = ["float32", "bfloat16", "float16"]


def tensors(dtype: str, *more: tuple[int, ...]) -> list[Any]:
    """q, k, v of 21 tokens with four query heads and two key heads; then further arrays of these shapes."""
    shapes = [(1, 21, heads, 8) for heads in (4, 2, 2)]
    torch.manual_seed(len(more))
    kind = getattr(torch, dtype)
    return [torch.randn(shape, dtype=kind, requires_grad=True) for shape in (*shapes, *more)]


def gradients(backend: str, leaves: list[Any], mask: masks.Mask | None, names: tuple[str, ...] = ()) -> list[Any]:
    """o, lse and the gradients of all leaves; leaves after v are options by name."""
    options = dict(zip(names, leaves[3:], strict=True))
    if "slopes" in options:
        options["bias"] = saccade.alibi(options.pop("slopes"))
    o, lse = saccade.attention(*leaves[:3], mask, return_lse=True, backend=backend, **options)
    assert o.dtype == leaves[0].dtype
    assert lse.dtype == torch.float32
    return [o, lse, *torch.autograd.grad(o.float().sin().sum() + lse.sin().sum(), leaves)]


def assert_same(got: list[Any], expected: list[Any], dtype: str) -> None:
    # a few roundings of scores up to tens, relative to the array's size
    for a, b in zip(got, expected, strict=True):
        size = float(b.detach().abs().max())
        eps = torch.finfo(getattr(torch, dtype)).eps
        torch.testing.assert_close(a, b, rtol=0, atol=32 * eps * max(size, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: str):
    leaves = tensors(dtype)
    mask = masks.causal() & masks.window(9, 0)
    assert_same(gradients("webgpu", leaves, mask), gradients("cpu", leaves, mask), dtype)


@pytest.mark.parametrize("name, shape", [("sinks", (4,)), ("bias", (1, 4, 21, 21)), ("slopes", (4,))])
def test_gradients_of_what_else_is_given(name: str, shape: tuple[int, ...]):
    leaves = tensors("float32", shape)
    found = [gradients(backend, leaves, masks.causal(), (name,)) for backend in ("webgpu", "cpu")]
    assert_same(*found, "float32")


def test_without_gradients_and_with_any_strides():
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors("float32"))
    found = [saccade.attention(q, k, v, masks.causal(), backend=backend) for backend in ("webgpu", "cpu")]
    torch.testing.assert_close(*found)


def test_decode_from_a_cache():
    cache = saccade.KVCache(2, 40, 2, 8, dtype=torch.float32, fill=float("nan"))
    q, k, v = (torch.randn(2, 30, heads, 8) for heads in (4, 2, 2))
    cache.append(k, v, lengths=torch.tensor([30, 17]))
    found = [saccade.decode(q[:, :1], cache, return_lse=True, backend=backend) for backend in ("webgpu", "cpu")]
    torch.testing.assert_close(*found)


def test_the_backward_call():
    q, k, v = (x.detach() for x in tensors("float32"))
    o, lse = saccade.attention(q, k, v, masks.causal(), return_lse=True)
    given = torch.ones_like(o), q, k, v, o, lse, masks.causal()
    found = [saccade.attention_backward(*given, backend=backend)[:3] for backend in ("webgpu", "cpu")]
    torch.testing.assert_close(*found)


def test_compiled():
    leaves = tensors("float32")

    def f(q: Any, k: Any, v: Any) -> Any:
        o, lse = saccade.attention(q, k, v, masks.causal(), return_lse=True, backend="webgpu")
        return o * lse[..., None]

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    found = [(o := g(*leaves), *torch.autograd.grad(o.square().sum(), leaves)) for g in (compiled, f)]
    torch.testing.assert_close(*found)


def test_the_operator_holds_torchs_rules():
    from torch.library import opcheck

    from saccade.frameworks import torch_arguments
    from saccade.operands import Options, Request

    leaves = tensors("float32")
    rest = torch_arguments.arguments(Request(masks.causal(), options=Options(backend="webgpu")))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.saccade.forward.default, (*leaves, *rest, False), test_utils=tests)


def test_refusals():
    with pytest.raises(saccade.Unsupported, match="float64 is not computed on WebGPU: cast"):
        saccade.attention(*(x.detach().double() for x in tensors("float32")), backend="webgpu")
