"""Decoding with keys on several ranks, and moving caches from one group of ranks to another.

Rank t mod P stores token t of a sequence. So ranks stay equally full, and the keys of a rank are at evenly spaced
positions, for which every mask is exact. Each rank attends to its own keys. The partial results are gathered and merged
by lse in the order of ranks, so that every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import api
from ..arrays import ArrayOrTuple
from ..backends import Inputs, choose
from ..caches.contiguous import KVCache
from ..caches.lengths import Bounded, unchanged
from ..errors import Unsupported
from ..frameworks.torch_run import dense, follow_threads, giver, spec, tensor
from ..mask import Mask, causal, keys
from ..mask.lowering import lower
from ..merge import merge
from ..operands import Options, Request
from ..plan import make_plan
from ..problem import check_kind, describe
from .call import fingerprint
from .comm import Like, Parcel, pack, peers_of
from .layout import Layout, Run, positions, runs_of
from .parcel import refuse_gradient
from .refusal import taking_part
from .schedule import pieces

# a single query at the last key sees all keys under this mask
_CAUSAL = causal().key


class ShardedKVCache(Bounded):
    """A `KVCache` whose tokens are divided among the ranks of a group: token t is on rank t mod P.

    Every rank creates one, with the same arguments. Its arrays are tensors.

    Args:
        batch, capacity, kv_heads, head_dim: as in `KVCache`; capacity is that of all ranks together.
        group: a ProcessGroup, a DeviceMesh with one dimension, or None for all ranks.
        options: the other arguments of `KVCache`.

    Attributes:
        lengths: int32 [batch], tokens of each sequence on all ranks together.
        local: the `KVCache` of this rank's tokens.

    Examples:
        >>> from saccade.distributed import ShardedKVCache  # on every rank, after init_process_group
        >>> cache = ShardedKVCache(1, 4096, 8, 64)
        >>> cache.append(*torch.randn(2, 1, 10, 8, 64))  # the same 10 tokens on every rank
        >>> cache.lengths
        tensor([10], dtype=torch.int32)
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        group: Any = None,
        dtype: Any = torch.float32,
        **options: Any,
    ) -> None:
        self.peers = peers_of(group)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {dtype!r}; expected a dtype of torch, such as torch.bfloat16")
        share = -(-(capacity - self.peers.rank) // self.peers.world)
        self.local = KVCache(batch, max(0, share), kv_heads, head_dim, dtype=dtype, **options)
        self.capacity = capacity
        self._lengths = self.local.lengths.clone()

    def _assigned(self) -> None:
        rank, world = self.peers.rank, self.peers.world
        self.local.lengths = (self._lengths - rank + world - 1) // world

    def settle(self) -> None:
        """Let the tokens of this rank be those of lengths that were changed in place."""
        if not unchanged(self._lengths):
            self._assigned()

    @property
    def positions(self) -> Tensor:
        """int32 [batch]: the position of each sequence's next token."""
        return self.lengths

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> None:
        """Write new tokens, which are the same on every rank; each rank stores its own.

        k: [batch, T, kv_heads, head_dim]; v likewise. lengths: int [batch], how many of the T tokens, from the first
        on, each sequence takes; None for all. Raises the errors of `KVCache.append`, on every rank.
        """
        self.settle()
        (B,), (rank, world) = self.lengths.shape, (self.peers.rank, self.peers.world)
        self.local.check_tokens(k, v, f"{B}, T", (B,))
        T = k.shape[1]
        new, most = self.local.counts(lengths, T)
        after = self.lengths + new
        self.grow(after, most, self.capacity)
        # for each sequence the first new token of this rank, and the number of its tokens
        first = (rank - self.lengths.long()) % world
        taken = ((new - first + world - 1) // world).clamp(min=0)
        index = first[:, None] + world * torch.arange(-(-T // world), device=first.device)
        rows, index = torch.arange(len(first), device=first.device)[:, None], index.clamp(max=T - 1)
        self.local.append(k[rows, index], v[rows, index], lengths=taken)
        self._lengths = after

    def extend(self, k: Tensor, v: Tensor, tokens: int) -> None:
        """Write the first `tokens` tokens of every sequence from slices, cut by `shard(k, layout="striped")`.

        Raises ValueError if the cache has tokens already, or the slices are not those of this rank.
        """
        rank, world = self.peers.rank, self.peers.world
        wanted = len(range(rank, tokens, world))
        if bool((self.lengths != 0).any()) or k.shape[1] != wanted:
            raise ValueError(
                f"k has {k.shape[1]} tokens, and the cache holds {self.lengths.tolist()}; expected an empty cache and "
                f"{wanted} of {tokens} tokens: those that shard(..., layout='striped') gives rank {rank}"
            )
        if tokens > self.capacity:
            raise ValueError(f"tokens is {tokens}; expected at most {self.capacity}, the capacity")
        self.local.append(k, v)
        self._lengths, self._bound = self.lengths + tokens, tokens


def decode(
    q: Tensor,
    cache: ShardedKVCache,
    *,
    mask: Mask | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> ArrayOrTuple:
    """`saccade.decode` over keys on several ranks, with one small message to each other rank.

    Args:
        q: [B, Tq, Hq, D], a tensor with the same contents on every rank of the cache's group.
        cache: with the new tokens appended.
        mask, causal: of the whole sequences, as in `saccade.decode`. A mask that excludes keys is lowered on the host
            at every call.
        scale, softcap, sinks, return_lse, backend: as in `saccade.decode`.

    Returns:
        o [B, Tq, Hq, Dv] in the dtype of q, with `return_lse` also lse [B, Tq, Hq]; the same bits on every rank.

    Raises:
        TypeError, ValueError, Unsupported: as in `saccade.decode`; Unsupported also for masks with quantised keys.
        PeerError: another rank died, hangs, or makes another call.

    Examples:
        >>> from saccade.distributed import ShardedKVCache, decode  # on every rank, after init_process_group
        >>> cache, (q, k, v) = ShardedKVCache(1, 4096, 8, 64), torch.randn(3, 1, 10, 8, 64)
        >>> cache.append(k, v)
        >>> o = decode(q, cache)
    """
    cache.settle()
    with taking_part(cache.peers):
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "backend": backend}
        check_kind(mask)
        mask = api.of_decode(mask, q, causal)
        whole = mask is None or (q.shape[1] == 1 and mask.key == _CAUSAL)
        # check before the call starts, so that every rank raises its own error
        refuse_gradient("decode", (q,) if sinks is None else (q, sinks), "under torch.no_grad()")
        if not whole and cache.local.quantised is not None:
            raise Unsupported("distributed", ["masks over quantised keys: leave the mask out, or store numbers"])
        seen = f"mask {fingerprint(mask)}; sinks {sinks is not None}; {options}"
        call = cache.peers.begin("decode", f"decode; q {list(q.shape)} {q.dtype}; {seen}", q.device)
        if mask is None or whole:
            part = api.decode(q, cache.local, causal=False, return_lse=True, **options)
        else:
            part = _masked(q, cache, mask, **options)
        ranks = call.gather("parts", part)
        o, lse = merge([(x[0], x[1]) for x in ranks], sinks=sinks)
    return (o, lse) if return_lse else o


def _masked(
    q: Tensor, cache: ShardedKVCache, mask: Mask, scale: float | None, softcap: float | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    lengths: list[int] = cache.lengths.tolist()
    longest, rank, world = max(lengths, default=0), cache.peers.rank, cache.peers.world
    if len(set(lengths)) > 1:
        mask = mask & keys(np.array(lengths, np.int32))
    n = len(range(rank, longest, world))
    k, v = cache.local.k[:, :n], cache.local.v[:, :n]
    whole = describe(spec(q), spec(k), spec(v), Request(options=Options(scale, softcap)))
    heads = lower(mask, whole.B, whole.Hq, whole.Tq, longest)
    chosen = choose(whole, backend)
    follow_threads(chosen)
    give = giver(chosen)
    o = q.new_zeros((*q.shape[:3], whole.Dv))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=getattr(torch, whole.accumulator))
    for rows, cut, local in pieces(heads, (Run(0, 1, whole.Tq),), (Run(rank, world, n),)):
        problem = replace(whole, Tq=rows.stop - rows.start, Tk=cut.stop - cut.start)
        plan = make_plan(problem, chosen.limits(problem), local)
        inputs = Inputs(*(give(dense(x)) for x in (q[:, rows], k[:, cut], v[:, cut])))
        part = chosen.decode(problem, plan, inputs)
        o[:, rows], lse[:, rows] = merge([(o[:, rows], lse[:, rows]), (tensor(part[0], q.dtype), tensor(part[1]))])
    return o, lse


def move(
    tensors: Sequence[Tensor],
    *,
    length: int,
    source: Sequence[int],
    target: Sequence[int],
    source_layout: Layout,
    target_layout: Layout = "striped",
    group: Any = None,
) -> list[Tensor]:
    """Move slices of `length` tokens from some ranks to others, such as keys and values from prefill to decode.

    Every rank of the group calls it. tensors: on ranks of source their slices [B, n, ...]; on other ranks tensors with
    the same sizes and dtypes but 0 tokens, [B, 0, ...]. source, target: ranks of the group, the i-th with the i-th
    slice of its layout; a rank may be in both. Returns the slices [B, m, ...] on ranks of target, else []. Tokens go
    directly from each rank that has them to each rank that needs them.

    Raises ValueError for slices that do not fit the layout, and PeerError as in `decode`.

    Examples:
        >>> from saccade.distributed import move  # on every rank, after init_process_group
        >>> keys = torch.arange(4.0).view(1, 4, 1, 1)
        >>> (moved,) = move([keys], length=4, source=[0], target=[0], source_layout="zigzag")
        >>> moved.flatten()
        tensor([0., 1., 2., 3.])
    """
    peers = peers_of(group)
    with taking_part(peers):
        for name, ranks in (("source", source), ("target", target)):
            if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(peers.world)):
                last = peers.world - 1
                raise ValueError(f"{name} is {list(ranks)}; expected different ranks of the group, 0 to {last}")
        if not tensors:
            raise ValueError("tensors is empty; expected the slices of at least one tensor")
        refuse_gradient("move", tensors, "under torch.no_grad()")
        have, want = _places(source_layout, source, length), _places(target_layout, target, length)
        mine = have[source.index(peers.rank)] if peers.rank in source else np.zeros(0, np.int64)
        if any(x.shape[1] != len(mine) for x in tensors):
            counts = [x.shape[1] for x in tensors]
            raise ValueError(
                f"rank {peers.rank} gives slices of {counts} tokens; expected {len(mine)} of {length} in each"
            )
        shapes = [(x.shape[0], *x.shape[2:], str(x.dtype)) for x in tensors]
        signature = f"move; {shapes}; {length}; {list(source)} {source_layout!r}; {list(target)} {target_layout!r}"
        call = peers.begin("move", signature, tensors[0].device)
        device, nothing = tensors[0].device, np.zeros(0, np.int64)
        sends = dict[int, Parcel]()
        for rank, places in zip(target, want, strict=True):
            chosen = np.flatnonzero(np.isin(mine, places))
            if len(chosen):
                sends[rank] = pack([x.index_select(1, torch.from_numpy(chosen).to(device)) for x in tensors])
        keep = want[target.index(peers.rank)] if peers.rank in target else nothing
        results = [x.new_empty(x.shape[0], len(keep), *x.shape[2:]) for x in tensors]
        # the indices, in this rank's new slices, of the tokens from each rank
        order = np.argsort(keep)
        at = {r: order[np.searchsorted(keep[order], p[np.isin(p, keep)])] for r, p in zip(source, have, strict=True)}
        receives = {
            rank: Parcel([Like((x.shape[0], len(places), *x.shape[2:]), x.dtype) for x in tensors], device)
            for rank, places in at.items()
            if len(places) and rank != peers.rank
        }
        own = sends.pop(peers.rank, None)
        call.post("slices", sends, receives).wait()
        for rank, parcel in (receives if own is None else {**receives, peers.rank: own}).items():
            for x, part in zip(results, parcel.tensors, strict=True):
                x[:, torch.from_numpy(at[rank]).to(device)] = part
        return results if peers.rank in target else []


def _places(layout: Layout, ranks: Sequence[int], length: int) -> list[np.ndarray]:
    return [positions(runs) for runs in runs_of(layout, len(ranks), length)]
