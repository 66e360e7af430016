"""Checkpoints of Qwen3-Next and Kimi Linear, whose stacks have delta rules and attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .fields import LINEAR, check_fields
from .hybrid_config import HybridConfig
from .hybrid_fields import Tensors, Values, common, rotation, understood
from .recurrent_blocks import wide


def qwen(values: Values) -> dict[str, Any]:
    """The stack of Qwen3-Next (Qwen Team, 2025): gated DeltaNet, and gated attention in every fourth layer."""
    understood(values, hidden_act="silu")
    layers, every = range(values["num_hidden_layers"]), values.get("full_attention_interval", 4)
    kinds = values.get("layer_types") or ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
    dense, step = values.get("mlp_only_layers", ()), values.get("decoder_sparse_step", 1)
    after = tuple("swiglu" if i in dense or (i + 1) % step else "gated" for i in layers)
    bias = values.get("attention_bias", False)
    return common(values, mixers(kinds, "delta", "gated"), after, "rms_norm_eps", False) | {
        "num_attention_heads": values["num_attention_heads"],
        "num_key_value_heads": values["num_key_value_heads"],
        "head_dim": values.get("head_dim", 256),
        **rotation(values, 0.25),
        "attention_bias": bias,
        "output_bias": bias,
        "kernel": values.get("linear_conv_kernel_dim", 4),
        "key_dim": values.get("linear_key_head_dim", 128),
        "value_dim": values.get("linear_value_head_dim", 128),
        "key_heads": values.get("linear_num_key_heads", 16),
        "value_heads": values.get("linear_num_value_heads", 32),
        "intermediate_size": values["intermediate_size"],
        "moe_intermediate_size": values.get("moe_intermediate_size", 512),
        "shared_intermediate_size": values.get("shared_expert_intermediate_size", 512),
        "num_experts": values.get("num_experts", 512),
        "num_experts_per_tok": values.get("num_experts_per_tok", 10),
        "norm_topk_prob": values.get("norm_topk_prob", True),
    }


def kimi(values: Values) -> dict[str, Any]:
    """The stack of Kimi Linear (Kimi Team, 2025): Kimi delta attention, and latent attention without positions."""
    understood(values, hidden_act="silu", num_expert_group=1, topk_group=1, moe_layer_freq=1, mla_use_nope=True)
    understood(values, moe_router_activation_func="sigmoid")
    layers, linear = range(values["num_hidden_layers"]), values.get("linear_attn_config", {})
    check_fields(linear, LINEAR, "config.json: linear_attn_config")
    if unknown := sorted(linear.keys() - LINEAR.keys()):
        raise ValueError(f"config.json: linear_attn_config has {unknown[0]}; expected {', '.join(LINEAR)}")
    full = linear.get("full_attn_layers", range(5, len(layers) + 1, 4))
    kinds = values.get("layer_types") or ["full_attention" if i + 1 in full else "linear_attention" for i in layers]
    first = values.get("first_k_dense_replace", 1)
    dense = values.get("mlp_layer_types") or ["dense" if i < first else "sparse" for i in layers]
    after = tuple(chosen(kind, "mlp_layer_types", dense="swiglu", sparse="shared") for kind in dense)
    size, width = linear.get("head_dim", values.get("linear_head_dim", 128)), values.get("moe_intermediate_size", 1024)
    fields = common(values, mixers(kinds, "kimi", "latent"), after, "rms_norm_eps", False)
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "attention_bias"
    return (
        fields
        | {name: values[name] for name in names if values.get(name) is not None}
        | {
            "max_position_embeddings": values.get("model_max_length") or fields["max_position_embeddings"],
            "num_attention_heads": values["num_attention_heads"],
            "num_key_value_heads": values["num_attention_heads"],
            "rotary": 0.0,
            "kernel": linear.get("short_conv_kernel_size", values.get("linear_conv_kernel_dim", 4)),
            "key_dim": size,
            "value_heads": linear.get("num_heads", values.get("linear_num_heads", 32)),
            "intermediate_size": values["intermediate_size"],
            "moe_intermediate_size": width,
            "shared_intermediate_size": width * values.get("num_shared_experts", 1),
            "num_experts": values["num_experts"],
            "num_experts_per_tok": values.get("num_experts_per_token", 8),
            "norm_topk_prob": values.get("moe_renormalize", True),
            "routed_scaling_factor": values.get("routed_scaling_factor", 2.446),
        }
    )


def mixers(kinds: list[str], linear: str, full: str) -> tuple[str, ...]:
    """The mixers of the layers that a config calls linear_attention and full_attention."""
    return tuple(chosen(kind, "layer_types", linear_attention=linear, full_attention=full) for kind in kinds)


def chosen(kind: str, key: str, **ours: str) -> str:
    """The part that a config's list calls `kind`. Raises ValueError for a kind that is not supported."""
    if kind not in ours:
        raise ValueError(f"config.json says {key} has {kind!r}; expected {' or '.join(ours)}")
    return ours[kind]


def qwen_tensors(stack: HybridConfig, name: str, x: Tensor) -> Tensors:
    """A tensor of Qwen3-Next: norms store their weights minus 1, and every head has the rows of several maps."""
    c, ratio = stack, stack.value_heads // stack.key_heads
    keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    # the number of heads, and the rows of each map per head
    fused = {
        "in_proj_qkvz": (
            c.key_heads,
            {"q_proj": c.key_dim, "k_proj": c.key_dim} | dict.fromkeys(("v_proj", "g_proj"), ratio * c.value_dim),
        ),
        "in_proj_ba": (c.key_heads, {"b_proj": ratio, "a_proj": ratio}),
        "conv1d": (1, {"convs.q": keys, "convs.k": keys, "convs.v": values}),
        "q_proj": (c.num_attention_heads, {"q_proj": c.head_dim, "gate_proj": c.head_dim}),
    }
    layer, _, leaf = name.rpartition(".")
    layer, _, module = layer.rpartition(".")
    if module in fused:
        heads, rows = fused[module]
        # other sizes keep the name, which is then refused as unknown
        if x.ndim and len(x) == heads * sum(rows.values()):
            parts = x.unflatten(0, (heads, -1)).split(list(rows.values()), 1)
            return {f"{layer}.{to}.{leaf}": part.flatten(0, 1) for to, part in zip(rows, parts, strict=True)}
    if name.endswith("norm.weight") and module != "o_norm":
        return {name: 1 + wide(x)}
    return repeated(stack, name, x)


def kimi_tensors(stack: HybridConfig, name: str, x: Tensor) -> Tensors:
    """A tensor of Kimi Linear: decays are stored with the dimensions that its kernels read."""
    return {name: x.flatten()} if name.endswith(".A_log") else repeated(stack, name, x)


def repeated(stack: HybridConfig, name: str, x: Tensor) -> Tensors:
    """The weights of a norm that all heads share, once for each head; other tensors as they are."""
    return {name: x.repeat(stack.value_heads) if name.endswith(".o_norm.weight") and x.ndim == 1 else x}


COMMON = {
    r"^model\.embed_tokens\.": "embedding.",
    r"^lm_head\.": "head.",
    r"^model\.": "",
    r"\.input_layernorm\.": ".mixer_norm.",
    r"\.post_attention_layernorm\.": ".mlp_norm.",
    r"\.(linear_attn|self_attn)\.": ".mixer.",
}
# layers that predict further tokens are not read
QWEN = COMMON | {
    r"^mtp\..*": "",
    r"\.mixer\.norm\.": ".mixer.o_norm.",
    r"\.mixer\.out_proj\.": ".mixer.o_proj.",
    r"\.shared_expert\.": ".shared_experts.",
    r"\.shared_expert_gate\.": ".shared_gate.",
}
KIMI = COMMON | {
    r"\.f_a_proj\.": ".a_proj.0.",
    r"\.f_b_proj\.": ".a_proj.1.",
    r"\.g_a_proj\.": ".g_proj.0.",
    r"\.g_b_proj\.": ".g_proj.1.",
    r"\.([qkv])_conv1d\.": r".convs.\1.",
    r"\.block_sparse_moe\.": ".mlp.",
    r"\.w1\.": ".gate_proj.",
    r"\.w2\.": ".down_proj.",
    r"\.w3\.": ".up_proj.",
}
