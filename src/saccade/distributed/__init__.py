"""Attention and recurrences of sequences that are cut over the ranks of torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attend import attention
    from .comm import peers_of
    from .context import ContextParallel
    from .errors import PeerError
    from .layout import Run, runs_of
    from .ring import ring_attention
    from .sharded_cache import ShardedKVCache, decode, move
    from .sharding import shard, unshard
    from .states import recurrent

__all__ = [
    "ContextParallel",
    "PeerError",
    "Run",
    "ShardedKVCache",
    "attention",
    "decode",
    "move",
    "peers_of",
    "recurrent",
    "ring_attention",
    "runs_of",
    "shard",
    "unshard",
]

_ROOMS = {
    "ContextParallel": "context",
    "PeerError": "errors",
    "Run": "layout",
    "ShardedKVCache": "sharded_cache",
    "attention": "attend",
    "decode": "sharded_cache",
    "move": "sharded_cache",
    "peers_of": "comm",
    "recurrent": "states",
    "ring_attention": "ring",
    "runs_of": "layout",
    "shard": "sharding",
    "unshard": "sharding",
}


def __getattr__(name: str) -> Any:
    # torch is imported at the first use of what needs it
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
