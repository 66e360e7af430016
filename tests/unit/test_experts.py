"""Models with experts: the shapes of their products depend on the tokens."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from saccade.models.batching import serve  # noqa: E402
from saccade.models.blocks import Decoder  # noqa: E402
from saccade.models.deepseek import DeepSeek  # noqa: E402
from saccade.models.deepseek_config import DeepSeekConfig  # noqa: E402
from saccade.models.hybrid import Hybrid  # noqa: E402
from saccade.models.hybrid_config import HybridConfig  # noqa: E402
from saccade.models.llama import Llama  # noqa: E402
from saccade.models.llama_config import LlamaConfig  # noqa: E402
from saccade.models.sampler import Sampler  # noqa: E402

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4}
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}


def deepseek(dense: int) -> DeepSeek:
    return DeepSeek(DeepSeekConfig(**SIZES, **LATENT, num_hidden_layers=2, first_k_dense_replace=dense))


def hybrid(kind: str) -> Hybrid:
    return Hybrid(HybridConfig(**SIZES, mixers=("attention",), feed_forward=(kind,), num_experts=2))


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        (Llama(LlamaConfig(**SIZES, num_hidden_layers=1)), False),
        (deepseek(2), False),
        (deepseek(1), True),
        (hybrid("swiglu"), False),
        *((hybrid(kind), True) for kind in ("experts", "shared", "gated")),
    ],
    ids=["llama", "deepseek, dense", "deepseek", "swiglu", "experts", "shared", "gated"],
)
def test_their_steps_are_not_replayed_and_their_rows_not_fixed(model, experts, monkeypatch) -> None:
    assert model.has_experts == experts
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    assert model.replayable([]) != experts
    if experts:
        with pytest.raises(ValueError, match="rows is 16 for a model with experts"):
            next(serve(model, [[1, 2]], 3, Sampler(0.0), rows=16))
