"""A Llama-style language model whose parameters carry the names of the Hugging Face Llama layout, Mistral's too.

Source: Touvron et al. 2023 (Llama, Llama 2), Jiang et al. 2023 (Mistral); SPEC row S21.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from saccade import mask as masks
from saccade.distributed.context import Where
from saccade.mask import Mask
from saccade.models.blocks import Block, Cached, Decoder, RMSNorm, positions_of
from saccade.models.fields import CONFIG, check_fields
from saccade.models.positions import rotary
from saccade.models.states import Turn
from saccade.models.weights import Tensors, filled, read_config
from saccade.rope import angles

# keys of a Hugging Face config.json that would change the function computed, with the values understood here
UNDERSTOOD = {"model_type": ("llama", "mistral"), "hidden_act": ("silu",), "partial_rotary_factor": (1.0, None)}


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model, named as in a Hugging Face Llama ``config.json``.

    ``head_dim`` 0 means ``hidden_size / num_attention_heads``; ``intermediate_size`` 0 means 8/3 · width, rounded up
    to a multiple of 64; ``sliding_window`` 0 means none.  Raises ValueError for a value that ``fields.CONFIG`` does not
    allow, where the sizes do not divide, or for a ``rope_scaling`` that is not computed here.
    """

    vocab_size: int
    hidden_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 0
    intermediate_size: int = 0
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int = 0
    eos_token_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        check_fields(vars(self), CONFIG)
        width, heads, kv_heads = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
        if not self.head_dim:
            if width % heads:
                raise ValueError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}; give head_dim")
            object.__setattr__(self, "head_dim", width // heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs")
        if not self.intermediate_size:
            object.__setattr__(self, "intermediate_size", -(-8 * width // 3 // 64) * 64)
        self.rotary()

    def rotary(self) -> tuple[Any, float]:
        """Angle per position of every pair [head_dim / 2], and the factor of the rotation."""
        return rotary(self.rope_scaling, self.rope_theta, self.head_dim, self.max_position_embeddings)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LlamaConfig:
        """From the contents of a ``config.json``.  Raises ValueError where it asks for what is not computed here."""
        values = dict(values)
        # transformers 5 keeps the base among the rest of the rotary parameters
        rope = dict(values.pop("rope_parameters", None) or values.pop("rope_scaling", None) or {})
        values["rope_theta"] = rope.pop("rope_theta", values.get("rope_theta"))
        plain = set(rope) <= {"rope_type", "type"} and set(rope.values()) <= {"default"}
        values["rope_scaling"] = None if plain else rope
        values.setdefault("model_type", "llama")
        for key, understood in UNDERSTOOD.items():
            if values.get(key, understood[0]) not in understood:
                raise ValueError(f"config.json says {key}={values[key]!r}; this model computes {understood[0]!r} only")
        if values["model_type"] == "llama":
            values.pop("sliding_window", None)
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        known = {field.name for field in fields(cls)}
        chosen = {key: value for key, value in values.items() if key in known and value is not None}
        lacking = [name for name in ("vocab_size", "num_attention_heads") if name not in chosen]
        if lacking:
            raise ValueError(f"config.json lacks {' and '.join(lacking)}; expected that of a Llama or Mistral model")
        chosen.setdefault("num_key_value_heads", chosen["num_attention_heads"])
        return cls(**chosen)

    def to_dict(self) -> dict[str, Any]:
        """The contents of a ``config.json`` that Hugging Face transformers reads as a Llama."""
        kind = "Mistral" if self.sliding_window else "Llama"
        own = {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_act": "silu"}
        return {**own, **asdict(self), "sliding_window": self.sliding_window or None, "torch_dtype": "float32"}


class LlamaStack(nn.Module):
    """Embedding, blocks, last norm; under the name ``model`` as in the Hugging Face layout."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(Decoder):
    """tokens -> logits.  Tied models have no ``lm_head.weight``: the embedding serves as the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaStack(config)
        # in float64, and no part of the state
        frequencies, factor = config.rotary()
        self.rotation = {"base": config.rope_theta, "frequencies": frequencies, "factor": factor}
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of ``initializer_range``; those that write to the residual stream by √(2·layers) less."""
        std = self.config.initializer_range
        residual = std / (2 * self.config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(
                    parameter, std=residual if name.endswith(("o_proj.weight", "down_proj.weight")) else std
                )

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        caches: Sequence[Cached] | None = None,
        backend: Where = None,
    ) -> Tensor:
        """The last norm's output [B, T, width]; arguments as in ``forward``."""
        positions = positions_of(tokens, caches, backend) if positions is None else positions
        mask = masks.causal() if mask is None else mask
        if self.config.sliding_window:
            mask = mask & masks.window(self.config.sliding_window - 1, None)
        x = self.model.embed_tokens(tokens)
        turn = self.turn(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, turn, mask, caches[i] if caches else None, backend)
        return self.model.norm(x)

    def turn(self, positions: Tensor) -> Turn:
        """The rotation of every layer at positions [T] or [B, T]."""
        return angles(self.model.embed_tokens.weight, positions, self.config.head_dim, **self.rotation or {})

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last."""
        return list(cast("Iterable[Block]", self.model.layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., width] -> [..., vocab]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return functional.linear(hidden, head.weight)

    @property
    def cached(self) -> tuple[int, int, int]:
        """(layers, kv_heads, head_dim) of what is cached."""
        return self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim

    @classmethod
    def load(cls, directory: str | Path) -> Llama:
        """The model of ``directory`` (``config.json`` and safetensors, in one file or in shards), in fp32 on the CPU.

        Raises FileNotFoundError without those files, ValueError where config or tensors are not such a model's, or
        where there are pickled weights alone.
        """
        directory = Path(directory)
        config = LlamaConfig.from_dict(read_config(directory))

        def ours(tensors: Tensors) -> Tensors:
            # old files hold tables that follow from the config, and a head beside the embedding that serves as one
            tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
            return {name: x for name, x in tensors.items() if not name.endswith(("rotary_emb.inv_freq", *tied))}

        return filled(lambda: cls(config), {"layers": config.num_hidden_layers}, directory, ours)
