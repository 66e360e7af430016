"""GPT-2, with parameters named as in the Hugging Face layout.

Source: Radford et al. 2019; learned positions, layer norm before each half of a block, tied head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import mask as masks
from ..distributed.context import Where
from ..mask import Mask
from .blocks import Decoder, linear
from .fields import CONFIG, check_fields, ends_of
from .stores import Cached, attend, positions_of, unless_failed
from .weights import Tensors, filled, read_config, without_tied

# keys that change what is computed, each with the only supported value
UNDERSTOOD = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Gpt2Config:
    """The shape of a model, named as in a Hugging Face GPT-2 `config.json`; `n_inner` 0 means 4 · width.

    Raises ValueError for a value that `fields.CONFIG` does not allow, or if the heads do not divide the width.
    """

    vocab_size: int
    n_embd: int
    n_layer: int
    n_head: int
    n_positions: int = 1024
    n_inner: int = 0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    bos_token_id: int = 50256
    eos_token_id: int | tuple[int, ...] = 50256

    def __post_init__(self) -> None:
        check_fields(vars(self), CONFIG)
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Gpt2Config:
        """The config of the contents of a `config.json`. Raises ValueError for one that is not supported."""
        for key, value in UNDERSTOOD.items():
            if values.get(key, value) != value:
                raise ValueError(f"config.json says {key}={values[key]!r}; this model computes {key}={value!r} only")
        names = list(cls.__dataclass_fields__)
        lacking = [name for name in names[:4] if values.get(name) is None]
        if lacking:
            raise ValueError(f"config.json lacks {', '.join(lacking)}; expected that of a GPT-2 model")
        chosen = {name: values[name] for name in names if values.get(name) is not None}
        chosen["eos_token_id"] = ends_of(values, cls.eos_token_id)
        return cls(**chosen)

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` that Hugging Face transformers reads as a GPT-2."""
        # no dropout: none was trained with
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        own = {"architectures": ["GPT2LMHeadModel"], **UNDERSTOOD, **dropouts, "torch_dtype": "float32"}
        return {**own, **asdict(self), "n_inner": self.n_inner or None}

    @property
    def max_position_embeddings(self) -> int:
        """The length of the longest text, in tokens."""
        return self.n_positions

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)


class Linear(nn.Module):
    """x weight + bias, with weight [in, out] as in GPT-2's files."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    """Multi-head attention on x [B, T, width]; with a cache, the T tokens are first appended to it."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.heads = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [B, T, width] -> q, k, v [B, T, H, D]."""
        return self.c_attn(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)

    def forward(self, x: Tensor, mask: Mask, cache: Cached | None, backend: Where) -> Tensor:
        q, k, v = self.project(x)
        return self.c_proj(attend(q, k, v, mask, cache, backend).flatten(-2))


class FeedForward(nn.Module):
    """gelu between two linear maps; x [B, T, width] -> the same."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc, self.c_proj = Linear(config.n_embd, inner), Linear(inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, mask: Mask, cache: Cached | None, backend: Where) -> Tensor:
        return self.finish(x, self.attn(self.ln_1(x), mask, cache, backend))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention, whose output is `attended` [B, T, width]."""
        x = x + attended
        return x + self.mlp(self.ln_2(x))


class Gpt2(Decoder):
    """tokens -> logits; called as `Llama`.

    Examples:
        >>> from saccade.models.gpt2 import Gpt2, Gpt2Config
        >>> model = Gpt2(Gpt2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 100])
    """

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of `initializer_range`, divided by √(2·layers) where they write to the residual stream."""
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                less = (2 * self.config.n_layer) ** 0.5 if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=std / less)

    @unless_failed
    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        caches: Sequence[Cached] | None = None,
        backend: Where = None,
    ) -> Tensor:
        """The last norm's output [B, T, width]."""
        limit = self.config.n_positions
        if positions is None and not caches and tokens.shape[1] > limit:
            raise ValueError(f"the text has {tokens.shape[1]} tokens; expected at most {limit}, the positions")
        positions = positions_of(tokens, caches, backend) if positions is None else positions
        # a GPU is not waited for, and may read steps beyond the last position whose tokens nothing uses
        if positions.is_cpu and positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < limit:
            raise ValueError(
                f"positions are {int(positions.min())} to {int(positions.max())}; expected 0 to {limit - 1}, those of "
                "the model: shorten the text"
            )
        positions = positions.clamp(0, limit - 1)
        mask = masks.causal() if mask is None else mask
        x = self.wte(tokens) + self.wpe(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, caches[i] if caches else None, backend)
        return self.ln_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., width] -> [..., vocab]."""
        return linear(hidden, self.wte.weight)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last."""
        return list(cast("Iterable[Block]", self.h))

    @property
    def cached(self) -> tuple[int, int, int]:
        """(layers, kv_heads, head_dim) of the cached keys."""
        return self.config.n_layer, self.config.n_head, self.config.n_embd // self.config.n_head

    @classmethod
    def load(cls, directory: str | Path) -> Gpt2:
        """The model of `directory`; raises as `Llama.load`."""
        directory = Path(directory)
        config = Gpt2Config.from_dict(read_config(directory))

        def ours(tensors: Tensors) -> Tensors:
            # the oldest files have no prefix, and store masks
            dropped = (".attn.bias", ".attn.masked_bias")
            named = {name.removeprefix("transformer."): x for name, x in tensors.items() if not name.endswith(dropped)}
            return without_tied(named, "lm_head.weight", "wte.weight")

        return filled(lambda: cls(config), {"layers": config.n_layer}, directory, ours)
