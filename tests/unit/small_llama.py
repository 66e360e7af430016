"""A Llama of two layers, and tokens for it."""

from __future__ import annotations

import torch

from saccade.models.llama import Llama, LlamaConfig

VOCABULARY = 61


def small(**changes) -> Llama:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    return Llama(LlamaConfig(vocab_size=VOCABULARY, **sizes, **changes)).eval()


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
