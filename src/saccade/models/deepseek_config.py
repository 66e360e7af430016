"""The shape of a DeepSeek-V2, V3 or V3.2 model, and its `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .llama_config import LlamaConfig
from .positions import stretch

if TYPE_CHECKING:
    from typing_extensions import Self

KINDS = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}


@dataclass(frozen=True)
class DeepSeekConfig(LlamaConfig):
    """A `LlamaConfig` with latent attention and experts, named as in a Hugging Face `config.json`.

    Keys and values are computed from a latent row of `kv_lora_rank` numbers per token, and queries from one of
    `q_lora_rank`, or directly if it is 0. A head of q and k has `qk_nope_head_dim` numbers and `qk_rope_head_dim`
    rotated ones, a head of v has `v_head_dim`. The first `first_k_dense_replace` layers have a SwiGLU, the others
    `n_routed_experts`, of which a token uses `num_experts_per_tok`, and one that all tokens use.
    In models of type deepseek_v32, an indexer with `index_n_heads` heads of `index_head_dim` chooses the `index_topk`
    keys that each query sees.
    """

    END: ClassVar[dict[str, int]] = {"deepseek_v3": 1, "deepseek_v32": 1}
    UNDERSTOOD: ClassVar[dict[str, tuple[Any, ...]]] = {
        "model_type": tuple(KINDS),
        "hidden_act": ("silu",),
        "moe_layer_freq": (1,),
        "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
        "quantization_config": (None,),
        "sliding_window": (None, 0),
    }
    _V3: ClassVar[dict[str, Any]] = {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    MISSING: ClassVar[dict[str, dict[str, Any]]] = {
        "deepseek_v2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        "deepseek_v3": _V3,
        "deepseek_v32": {**_V3, "max_position_embeddings": 163840, "index_topk": 2048},
    }
    NEEDED: ClassVar[tuple[str, ...]] = ("vocab_size", "num_attention_heads", "num_experts_per_tok")

    model_type: str = "deepseek_v3"
    moe_intermediate_size: int = 64
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    first_k_dense_replace: int = 0
    n_routed_experts: int = 1
    n_shared_experts: int = 1
    num_experts_per_tok: int = 1
    n_group: int = 1
    topk_group: int = 1
    topk_method: str = "greedy"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    index_topk: int = 0
    index_n_heads: int = 64
    index_head_dim: int = 128

    def __post_init__(self) -> None:
        # the rotated numbers of a head
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()
        if self.model_type == "deepseek_v2" and self.norm_topk_prob:
            raise ValueError("norm_topk_prob is true; expected false in a model of type deepseek_v2")
        if self.num_experts_per_tok > self.n_routed_experts:
            experts = f"num_experts_per_tok={self.num_experts_per_tok} and n_routed_experts={self.n_routed_experts}"
            raise ValueError(f"{experts}; expected at most as many chosen as there are")
        if self.grouped:
            self._check_groups()
        if (self.model_type == "deepseek_v32") != bool(self.index_topk):
            raise ValueError(
                f"index_topk={self.index_topk} in a model of type {self.model_type}; expected the number of keys that "
                "a query sees in deepseek_v32, and 0 in others"
            )
        if self.index_topk and (not self.q_lora_rank or self.index_head_dim < self.qk_rope_head_dim):
            raise ValueError(
                f"q_lora_rank={self.q_lora_rank}, index_head_dim={self.index_head_dim}; expected a rank, because the "
                f"indexer reads the latent row of queries, and at least qk_rope_head_dim={self.qk_rope_head_dim}"
            )

    def _check_groups(self) -> None:
        count, groups, kept = self.n_routed_experts, self.n_group, self.topk_group
        # a group is rated by its two best experts in V3
        least = max(1 + self.sigmoid, -(-self.num_experts_per_tok // kept))
        if count % groups or kept > groups or count // groups < least:
            raise ValueError(
                f"n_group={groups} and topk_group={kept} with n_routed_experts={count}; expected groups of equal size, "
                "from which enough experts can be chosen"
            )

    @property
    def sigmoid(self) -> bool:
        """Whether experts are scored by sigmoids, as in V3, instead of a softmax, as in V2."""
        return self.model_type != "deepseek_v2"

    @property
    def grouped(self) -> bool:
        """Whether experts are chosen from the best groups only."""
        return self.n_group > 1 and (self.sigmoid or self.topk_method == "group_limited_greedy")

    @property
    def shared_intermediate_size(self) -> int:
        """The width of the expert that all tokens use."""
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def temperature(self) -> float:
        """The factor of scores beyond 1 / √D: the square of YaRN's factor for long texts, or 1."""
        scaling = self.rope_scaling or {"rope_type": "default"}
        share, factor = scaling.get("mscale_all_dim") or 0.0, stretch(scaling, self.max_position_embeddings)
        return (0.1 * share * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        expected = "softmax" if values.get("model_type") == "deepseek_v2" else "sigmoid"
        if (scoring := values.get("scoring_func", expected)) != expected:
            kind = values.get("model_type")
            raise ValueError(f"config.json says scoring_func={scoring!r}; expected {expected!r} in a {kind} model")
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` that Hugging Face transformers reads as this model."""
        own = {"architectures": [KINDS[self.model_type]], "model_type": self.model_type}
        own |= {"q_lora_rank": self.q_lora_rank or None, "num_nextn_predict_layers": 0}
        values = {**super().to_dict(), **own}
        return values if self.index_topk else {k: x for k, x in values.items() if not k.startswith("index_")}
