"""saccade.patch_sdpa and torch.compile: graphs that hold our operator, how many, and their numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as by_name

import saccade
from saccade.integrations import sdpa_mode

testing = pytest.importorskip("torch._dynamo.testing")


@pytest.fixture(autouse=True)
def fresh(seed) -> None:
    torch.manual_seed(seed)
    torch._dynamo.reset()


def heads() -> torch.Tensor:
    return torch.randn(2, 4, 9, 8, requires_grad=True)


def operators(counter) -> list[bool]:
    """For each graph, whether it holds our operator."""
    return ["saccade.forward" in str([n.target for n in graph.graph.nodes]) for graph in counter.graphs]


def test_a_compiled_model_is_traced_again_inside() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return by_name(q, q.flip(-2), 2 * q, is_causal=True).square()

    counter = testing.CompileCounterWithBackend("aot_eager")
    compiled, q = torch.compile(attend, backend=counter, fullgraph=True), heads()
    # the first call of all notes tensors' framework, which a graph would depend on
    saccade.attention(*[torch.randn(1, 2, 1, 4)] * 3)
    want = compiled(q)
    (gradient,) = torch.autograd.grad(want.sum(), q)
    for _ in range(3):
        with saccade.patch_sdpa():
            got = compiled(q)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), q)[0], gradient, rtol=1e-4, atol=1e-5)
    assert operators(counter) == [False, True]
    torch.testing.assert_close(compiled(q), want, rtol=0, atol=0)
    assert counter.frame_count == 2


def test_contexts_inside_a_graph(monkeypatch) -> None:
    monkeypatch.setattr(sdpa_mode, "_modes", {})

    def attend(q: torch.Tensor) -> torch.Tensor:
        with saccade.patch_sdpa():
            return by_name(q, q, q)

    decorated = saccade.patch_sdpa()(lambda q: by_name(q, q, q))
    q = heads()
    for f in (attend, decorated):
        counter = testing.CompileCounterWithBackend("aot_eager")
        got = torch.compile(f, backend=counter, fullgraph=True)(q)
        torch.testing.assert_close(got, by_name(q, q, q))
        assert operators(counter) == [True]


@pytest.mark.parametrize("grad", [True, False])
def test_compiled_modules_of_torch(grad) -> None:
    module, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 5, 32)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    with torch.set_grad_enabled(grad):
        for f in (lambda x: module(x, x, x, need_weights=False)[0], layer):
            counter = testing.CompileCounterWithBackend("aot_eager")
            with saccade.patch_sdpa():
                got = torch.compile(f, backend=counter, fullgraph=True)(x)
            torch.testing.assert_close(got, f(x), rtol=1e-4, atol=1e-5)
            # of layers without gradients torch compiles the fused operator, and before 2.10 of modules
            assert operators(counter) == [grad or (f is not layer and torch.__version__ >= "2.10")]


def test_unflatten_compiles_inside() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return by_name(q, q, q)

    x = torch.randn(2, 9, 32)
    with saccade.patch_sdpa():
        got = torch.compile(attend, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, attend(x))
