"""Every architecture of the installed transformers, tiny: its class, a configuration of small numbers, and inputs.

Configurations are shrunk by the names of their fields (`SIZES`), sub-configurations too; `OVERRIDES` holds what some
models need beside. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers as hf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

# where a model's class is looked for, the first that has one
MAPPINGS = (
    "FOR_CAUSAL_LM", "FOR_SEQ_TO_SEQ_CAUSAL_LM", "FOR_IMAGE_TEXT_TO_TEXT", "FOR_MULTIMODAL_LM", "FOR_SPEECH_SEQ_2_SEQ",
    "",
)  # fmt: skip
VOCAB, T, DECODER_T, IMAGE = 99, 24, 10, 32


def sizes(value: int, *names: str) -> dict[str, int]:
    return dict.fromkeys(names, value)


# of fields that are integers
SIZES = {
    **sizes(
        32, "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "word_embed_proj_dim", "embedding_size",
        "encoder_hidden_size", "decoder_hidden_size", "projection_dim", "output_dim", "cross_attention_hidden_size", "text_embed_dim",
        "out_hidden_size", "output_hidden_size", "text_hidden_size", "vision_hidden_size", "audio_hidden_size", "backbone_hidden_size",
        "image_hidden_size", "encoder_dim", "decoder_dim", "lru_width", "model_dim", "emb_dim", "qformer_hidden_size", "kv_dim", "hidden_channels",
        "vision_embed_dim", "projector_hidden_size", "vision_output_dim", "neck_hidden_sizes", "attention_hidden_size", "conv_dim", "d_embed",
        "entity_emb_size", "connector_hidden_size", "text_config_hidden_size", "d_emb", "bottleneck_size", "fpn_hidden_size", "mask_feature_size", "feature_size",
    ),
    **sizes(
        2, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth",
        "num_encoder_layers", "num_decoder_layers", "encoder_num_layers", "decoder_num_layers", "num_block_layers", "text_layers", "vision_layers",
        "encoder_num_hidden_layers", "decoder_num_hidden_layers", "decoder_num_layers", "num_x_layers", "l_layers", "r_layers", "x_layers",
        "num_blocks", "prenet_layers", "postnet_layers", "num_rnn_layers", "num_conformer_blocks",
    ),
    **sizes(
        4, "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "encoder_num_attention_heads", "decoder_num_attention_heads", "num_vision_heads", "text_num_heads", "attention_heads", "encoder_num_heads",
        "decoder_num_heads", "linear_num_value_heads", "linear_num_key_heads", "swa_num_attention_heads", "num_global_attention_heads",
    ),
    **sizes(
        8, "head_dim", "d_kv", "attention_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "patch_size", "global_head_dim",
        "linear_key_head_dim", "linear_value_head_dim", "attention_key_dim", "index_head_dim", "rotary_dim", "swa_head_dim", "swa_v_head_dim",
        "decoder_head_dim", "encoder_head_dim", "kv_channels", "attention_head_size", "attn_head_dim", "hidden_size_per_layer_input",
    ),
    **sizes(
        48, "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size",
        "moe_intermediate_size", "shared_expert_intermediate_size", "encoder_intermediate_size", "decoder_intermediate_size",
        "intermediate_dim", "shared_intermediate_size", "dense_intermediate_size", "mlp_dim", "dff", "dim_feedforward",
        "encoder_intermediate_dim", "expert_intermediate_size", "block_ff_dim", "dim_ff", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
        "projector_intermediate_size", "feed_forward_size", "mlp_hidden_size", "intermediate_size_mlp", "feedforward_size",
    ),
    **sizes(VOCAB, "vocab_size", "text_vocab_size", "vocab_size_per_layer_input", "codebook_size", "audio_vocab_size", "image_vocab_size", "entity_vocab_size"),
    **sizes(64, "max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx", "max_seq_len",
            "max_sequence_length", "max_position_embeddings_vision", "seq_length", "max_seq_length", "max_2d_position_embeddings"),
    **sizes(IMAGE, "image_size", "input_size", "img_size", "resolution"),
    **sizes(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts", "index_topk", "index_n_heads"),
    **sizes(2, "num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k", "index_topk_blocks"),
    **sizes(1, "n_group", "topk_group", "first_k_dense_replace", "num_dense_layers", "n_shared_experts", "num_expert_group", "num_nextn_predict_layers"),
    **sizes(16, "q_lora_rank", "kv_lora_rank", "mamba_d_state", "ssm_state_size", "state_size", "time_step_rank", "mamba_d_ssm", "o_lora_rank"),
    **sizes(7, "sliding_window", "attention_window_size", "local_attention", "attention_window"),
    **sizes(4, "window_size"),
    **sizes(8, "attention_chunk_size", "chunk_size", "num_mel_bins", "num_queries", "image_seq_length", "relative_attention_num_buckets"),
    **sizes(2, "num_frames", "mamba_n_heads", "num_latents", "num_query_tokens"),
    **sizes(2, "attn_layer_period", "expert_layer_period", "full_attention_interval", "attn_layer_offset"),
    **sizes(1, "attn_layer_offset", "expert_layer_offset"),
}  # fmt: skip
# of fields that are lists of integers: a number for each entry
LISTS = {
    **dict.fromkeys(("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "embed_dim_per_stage"), (16, 32, 32, 32, 32)),
    **dict.fromkeys(("depths", "num_layers_per_stage", "blocks_per_stage", "depth_per_stage"), (1, 1, 1, 1, 1)),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_attention_heads_per_stage"), (2, 2, 2, 2, 2)),
}
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_kv_head", "multi_query_group_num", "n_head_kv")
# beside: fields of one model's configuration, "text_config.field" for those below
OVERRIDES: dict[str, dict[str, Any]] = {}


def model_types() -> list[str]:
    """Every name of an architecture, in order."""
    return sorted(CONFIG_MAPPING_NAMES)


def class_of(name: str) -> Any:
    """The model class of an architecture: what generates text if it can, its base model otherwise."""
    for kind in MAPPINGS:
        table = getattr(modeling_auto, f"MODEL_{kind}_MAPPING_NAMES" if kind else "MODEL_MAPPING_NAMES")
        if name in table:
            found = table[name]
            return getattr(hf, found if isinstance(found, str) else found[0])
    for mapping, table in vars(modeling_auto).items():
        if mapping.startswith("MODEL_") and mapping.endswith("_MAPPING_NAMES") and name in table:
            found = table[name]
            return getattr(hf, found if isinstance(found, str) else found[0])
    # parts of other models, whose classes are named like their configurations
    beside = CONFIG_MAPPING_NAMES[name].removesuffix("Config")
    for ending in ("Model", "", "ForConditionalGeneration"):
        found = getattr(hf, beside + ending, None)
        if isinstance(found, type) and issubclass(found, hf.PreTrainedModel):
            return found
    raise LookupError("no model class of its own")


def config_of(name: str) -> Any:
    """A small configuration."""
    return shrink(CONFIG_MAPPING[name], OVERRIDES.get(name, {}))


def shrink(kind: Any, overrides: Mapping[str, Any], given: Any = None) -> Any:
    """A configuration of this class with small numbers; `given` is the one it stands for, the default if None."""
    default = kind() if given is None else given
    fields = {n: x for n, x in vars(default).items() if not n.startswith("_")}
    changed: dict[str, Any] = {}
    heads = next((fields[n] for n in ("num_attention_heads", "n_head", "num_heads") if isinstance(fields.get(n), int)), 1)
    for name, value in fields.items():
        if isinstance(value, hf.PreTrainedConfig):
            inside = {n.partition(".")[2]: x for n, x in overrides.items() if n.startswith(name + ".")}
            changed[name] = shrink(type(value), inside, value).to_dict()
        elif name in KV_HEADS and isinstance(value, int):
            changed[name] = 4 if value == heads else min(value, 2)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int) and name in SIZES:
            changed[name] = SIZES[name]
        elif name in LISTS and isinstance(value, (list, tuple)):
            changed[name] = list(LISTS[name][: len(value)])
        elif "drop" in name and isinstance(value, float):
            changed[name] = 0.0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            changed[name] = {"pad": 0, "bos": 1, "eos": 2}.get(name[:3], VOCAB - 9 + len(name) % 7)
        elif name in ("layer_types", "layers_block_type") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            changed[name] = kinds * 2 if len(kinds) == 1 else kinds
    for name in ("layer_types", "layers_block_type"):
        if name in changed:
            layers = next(n for n in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers") if n in fields)
            changed[layers] = len(changed[name])
    if "eos_token_id" in fields and isinstance(fields["eos_token_id"], list):
        changed["eos_token_id"] = 2
    per_layer = {n: x for n, x in fields.items() if isinstance(x, list) and n not in changed and n.endswith("layer_types")}
    for name, value in per_layer.items():
        changed[name] = value[: SIZES["num_hidden_layers"]]
    changed |= {n: x for n, x in overrides.items() if "." not in n}
    return kind(**changed)


def inputs_of(model: Any, seed: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs that a forward pass may take, by the names of its arguments: the plainest first."""
    r = torch.Generator().manual_seed(seed)
    takes = inspect.signature(model.forward).parameters
    text: dict[str, torch.Tensor] = {}
    if "input_ids" in takes:
        text["input_ids"] = torch.randint(5, 80, (2, T), generator=r)
    if "decoder_input_ids" in takes:
        text["decoder_input_ids"] = torch.randint(5, 80, (2, DECODER_T), generator=r)
    if "bbox" in takes and "input_ids" in takes:
        corners = torch.randint(0, 30, (2, T, 2, 2), generator=r).sort(2).values
        text["bbox"] = corners.flatten(2)
    if "input_ids" in text:
        yield text
    dtype = next(x.dtype for x in model.parameters() if x.is_floating_point())
    for name, shapes in _shapes_of(model.config).items():
        if name in takes:
            for shape in shapes:
                noise = torch.randn(shape, generator=r, dtype=dtype)
                for more in (text, {}) if text else ({},):
                    yield {**more, name: noise}


def _shapes_of(config: Any) -> dict[str, list[tuple[int, ...]]]:
    parts = [getattr(config, n, None) for n in ("vision_config", "encoder", "audio_config", "backbone_config", "encoder_config", "text_config")]

    def find(*names: str, default: Any = None) -> Any:
        for where in (config, *parts):
            for n in names:
                found = getattr(where, n, None)
                if found is not None:
                    return found
        return default

    size = find("image_size", "input_size", "img_size", default=IMAGE)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:] if isinstance(size, (list, tuple)) else (IMAGE, IMAGE)
    channels = find("num_channels", "in_channels", "in_chans", default=3)
    frames = find("num_frames", "frames_per_clip", default=2)
    image, video = (2, channels, height, width), (2, frames, channels, height, width)
    mels = find("num_mel_bins", "input_feat_per_channel", "feature_size", "mel_bins", default=8)
    return {
        "pixel_values": [image, video, (2, channels, 64, 64)],
        "pixel_values_videos": [video],
        "input_values": [(2, 1600), (2, 64, mels), (2, 1, 1600)],
        "input_features": [(2, mels, 64), (2, mels, 128), (2, 64, mels), (2, 1, 64, mels)],
        "past_values": [(2, find("context_length", default=16), find("num_input_channels", default=1))],
        "inputs_embeds": [(2, T, find("hidden_size", "d_model", default=32))],
        "hidden_states": [(2, T, find("hidden_size", "d_model", default=32))],
    }
