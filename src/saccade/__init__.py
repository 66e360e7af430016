"""Saccade: exact attention, forward, backward and decode, with memory linear in length.

Importing this package costs NumPy and nothing else: frameworks and backends are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# functions named as their modules: bound here, before anything can bind the module to the name
from saccade.merge import merge
from saccade.rope import rope

if TYPE_CHECKING:
    from saccade import mask, recurrent
    from saccade.api import alibi, attention, attention_backward, decode
    from saccade.backends.cpu import get_num_threads, set_num_threads
    from saccade.cache import KVCache
    from saccade.errors import Unsupported
    from saccade.paged import PagedKeys, PagedKVCache
    from saccade.ragged import paged_attention

__version__ = "0.1.0"

__all__ = [
    "KVCache",
    "PagedKVCache",
    "PagedKeys",
    "Unsupported",
    "__version__",
    "alibi",
    "attention",
    "attention_backward",
    "decode",
    "get_num_threads",
    "mask",
    "merge",
    "paged_attention",
    "recurrent",
    "rope",
    "set_num_threads",
]

_HOMES = {
    "KVCache": "saccade.cache",
    "PagedKVCache": "saccade.paged",
    "PagedKeys": "saccade.paged",
    "Unsupported": "saccade.errors",
    "alibi": "saccade.api",
    "attention": "saccade.api",
    "attention_backward": "saccade.api",
    "decode": "saccade.api",
    "get_num_threads": "saccade.backends.cpu",
    "paged_attention": "saccade.ragged",
    "set_num_threads": "saccade.backends.cpu",
}


def __getattr__(name: str) -> Any:
    if name in ("mask", "recurrent"):
        return import_module(f"saccade.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
