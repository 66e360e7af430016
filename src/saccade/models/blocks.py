"""The parts of a Llama-style stack: RMSNorm, SwiGLU, rotary grouped-query attention, and the block that joins them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..caches.contiguous import KVCache
from ..caches.latent import IndexedLatentKVCache, PagedLatentKVCache
from ..caches.paged import PagedKVCache
from ..distributed.context import Where
from ..rope import rotated
from .data import IGNORED
from .states import StackCache, Turn
from .stores import Cached, attend

if TYPE_CHECKING:
    from ..mask import Mask
    from .hybrid_config import HybridConfig
    from .llama_config import LlamaConfig


def turned(x: Tensor, turn: Turn | None) -> Tensor:
    """x [B, T, H, D] with the first dimensions of D rotated, those for which turn has angles; x itself for None."""
    if turn is None:
        return x
    width = 2 * turn[0].shape[-1]
    first = rotated(x[..., :width].to(turn[0].dtype), *turn, False).to(x.dtype)
    return first if width == x.shape[-1] else torch.cat([first, x[..., width:]], -1)


# the most logits of a cross-entropy that are in memory at a time
LOGITS = 1 << 31


def summed_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of logits [N, vocab], in nats and at least in float32; targets int64 [N]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


class Routed(nn.Module):
    """A layer of experts, each of which reads the tokens that choose it."""


class Decoder(nn.Module):
    """A stack that continues text: logits of its hidden states, and caches for its layers."""

    config: Any
    # options of `rope` by which cached keys are rotated; None for positions of another kind
    rotation: dict[str, Any] | None = None
    # `summed_losses`, which a training run compiles
    summed: Callable[[Tensor, Tensor], Tensor] = staticmethod(summed_losses)
    # whether `compile_steps` was called, and the steps of `replay.py` that `generate` then keeps
    steps_compiled = False
    kept_steps: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # copied graphs would read the weights of this model, and compiled functions are not pickled
        return {name: x for name, x in super().__getstate__().items() if name not in ("kept_steps", "summed")}

    @abstractmethod
    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        caches: Any = None,
        backend: Where = None,
    ) -> Tensor:
        """The last norm's output [B, T, width]; arguments as in `forward`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., width] -> [..., vocab]."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def has_experts(self) -> bool:
        """Whether the shapes of products depend on which experts the tokens choose."""
        return any(isinstance(module, Routed) for module in self.modules())

    @property
    @abstractmethod
    def blocks(self) -> list[Any]:
        """The layers of the stack, modules, first to last."""

    @property
    @abstractmethod
    def cached(self) -> tuple[int, int, int]:
        """(layers, kv_heads, head_dim) of the cached keys."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        caches: Sequence[Cached] | StackCache | None = None,
        backend: Where = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """The logits [B, T, vocab] of every token's successor; with targets their `cross_entropy`.

        tokens: int64 [B, T]. positions: [T] or [B, T], by default counted from 0, or from each sequence's cached
        length. mask: by default `causal()`. caches: one per layer, to which the tokens are appended. targets [B, T].
        """
        hidden = self.hidden(tokens, positions, mask, caches, backend)
        return self.logits(hidden) if targets is None else self.cross_entropy(hidden, targets)

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum in nats over all tokens, except those whose target is `IGNORED`; at least in float32.

        hidden [B, T, width], targets int64 [B, T]. `LOGITS` are in memory at a time, computed again in the backward.
        """
        if hidden.shape[:-1] != targets.shape:
            raise ValueError(f"targets has shape {list(targets.shape)}; expected {list(hidden.shape[:-1])}, as tokens")
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        rows = max(1, LOGITS // self.config.vocab_size)
        if len(targets) <= rows:
            return self._cross_entropy(hidden, targets)
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.stack([checkpoint(self._cross_entropy, *part, use_reentrant=False) for part in parts]).sum()

    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.summed(self.logits(hidden), targets)

    def compile_steps(self) -> None:
        """Let torch.compile fuse what surrounds the products, in steps that an NVIDIA GPU replays for each new token.

        The second new token waits some seconds for it. `generate` keeps its caches and its CUDA graph for calls with as
        many prompts, the same options, and texts of at least half the length; `forget_steps` frees them. `generate` and
        `serve` say which of their steps are replayed. Raises ValueError for a model whose steps are never replayed.
        """
        if not self.replayable(self.make_caches(1, 1)):
            raise ValueError(
                f"this model is a {type(self).__name__} on {self.device}; steps are replayed and compiled only on an "
                "NVIDIA GPU, and for models without recurrent layers, experts and indexers"
            )
        self.steps_compiled = True

    def forget_steps(self) -> None:
        """Free the caches and the CUDA graph that `generate` keeps after `compile_steps`."""
        self.kept_steps = None

    def replayable(self, stores: Sequence[KVCache] | Sequence[PagedKVCache] | StackCache) -> bool:
        """Whether steps with these caches or pages have static shapes, on a GPU.

        States of layers, experts, indexers and pages of latent rows have none.
        """
        if self.device.type != "cuda" or self.has_experts or isinstance(stores, StackCache):
            return False
        return not any(isinstance(store, IndexedLatentKVCache | PagedLatentKVCache) for store in stores)

    def make_caches(self, batch: int, capacity: int, quantised: str | None = None) -> list[KVCache] | StackCache:
        """An empty cache per layer for `batch` sequences of up to `capacity` tokens, in the model's dtype.

        quantised: the codes in which they store keys and values, as in `KVCache`.
        """
        return [KVCache(batch, capacity, *sizes, **options) for sizes, options in self._stores(quantised)]

    def make_pages(self, pages: int, page_size: int, quantised: str | None = None) -> list[PagedKVCache]:
        """An empty pool of pages per layer; quantised as in `make_caches`."""
        return [PagedKVCache(pages, page_size, *sizes, **options) for sizes, options in self._stores(quantised)]

    def _stores(self, quantised: str | None) -> list[tuple[tuple[int, int], dict[str, Any]]]:
        # sizes and options of each layer's cache
        layers, heads, size = self.cached
        weight = next(self.parameters())
        return [((heads, size), {"dtype": weight.dtype, "device": weight.device, "quantised": quantised})] * layers


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, x [..., width] -> the same shape and dtype.

    The mean square is computed in at least fp32. Source: Zhang and Sennrich 2019, as in Llama.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # on a GPU one kernel, which rounds once
        if x.dtype.itemsize >= 4 or (x.is_cuda and x.dtype == self.weight.dtype):
            return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


# rows of a product in float32 for which MKL is twice as fast with its factors exchanged
SOME_ROWS = range(16, 33)
# On a GPU, the fast kernels write rows of a multiple of 8 numbers: 50257 tokens take six times as long as 50304.
# With few rows, a product only reads the weight.
ALIGNED, MANY_ROWS = 64, 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., n] times the transpose of weight [m, n], plus bias [m] -> [..., m]."""
    rows = x.shape[:-1].numel()
    if bias is None and x.is_cuda and len(weight) % ALIGNED and rows >= MANY_ROWS:
        return functional.linear(x, functional.pad(weight, (0, 0, 0, -len(weight) % ALIGNED)))[..., : len(weight)]
    if rows not in SOME_ROWS or not x.is_cpu or x.dtype != torch.float32 or torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    y = (weight @ x.reshape(rows, x.shape[-1]).t()).t().contiguous().view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in_features] -> [..., out_features]."""
        return linear(input, self.weight, self.bias)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), x [..., width] -> [..., width]. Source: Shazeer 2020."""

    def __init__(self, config: LlamaConfig | HybridConfig) -> None:
        super().__init__()
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj, self.up_proj = (Linear(width, hidden, bias=bias) for _ in range(2))
        self.down_proj = Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Rotary attention (Su et al., 2021) of `Hq` query heads on `Hk` key/value heads (Ainslie et al., 2023)."""

    def __init__(self, config: LlamaConfig | HybridConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, width, bias = config.head_dim, config.hidden_size, config.attention_bias
        self.q_proj = Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj, self.v_proj = (Linear(width, self.kv_heads * self.head_dim, bias=bias) for _ in range(2))
        self.o_proj = Linear(self.heads * self.head_dim, width, bias=bias)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def project(self, x: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, width] -> rotated q [B, T, Hq, D], rotated k and plain v [B, T, Hk, D]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        # q and k in one call
        q, k = turned(torch.cat([q, k], -2), turn).split([self.heads, self.kv_heads], -2)
        return q, k, v

    def forward(
        self, x: Tensor, turn: Turn | None, mask: Mask | None, cache: Cached | None = None, backend: Where = None
    ) -> Tensor:
        """x [B, T, width] -> [B, T, width]; with a cache, the T tokens are first appended to it, and see all of it."""
        return self.o_proj(attend(*self.project(x, turn), mask, cache, backend).flatten(-2))


class GatedAttention(Attention):
    """Attention with a norm of q and k, and a sigmoid gate on each number of its output (Qwen3-Next, 2025)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.gate_proj = Linear(config.hidden_size, self.heads * self.head_dim, bias=config.attention_bias)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(
        self, x: Tensor, turn: Turn | None, mask: Mask | None, cache: Cached | None = None, backend: Where = None
    ) -> Tensor:
        o = attend(*self.project(x, turn), mask, cache, backend).flatten(-2)
        return self.o_proj(o * self.gate_proj(x).sigmoid())


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); x [B, T, width] -> [B, T, width]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn: nn.Module = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module = SwiGLU(config)

    def forward(
        self, x: Tensor, turn: Turn, mask: Mask | None, cache: Cached | None = None, backend: Where = None
    ) -> Tensor:
        return self.finish(x, self.self_attn(self.input_layernorm(x), turn, mask, cache, backend))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention, whose output is `attended` [B, T, width]."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))
