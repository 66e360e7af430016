"""A Llama-style language model with parameters named as in the Hugging Face layout of Llama and Mistral.

Source: Touvron et al. 2023 (Llama, Llama 2), Jiang et al. 2023 (Mistral).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import mask as masks
from ..distributed.context import Where
from ..mask import Mask
from ..rope import angles
from .blocks import Block, Decoder, Linear, RMSNorm, linear
from .llama_config import LlamaConfig
from .states import Turn
from .stores import Cached, positions_of, unless_failed
from .weights import Tensors, filled, read_config, without_tied

if TYPE_CHECKING:
    from typing_extensions import Self


class LlamaStack(nn.Module):
    """Embedding, blocks and last norm: the part that the Hugging Face layout names `model`."""

    def __init__(self, config: LlamaConfig, make_block: Callable[[LlamaConfig, int], Block]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(make_block(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(Decoder):
    """tokens -> logits. Tied models have no `lm_head.weight`: the embedding serves as the head.

    Examples:
        >>> from saccade.models.llama import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(vocab_size=100))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 100])
    """

    # the class of its config
    Config: type[LlamaConfig] = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaStack(config, self.make_block)
        self._frequencies: dict[torch.device, Tensor] = {}
        # in float64, and not in the state dict
        frequencies, factor = config.rotary()
        self.rotation = {"base": config.rope_theta, "frequencies": frequencies, "factor": factor}
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    def make_block(self, config: LlamaConfig, number: int) -> Block:
        """The block of layer `number`."""
        return Block(config)

    def reset_parameters(self) -> None:
        """Normal weights of `initializer_range`, divided by √(2·layers) where they write to the residual stream."""
        std = self.config.initializer_range
        residual = std / (2 * self.config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(
                    parameter, std=residual if name.endswith(("o_proj.weight", "down_proj.weight")) else std
                )

    @unless_failed
    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        caches: Sequence[Cached] | None = None,
        backend: Where = None,
    ) -> Tensor:
        """The last norm's output [B, T, width]; arguments as in `forward`."""
        positions = positions_of(tokens, caches, backend) if positions is None else positions
        if mask is not None and self.config.sliding_window:
            mask = mask & masks.window(self.config.sliding_window - 1, None)
        mask = self.mask if mask is None else mask
        x = self.model.embed_tokens(tokens)
        turn = self.turn(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, turn, mask, caches[i] if caches else None, backend)
        return self.model.norm(x)

    @property
    def mask(self) -> Mask:
        """The mask of a call without one: a single node, whose reach decode follows on the device."""
        window = self.config.sliding_window
        return masks.window(window - 1, 0) if window else masks.causal()

    def turn(self, positions: Tensor) -> Turn:
        """The rotation of every layer at positions [T] or [B, T]."""
        frequencies, factor = self.config.rotary()
        if frequencies is not None:
            # copied to each device once: a copy from the host ends the capture of a graph
            if self.device not in self._frequencies:
                self._frequencies[self.device] = torch.from_numpy(frequencies).to(self.device)
            frequencies = self._frequencies[self.device]
        options: dict[str, Any] = {"base": self.config.rope_theta, "frequencies": frequencies, "factor": factor}
        return angles(self.model.embed_tokens.weight, positions, self.config.head_dim, **options)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last."""
        return list(cast("Iterable[Block]", self.model.layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., width] -> [..., vocab]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head.weight)

    @property
    def cached(self) -> tuple[int, int, int]:
        """(layers, kv_heads, head_dim) of the cached keys."""
        return self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """The model of `directory` (`config.json` and safetensors, in one file or in shards), in fp32 on the CPU.

        Raises FileNotFoundError without those files, and ValueError if config or tensors do not belong to such a model,
        or if there are only pickled weights.
        """
        directory = Path(directory)
        config = cls.Config.from_dict(read_config(directory))
        return filled(lambda: cls(config), cls.counts(config), directory, partial(cls.own, config))

    @classmethod
    def own(cls, config: LlamaConfig, tensors: Tensors) -> Tensors:
        """The tensors of a checkpoint that the model reads."""
        # old files store tables that follow from the config
        kept = {name: x for name, x in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
        return without_tied(kept, "lm_head.weight", "model.embed_tokens.weight") if config.tie_word_embeddings else kept

    @classmethod
    def counts(cls, config: LlamaConfig) -> dict[str, int]:
        """The numbers of layers and other parts of a checkpoint, as `weights.filled` takes them."""
        return {"layers": config.num_hidden_layers}
