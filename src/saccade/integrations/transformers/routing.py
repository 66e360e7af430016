"""Which layers of a model go through Saccade, and a warning for models of which none does."""

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

# the name under which every model's file imports the attention functions
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def routed(model: torch.nn.Module) -> list[str]:
    """The qualified names of the layers of `model` whose attention goes through Saccade.

    A layer does if its code asks transformers' `AttentionInterface` for its function, and its configuration names
    "saccade". Attention of other layers is the model's own.
    """
    return [name for name, layer in model.named_modules() if _asks(type(layer)) and _named(layer)]


def _named(layer: torch.nn.Module) -> bool:
    return getattr(getattr(layer, "config", None), "_attn_implementation", None) == NAME


@functools.cache
def _asks(kind: type) -> bool:
    # whether a method of the class, or of a base that is a layer too, looks the function up
    for base in kind.__mro__:
        if base is torch.nn.Module or base.__module__ == PreTrainedModel.__module__:
            continue
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            if code is not None and INTERFACE in code.co_names:
                return True
    return False


class _Refusing:
    """Stands in a model's own table of attention classes, for this name, and says so when a layer uses it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        reason = f"the model chooses its attention from a table of its own, which Saccade is not in: {INSTEAD}"
        raise Unsupported(NAME, [reason])


def watch() -> None:
    """Look at models that are built for "saccade": where transformers checks the name, and when a model is whole."""
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
            "its own, and not through Saccade, whatever attn_implementation says",
            stacklevel=3,
        )
