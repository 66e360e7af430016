"""Attention and recurrences of sequences that are divided among the ranks of torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazily import names

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

# torch is imported when a name that needs it is first used
_HOMES = {
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


__getattr__ = names(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
