"""Products of one row, and steps of a model that consist of them, compared with the same in float64 and with the model.

Run in Triton's interpreter by tests/system, and on a GPU by `make test-gpu`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from saccade.backends.triton import one_row
from saccade.backends.triton.chip import interpreted
from saccade.backends.triton.kernels.one_row import Row, Weight
from saccade.models.blocks import RMSNorm
from saccade.models.llama import Llama, LlamaConfig
from saccade.models.one_row import OneRow, is_plain, step_of

DEVICE = "cpu" if interpreted() else "cuda:0"
# rounding once, at the end, and sums in float32
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
}
DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=str)
LLAMA: dict[str, Any] = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 400, "eos_token_id": -1}


@pytest.fixture
def drawn(seed: int) -> Any:
    """drawn(*shape, dtype): normal numbers on the device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype: torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), want, **CLOSE[found.dtype])


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
# the last row is longer than what is read of a weight before the wait
@pytest.mark.parametrize(("n", "m"), [(1, 1), (20, 7), (1000, 13), (4500, 6)])
def test_products(n: int, m: int, bias: bool, dtype: torch.dtype, drawn: Any) -> None:
    x, norm, added = drawn(n, dtype=dtype), drawn(n, dtype=dtype), drawn(m, dtype=dtype)
    a, b = (Weight(drawn(m, n, dtype=dtype) / n**0.5, drawn(m, dtype=dtype) if bias else None) for _ in range(2))
    row, eps = x.double(), 1e-5
    normed = row * (row.square().mean() + eps).rsqrt() * norm.double()

    def exact(matrix: Weight, x: torch.Tensor) -> torch.Tensor:
        return matrix.p.double() @ x + (0 if matrix.bias is None else matrix.bias.double())

    out = torch.empty(m, dtype=dtype, device=DEVICE)
    one_row.product(Row(x), a, out)
    close(out, exact(a, row))
    one_row.product(Row(x, norm, eps), a, out, added)
    close(out, exact(a, normed) + added.double())
    one_row.gated(Row(x, norm, eps), a, b, out)
    close(out, torch.nn.functional.silu(exact(a, normed)) * exact(b, normed))
    # a sigmoid that underflows
    one_row.gated(Row(x), Weight(0 * a.p, torch.full_like(added, -1e4)), b, out)
    assert (out == 0).all()


@DTYPES
@pytest.mark.parametrize(("heads", "D"), [((4, 2), 16), ((3, 3), 10), ((6, 1), 64)], ids=str)
def test_projections_go_to_the_last_slot(heads: tuple[int, int], D: int, dtype: torch.dtype, drawn: Any) -> None:
    """Also to that of a cache with gaps between its slots; a cache without that slot stays as it is."""
    n, capacity, (Hq, Hk) = 40, 9, heads
    x = drawn(n, dtype=dtype)
    qkv = [Weight(drawn(h * D, n, dtype=dtype) / n**0.5, drawn(h * D, dtype=dtype)) for h in (Hq, Hk, Hk)]
    angle = torch.arange(capacity)[:, None] * 0.3 ** torch.arange(D // 2)
    turn = [part.to(DEVICE) for part in (angle.cos(), angle.sin())]
    want = [(m.p.double() @ x.double() + m.bias.double()).view(-1, D) for m in qkv]
    for slot in (-1, 0, 7, capacity):
        wide = torch.full((2, 1, 2 * capacity, Hk, D), torch.nan, dtype=dtype, device=DEVICE)
        k, v = wide[:, :, ::2]
        q = torch.empty(Hq, D, dtype=dtype, device=DEVICE)
        one_row.project(Row(x), qkv, turn, (k, v, torch.tensor([slot + 1], dtype=torch.int32, device=DEVICE)), q)
        if 0 <= slot < capacity:
            cos, sin = (part[slot].double() for part in turn)
            for found, exact in ((q, want[0]), (k[0, slot], want[1])):
                y, z = exact.chunk(2, -1)
                close(found, torch.cat([y * cos - z * sin, y * sin + z * cos], -1))
            close(v[0, slot], want[2])
            k[0, slot] = v[0, slot] = torch.nan
        assert wide.isnan().all()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sliding_window": 7, "attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "head_dim": 24, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=["plain", "window and biases", "tied, scaled"],
)
def test_steps_equal_the_model(more: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(**LLAMA, **more)).to(DEVICE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours, theirs = model.make_caches(1, 100), model.make_caches(1, 100)
    with torch.no_grad():
        for caches in (ours, theirs):
            model(torch.arange(37, device=DEVICE)[None], caches=caches)
        lengths = ours[0].lengths.clone()
        for cache in ours:
            cache.follow(lengths)
        step = OneRow(model, ours).logits
        for token in torch.tensor([3, 60, 0], device=DEVICE):
            found, want = step(token[None]), model(token[None, None], caches=theirs)[:, -1]
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert lengths.tolist() == [40]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.k, b.k, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.v, b.v, rtol=1e-4, atol=1e-4)


def test_what_has_no_such_steps() -> None:
    model = Llama(LlamaConfig(**LLAMA)).to(DEVICE)

    def found(caches: Any = None, backend: str | None = None) -> bool:
        caches = caches or model.make_caches(1, 10)
        lengths = caches[0].lengths
        for cache in caches:
            cache.follow(lengths)
        return step_of(model, caches, backend) is not None

    assert found() is found(backend="triton") is not interpreted()
    assert not found(model.make_caches(2, 10))
    assert not found(model.make_caches(1, 10, "int8"))
    assert not found(backend="cpu")
    for change in (
        lambda block: block.register_forward_hook(lambda *_: None),
        lambda block: setattr(block, "finish", block.finish),
        lambda block: setattr(block.self_attn, "q_norm", RMSNorm(12, 1e-6)),
        lambda block: setattr(block.mlp, "up_proj", torch.nn.Linear(48, 128, bias=False, device=DEVICE)),
    ):
        other = copy.deepcopy(model)
        change(other.blocks[1])
        assert not is_plain(other)
        assert step_of(other, other.make_caches(1, 10), None) is None
    assert is_plain(model)
    model.model.norm.bfloat16()
    assert not found()


def test_a_graph_keeps_the_arrays_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They must live as long as the graph, which is longer than the object that made them."""
    model, kept = Llama(LlamaConfig(**LLAMA)).to(DEVICE), list[torch.Tensor]()
    caches = model.make_caches(1, 10)
    for cache in caches:
        cache.follow(caches[0].lengths)
    monkeypatch.setattr("saccade.models.one_row.keep_captured", lambda arrays, _: kept.extend(arrays))
    step = OneRow(model, caches)
    step.logits(torch.tensor([3], device=DEVICE))
    own = [x for x in vars(step).values() if isinstance(x, torch.Tensor) and x is not step.lengths]
    assert {id(x) for x in kept} == {id(x) for x in (*own, *step.turn)}
    assert len(own) == 5
