"""torch.compile: whole graphs, at most two of them, and the numbers of the eager call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import saccade
from saccade import mask as masks
from saccade.frameworks import KNOWN

torch = pytest.importorskip("torch")
testing = pytest.importorskip("torch._dynamo.testing")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])


@pytest.fixture(autouse=True)
def fresh(seed: int) -> None:
    torch.manual_seed(seed)
    # after the first call of a process that is not compiled, those that are compile once more
    attend(tokens())
    torch._dynamo.reset()


def tokens(T: int = 8, heads: int = 4) -> torch.Tensor:
    return torch.randn(2, T, heads, 8, requires_grad=True)


def graphs(f: Callable[..., Any], calls: Iterable[tuple[Any, ...]], backend: str = "aot_eager") -> int:
    """Compile f as one graph, compare it and its gradients with f itself, and count the graphs that were made."""
    counter = testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for args in calls:
        leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        got, expected = compiled(*args), f(*args)
        torch.testing.assert_close(got, expected)
        if leaves:
            pair = [torch.autograd.grad(o.square().sum(), leaves) for o in (got, expected)]
            torch.testing.assert_close(*pair)
    return counter.frame_count


def attend(q: torch.Tensor, mask: Any = None, **options: Any) -> torch.Tensor:
    o, lse = saccade.attention(q, q[:, :, ::2], q[:, :, 1::2], mask, return_lse=True, **options)
    return o + lse[..., None]


def test_a_length_changes() -> None:
    assert graphs(lambda q: attend(q, masks.causal()), [(tokens(T),) for T in (8, 11, 6, 40)]) <= 2


def test_the_length_of_keys_changes() -> None:
    def f(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return saccade.attention(q, k, k, masks.causal())

    assert graphs(f, [(tokens(4), tokens(T)) for T in (8, 11, 40)]) <= 2


def test_an_integer_of_the_mask_changes() -> None:
    def f(q: torch.Tensor, left: int) -> torch.Tensor:
        return attend(q, masks.causal() & masks.window(left, 0) | masks.prefix(left))

    assert graphs(f, [(tokens(), n) for n in (2, 3, 5, 7)]) <= 2


def test_a_mask_is_an_argument() -> None:
    calls = [(tokens(), masks.causal() & masks.window(n, 0) & masks.strided(n)) for n in (2, 3, 5, 7)]
    assert graphs(attend, calls) <= 2


def test_a_mask_from_outside() -> None:
    mask = masks.causal() & masks.documents(IDS)
    assert graphs(lambda q: attend(q, mask), [(tokens(),), (tokens(),)]) == 1


def test_arrays_of_a_mask_change() -> None:
    def f(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return attend(q, masks.causal() & masks.documents(ids))

    assert graphs(f, [(tokens(), IDS), (tokens(), IDS // 2), (tokens(), IDS * 0)]) == 1
    assert graphs(attend, [(tokens(), masks.documents(x)) for x in (IDS, IDS // 2)]) == 1


def test_numpy_arrays_of_a_mask() -> None:
    calls = [(tokens(), masks.causal() & masks.documents(x.numpy())) for x in (IDS, IDS // 2)]
    assert graphs(attend, calls) == 1


def test_stacked_layers_share_a_graph() -> None:
    def f(x: torch.Tensor, left: int) -> torch.Tensor:
        for mask in (masks.causal(), masks.causal() & masks.window(left, 0), masks.causal() & masks.strided(2)):
            x = x + attend(x, mask)
        return x

    assert graphs(f, [(tokens(T), n) for T, n in ((8, 2), (9, 3), (12, 4))]) <= 2


@pytest.mark.parametrize("what", ["sinks", "softcap", "slopes", "bias"])
def test_options(what: str) -> None:
    def f(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        options = {"softcap": 2.0} if what == "softcap" else {what: x}
        if what == "slopes":
            options = {"bias": saccade.alibi(x)}
        return attend(q, masks.causal(), scale=0.3, **options) + 0 * x.sum()

    shape = (1, 4, 8, 8) if what == "bias" else (4,)
    assert graphs(f, [(tokens(), torch.rand(*shape, requires_grad=True))]) == 1


def test_the_first_calls_of_a_process_make_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KNOWN, torch.Tensor, raising=False)
    counter = testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q: attend(q, masks.causal()), fullgraph=True, backend=counter)
    for _ in range(2):
        compiled(tokens())
    assert counter.frame_count == 1


def test_dropout() -> None:
    assert graphs(lambda q, seed: attend(q, dropout=0.5, seed=seed), [(tokens(), torch.tensor(n)) for n in (3, 4)]) == 1
    assert graphs(lambda q: attend(q, dropout=0.5, seed=7), [(tokens(),)]) == 1


def test_a_seed_may_be_a_symbol() -> None:
    # the second number makes a graph in which the seed is one
    assert graphs(lambda q, seed: attend(q, dropout=0.5, seed=seed), [(tokens(), n) for n in (3, 4, 2**63 - 1)]) == 2


def test_a_drawn_seed_is_the_same_in_the_backward() -> None:
    f = torch.compile(lambda q, v: saccade.attention(q, q, v, dropout=0.5), fullgraph=True, backend="aot_eager")
    q, v = tokens(), tokens()
    o = f(q.detach(), v)
    # o is linear in v, so its derivative along v is o itself, if the same weights are dropped
    torch.testing.assert_close((torch.autograd.grad(o.sum(), v)[0] * v).sum(), o.sum())
    assert not torch.equal(o, f(q.detach(), v))


def test_three_axes() -> None:
    assert graphs(lambda q: saccade.attention(q[0], q[1], q[0]), [(tokens(T),) for T in (8, 11)]) <= 2


def test_autocast() -> None:
    def f(q: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return saccade.attention(q, q, q, masks.causal())

    assert torch.compile(f, fullgraph=True, backend="aot_eager")(tokens()).dtype is torch.bfloat16


def test_checkpoint() -> None:
    def f(q: torch.Tensor) -> torch.Tensor:
        return checkpoint(attend, q, masks.causal(), use_reentrant=False)

    assert graphs(f, [(tokens(),)]) == 1


def test_decode_steps_share_a_graph() -> None:
    cache = saccade.KVCache(2, 32, 2, 8, dtype=torch.float32, fill=float("nan"))
    cache.append(torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8), lengths=[5, 3])
    counter = testing.CompileCounterWithBackend("aot_eager")

    def step(q: torch.Tensor) -> torch.Tensor:
        return saccade.decode(q, cache, mask=masks.causal() & masks.window(6, 0))

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for _ in range(4):
        cache.append(torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8))
        q = torch.randn(2, 1, 4, 8)
        torch.testing.assert_close(compiled(q), step(q))
    assert counter.frame_count <= 2


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo has no vmap of autograd Functions before torch 2.13")
def test_vmap_inside() -> None:
    x = torch.randn(3, 2, 8, 4, 8)
    f = torch.vmap(lambda q: attend(q, masks.causal()))
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))


def test_heads_first() -> None:
    x = torch.randn(2, 4, 9, 16)
    f = lambda q: saccade.attention(q, q, q, masks.causal(), layout="bhtd")  # noqa: E731
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))


def test_bad_shapes_are_named_at_compile_time() -> None:
    f = torch.compile(lambda q: saccade.attention(q, q[:, :, :3], q), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="differ in number of heads, 3 and 4"):
        f(tokens())


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attend(q, masks.causal() & masks.window(4, 0))

    sizes = ({1: torch.export.Dim("T", min=2, max=4096)},)
    program = torch.export.export(Layer(), (tokens().detach(),), dynamic_shapes=sizes)
    x = tokens(23).detach()
    torch.testing.assert_close(program.module()(x), Layer()(x))


FIRST = """
import torch, saccade
from saccade import mask, recurrent
def call(q):
    return {}
f = torch.compile(call, fullgraph=True, backend="aot_eager")
q = torch.randn(1, 5, 2, 8)
torch.testing.assert_close(f(q), call(q))
"""


@pytest.mark.parametrize("call", ["saccade.attention(q, q, q, mask.causal())", "recurrent.linear_attention(q, q, q)"])
def test_the_first_call_of_a_process_may_be_compiled(call: str) -> None:
    words = [sys.executable, "-c", FIRST.format(call)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_inductor() -> None:
    calls = [(tokens(T), masks.causal() & masks.window(n, 0)) for T, n in ((8, 2), (11, 3), (40, 5))]
    assert graphs(attend, calls, backend="inductor") <= 2
