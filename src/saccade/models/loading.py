"""Loads the model of a checkpoint, with the architecture that its config.json names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from .deepseek import DeepSeek
from .deepseek_config import KINDS as DEEPSEEK
from .gpt2 import Gpt2
from .hybrid import Hybrid
from .hybrid_config import KIND as OWN_KIND
from .hybrid_loading import KINDS as HYBRIDS
from .llama import Llama
from .weights import read_config

KINDS: dict[str, type[Llama | Gpt2 | Hybrid]] = {
    "llama": Llama,
    "mistral": Llama,
    "gpt2": Gpt2,
    **dict.fromkeys(DEEPSEEK, DeepSeek),
    **dict.fromkeys([*HYBRIDS, OWN_KIND], Hybrid),
}


# decays and steps of recurrent layers stay in float32, because their errors accumulate over the whole text; so do the
# numbers that decide which experts are chosen
WHOLE = ("A_log", "decays", ".D", "dt_bias", "dt_proj.bias", "recurrent_param", "e_score_correction_bias")


def load_model(
    directory: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Llama | Gpt2 | Hybrid:
    """The model of a folder with config.json and safetensors, in `dtype` on a device.

    Raises FileNotFoundError without those files, TypeError unless dtype is one of torch, and ValueError for an
    unsupported architecture, config or tensor, for pickled weights, and for numbers that float16 does not hold.
    """
    if not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"dtype is {dtype!r}; expected a dtype of torch, such as torch.bfloat16")
    kind = read_config(Path(directory)).get("model_type", "llama")
    if kind not in KINDS:
        raise ValueError(f"config.json says model_type={kind!r}; expected one of {', '.join(KINDS)}")
    model = KINDS[kind].load(directory)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {name: x.data for name, x in state.items() if name.endswith(WHOLE)}
    model = model.to(dtype)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, x in whole.items():
        state[name].data = x
    if dtype == torch.float16:
        for name, x in model.named_parameters():
            if not x.isfinite().all():
                raise ValueError(
                    f"{name} has numbers above {torch.finfo(dtype).max:.0f}, the largest of float16; load the model as "
                    "bfloat16 or float32"
                )
    model = model.to(device)
    if dtype == torch.float32 and model.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.out_features >= 2 * module.in_features:
                # for one token, torch reads a wide matrix 1.7 times as fast if it is stored input by input (Zen 4)
                module.weight.data = module.weight.data.T.contiguous().T
    return model


def device_of(name: str) -> torch.device:
    """The device with a name of torch's. Raises ValueError for an unknown name, and if this machine lacks it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}; expected cpu, cuda, or cuda:1 for the second GPU") from None
    if device.type != "cpu" and not torch.accelerator.is_available():
        raise ValueError(f"device is {name!r}, and torch {torch.__version__} finds no accelerator on this machine")
    return device
