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


@functools.lru_cache(maxsize=None)
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
    """Stands in a model's own table of attention classes, for this name, and says so when a layer is made of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        reason = f"the model chooses its attention from a table of its own, which Saccade is not in: {INSTEAD}"
        raise Unsupported(NAME, [reason])


def watch() -> None:
    """Look at every model that is made with, or set to, "saccade", where transformers checks that name."""
    checked = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(checked)
    def check(self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False) -> str:
        found = checked(self, requested_attention, is_init_check)
        if found == NAME:
            _look_at(type(self))
        return found

    PreTrainedModel.get_correct_attn_implementation = check


def _look_at(kind: type[PreTrainedModel]) -> None:
    # transformers' own test whether the file of a model calls the interface
    source = sys.modules[kind.__module__]
    for name, table in vars(source).items():
        if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict):
            table.setdefault(NAME, _Refusing)
    if not kind._can_set_attn_implementation():
        warnings.warn(
            f"{kind.__name__} does not call transformers' attention interface: it computes attention by code of its "
            f"own, and not through Saccade, whatever attn_implementation says",
            stacklevel=2,
        )
