"""What the heads of each kind of stack attend to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from saccade.models.attended import attended  # noqa: E402
from saccade.models.gpt2 import Gpt2, Gpt2Config  # noqa: E402
from saccade.models.hybrid import Hybrid  # noqa: E402
from saccade.models.hybrid_config import HybridConfig  # noqa: E402
from saccade.models.llama import Llama, LlamaConfig  # noqa: E402

T = 21


@pytest.fixture
def tokens(rng: np.random.Generator) -> list[int]:
    return rng.integers(1, 61, T).tolist()


def stack(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return Llama(LlamaConfig(61, 48, 2, num_attention_heads=6, num_key_value_heads=2))
    if kind == "gpt2":
        return Gpt2(Gpt2Config(61, 48, 2, 4))
    mixers, after = ("mamba", "attention", "local"), ("swiglu",) * 3
    return Hybrid(
        HybridConfig(61, mixers, after, 48, 64, num_attention_heads=4, num_key_value_heads=2, sliding_window=5)
    )


@pytest.mark.parametrize("kind, heads", [("llama", 6), ("gpt2", 4), ("hybrid", 4)])
def test_rows_are_weights_of_the_past(kind: str, heads: int, tokens: list[int]) -> None:
    weights = attended(stack(kind), tokens)
    assert weights.shape == (2, heads, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert np.all(np.triu(weights, 1) == 0)
    if kind == "hybrid":
        # its last layer has a window of five
        assert np.all(np.tril(weights[1], -5) == 0)


def test_weights_are_those_of_the_scores(tokens: list[int]) -> None:
    model = stack("gpt2")
    block = model.h[0]
    with torch.no_grad():
        q, k, _ = block.attn.project(block.ln_1(model.wte(torch.tensor(tokens)) + model.wpe.weight[:T]))
        scores = torch.einsum("ihd,jhd->hij", q, k) / 12**0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    np.testing.assert_allclose(attended(model, tokens)[0], scores.softmax(-1), atol=1e-6)


def test_a_stack_without_attention() -> None:
    model = Hybrid(HybridConfig(61, ("mamba",), ("none",), 48, num_attention_heads=4))
    with pytest.raises(ValueError, match="Hybrid has no layer of attention"):
        attended(model, [1, 2])
