"""Checkpoints of Mamba, Mamba-2, Jamba, RecurrentGemma and the stacks of `delta_loading`, as `Hybrid` stacks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .delta_loading import KIMI, QWEN, kimi, kimi_tensors, qwen, qwen_tensors
from .hybrid_config import KIND, HybridConfig
from .hybrid_fields import Layout, Tensors, Values, common, rotation, understood
from .recurrent_blocks import wide
from .weights import without_tied


def read_hybrid(values: Values) -> tuple[HybridConfig, Callable[[Tensors], Tensors]]:
    """The stack that a `config.json` describes, and a function that gives its tensors the names of `Hybrid`.

    Raises ValueError for a config that is not supported.
    """
    kind = values.get("model_type")
    if kind == KIND:
        return HybridConfig.from_dict(values), lambda tensors: tensors
    layout = KINDS[str(kind)]
    try:
        stack = HybridConfig(**layout.fields(values))
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}; expected that of a {kind} model") from None
    return stack, lambda tensors: renamed(tensors, layout, stack)


def renamed(tensors: Tensors, layout: Layout, stack: HybridConfig) -> Tensors:
    """Tensors under the names of `Hybrid`, without a tied head."""
    weights = Tensors()
    for name, x in tensors.items():
        for theirs, ours in layout.names.items():
            name = re.sub(theirs, ours, name)
        if name:
            weights |= layout.adapt(stack, name, x)
    return without_tied(weights, "head.weight", "embedding.weight") if stack.tie_word_embeddings else weights


def state_space(values: Values) -> dict[str, Any]:
    """Sizes of a Mamba layer under the keys that Mamba and Mamba-2 share; these stacks have no attention heads."""
    return {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rotary": 0.0,
        "intermediate_size": 1,
        "state_size": values["state_size"],
        "kernel": values.get("conv_kernel", 4),
        "expand": values.get("expand", 2),
        "projection_bias": values.get("use_bias", False),
        "conv_bias": values.get("use_conv_bias", True),
    }


def mamba(values: Values) -> dict[str, Any]:
    """The stack of Mamba (Gu and Dao, 2023)."""
    understood(values, hidden_act="silu")
    layers, rank = values["num_hidden_layers"], values.get("time_step_rank", "auto")
    fields = common(values, ("mamba",) * layers, ("none",) * layers, "layer_norm_epsilon", True)
    return fields | state_space(values) | {"dt_rank": 0 if rank == "auto" else rank}


def mamba2(values: Values) -> dict[str, Any]:
    """The stack of Mamba-2 (Dao and Gu, 2024)."""
    understood(values, hidden_act="silu")
    layers, heads = values["num_hidden_layers"], values["num_heads"]
    expand = values.get("expand", 2)
    if heads * values["head_dim"] != expand * values["hidden_size"]:
        raise ValueError(
            f"config.json says num_heads={heads} of head_dim={values['head_dim']}; expected them to fill expand · "
            f"hidden_size = {expand * values['hidden_size']}"
        )
    low, high = values.get("time_step_limit") or (0.0, math.inf)
    fields = common(values, ("mamba2",) * layers, ("none",) * layers, "layer_norm_epsilon", False)
    limit = bound_of(low, 0.0), bound_of(high, math.inf)
    own = {"ssm_heads": heads, "groups": values.get("n_groups", 8), "step_limit": limit}
    return fields | state_space(values) | own


def bound_of(bound: Any, none: float) -> float:
    """A bound of the steps from JSON: a number, {"__float__": "Infinity"}, or null for `none`."""
    return none if bound is None else float(bound["__float__"] if isinstance(bound, dict) else bound)


def jamba(values: Values) -> dict[str, Any]:
    """The stack of Jamba (Lieber et al., 2024)."""
    understood(values, hidden_act="silu")
    layers, experts = range(values["num_hidden_layers"]), values.get("num_experts", 16)
    period, offset = values.get("attn_layer_period", 8), values.get("attn_layer_offset", 4)
    every, first = values.get("expert_layer_period", 2), values.get("expert_layer_offset", 1)
    mixers = tuple("attention" if i % period == offset else "mamba" for i in layers)
    after = tuple("experts" if i % every == first and experts > 1 else "swiglu" for i in layers)
    heads, rank = values["num_attention_heads"], values.get("mamba_dt_rank", "auto")
    eps = values.get("rms_norm_eps", 1e-6)
    return common(values, mixers, after, "rms_norm_eps", False) | {
        "intermediate_size": values["intermediate_size"],
        "num_attention_heads": heads,
        "rotary": 0.0,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or 0,
        "state_size": values.get("mamba_d_state", 16),
        "kernel": values.get("mamba_d_conv", 4),
        "expand": values.get("mamba_expand", 2),
        "dt_rank": 0 if rank == "auto" else rank,
        "inner_eps": eps,
        "projection_bias": values.get("mamba_proj_bias", False),
        "conv_bias": values.get("mamba_conv_bias", True),
        "num_experts": experts,
        "num_experts_per_tok": values.get("num_experts_per_tok", 2),
    }


def recurrent_gemma(values: Values) -> dict[str, Any]:
    """The stack of RecurrentGemma, a Griffin (De et al., 2024; Botev et al., 2024)."""
    understood(values, hidden_activation="gelu_pytorch_tanh")
    layers, heads = values["num_hidden_layers"], values["num_attention_heads"]
    pattern = tuple(values.get("block_types") or ("recurrent", "recurrent", "attention")) * layers
    mixers = tuple("griffin" if kind == "recurrent" else "local" for kind in pattern[:layers])
    width = values["hidden_size"]
    return common(values, mixers, ("geglu",) * layers, "rms_norm_eps", True) | {
        # config.json counts gate and up as one map
        "intermediate_size": values["intermediate_size"] // 2,
        "mlp_bias": True,
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or 0,
        "sliding_window": values.get("attention_window_size", 2048),
        **rotation(values, 0.5),
        "attention_bias": values.get("attention_bias", False),
        "output_bias": True,
        "kernel": values.get("conv1d_width", 4),
        "lru_width": values.get("lru_width") or width,
        "softcap": values.get("logits_soft_cap", 30.0),
        # rounded as in the training of the model
        "embedding_scale": torch.tensor(width**0.5, dtype=torch.bfloat16).item(),
    }


STATE_SPACE = {
    r"^backbone\.embeddings?\.": "embedding.",
    r"^backbone\.norm_f\.": "norm.",
    r"^lm_head\.": "head.",
    r"^backbone\.layers\.(\d+)\.norm\.": r"layers.\1.mixer_norm.",
    r"^backbone\.": "",
}
JAMBA = {
    r"^model\.embed_tokens\.": "embedding.",
    r"^model\.final_layernorm\.": "norm.",
    r"^lm_head\.": "head.",
    r"\.input_layernorm\.": ".mixer_norm.",
    r"\.pre_ff_layernorm\.": ".mlp_norm.",
    r"\.feed_forward\.": ".mlp.",
    r"\.(mamba|self_attn)\.": ".mixer.",
    r"^model\.": "",
}
RECURRENT_GEMMA = {
    r"^model\.embed_tokens\.": "embedding.",
    r"^model\.final_norm\.": "norm.",
    r"^lm_head\.": "head.",
    r"\.temporal_pre_norm\.": ".mixer_norm.",
    r"\.channel_pre_norm\.": ".mlp_norm.",
    r"\.mlp_block\.": ".mlp.",
    r"\.temporal_block\.": ".mixer.",
    r"^model\.": "",
}


def shifted(stack: HybridConfig, name: str, x: Tensor) -> Tensors:
    """RecurrentGemma stores the weights of norms minus 1."""
    return {name: 1 + wide(x) if name.endswith("norm.weight") else x}


KINDS = {
    "mamba": Layout(mamba, STATE_SPACE),
    "mamba2": Layout(mamba2, STATE_SPACE),
    "jamba": Layout(jamba, JAMBA),
    "recurrent_gemma": Layout(recurrent_gemma, RECURRENT_GEMMA, shifted),
    "qwen3_next": Layout(qwen, QWEN, qwen_tensors),
    "kimi_linear": Layout(kimi, KIMI, kimi_tensors),
}
