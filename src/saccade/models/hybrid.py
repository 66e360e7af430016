"""Stacks of attention and recurrent layers: Jamba, Griffin, Samba, and stacks of one kind of layer.

One `StackCache` stores the keys and states of all layers. Packed documents start wherever a position is 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import mask as masks
from ..caches.contiguous import KVCache
from ..caches.latent import LatentKVCache
from ..caches.paged import PagedKVCache
from ..distributed.context import ContextParallel, Where
from ..mask import Mask
from ..rope import angles
from .blocks import Attention, Decoder, GatedAttention, Linear, RMSNorm, SwiGLU, linear
from .deepseek import LatentAttention
from .experts import Experts, Router, SharedExperts
from .gated_blocks import GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention, Retention
from .hybrid_config import ATTENTION, EXPERTS, HybridConfig
from .recurrent_blocks import GriffinRecurrent, Mamba, Mamba2
from .states import Carry, Packing, StackCache, State, Turn
from .stores import positions_of, unless_failed
from .weights import filled, read_config

# layers that write to the residual stream
WRITERS = ("o_proj.weight", "out_proj.weight", "linear_out.weight", "down_proj.weight")


class StackCall(NamedTuple):
    """The arguments that the layers of one pass share; turn is None if no positions are rotated."""

    turn: Turn | None
    mask: Mask
    packing: Packing | None
    backend: Where


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) · up(x)), x [..., width] -> [..., width]. Source: Shazeer 2020."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x)) if there is one; x [B, T, width] -> [B, T, width]."""

    def __init__(self, config: HybridConfig, number: int) -> None:
        super().__init__()
        kind, after = config.mixers[number], config.feed_forward[number]
        self.window = config.sliding_window if kind == "local" else 0
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = make_mixer(config, kind)
        self.mlp_norm = None if after == "none" else RMSNorm(config.hidden_size, config.rms_norm_eps)
        gated = partial(SharedExperts, gated=True)
        kinds = {"swiglu": SwiGLU, "geglu": GeGLU, "experts": Experts, "shared": SharedExperts, "gated": gated}
        self.mlp = None if after == "none" else kinds[after](config)

    def forward(self, x: Tensor, call: StackCall, cache: KVCache | State | None = None) -> Tensor:
        x = x + self.mix(self.mixer_norm(x), call, cache)
        if self.mlp is None:
            return x
        return x + self.mlp(cast("RMSNorm", self.mlp_norm)(x))

    def mix(self, x: Tensor, call: StackCall, cache: KVCache | State | None) -> Tensor:
        """The mixer's output [B, T, width]; a recurrent one reads packed sequences as one row."""
        if isinstance(self.mixer, (Attention, LatentAttention)):
            mask = call.mask & masks.window(self.window - 1, None) if self.window else call.mask
            return self.mixer(x, call.turn, mask, cast("KVCache | None", cache), call.backend)
        state = cast("State | None", cache)
        if call.packing is None:
            return self.mixer(x, Carry(state, None, call.turn, call.backend))
        B, T = x.shape[:2]
        turn = call.turn
        if turn is not None:
            # angles of positions [T] or [1, T] apply to every row
            cos, sin = (call.packing.pack(part.expand(B, T, *part.shape[-2:])) for part in turn)
            turn = cos, sin
        packed = self.mixer(call.packing.pack(x), Carry(state, call.packing.cu_seqlens, turn, call.backend))
        return call.packing.unpack(packed, B, T)


def make_mixer(config: HybridConfig, kind: str) -> nn.Module:
    """A layer's mixer of one of the kinds that `HybridConfig` names."""
    c = config
    if kind == "latent":
        return LatentAttention(c)
    if kind in ATTENTION:
        attention = GatedAttention(c) if kind == "gated" else Attention(c)
        if c.output_bias:
            attention.o_proj = Linear(attention.heads * attention.head_dim, c.hidden_size)
        return attention
    if kind == "mamba":
        return Mamba(
            c.hidden_size, c.state_size, c.kernel, c.expand, c.dt_rank, c.projection_bias, c.conv_bias, c.inner_eps
        )
    if kind == "mamba2":
        size = c.expand * c.hidden_size // c.ssm_heads
        return Mamba2(
            c.hidden_size,
            c.ssm_heads,
            size,
            c.state_size,
            c.groups,
            c.kernel,
            c.projection_bias,
            c.conv_bias,
            c.rms_norm_eps,
            c.step_limit,
        )
    if kind == "griffin":
        return GriffinRecurrent(c.hidden_size, c.lru_width, c.num_attention_heads, c.kernel)
    sizes = c.hidden_size, c.value_heads, c.key_dim, c.value_dim
    if kind == "delta":
        return GatedDeltaNet(*sizes, c.kernel, c.rms_norm_eps, c.key_heads)
    if kind == "kimi":
        return KimiDeltaAttention(*sizes, c.kernel, c.rms_norm_eps)
    return {"retention": Retention, "gla": GatedLinearAttention}[kind](*sizes, c.rms_norm_eps)


class Hybrid(Decoder):
    """tokens -> logits through the layers of a `HybridConfig`; called as `Llama`, with one `StackCache` as caches.

    Positions separate the documents of a row: the states of recurrent layers start again where one is 0. Documents are
    not read with caches, which raise a ValueError then.

    Examples:
        >>> from saccade.models.hybrid import Hybrid
        >>> from saccade.models.hybrid_config import HybridConfig, jamba
        >>> model = Hybrid(HybridConfig(vocab_size=100, **jamba(8)))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 100])
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of `initializer_range`, divided by √(2·layers) where they write to the residual stream.

        Convolutions, decays, steps and biases keep the values that their layers set.
        """
        std = self.config.initializer_range
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding, Router)) and not name.endswith("dt_proj"):
                less = f"{name}.weight".endswith(WRITERS)
                nn.init.normal_(module.weight, std=std / (2 * self.config.num_hidden_layers) ** 0.5 if less else std)

    @unless_failed
    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        caches: StackCache | None = None,
        backend: Where = None,
    ) -> Tensor:
        """The last norm's output [B, T, width]; arguments as in `forward`."""
        mask = masks.causal() if mask is None else mask
        positions = positions if positions is None else positions.expand(tokens.shape)
        if not isinstance(caches, StackCache):
            # none, or the pages of a stack with attention only
            packing = None if caches else Packing.of_documents(positions)
            positions = positions_of(tokens, caches, backend) if positions is None else positions
            if isinstance(backend, ContextParallel):
                backend = backend.at(positions.expand(tokens.shape))
                packing = Packing(backend.borders)
            return self._read(tokens, positions, mask, packing, caches, backend)
        if isinstance(backend, ContextParallel):
            raise ValueError("caches are given with ContextParallel, and states are of whole rows; leave caches out")
        if positions is not None and caches.states:
            begins = positions == 0
            begins[:, 0] &= caches.lengths > 0
            if bool(begins.any()):
                raise ValueError(
                    "positions begin again at 0, and the states in caches would not; expected one document per "
                    "sequence: leave caches out, or make caches for each document"
                )
        parts = list[Tensor]()
        for start, stop in caches.pieces(tokens):
            piece = tokens[:, start:stop]
            if positions is None:
                where = caches.positions[:, None] + torch.arange(stop - start, device=tokens.device)
            else:
                where = positions[..., start:stop]
            parts.append(self._read(piece, where, mask, caches.packing(stop - start), caches, backend))
            caches.read(piece)
        return torch.cat(parts, 1)

    def _read(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Mask,
        packing: Packing | None,
        caches: StackCache | None,
        backend: Where,
    ) -> Tensor:
        config, x = self.config, self.embedding(tokens)
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        turn = angles(x, positions, config.turned_dim, base=config.rope_theta) if config.turned_dim else None
        call = StackCall(turn, mask, packing, backend)
        for number, layer in enumerate(self.blocks):
            x = layer(x, call, caches[number] if caches is not None else None)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., width] -> [..., vocab]."""
        cap = self.config.softcap
        logits = linear(hidden, (self.embedding if self.head is None else self.head).weight)
        return torch.tanh(logits / cap) * cap if cap else logits

    @property
    def blocks(self) -> list[Layer]:
        """The layers, first to last."""
        return list(cast("Iterable[Layer]", self.layers))

    @property
    def cached(self) -> tuple[int, int, int]:
        """(attention layers, kv_heads, head_dim) of the keys that are cached."""
        attention = sum(kind in ATTENTION for kind in self.config.mixers)
        return attention, self.config.num_key_value_heads, self.config.head_dim

    def make_caches(
        self, batch: int, capacity: int, quantised: str | None = None, every: int | None = None
    ) -> StackCache:
        """An empty cache of the stack for `batch` sequences; `capacity` and `quantised` apply to the keys.

        every: tokens between two copies of the states, which `crop` needs; None for no copies.
        """
        stores, latent = iter(self._stores(quantised)), (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        layers = list[KVCache | State]()
        for kind in self.config.mixers:
            sizes, options = next(stores) if kind in ATTENTION else ((), {})
            if kind == "latent":
                layers.append(LatentKVCache(batch, capacity, *latent, **options))
            else:
                layers.append(KVCache(batch, capacity, *sizes, **options) if sizes else {})
        return StackCache(layers, batch, every, self.device)

    def make_pages(self, pages: int, page_size: int, quantised: str | None = None) -> list[PagedKVCache]:
        """Raises ValueError for recurrent layers and for latent attention, whose states and rows these pages lack."""
        if any(kind == "latent" or kind not in ATTENTION for kind in self.config.mixers):
            raise ValueError(
                "pages cannot hold the states of recurrent layers, nor latent rows next to keys; leave out pages and "
                "give the prompts as one batch"
            )
        return super().make_pages(pages, page_size, quantised)

    @torch.no_grad()
    def crop(self, caches: StackCache, length: int, backend: Where = None) -> None:
        """Cut every sequence to `length` tokens: go back to the nearest copy of the states and read the rest again.

        Raises TypeError and ValueError as `StackCache.rewind`.
        """
        undo = caches.undoing()
        try:
            again = caches.rewind(length)
            if again.shape[1]:
                self.hidden(again, caches=caches, backend=backend)
        except BaseException:
            undo()
            raise

    @classmethod
    def load(cls, directory: str | Path) -> Hybrid:
        """The model of `directory`, a run of `saccade train` or a checkpoint of `hybrid_loading.KINDS`.

        Raises as `Llama.load`.
        """
        from .hybrid_loading import read_hybrid

        directory = Path(directory)
        config, rename = read_hybrid(read_config(directory))
        experts = config.num_experts if set(EXPERTS) & set(config.feed_forward) else 0
        counts = {"layers": config.num_hidden_layers, "experts in a layer": experts}
        return filled(lambda: cls(config), counts, directory, rename)


def parameters(config: Any, build: Any) -> int:
    """The number of parameters of the model that `build` makes of config; allocates nothing."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())
