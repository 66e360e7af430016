"""List the layers of a model that use Saccade, and warn about models without any."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import Unsupported
from .described import INSTEAD, NAME

# the name under which the file of every model imports the attention functions
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def routed(model: torch.nn.Module) -> list[str]:
    """The qualified names of the layers of `model` whose attention Saccade computes.

    These are layers whose code looks its function up in transformers' `AttentionInterface`, and whose configuration
    names "saccade". Other layers compute attention themselves.
    """
    return [name for name, layer in model.named_modules() if _asks(type(layer)) and _named(layer)]


def _named(layer: torch.nn.Module) -> bool:
    return getattr(getattr(layer, "config", None), "_attn_implementation", None) == NAME


@functools.cache
def _asks(kind: type) -> bool:
    # whether a method of the class, or of a base class that is a layer, looks the function up
    for base in kind.__mro__:
        if base is torch.nn.Module or base.__module__ == PreTrainedModel.__module__:
            continue
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and INTERFACE in code.co_names:
                return True
    return False


class _Refusing:
    """The entry for "saccade" in a model's own table of attention classes; it raises Unsupported when it is used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        reason = f"the model chooses its attention from its own table, which lacks Saccade: {INSTEAD}"
        raise Unsupported(NAME, [reason])


def watch() -> None:
    """Hook into the construction of models with "saccade": where transformers checks the name, and at the end."""
    checked, finished = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.post_init

    @functools.wraps(checked)
    def check(self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False) -> str:
        name = checked(self, requested_attention, is_init_check)
        if name == NAME:
            _fill_tables(type(self))
        return name

    @functools.wraps(finished)
    def finish(self: PreTrainedModel) -> None:
        finished(self)
        if _named(self):
            _warn_of(self)

    PreTrainedModel.get_correct_attn_implementation = check
    PreTrainedModel.post_init = finish


def _fill_tables(kind: type[PreTrainedModel]) -> None:
    # dictionaries from names to classes of attention, which would raise KeyError
    for name, table in vars(sys.modules[kind.__module__]).items():
        if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict):
            table.setdefault(NAME, _Refusing)


def _warn_of(model: PreTrainedModel) -> None:
    kinds = {type(layer) for layer in model.modules()}
    if any("attention" in kind.__name__.lower() for kind in kinds) and not any(map(_asks, kinds)):
        warnings.warn(
            f"{type(model).__name__} does not call transformers' attention interface: it computes attention by code of "
            "its own, and not with Saccade, in spite of attn_implementation",
            stacklevel=3,
        )
