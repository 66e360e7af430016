"""Models on slices of their rows: logits and gradients of weights are those of one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import world

from saccade import mask as masks
from saccade.distributed import ContextParallel, unshard
from saccade.models.gpt2 import Gpt2, Gpt2Config
from saccade.models.hybrid import Hybrid
from saccade.models.hybrid_config import HybridConfig
from saccade.models.llama import Llama, LlamaConfig
from saccade.recurrent import scalar_decay

ROWS, TOKENS = 2, 29
# documents of each row: where they begin
BEGINS = ((0, 4, 5, 20), (0, 16))
SIZES = {"vocab_size": 17, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
RECURRENT = ("mamba", "mamba2", "griffin", "retention", "gla", "delta")
STACKS = {
    "recurrent": RECURRENT,
    "hybrid": ("mamba2", "attention", "griffin", "local", "delta"),
}


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "llama":
        model = Llama(LlamaConfig(**SIZES, num_hidden_layers=2))
    elif kind == "gpt2":
        model = Gpt2(Gpt2Config(vocab_size=17, n_positions=TOKENS, n_embd=24, n_layer=2, n_head=4))
    else:
        kinds = STACKS[kind]
        plain = HybridConfig(
            **SIZES, mixers=kinds, feed_forward=("swiglu",) * len(kinds), intermediate_size=16, state_size=4,
            sliding_window=9, softcap=20.0,
        )  # fmt: skip
        model = Hybrid(plain)
    return model.double()


def documents() -> tuple[torch.Tensor, Any]:
    """Positions [ROWS, TOKENS], and the mask of the whole."""
    begins = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    for row, places in enumerate(BEGINS):
        begins[row, list(places)] = 1
    ids = begins.cumsum(1)
    first = torch.tensor([[BEGINS[row][int(n) - 1] for n in ids[row]] for row in range(ROWS)])
    return torch.arange(TOKENS) - first, masks.causal() & masks.documents(ids.int().numpy())


def furthest(kind: str, layout: str, packed: bool) -> float:
    """The largest difference of logits and of summed gradients, in units of 1 or of the largest number."""
    tokens = torch.randint(0, 17, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    positions, mask = documents() if packed else (None, None)
    given = torch.randn(ROWS, TOKENS, 17, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    alone, shared = model_of(kind), model_of(kind)
    whole = alone(tokens, positions, mask)
    (whole * given).sum().backward()
    ranks = ContextParallel(TOKENS, layout=layout)
    cut = None if positions is None else ranks.shard(positions)
    mine = shared(ranks.shard(tokens), cut, mask, backend=ranks)
    (mine * ranks.shard(given)).sum().backward()
    pairs = [(whole.detach(), unshard(mine.detach(), layout=layout))]
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        dist.all_reduce(other.grad)
        pairs.append((one.grad, other.grad))
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
@pytest.mark.parametrize("size", [2, 4])
def test_stacks_under_one_layout(kind: str, packed: bool, size: int) -> None:
    assert max(world(size).run(furthest, kind, "contiguous", packed)) <= 1e-12


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_attention_under_every_layout(kind: str, layout: str) -> None:
    assert max(world(4).run(furthest, kind, layout, kind == "llama")) <= 1e-12


def refusals() -> list[str]:
    told: list[str] = []
    model, tokens = model_of("recurrent"), torch.zeros(1, 4, dtype=torch.int64)
    ranks, x = ContextParallel(8, layout="zigzag"), torch.zeros(1, 4, 1, 2)
    at_start = ContextParallel(8).at(torch.arange(4)[None])
    for wrong in (
        lambda: model(tokens, backend=ranks),
        lambda: ranks.shard(tokens),
        lambda: model(tokens, caches=model.make_caches(1, 8), backend=ranks),
        lambda: at_start.recurrent(scalar_decay, x, x, x, x[..., 0], initial_state=x),
        lambda: at_start.recurrent(scalar_decay, x, x, x, x[..., 0], return_state=True),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            wrong()
        told.append(str(caught.value))
    return told


def test_wrong_use_is_told() -> None:
    for told in world(2).run(refusals):
        wanted = ["expected 'contiguous'", "whole rows of 8", "leave caches out"]
        wanted += ["initial_state is given; expected none", "return_state is given; expected none"]
        for text, part in zip(told, wanted, strict=True):
            assert part in text
