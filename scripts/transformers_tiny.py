"""Builds a tiny version of every architecture of the installed transformers: class, configuration, weights, inputs.

Configurations and their sub-configurations are shrunk by the names of their fields (`SIZES`). `OVERRIDES` holds the
fields that some models need in addition. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers as hf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers_overrides import OVERRIDES
from transformers_sizes import IMAGE, KV_HEADS, LISTS, SIZES, VOCAB

# mappings in which a model's class is looked up, in this order
MAPPINGS = (
    "FOR_CAUSAL_LM",
    "FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "FOR_IMAGE_TEXT_TO_TEXT",
    "FOR_MULTIMODAL_LM",
    "FOR_SPEECH_SEQ_2_SEQ",
    "",
)
# tokens of a prompt, and of a decoder's input
T, DECODER_T = 24, 10


def model_types() -> list[str]:
    """The names of all architectures, sorted."""
    return sorted(CONFIG_MAPPING_NAMES)


def class_of(name: str) -> Any:
    """The model class of an architecture: the one that generates text if there is one, else its base model."""
    first = [f"MODEL_{kind}_MAPPING_NAMES" if kind else "MODEL_MAPPING_NAMES" for kind in MAPPINGS]
    rest = [n for n in vars(modeling_auto) if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES")]
    config = CONFIG_MAPPING[name]
    classes: list[Any] = []
    for mapping in (*first, *rest):
        listed = getattr(modeling_auto, mapping).get(name)
        if listed is not None:
            classes.append(getattr(hf, listed if isinstance(listed, str) else listed[0]))
    # parts of other models are named like their configurations
    beside = config.__name__.removesuffix("Config")
    classes += [getattr(hf, beside + ending, None) for ending in ("Model", "", "ForConditionalGeneration")]
    for kind in classes:
        # some models generate text by the class of their text part
        if isinstance(kind, type) and issubclass(kind, hf.PreTrainedModel) and kind.config_class in (config, None):
            return kind
    raise LookupError("no model class of its own")


def config_of(name: str) -> Any:
    """A small configuration."""
    return shrink(CONFIG_MAPPING[name], OVERRIDES.get(name, {}))


def shrink(kind: Any, overrides: Mapping[str, Any], config: Any = None) -> Any:
    """A configuration of class `kind` with small sizes, made from `config`, or by default from `kind()`."""
    default = kind() if config is None else config
    fields = {n: x for n, x in vars(default).items() if not n.startswith("_")}
    changed: dict[str, Any] = {}
    heads = next(
        (fields[n] for n in ("num_attention_heads", "n_head", "num_heads") if isinstance(fields.get(n), int)), 1
    )
    for name, value in fields.items():
        if isinstance(value, hf.PreTrainedConfig):
            inside = {n.partition(".")[2]: x for n, x in overrides.items() if n.startswith(name + ".")}
            small = shrink(type(value), inside, value)
            changed[name] = small if type(value).model_type == "" else small.to_dict()
        elif name in KV_HEADS and isinstance(value, int):
            changed[name] = 4 if value == heads else min(value, 2)
        elif name == "head_dim" and value is None:
            changed[name] = SIZES[name]
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, dict) and ("mrope_section" in str(value) or "partial_rotary_factor" in str(value)):
            changed[name] = _rope(value)
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
            counts = [n for n in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers") if n in fields]
            changed |= dict.fromkeys(counts[:1], len(changed[name]))
    if "eos_token_id" in fields and isinstance(fields["eos_token_id"], list):
        changed["eos_token_id"] = 2
    per_layer = {
        n: x for n, x in fields.items() if isinstance(x, list) and n not in changed and n.endswith("layer_types")
    }
    for name, value in per_layer.items():
        changed[name] = value[: SIZES["num_hidden_layers"]]
    changed |= {n: x for n, x in overrides.items() if "." not in n}
    return kind(**changed)


def _rope(value: Any) -> Any:
    # all of a head is rotated; the sections fill half of it
    if not isinstance(value, dict):
        return value
    small = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    return {n: small.get(n, _rope(x)) for n, x in value.items()}


def redraw(model: torch.nn.Module) -> None:
    """Weights of 1.3/sqrt(fan-in), scales near 1, gates open."""
    r = torch.Generator().manual_seed(3)
    for name, x in model.named_parameters():
        if not x.numel():
            continue
        noise = torch.randn(x.shape, generator=r, dtype=x.dtype)
        with torch.no_grad():
            if x.dim() > 1 and min(x.shape[-2:]) > 1:
                fan_in = x[0].numel() if x.dim() != 3 or "expert" not in name else x.shape[-1]
                x.copy_(noise * 1.3 / max(fan_in, 1) ** 0.5)
            elif name.endswith(("A_log", "dt_bias", ".D")) and bool(torch.isfinite(x).all()):
                continue
            elif "bias" in name or "sink" in name:
                x.copy_(noise * 0.2)
            elif not bool(torch.isfinite(x).all()) or float(x.abs().max()) < 0.1:
                # norms of 1 + weight start at 0, layer scales at 1e-5, gates at 0: these would hide the layers behind
                x.copy_((0.2 if name.endswith("norm.weight") else 0.7) + 0.1 * noise)
            else:
                x.add_(noise * 0.1)
    for x in model.buffers():
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            x.zero_()


def inputs_of(model: Any, seed: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs that a forward pass may take, by the names of its arguments, the simplest first."""
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
    if "grid_thw" in takes:
        c = model.config
        patch = getattr(c, "patch_size", 8) ** 2 * getattr(c, "temporal_patch_size", 1)
        first = next(iter(takes))
        for channels in {getattr(c, n, 3) for n in ("in_channels", "in_chans", "num_channels")}:
            pixels = torch.randn(24, channels * patch, generator=r, dtype=dtype)
            yield {first: pixels, "grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])}
    masks = {
        n: torch.ones(2, 64, dtype=torch.long) for n in ("input_features_mask", "feature_attention_mask") if n in takes
    }
    text |= masks
    for name, shapes in _shapes_of(model.config).items():
        if name in takes:
            for shape in shapes:
                noise = torch.randn(shape, generator=r, dtype=dtype)
                for more in (text, masks) if text else ({},):
                    yield {**more, name: noise}


def _shapes_of(config: Any) -> dict[str, list[tuple[int, ...]]]:
    parts = [
        getattr(config, n, None)
        for n in ("vision_config", "encoder", "audio_config", "backbone_config", "encoder_config", "text_config")
    ]

    def find(*names: str, default: Any = None) -> Any:
        for where in (config, *parts):
            for n in names:
                part = getattr(where, n, None)
                if part is not None:
                    return part
        return default

    size = find("image_size", "input_size", "img_size", default=IMAGE)
    height, width = (
        (size, size)
        if isinstance(size, int)
        else tuple(size)[-2:]
        if isinstance(size, (list, tuple))
        else (IMAGE, IMAGE)
    )
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
