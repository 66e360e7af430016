"""Fields of single models that shrinking by name misses. "text_config.field" is a field of a sub-configuration."""

from __future__ import annotations

from typing import Any

MROPE = {"partial_rotary_factor": 1.0, "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_expand": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


def within(part: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Prefix names of fields with the name of a sub-configuration."""
    return {f"{part}.{name}": x for name, x in fields.items()}


MINIMAX = {
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
INKLING = {
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "sliding_window_size": 7,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["hybrid_sliding", "hybrid"],
    "rel_extent": 16,
    "d_rel": 8,
    "n_shared_experts": 1,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "dbrx": within("attn_config", {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0})
    | within("ffn_config", {"moe_num_experts": 4, "moe_top_k": 2}),
    "deepseek_v2": EXPERTS | {"layer_types": None},
    "dinov3_vit": {"hidden_size": 64},
    "dots1": EXPERTS | {"n_shared_experts": 1, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": MROPE | {"mrope_section": [1, 1, 2]},
        "mlp_layer_types": ["dense", "sparse"],
    },
    "esm": {"vocab_size": 99, "pad_token_id": 0, "mask_token_id": 3},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm4v_text": {"rope_parameters": MROPE},
    "glm4v": within("text_config", {"rope_parameters": MROPE}),
    "glm46v": within("text_config", {"rope_parameters": MROPE}),
    "glmga": within("text_config", {"rope_parameters": MROPE}),
    "glm4v_moe": within("text_config", {"rope_parameters": MROPE}),
    "glm4v_moe_text": {"rope_parameters": MROPE},
    "glm_image": within("text_config", {"rope_parameters": MROPE}),
    "glm_image_text": {"rope_parameters": MROPE},
    "glm_ocr": within("text_config", {"rope_parameters": MROPE}),
    "glm_ocr_text": {"rope_parameters": MROPE},
    "glm5_next": within("text_config", {"index_kpool": 4}),
    "glm5_next_text": {"index_kpool": 4},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 7},
    "granitemoehybrid": MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_vl_text": {"head_dim": 8},
    "inkling_text": INKLING,
    "inkling2_text": INKLING,
    "inkling2": within("text_config", INKLING),
    "inkling_mm_model": within("text_config", INKLING),
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "qk_head_dim": 16,
    },
    "led": {"attention_window": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48, "num_attention_heads": 4, "channel_shrink_ratio": 4},
    "longcat_flash": {
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 48,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "minimax_m3_vl": within("text_config", MINIMAX),
    "minimax_m3_vl_text": MINIMAX,
    "ministral": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral4": EXPERTS | {"head_dim": 8, "qk_head_dim": 16, "num_key_value_heads": 4},
    "mpnet": {"vocab_size": 200, "max_position_embeddings": 64, "pad_token_id": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 48,
    },
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "paddleocr_vl": within("text_config", {"rope_parameters": MROPE}),
    "qwen2_vl": within("text_config", {"rope_parameters": MROPE}),
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl": within("text_config", {"rope_parameters": MROPE}),
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "colqwen2": within("vlm_config.text_config", {"rope_parameters": MROPE}),
    "qwen2_5_omni_thinker": within("text_config", {"rope_parameters": MROPE}),
    "qwen2_5_omni_talker": {"rope_parameters": MROPE},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
    },
    "roc_bert": {
        "pronunciation_vocab_size": 99,
        "shape_vocab_size": 99,
        "shape_embed_dim": 32,
        "pronunciation_embed_dim": 32,
    },
    "step3p5": {
        "sliding_window": 7,
        "num_sliding_attention_heads": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "share_expert_dim": 48,
    },
    "step3p7": within(
        "text_config",
        {
            "sliding_window": 7,
            "num_sliding_attention_heads": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["full_attention", "sliding_attention"],
            "share_expert_dim": 48,
        },
    ),
    "swin": {"window_size": 2, "patch_size": 2, "depths": [2, 2], "num_heads": [2, 4], "embed_dim": 16},
    "swinv2": {"window_size": 2, "patch_size": 2, "depths": [2, 2], "num_heads": [2, 4], "embed_dim": 16},
    "donut-swin": {"window_size": 2, "patch_size": 2, "depths": [2, 2], "num_heads": [2, 4], "embed_dim": 16},
    "maskformer-swin": {"window_size": 2, "patch_size": 2, "depths": [2, 2], "num_heads": [2, 4], "embed_dim": 16},
    "time_series_transformer": {"prediction_length": 8},
    "vitpose_backbone": {"image_size": [32, 32], "patch_size": [8, 8]},
    "wav2vec2-bert": {"feature_projection_input_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 4},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "num_query_groups": 4,
        "kv_channels": 8,
        "adapter_rank": 8,
        "mamba_ngroups": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
