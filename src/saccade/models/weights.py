"""The weights in a model's folder. Names and shapes are checked before anything large is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .fields import CONFIG, ROPE, check_fields
from .files import check_readable, check_seal, read_object, seal, write_atomic

Tensors = dict[str, Tensor]
Built = TypeVar("Built", bound=nn.Module)

# the index of weights that are divided into shards, which takes precedence over a single file
WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"

# fields for which null is a value of its own, not a missing one: no end token, no window, no low rank
NULLS = {"eos_token_id", "sliding_window", "q_lora_rank"}
# dtypes of safetensors that are supported, as torch dtypes
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# modules that a config counts, and where a tensor's name has their number
COUNTED = {"layers": r"(?:^|\.)(?:layers|h)\.(\d+)\.", "experts in a layer": r"\.experts\.(\d+)\."}
AGAIN = "copy it again, or let saccade train --resume write it from the checkpoint"


def encode_weights(weights: nn.Module | Mapping[str, Any]) -> bytes:
    """A model's state dict as a sealed safetensors file, which Hugging Face transformers reads."""
    from safetensors.torch import save

    tensors = weights.state_dict() if isinstance(weights, nn.Module) else weights
    return seal(save({name: value.contiguous() for name, value in tensors.items()}), {"format": "pt"})


def save_weights(path: str | Path, weights: nn.Module | Mapping[str, Any]) -> None:
    """Write a model's state dict, encoded by `encode_weights`."""
    write_atomic(path, encode_weights(weights))


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of `config.json`, without keys that are null, except those in `NULLS`.

    The `eos_token_id` of `generation_config.json` takes precedence: chat models end their turns with it. Its options of
    sampling are not read. Raises FileNotFoundError without `config.json`, and ValueError if a file is not a JSON object
    or a field has an impossible value.
    """
    path = directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"no config.json in {directory}")
    values: dict[str, Any] = {
        name: value for name, value in read_object(path).items() if value is not None or name in NULLS
    }
    check_fields(values, CONFIG, str(path))
    generation = directory / "generation_config.json"
    if generation.exists() and (ends := read_object(generation).get("eos_token_id")) is not None:
        check_fields({"eos_token_id": ends}, CONFIG, str(generation))
        values["eos_token_id"] = ends
    for name in ("rope_scaling", "rope_parameters"):
        check_fields(values.get(name, {}), ROPE, f"{path}: {name}")
    return values


def shards_of(directory: Path) -> dict[str, str]:
    """The file of each tensor, by `model.safetensors.index.json`. Raises ValueError for a malformed index."""
    index = directory / SHARDS
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index} has no weight_map; expected an object that names the file of each tensor")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{index} names {str(name)[:60]!r}; expected names of files in its folder")
    return listed


def remove_shards(directory: Path) -> None:
    """Remove the shards of a folder, if it has some, then their index; of a malformed index, the index alone."""
    index = directory / SHARDS
    if index.exists():
        with suppress(ValueError):
            for name in set(shards_of(directory).values()):
                if name.endswith(".safetensors"):
                    (directory / name).unlink(missing_ok=True)
        index.unlink()


def weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names, and the shard of each tensor.

    Raises FileNotFoundError without them, ValueError for a malformed index, and if there are only pickled weights.
    """
    owner = shards_of(directory) if (directory / SHARDS).exists() else {}
    names = sorted(set(owner.values())) or [WEIGHTS]
    if names == [WEIGHTS] and not (directory / WEIGHTS).exists() and list(directory.glob("*.bin")):
        raise ValueError(f"{directory} contains only pickled weights, which can run code: convert them to safetensors")
    for name in names:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"no {name} in {directory}")
        check_readable(directory / name)
    return [directory / name for name in names], owner


def read_header(directory: Path) -> Tensors:
    """The tensors of `weight_files` on torch's meta device: names, shapes and dtypes, without their numbers.

    Raises as `weight_files` does, and ValueError for a file that is cut short, damaged or not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    tensors: Tensors = {}
    files, owner = weight_files(directory)
    for path in files:
        check_seal(path, AGAIN)
        try:
            with safe_open(path, framework="pt") as file:
                # a tensor in several files is read from the one that the index names
                for name in (name for name in file.keys() if owner.get(name, path.name) == path.name):  # noqa: SIM118
                    part = file.get_slice(name)
                    # other dtypes become int8, which `compare` refuses if the model has that tensor
                    dtype = DTYPES.get(part.get_dtype(), torch.int8)
                    tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from None
    return tensors


def load_tensors(directory: Path) -> Tensors:
    """The tensors of `weight_files`.

    Raises as `read_header`, and ValueError if a number is NaN or infinite in float32, the dtype of models at first.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: Tensors = {}
    files, owner = weight_files(directory)
    for path in files:
        try:
            loaded = {name: x for name, x in load_file(path).items() if owner.get(name, path.name) == path.name}
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from None
        for name, x in loaded.items():
            if x.dtype in DTYPES.values() and x.numel() and not all(bound.float().isfinite() for bound in x.aminmax()):
                raise ValueError(
                    f"{name} in {path} holds NaN or an infinity in float32; the weights of a model are finite: copy or "
                    "train it again"
                )
        tensors |= loaded
    return tensors


def filled(
    build: Callable[[], Built],
    counts: Mapping[str, int],
    directory: Path,
    ours: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> Built:
    """The model that `build` makes, with the weights of a folder under the names that `ours` gives them.

    counts: the numbers of the modules in `COUNTED`, from the config. The files' headers are first compared with these
    and with the model's names and shapes, so that a config that asks for more than the files contain builds nothing.
    Raises as `load_tensors`, and ValueError if config and files differ.
    """
    header = ours(read_header(directory))
    for what, number in counts.items():
        count = len({at[1] for name in header for at in re.finditer(COUNTED[what], name)})
        if count != number:
            raise ValueError(f"config.json in {directory} has {number} {what}, and the weights there have {count}")
    with torch.device("meta"):
        expected = build().state_dict()
    compare(header, expected, directory)
    model = build()
    model.load_state_dict(ours(load_tensors(directory)))
    return model.eval()


def without_tied(tensors: Tensors, head: str, table: str) -> Tensors:
    """The tensors without the head of a tied model, which old files store as well as the table that serves as it.

    Raises ValueError for a head with other numbers than the table: it was trained apart, and transformers would use it.
    """
    x, other = tensors.get(head), tensors.get(table)
    # tensors of a header have no numbers
    if x is not None and other is not None and not x.is_meta and not torch.equal(x, other.to(x.dtype)):
        raise ValueError(
            f"the model is tied by its config.json, and {head} differs from {table}; expected equal tensors, or "
            "tie_word_embeddings false in config.json"
        )
    return {name: x for name, x in tensors.items() if name != head}


def compare(header: Tensors, expected: Tensors, directory: Path) -> None:
    """Raises ValueError for the first tensors that are missing, unknown or of another shape or kind."""
    wrong = [f"{name} is missing" for name in expected.keys() - header.keys()]
    wrong += [f"{name} is unknown" for name in header.keys() - expected.keys()]
    for name in header.keys() & expected.keys():
        shape, wanted = list(header[name].shape), list(expected[name].shape)
        if shape != wanted:
            wrong.append(f"{name} has shape {shape} and needs {wanted}")
        elif not header[name].is_floating_point():
            wrong.append(f"{name} does not hold numbers of {', '.join(DTYPES)}")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the tensors in {directory} do not fit its config.json: {', '.join(sorted(wrong)[:3])}{more}")
