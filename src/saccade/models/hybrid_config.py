"""The shape of a stack that mixes attention with recurrent layers, and the stacks of published models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from .fields import CONFIG, check_fields, ends_of

# mixers whose keys are cached, and those that carry a state
ATTENTION = ("attention", "local", "gated", "latent")
MIXERS = (*ATTENTION, "mamba", "mamba2", "griffin", "retention", "gla", "delta", "kimi")
EXPERTS = ("experts", "shared", "gated")
FEED_FORWARD = ("swiglu", "geglu", *EXPERTS, "none")
# no positions are learned, so only memory bounds the length of a text
UNBOUNDED = 1 << 30
KIND = "saccade_hybrid"


@dataclass(frozen=True)
class HybridConfig:
    """A stack: the mixer and the feed-forward of each layer, and the sizes of each kind.

    mixers: "attention" and "local" (over the last `sliding_window` tokens) have `num_attention_heads` query heads and
    `num_key_value_heads` key heads; the share `rotary` of their dimensions is rotated. "gated" also normalises q and k
    and gates its output (Qwen3-Next). "latent" has the sizes of a `DeepSeekConfig`. "mamba" and "mamba2" are `expand`
    times as wide, with `state_size`, `dt_rank` (mamba; 0 for a sixteenth of the width), `ssm_heads` and `groups`
    (mamba2). "griffin" has `lru_width` channels in num_attention_heads blocks. "retention", "gla", "delta" and "kimi"
    (Kimi delta attention) have `value_heads` heads of `key_dim` and `value_dim`, or num_attention_heads if it is 0; in
    "delta", `key_heads` of them have queries and keys. `kernel` is the length of every convolution.
    feed_forward: "swiglu", "geglu", "none", or "experts", which uses `num_experts_per_tok` of `num_experts` SwiGLUs.
    "shared" and "gated" experts are `moe_intermediate_size` wide, and every token uses one more that is
    `shared_intermediate_size` wide: "shared" chooses experts as DeepSeek-V3 does, "gated" by a softmax, and gates the
    shared one (Qwen3-Next).
    `inner_eps` is the eps of the norms inside a mamba layer; None means no norms. `embedding_scale` multiplies
    embeddings. `softcap` bounds logits; 0 means no bound. Raises ValueError if the fields contradict each other.

    Examples:
        >>> from saccade.models.hybrid_config import HybridConfig
        >>> config = HybridConfig(vocab_size=100, mixers=("mamba", "attention"), feed_forward=("swiglu", "swiglu"))
        >>> config.num_hidden_layers
        2
    """

    # fields of a `DeepSeekConfig` that these stacks do not vary
    sigmoid: ClassVar[bool] = True
    grouped: ClassVar[bool] = False
    n_group: ClassVar[int] = 1
    topk_group: ClassVar[int] = 1
    temperature: ClassVar[float] = 1.0
    rope_interleave: ClassVar[bool] = False

    vocab_size: int
    mixers: tuple[str, ...]
    feed_forward: tuple[str, ...]
    hidden_size: int = 192
    intermediate_size: int = 512
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 0
    sliding_window: int = 0
    rotary: float = 1.0
    rope_theta: float = 10000.0
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    state_size: int = 16
    kernel: int = 4
    expand: int = 2
    dt_rank: int = 0
    ssm_heads: int = 0
    groups: int = 1
    step_limit: tuple[float, float] = (0.0, math.inf)
    projection_bias: bool = False
    conv_bias: bool = True
    inner_eps: float | None = None
    lru_width: int = 0
    key_dim: int = 0
    value_dim: int = 0
    value_heads: int = 0
    key_heads: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    num_experts: int = 1
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 64
    shared_intermediate_size: int = 0
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    embedding_scale: float = 1.0
    softcap: float = 0.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = UNBOUNDED
    initializer_range: float = 0.02
    eos_token_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        check_fields(vars(self), CONFIG)
        for name, known in (("mixers", MIXERS), ("feed_forward", FEED_FORWARD)):
            unknown = [kind for kind in getattr(self, name) if kind not in known]
            if unknown:
                raise ValueError(f"{name} has {unknown[0]!r}; expected {', '.join(known)}")
        if not self.mixers or len(self.mixers) != len(self.feed_forward):
            raise ValueError(
                f"{len(self.mixers)} mixers and {len(self.feed_forward)} feed-forwards are given; expected one of each "
                "per layer, and at least one layer"
            )
        width, heads = self.hidden_size, self.num_attention_heads
        defaults = {"head_dim": width // heads, "lru_width": width, "key_dim": width // heads, "ssm_heads": heads}
        defaults |= {"value_heads": heads, "shared_intermediate_size": self.moe_intermediate_size}
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        for name, other in (("value_dim", "key_dim"), ("key_heads", "value_heads")):
            if not getattr(self, name):
                object.__setattr__(self, name, getattr(self, other))
        self._check()

    def _check(self) -> None:
        heads = "num_attention_heads"
        pairs = [(heads, "num_key_value_heads"), ("ssm_heads", "groups"), ("value_heads", "key_heads")]
        if "griffin" in self.mixers:
            pairs.append(("lru_width", heads))
        for above, below in pairs:
            if getattr(self, above) % getattr(self, below):
                what = f"{above}={getattr(self, above)} and {below}={getattr(self, below)}"
                raise ValueError(f"{what}; expected {above} to be a multiple of {below}")
        if "mamba2" in self.mixers and self.expand * self.hidden_size % self.ssm_heads:
            raise ValueError(
                f"ssm_heads is {self.ssm_heads}; expected a divisor of expand · hidden_size = "
                f"{self.expand * self.hidden_size}"
            )
        if "latent" in self.mixers and self.turned_dim not in (0, self.qk_rope_head_dim):
            raise ValueError(
                f"{self.turned_dim} dimensions are rotated; expected qk_rope_head_dim = {self.qk_rope_head_dim} or "
                "rotary = 0, because a layer is latent"
            )
        if "local" in self.mixers and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window is {self.sliding_window}; expected at least 1 token, because a layer is local"
            )
        if "retention" in self.mixers and self.turned_dim > self.key_dim:
            raise ValueError(
                f"{self.turned_dim} dimensions are rotated; expected at most key_dim = {self.key_dim}, because a layer "
                "is retention"
            )
        if self.turned_dim % 2:
            raise ValueError(
                f"{self.turned_dim} dimensions are rotated; expected an even number: choose head_dim so that it is even"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; expected at most num_experts, {self.num_experts}"
            )

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers."""
        return len(self.mixers)

    @property
    def n_routed_experts(self) -> int:
        """The number of experts, under the name of a `DeepSeekConfig`."""
        return self.num_experts

    @property
    def turned_dim(self) -> int:
        """The number of rotated dimensions per head, 0 for no positions."""
        return int(self.head_dim * self.rotary)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json`."""
        values = asdict(self)
        # JSON has no infinity
        values["step_limit"] = [None if math.isinf(bound) else bound for bound in self.step_limit]
        return {"model_type": KIND, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HybridConfig:
        """The config of what `to_dict` returned. Raises ValueError if a layer's kind or the vocabulary is missing."""
        names = {field.name for field in fields(cls)}
        chosen: dict[str, Any] = {key: _frozen(x) for key, x in values.items() if key in names and x is not None}
        lacking = [name for name in ("vocab_size", "mixers", "feed_forward") if name not in chosen]
        if lacking:
            raise ValueError(f"config.json lacks {' and '.join(lacking)}; expected that of a saccade hybrid model")
        chosen["eos_token_id"] = ends_of(values, cls.eos_token_id)
        limit = chosen.pop("step_limit", None)
        if limit is not None:
            chosen["step_limit"] = tuple(math.inf if bound is None else bound for bound in limit)
        return cls(**chosen)


def _frozen(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x


def jamba(layers: int, period: int = 8, offset: int = 4, experts: int = 1) -> dict[str, Any]:
    """Mixers and feed-forwards of Jamba: attention at i % period = offset, Mamba elsewhere, experts at odd i.

    Source: Lieber et al., 2024. Positions come from Mamba alone. experts: 1 for none.
    """
    mixers = tuple("attention" if i % period == offset else "mamba" for i in range(layers))
    dense = tuple("experts" if i % 2 and experts > 1 else "swiglu" for i in range(layers))
    return {"mixers": mixers, "feed_forward": dense, "num_experts": experts, "rotary": 0.0, "inner_eps": 1e-6}


def griffin(layers: int, window: int = 2048) -> dict[str, Any]:
    """Mixers and feed-forwards of Griffin: two recurrent blocks, then local multi-query attention (De et al., 2024)."""
    pattern = ("griffin", "griffin", "local") * layers
    return {
        "mixers": pattern[:layers],
        "feed_forward": ("geglu",) * layers,
        "sliding_window": window,
        "num_key_value_heads": 1,
    }


def samba(layers: int, window: int = 2048) -> dict[str, Any]:
    """Mixers and feed-forwards of Samba: Mamba and windowed attention in turn, with SwiGLUs (Ren et al., 2024)."""
    pattern = ("mamba", "local") * layers
    return {"mixers": pattern[:layers], "feed_forward": ("swiglu",) * layers, "sliding_window": window}
