"""DeepSeek-V2, V3 and V3.2, with parameters named as in the Hugging Face layout: latent attention and experts.

Source: DeepSeek-AI 2024 (DeepSeek-V2, DeepSeek-V3), 2025 (DeepSeek-V3.2).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import api
from .. import mask as masks
from ..caches.contiguous import KVCache
from ..caches.latent import IndexedLatentKVCache, LatentKVCache, PagedLatentKVCache
from ..distributed.context import ContextParallel, Where
from ..rope import rotated
from .blocks import Block, RMSNorm, SwiGLU
from .deepseek_config import DeepSeekConfig
from .experts import SharedExperts
from .indexer import Index, LightningIndexer, best_keys, indexer_loss
from .llama import Llama
from .states import Turn
from .stores import Cached, PagedTokens, attend
from .weights import Tensors

if TYPE_CHECKING:
    from ..mask import Mask
    from .hybrid_config import HybridConfig
    from .llama_config import LlamaConfig

# eps of the norms of latent rows, which no config changes
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Attention whose keys and values are computed from one latent row per token, which is all that a cache stores.

    absorbed: whether the up-projections of keys and values are multiplied into q and o, so that attention reads latent
    rows as its only key head, instead of being applied to every row. None absorbs wherever a cache has earlier tokens,
    because a few queries then read many rows, and wherever an indexer chooses the rows. Both compute the same numbers
    except for rounding.
    """

    def __init__(self, config: DeepSeekConfig | HybridConfig, absorbed: bool | None = None) -> None:
        super().__init__()
        self.absorbed, self.config = absorbed, config
        width, heads, rank, bias = (
            config.hidden_size,
            config.num_attention_heads,
            config.kv_lora_rank,
            config.attention_bias,
        )
        self.parts = config.qk_nope_head_dim, config.qk_rope_head_dim
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * sum(self.parts), bias=False)
        else:
            self.q_proj = nn.Linear(width, heads * sum(self.parts), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, rank + self.parts[1], bias=bias)
        self.kv_a_layernorm = RMSNorm(rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(rank, heads * (self.parts[0] + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, width, bias=bias)
        self.indexer = None
        if isinstance(config, DeepSeekConfig) and config.index_topk:
            sizes = config.index_n_heads, config.index_head_dim, config.index_topk
            self.indexer = LightningIndexer(width, config.q_lora_rank, *sizes)

    def project(self, x: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] -> q and k [B, T, H, D], v [B, T, H, Dv]; scores of q and k are those of 1 / √D."""
        k, v = self.expand(*self.rows(x, turn))
        return torch.cat(self.queries(x, turn), -1), k, v

    def queries(self, x: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor]:
        """q [B, T, H, ..] in its two parts, of which the second is rotated, times the model's `temperature`."""
        config = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if config.q_lora_rank else self.q_proj(x)
        q = q.unflatten(-1, (config.num_attention_heads, -1))
        plain, turned = (q if config.temperature == 1.0 else q * config.temperature).split(self.parts, -1)
        return plain, self._turned(turned, turn)

    def rows(self, x: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor]:
        """The latent rows [B, T, rank] and the rotated keys [B, T, rope] of tokens."""
        latent, keys = self.kv_a_proj_with_mqa(x).split([self.config.kv_lora_rank, self.parts[1]], -1)
        return self.kv_a_layernorm(latent), self._turned(keys[..., None, :], turn)[..., 0, :]

    def expand(self, latent: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """k [B, T, H, D] and v [B, T, H, Dv] of latent rows and rotated keys."""
        heads = self.config.num_attention_heads
        both = self.kv_b_proj(latent).unflatten(-1, (heads, -1))
        k, v = both.split([self.parts[0], self.config.v_head_dim], -1)
        return torch.cat([k, keys[..., None, :].expand(*k.shape[:-1], -1)], -1), v

    def forward(
        self, x: Tensor, turn: Turn | None, mask: Mask | None, cache: Cached | None = None, backend: Where = None
    ) -> Tensor:
        """x [B, T, width] -> [B, T, width]; with a cache, the T tokens are first appended to it, and see all of it."""
        latent, keys = self.rows(x, turn)
        first = cache is None or (isinstance(cache, KVCache) and not len(cache))
        index = self.index(x, turn)
        self._append(latent, keys, index, cache, backend)
        best = None if index is None else self._best(index, mask, cache)
        absorbed = not first or best is not None if self.absorbed is None else self.absorbed
        if best is not None:
            mask = masks.causal() & masks.select(best if absorbed else self._each_head(best))
        if absorbed:
            o = self._absorbed(x, turn, mask, latent, keys, cache, backend)
        else:
            o = self._expanded(x, turn, mask, latent, keys, None if first else cache, backend)
        return self.o_proj(o.flatten(-2))

    def index(self, x: Tensor, turn: Turn | None) -> Index | None:
        """What the indexer scores the tokens of x by; None without an indexer."""
        if self.indexer is None:
            return None
        with torch.no_grad():
            source = self.q_a_layernorm(self.q_a_proj(x))
        return self.indexer(x, source, turn)

    def narrowed(self, x: Tensor, turn: Turn | None, mask: Mask | None) -> Mask | None:
        """The mask of expanded heads without a cache: with the keys that the indexer chooses, if there is one."""
        index = self.index(x, turn)
        best = None if index is None else self._best(index, mask, None)
        return mask if best is None else masks.causal() & masks.select(self._each_head(best))

    def _each_head(self, best: Tensor) -> Tensor:
        return best.expand(-1, self.config.num_attention_heads, -1, -1)

    def index_loss(self, x: Tensor, turn: Turn | None, dense: bool = False) -> Tensor:
        """The loss [B, T] of the indexer on x [B, T, width], the input of this layer (`indexer_loss`).

        dense: over all keys up to a query's own, as in the warm-up, instead of those that the indexer chooses. The
        layer itself attends to all keys if `indexer.count` is at least T. Raises ValueError without an indexer.
        """
        index = self.index(x, turn)
        if self.indexer is None or index is None:
            raise ValueError("index_loss of a layer without an indexer; expected a config with index_topk")
        with torch.no_grad():
            q, k = self._absorbed_queries(x, turn), torch.cat(self.rows(x, turn), -1)[:, :, None]
        best = None if dense else best_keys(index, self.indexer.count)
        return indexer_loss(index, q, k, best, sum(self.parts) ** -0.5)

    def _best(self, index: Index, mask: Mask | None, cache: Cached | None) -> Tensor | None:
        # the keys that the indexer chooses, [B, 1, T, n]; None if these are all
        count, lengths = cast("LightningIndexer", self.indexer).count, None
        if isinstance(cache, IndexedLatentKVCache):
            lengths = cache.lengths
            index = index._replace(k=cache.index[:, : len(cache), 0])
        if index.k.shape[1] <= count:
            return None
        if mask != masks.causal():
            raise ValueError(
                f"mask is {mask}; expected causal(), in which the indexer chooses {count} keys of each query"
            )
        return best_keys(index, count, lengths)

    def _append(self, latent: Tensor, keys: Tensor, index: Index | None, cache: Cached | None, backend: Where) -> None:
        if index is not None:
            if isinstance(backend, ContextParallel) or not isinstance(cache, IndexedLatentKVCache | None):
                kind = type(backend if isinstance(backend, ContextParallel) else cache).__name__
                raise ValueError(f"{kind} with an indexer; expected one rank, and caches of make_caches")
            if cache is not None:
                cache.append_indexed(latent, keys, index.k)
        elif isinstance(cache, PagedTokens):
            cache.append(latent, keys)
        elif cache is not None:
            cast("LatentKVCache", cache).append(latent, keys)

    def _absorbed_queries(self, x: Tensor, turn: Turn | None) -> Tensor:
        # [B, T, H, rank + rope]
        up = self.kv_b_proj.weight.unflatten(0, (self.config.num_attention_heads, -1))[:, : self.parts[0]]
        plain, turned = self.queries(x, turn)
        return torch.cat([torch.einsum("bthn,hnr->bthr", plain, up), turned], -1)

    def _absorbed(
        self, x: Tensor, turn: Turn | None, mask: Mask | None, latent: Tensor, keys: Tensor, cache: Any, backend: Where
    ) -> Tensor:
        down = self.kv_b_proj.weight.unflatten(0, (self.config.num_attention_heads, -1))[:, self.parts[0] :]
        q, scale = self._absorbed_queries(x, turn), sum(self.parts) ** -0.5
        if cache is None:
            k = torch.cat([latent, keys], -1)[:, :, None]
            o = api.attention(q, k, k[..., : latent.shape[-1]], mask, scale=scale, backend=cast("Any", backend))
        elif isinstance(cache, PagedTokens):
            o = cache.attend(q, mask=mask, scale=scale, backend=backend)
        else:
            o = api.decode(q, cache, mask=mask, scale=scale, backend=cast("Any", backend))
        return torch.einsum("bthr,hvr->bthv", o, down)

    def _expanded(
        self, x: Tensor, turn: Turn | None, mask: Mask | None, latent: Tensor, keys: Tensor, cache: Any, backend: Where
    ) -> Tensor:
        q = torch.cat(self.queries(x, turn), -1)
        if cache is None:
            return attend(q, *self.expand(latent, keys), mask, None, backend)
        if not isinstance(cache, LatentKVCache):
            raise ValueError(
                f"absorbed is False and the cache is {type(cache).__name__}; expected a LatentKVCache, or absorbed=True"
            )
        n = len(cache)
        rows = cache.numbers()[0][:, :n, 0].to(latent.dtype)
        k, v = self.expand(*rows.split([latent.shape[-1], keys.shape[-1]], -1))
        whole = KVCache(len(k), n, k.shape[2], k.shape[3], v_dim=v.shape[3], dtype=k.dtype, device=k.device)
        whole.append(k, v, cache.lengths)
        return api.decode(q, whole, mask=mask, backend=cast("Any", backend))

    def _turned(self, x: Tensor, turn: Turn | None) -> Tensor:
        return x if turn is None else rotated(x.to(turn[0].dtype), *turn, self.config.rope_interleave).to(x.dtype)


class DeepSeek(Llama):
    """tokens -> logits. Layers that predict further tokens, which checkpoints of V3 contain, are not read."""

    config: DeepSeekConfig
    Config = DeepSeekConfig

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__(config)
        self.rotation = {**(self.rotation or {}), "interleaved": config.rope_interleave}

    def make_block(self, config: LlamaConfig, number: int) -> Block:
        block, config = super().make_block(config, number), cast("DeepSeekConfig", config)
        block.self_attn = LatentAttention(config)
        block.mlp = SwiGLU(config) if number < config.first_k_dense_replace else SharedExperts(config)
        return block

    def absorb(self, absorbed: bool | None) -> None:
        """Sets `LatentAttention.absorbed` of every layer."""
        for block in self.blocks:
            cast("LatentAttention", block.self_attn).absorbed = absorbed

    @property
    def cached(self) -> tuple[int, int, int]:
        """(layers, kv_heads, head_dim) of the cached rows."""
        return self.config.num_hidden_layers, 1, self.config.kv_lora_rank + self.config.qk_rope_head_dim

    def make_caches(self, batch: int, capacity: int, quantised: str | None = None) -> list[KVCache]:
        """An empty `LatentKVCache` per layer; arguments as in `Decoder.make_caches`."""
        if self.config.index_topk:
            size = self.config.index_head_dim
            return [
                IndexedLatentKVCache(batch, capacity, *sizes, size, **options)
                for sizes, options in self._stores(quantised)
            ]
        return [LatentKVCache(batch, capacity, *sizes, **options) for sizes, options in self._stores(quantised)]

    def make_pages(self, pages: int, page_size: int, quantised: str | None = None) -> list[Any]:
        """An empty `PagedLatentKVCache` per layer; arguments as in `Decoder.make_pages`.

        Raises ValueError for a model with an indexer, whose keys have no pages.
        """
        if self.config.index_topk:
            raise ValueError(
                f"pages for a {self.config.model_type} model; expected make_caches: index keys have no pages"
            )
        return [PagedLatentKVCache(pages, page_size, *sizes, **options) for sizes, options in self._stores(quantised)]

    def _stores(self, quantised: str | None) -> list[tuple[tuple[int, int], dict[str, Any]]]:
        sizes = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        return [(sizes, options) for _, options in super()._stores(quantised)]

    @classmethod
    def counts(cls, config: LlamaConfig) -> dict[str, int]:
        """The numbers of layers and experts of a checkpoint, as `weights.filled` takes them."""
        config = cast("DeepSeekConfig", config)
        sparse = config.first_k_dense_replace < config.num_hidden_layers
        return super().counts(config) | {"experts in a layer": config.n_routed_experts * sparse}

    @classmethod
    def own(cls, config: LlamaConfig, tensors: Tensors) -> Tensors:
        # a layer that predicts further tokens joins the last hidden state with the next embedding by eh_proj
        joins = [at for name in tensors if (at := re.match(r"(model\.layers\.(\d+)\.)eh_proj\.", name))]
        further = tuple(at[1] for at in joins if int(at[2]) >= config.num_hidden_layers)
        return {name: x for name, x in super().own(config, tensors).items() if not name.startswith(further)}
