"""A checkpoint of training: a sealed safetensors file of weights, optimizer and generator; its header has the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .files import check_readable, check_seal, seal, write_atomic

GENERATOR = "generator.torch"
REMEDY = "restore it from a copy, or start again with --overwrite"


def encode_checkpoint(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> bytes:
    """The model, the optimizer's tensors, torch's CPU generator and `state` (JSON values) as one file's bytes."""
    from safetensors.torch import save

    tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    tensors[GENERATOR] = torch.get_rng_state()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    return seal(save(tensors), {"state": json.dumps(state)})


def save_checkpoint(path: str | Path, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Write the bytes that `encode_checkpoint` returns, with the same arguments."""
    write_atomic(path, encode_checkpoint(model, optimizer, state))


def read_state(path: str | Path) -> dict[str, Any]:
    """The `state` of a checkpoint, without its tensors.

    Raises FileNotFoundError, and ValueError for another kind of file or one whose bytes contradict its checksum.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    check_readable(path)
    check_seal(path, REMEDY, required=True)
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()["state"])
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a checkpoint of saccade train ({error!r}); {REMEDY}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a checkpoint of saccade train; {REMEDY}")
    return state


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Put a checkpoint's tensors and generator state back in place, and return its `state`.

    Raises FileNotFoundError, and ValueError if the file is not a checkpoint of such a model.
    """
    from safetensors.torch import load_file

    state = read_state(path)
    tensors = load_file(path)
    try:
        model.load_state_dict({name[len("model.") :]: x for name, x in tensors.items() if name.startswith("model.")})
        _restore(optimizer, model, tensors)
        torch.set_rng_state(tensors[GENERATOR])
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; {REMEDY}") from None
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{path} holds another model: {error}") from None
    return state


def remove_folders(out: Path, but: str = "") -> None:
    """Remove the checkpoints of ranks from a run's folder, except one; folders of other programs stay."""
    for folder in out.glob("checkpoint-*"):
        # torch.distributed.checkpoint writes such files
        if folder.name != but and any(folder.glob("*.distcp")):
            shutil.rmtree(folder)


def _restore(optimizer: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    names = [name.removeprefix("optimizer.").rpartition(".") for name in tensors if name.startswith("optimizer.")]
    stored, every = {name for name, _, _ in names}, {entry for _, _, entry in names}
    for name, parameter in model.named_parameters():
        # a parameter without a gradient so far has no entries, the others have all
        optimizer.state.pop(parameter, None)
        if name in stored:
            # clones, because a tensor of the file may be unaligned, and the rounding of sums depends on alignment
            entries = {key: tensors[f"optimizer.{name}.{key}"].clone().to(parameter.device) for key in every}
            optimizer.state[parameter] = entries
