"""Small models of transformers, whose checkpoints the tests read."""

from __future__ import annotations

import torch
import transformers as hf

SMALL = {
    "vocab_size": 83, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 82,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500.0,
}  # fmt: skip
RECURRENT = {
    "vocab_size": 83, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 8, "bos_token_id": 1, "eos_token_id": 82,
}  # fmt: skip
HEADS = {"num_heads": 6, "head_dim": 16}
JAMBA = SMALL | {"num_hidden_layers": 6, "num_experts": 4, "mamba_d_state": 8, "pad_token_id": 0}
SMALL_GEMMA = {
    "vocab_size": 83, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 1, "attention_window_size": 9, "bos_token_id": 1, "eos_token_id": 82,
}  # fmt: skip
DEEPSEEK = SMALL | {
    "num_hidden_layers": 3, "num_key_value_heads": 6, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "kv_lora_rank": 16,
    "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4, "mscale": 0.7,
    "mscale_all_dim": 1.3, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
QWEN = SMALL | {
    "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20, "num_experts": 8, "num_experts_per_tok": 3,
}  # fmt: skip
KIMI = SMALL | {
    "num_hidden_layers": 5, "num_key_value_heads": 6, "pad_token_id": 0, "moe_intermediate_size": 24,
    "num_local_experts": 8, "num_experts_per_tok": 3, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "linear_head_dim": 8, "linear_num_heads": 3,
}  # fmt: skip
LATENT = ["deepseek v3", "deepseek v3, yarn", "deepseek v2", "deepseek v2 lite", "deepseek v3.2"]
STACKS = ["mamba", "mamba2", "jamba", "recurrent gemma", "qwen3 next", "kimi linear"]
MODELS = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "tied": lambda: hf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "biases": lambda: hf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "wide heads": lambda: hf.LlamaConfig(**SMALL, head_dim=16),
    "base": lambda: hf.LlamaConfig(**SMALL, rope_parameters={"rope_type": "default", "rope_theta": 777.0}),
    "linear": lambda: hf.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "llama3": lambda: hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "yarn": lambda: hf.LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4,
        },
    ),
    "several ends": lambda: hf.LlamaConfig(**SMALL | {"eos_token_id": [81, 82]}),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=9),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=83, n_positions=128, n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=82
    ),
    "mistral without a window": lambda: hf.MistralConfig(**SMALL, sliding_window=None),
    "deepseek v3": lambda: hf.DeepseekV3Config(**DEEPSEEK),
    "deepseek v3, yarn": lambda: hf.DeepseekV3Config(
        **DEEPSEEK | {"norm_topk_prob": False}, rope_parameters=YARN, rope_interleave=False
    ),
    "deepseek v2": lambda: hf.DeepseekV2Config(
        **DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=1.7, rope_parameters=YARN
    ),
    "deepseek v2 lite": lambda: hf.DeepseekV2Config(**DEEPSEEK | {"q_lora_rank": None}, n_shared_experts=2),
    # few index heads would give several keys the score 0
    "deepseek v3.2": lambda: hf.DeepseekV32Config(**DEEPSEEK, index_topk=13, index_n_heads=24, index_head_dim=12),
    "mamba": lambda: hf.MambaConfig(**RECURRENT),
    "mamba untied, with biases": lambda: hf.MambaConfig(
        **RECURRENT, tie_word_embeddings=False, use_bias=True, use_conv_bias=False, conv_kernel=3, time_step_rank=5
    ),
    "mamba2": lambda: hf.Mamba2Config(**RECURRENT, **HEADS, n_groups=2, chunk_size=16),
    "mamba2, bounded steps": lambda: hf.Mamba2Config(
        **RECURRENT, **HEADS, n_groups=1, chunk_size=16, time_step_limit=(0.01, 0.05), use_bias=True
    ),
    "jamba": lambda: hf.JambaConfig(**JAMBA),
    "jamba without experts": lambda: hf.JambaConfig(**JAMBA | {"num_experts": 1, "num_experts_per_tok": 1}),
    "jamba, attention elsewhere": lambda: hf.JambaConfig(
        **JAMBA | {"num_hidden_layers": 4}, attn_layer_period=2, attn_layer_offset=0, expert_layer_offset=0
    ),
    "recurrent gemma": lambda: hf.RecurrentGemmaConfig(**SMALL_GEMMA),
    "recurrent gemma, wide": lambda: hf.RecurrentGemmaConfig(
        **SMALL_GEMMA | {"num_key_value_heads": 3}, lru_width=96, conv1d_width=3, attention_bias=True
    ),
    "qwen3 next": lambda: hf.Qwen3NextConfig(**QWEN),
    "qwen3 next, other layers": lambda: hf.Qwen3NextConfig(
        **QWEN | {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        layer_types=["full_attention", "linear_attention"] * 2, mlp_only_layers=[2], norm_topk_prob=False,
        attention_bias=True, linear_conv_kernel_dim=3,
    ),
    "qwen3 next, dense layers": lambda: hf.Qwen3NextConfig(**QWEN, decoder_sparse_step=2, full_attention_interval=2),
    "kimi linear": lambda: hf.KimiLinearConfig(**KIMI),
    "kimi linear, other layers": lambda: hf.KimiLinearConfig(
        **KIMI | {"num_hidden_layers": 3, "q_lora_rank": 20, "n_shared_experts": 2, "norm_topk_prob": False},
        layer_types=["full_attention", "linear_attention", "full_attention"], attention_bias=True,
        mlp_layer_types=["sparse", "dense", "sparse"], linear_conv_kernel_dim=3, routed_scaling_factor=1.3,
    ),
}  # fmt: skip


def saved(name: str, folder, **options):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    for x in model.state_dict().values():
        # norms, biases and decays, which may have the same number everywhere at first; Kimi's are [1, 1, heads, 1]
        if x.ndim in (1, 4):
            x += torch.empty_like(x).uniform_(-0.05, 0.05)
    model.save_pretrained(folder, **options)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, 80, shape, generator=torch.Generator().manual_seed(1))
