"""Divide a tensor into slices of ranks, and gather the slices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .comm import Like, Parcel, pack, peers_of
from .layout import Layout, Run, count, runs_of
from .parcel import refuse_gradient
from .refusal import taking_part


def shard(x: Tensor, *, layout: Layout, group: Any = None, dim: int = 1) -> Tensor:
    """This rank's slice of a tensor that every rank has; differentiable, and without messages.

    Args:
        x: any tensor with the sequence along `dim`, such as [B, T, ...].
        layout: "contiguous", "zigzag", "striped", or a list of runs (start, step, length) per rank, as in `runs_of`.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.
        dim: the dimension of the sequence.

    Returns:
        [B, n, ...], with the positions in the order of the layout's runs.

    Raises:
        ValueError: as in `runs_of`.

    Examples:
        >>> from saccade.distributed import shard  # on every rank, after init_process_group
        >>> q = shard(torch.randn(2, 1024, 8, 64), layout="zigzag")  # [B, T, H, D] -> [B, n, H, D]
    """
    peers = peers_of(group)
    return take(x, runs_of(layout, peers.world, x.shape[dim])[peers.rank], dim)


def unshard(x: Tensor, *, layout: Layout, group: Any = None, dim: int = 1) -> Tensor:
    """The whole tensor on every rank, from the slices of `shard`, which may differ in length; without a gradient.

    Args:
        x: this rank's slice. Other sizes, dtype, layout and dim must be the same on every rank.
        layout, group, dim: as in `shard`.

    Returns:
        [B, T, ...] on every rank, in the order of positions.

    Raises:
        ValueError: x requires grad, or its length does not fit the layout.
        PeerError: ranks disagree, or a rank died or hangs.

    Examples:
        >>> from saccade.distributed import shard, unshard  # on every rank, after init_process_group
        >>> positions = shard(torch.arange(8), layout="striped", dim=0)
        >>> unshard(positions, layout="striped", dim=0)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    peers = peers_of(group)
    with taking_part(peers):
        refuse_gradient("unshard", (x,), "compute the loss on slices and sum it")
        dim = dim % x.dim()
        rest = [*x.shape[:dim], *x.shape[dim + 1 :]]
        call = peers.begin("unshard", f"unshard; {rest}; {x.dtype}; dim {dim}; {layout!r}", x.device)
        sizes = [int(n) for (n,) in call.gather("lengths", [torch.tensor(x.shape[dim], device=x.device)])]
        runs = runs_of(layout, peers.world, sum(sizes))
        for rank, size in enumerate(sizes):
            if size != count(runs[rank]):
                raise ValueError(
                    f"rank {rank} has a slice of {size} of {sum(sizes)} positions; layout {layout!r} gives it "
                    f"{count(runs[rank])}: shard x by the same layout"
                )
        others = [r for r in range(peers.world) if r != peers.rank and sizes[r]]
        parts = {r: Parcel([Like((*rest[:dim], sizes[r], *rest[dim:]), x.dtype)], x.device) for r in others}
        mine = pack([x])
        sends = {r: mine for r in range(peers.world) if r != peers.rank} if x.shape[dim] else {}
        call.post("slices", sends, parts).wait()
        whole = x.new_empty((*rest[:dim], sum(sizes), *rest[dim:]))
        for rank, part in [*parts.items(), (peers.rank, mine)]:
            put(whole, part.tensors[0], runs[rank], dim)
        return whole


def take(x: Tensor, runs: tuple[Run, ...], dim: int) -> Tensor:
    """The positions of these runs along dim, concatenated; a view if there is one run."""
    index = (slice(None),) * (dim % x.dim())
    parts = [x[(*index, run.slice)] for run in runs]
    if not parts:
        return x.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def put(whole: Tensor, part: Tensor, runs: tuple[Run, ...], dim: int) -> None:
    """Write `part`, a result of `take`, back to its positions in `whole`."""
    index, at = (slice(None),) * dim, 0
    for run in runs:
        whole[(*index, run.slice)] = part.narrow(dim, at, run.length)
        at += run.length
