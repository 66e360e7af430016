"""Files that are whole or absent: written beside their place, synced, then renamed over it.

A checkpoint is one safetensors file (weights, optimizer state, generator state; the rest as JSON in its header), so
that a run killed at any moment finds the last one entire.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

GENERATOR = "generator.torch"


def write_atomic(path: str | Path, data: bytes) -> None:
    """Writes data at path so that at every moment, and after a crash, the old or the new content stands there."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.tmp")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save_weights(path: str | Path, weights: nn.Module | Mapping[str, Any]) -> None:
    """A model's state dict as safetensors, as Hugging Face transformers reads it."""
    from safetensors.torch import save

    found = weights.state_dict() if isinstance(weights, nn.Module) else weights
    write_atomic(path, save({name: value.contiguous() for name, value in found.items()}, {"format": "pt"}))


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of ``config.json``.  Raises FileNotFoundError without it, ValueError where it is no JSON object."""
    path = directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"no config.json in {directory}")
    try:
        found: Any = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}; expected an object")
    return found


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

    Raises FileNotFoundError without them, ValueError for a file that is cut or no safetensors, and for pickles alone.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    elif not (directory / names[0]).exists() and list(directory.glob("*.bin")):
        raise ValueError(f"{directory} holds pickled weights alone, which may run code: convert them to safetensors")
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}; expected files beside it")
        if not (directory / name).exists():
            raise FileNotFoundError(f"no {name} in {directory}")
        try:
            found |= load_file(directory / name)
        except SafetensorError as error:
            raise ValueError(f"{directory / name} is cut or no safetensors file: {error}") from None
    return found


def save_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Writes the model, the optimizer's tensors, torch's CPU generator and ``state`` (JSON values) as one file."""
    from safetensors.torch import save

    tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    tensors[GENERATOR] = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    write_atomic(path, save(tensors, {"state": json.dumps(state)}))


def read_state(path: str | Path) -> dict[str, Any]:
    """The ``state`` of a checkpoint, without its tensors.  Raises FileNotFoundError, or ValueError for another file."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["state"])
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint of saccade train: {error!r}") from None


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Puts a checkpoint's tensors and generator state back in place, and returns its ``state``.

    Raises FileNotFoundError, or ValueError where the file is no checkpoint of such a model.
    """
    from safetensors.torch import load_file

    state = read_state(path)
    tensors = load_file(path)
    torch.set_rng_state(tensors.pop(GENERATOR))
    weights = {name[len("model.") :]: value for name, value in tensors.items() if name.startswith("model.")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} holds another model: {error}") from None
    for name, parameter in model.named_parameters():
        start = f"optimizer.{name}."
        kept = {key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)}
        if kept:
            # clones: a tensor of the file may lie unaligned, and sums depend on alignment
            optimizer.state[parameter] = {key: value.clone() for key, value in kept.items()}
    return state
