"""Saccade: exact attention, forward, backward and decode, with memory linear in length.

This package imports only NumPy. Frameworks and backends are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazily import names

# these two functions have the names of their modules; import them first, before the module takes the name
from saccade.merge import merge
from saccade.rope import rope

if TYPE_CHECKING:
    from saccade import mask, nn, recurrent
    from saccade.api import attention, attention_backward, decode
    from saccade.backends.cpu import get_num_threads, set_num_threads
    from saccade.biases import alibi, gates, relative
    from saccade.caches.contiguous import KVCache
    from saccade.caches.latent import LatentKVCache, PagedLatentKVCache
    from saccade.caches.paged import PagedKVCache
    from saccade.caches.ragged import paged_attention
    from saccade.caches.sequences import PagedKeys
    from saccade.errors import Unsupported
    from saccade.integrations.patch import patch_sdpa
    from saccade.weights import attention_weights

__version__ = "0.1.0"

__all__ = [
    "KVCache",
    "LatentKVCache",
    "PagedKVCache",
    "PagedKeys",
    "PagedLatentKVCache",
    "Unsupported",
    "__version__",
    "alibi",
    "attention",
    "attention_backward",
    "attention_weights",
    "decode",
    "gates",
    "get_num_threads",
    "mask",
    "merge",
    "nn",
    "paged_attention",
    "patch_sdpa",
    "recurrent",
    "relative",
    "rope",
    "set_num_threads",
]

_HOMES = {
    "KVCache": "caches.contiguous",
    "LatentKVCache": "caches.latent",
    "PagedKVCache": "caches.paged",
    "PagedKeys": "caches.sequences",
    "PagedLatentKVCache": "caches.latent",
    "Unsupported": "errors",
    "alibi": "biases",
    "attention": "api",
    "attention_backward": "api",
    "attention_weights": "weights",
    "decode": "api",
    "gates": "biases",
    "get_num_threads": "backends.cpu",
    "mask": "",
    "nn": "",
    "paged_attention": "caches.ragged",
    "patch_sdpa": "integrations.patch",
    "recurrent": "",
    "relative": "biases",
    "set_num_threads": "backends.cpu",
}


__getattr__ = names(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
