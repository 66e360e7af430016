"""Models by name, and the bytes of their key-value caches: grouped heads, local layers and latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .units import item_bytes


@dataclass(frozen=True)
class Model:
    """The dimensions of a decoder that determine the size of its cache.

    head_dim: the size of keys. value_dim: the size of values; 0 for that of keys. window: how many tokens each of the
    `local_layers` stores. latent: how many numbers a layer stores per token instead of keys and values; 0 for none.
    source: where the dimensions are published.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    dtype: str = "bfloat16"
    value_dim: int = 0
    window: int = 0
    local_layers: int = 0
    latent: int = 0
    source: str = ""

    def numbers(self, kv_heads: int | None = None) -> int:
        """Numbers that a layer stores per token; with `kv_heads`, those of keys and values of so many heads."""
        if kv_heads is None and self.latent:
            return self.latent
        return (self.kv_heads if kv_heads is None else kv_heads) * (self.head_dim + (self.value_dim or self.head_dim))

    def cache_bytes(self, tokens: int = 1, batch: int = 1, *, kv_heads: int | None = None) -> int:
        """Bytes of the cache of `batch` sequences of `tokens` tokens. Local layers store at most `window` tokens.

        kv_heads: replaces the model's number of key heads, and its latents by the keys and values of so many heads.
        """
        stored = (self.layers - self.local_layers) * tokens + self.local_layers * min(tokens, self.window)
        return self.numbers(kv_heads) * item_bytes(self.dtype) * stored * batch

    def most_tokens(self, memory: float, batch: int = 1, *, kv_heads: int | None = None) -> int | None:
        """The longest sequences, of which `batch` fit in `memory` bytes; None if every layer is local and they fit."""
        layer = self.numbers(kv_heads) * item_bytes(self.dtype) * batch
        if memory < layer * self.layers * self.window:
            return int(memory // (layer * self.layers))
        grows = self.layers - self.local_layers
        return int((memory - layer * self.local_layers * self.window) // (layer * grows)) if grows else None

    def saving(self) -> float:
        """How many times smaller the cache is than with keys and values of every query head."""
        return self.numbers(self.heads) / self.numbers()

    def projections(self) -> dict[str, tuple[int, int]]:
        """Shapes [in, out] of the projections to q, k, v and from o; with a latent, to the latent and from o."""
        out = (self.heads * (self.value_dim or self.head_dim), self.width)
        if self.latent:
            return {"latent": (self.width, self.latent), "o": out}
        q, k, v = (n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads))
        return {"q": (self.width, q), "k": (self.width, k), "v": (self.width, v), "o": out}


def _config(path: str) -> str:
    return f"config.json of {path}"


MODELS: Mapping[str, Model] = {
    m.name: m
    for m in (
        Model("llama-3-8b", 32, 32, 8, 128, 4096, source=_config("meta-llama/Meta-Llama-3-8B")),
        Model("llama-3-70b", 80, 64, 8, 128, 8192, source=_config("meta-llama/Meta-Llama-3-70B")),
        Model("qwen-3-8b", 36, 32, 8, 128, 4096, source=_config("Qwen/Qwen3-8B")),
        Model("qwen-3-32b", 64, 64, 8, 128, 5120, source=_config("Qwen/Qwen3-32B")),
        # five local layers, then a global one
        Model(
            "gemma-3-27b", 62, 32, 16, 128, 5376, window=1024, local_layers=52, source=_config("google/gemma-3-27b-it")
        ),
        # keys of 128 + 64 numbers and values of 128; latents of 512, and 64 rotated numbers of keys
        Model(
            "deepseek-v3", 61, 128, 128, 192, 7168, value_dim=128, latent=576, source=_config("deepseek-ai/DeepSeek-V3")
        ),
        Model("llama-2-70b", 80, 64, 8, 128, 8192, source=_config("meta-llama/Llama-2-70b-hf")),
        Model("mistral-7b", 32, 32, 8, 128, 4096, source=_config("mistralai/Mistral-7B-v0.3")),
        Model("gpt-3-175b", 96, 96, 96, 128, 12288, source="Brown et al., 2020, table 2.1"),
        Model("gpt-2", 12, 12, 12, 64, 768, source=_config("openai-community/gpt2")),
    )
}


def kv_cache_bytes(
    layers: int, kv_heads: int, head_dim: int, tokens: int = 1, batch: int = 1, dtype: str = "bfloat16"
) -> int:
    """Bytes of keys and values of `batch` sequences of `tokens` tokens: 2·layers·Hk·D·bytes per token."""
    return 2 * layers * kv_heads * head_dim * item_bytes(dtype) * tokens * batch
