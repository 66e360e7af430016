"""Exchange slices of the sequence with all heads for the whole sequence with some heads (Jacobs et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..biases import Bias
from ..frameworks.torch_run import spec
from ..mask import Mask
from ..operands import bias_shape, slopes_shape, table_shape
from .comm import Peers
from .layout import Run, count
from .parcel import Like, Parcel, pack
from .sharding import put


class Exchange(NamedTuple):
    """The exchange of heads for positions. into: the runs of each rank's positions among all; Hq: query heads."""

    peers: Peers
    into: tuple[tuple[Run, ...], ...]
    Hq: int
    signature: str

    def heads(self, H: int, rank: int) -> slice:
        """The heads of a rank among H query or key heads; of key heads those that its query heads read."""
        share, group = self.Hq // self.peers.world, self.Hq // H
        return slice(rank * share // group, ((rank + 1) * share - 1) // group + 1)

    def gather(self, what: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert [B, n, H, ...] of this rank's positions to [B, T, h, ...] of its heads."""
        parts = [[x[:, :, self.heads(x.shape[2], r)] for x in tensors] for r in range(self.peers.world)]
        mine = parts[self.peers.rank]
        likes = [[Like((x.shape[0], count(runs), *x.shape[2:]), x.dtype) for x in mine] for runs in self.into]
        T, results = sum(map(count, self.into)), list[Tensor]()
        for pieces in self._exchange(what, parts, likes):
            x = pieces[0]
            whole = x.new_empty((x.shape[0], T, *x.shape[2:]))
            for piece, runs in zip(pieces, self.into, strict=True):
                put(whole, piece, runs, 1)
            results.append(whole)
        return results

    def scatter(self, what: str, tensors: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        """Convert [B, T, h, ...] to [B, n, H, ...], H from `heads`; key heads on several ranks are added by rank."""
        # every run apart, so that packing is the only copy before the exchange
        parts = [[x[:, run.slice] for x in tensors for run in runs] for runs in self.into]
        mine = self.into[self.peers.rank]
        likes: list[list[Like]] = []
        for r in range(self.peers.world):
            spans = [self.heads(H, r) for H in heads]
            sizes = [(x, span.stop - span.start) for x, span in zip(tensors, spans, strict=True)]
            likes.append([Like((x.shape[0], run.length, h, *x.shape[3:]), x.dtype) for x, h in sizes for run in mine])
        pieces = iter(self._exchange(what, parts, likes))
        results: list[Tensor] = []
        for x, H in zip(tensors, heads, strict=True):
            shared, shape = H % self.peers.world > 0, (x.shape[0], count(mine), H, *x.shape[3:])
            wide = torch.promote_types(x.dtype, torch.float32)
            whole = x.new_zeros(shape, dtype=wide) if shared else x.new_empty(shape)
            at = 0
            for run in mine:
                rows = whole[:, at : at + run.length]
                at += run.length
                for r, piece in enumerate(next(pieces)):
                    into = rows[:, :, self.heads(H, r)]
                    if shared:
                        into += piece
                    else:
                        into.copy_(piece)
            results.append(whole.to(x.dtype))
        return results

    def _exchange(
        self, what: str, parts: Sequence[Sequence[Tensor]], likes: Sequence[Sequence[Like]]
    ) -> list[tuple[Tensor, ...]]:
        # parts: by target rank; likes: by source rank. Returns for each tensor the parts received, by rank
        me, device = self.peers.rank, parts[0][0].device
        receives = {r: Parcel(like, device) for r, like in enumerate(likes) if r != me}
        sends = {r: pack(parts[r]) for r in receives}
        self.peers.begin(what, f"{what}; {self.signature}", device).post("exchange", sends, receives).wait()
        came = [parts[r] if r == me else receives[r].tensors for r in range(len(likes))]
        return list(zip(*came, strict=True))


class ToHeads(torch.autograd.Function):
    """`Exchange.gather`, differentiable."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.rest = exchange, [x.shape[2] for x in tensors]
        return tuple(exchange.gather("heads for positions", tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        exchange, heads = ctx.rest
        return None, *exchange.scatter("heads for positions, backward", grads, heads)


class ToSlices(torch.autograd.Function):
    """`Exchange.scatter` of tensors with query heads, differentiable."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.exchange = exchange
        return tuple(exchange.scatter("positions for heads", tensors, [exchange.Hq] * len(tensors)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, *ctx.exchange.gather("positions for heads, backward", grads)


def mask_of(mask: Mask | None, heads: slice, key_heads: slice) -> Mask | None:
    """The mask of some query heads and of the key heads that they read."""
    if mask is None:
        return None
    if mask.kind == "per_head":
        return Mask(mask.kind, (), mask.children[heads])
    if mask.kind == "select":
        return Mask(mask.kind, (mask.args[0][:, key_heads], *mask.args[1:]))
    children = tuple(part for child in mask.children if (part := mask_of(child, heads, key_heads)) is not None)
    same = all(a is b for a, b in zip(children, mask.children, strict=True))
    return mask if same else Mask(mask.kind, mask.args, children)


def check_heads(bias: Bias, sizes: tuple[int, int, int, int]) -> None:
    """Raise ValueError unless the terms of a bias fit all [B, Hq, T, T] scores, before they are cut."""
    B, Hq, _, _ = sizes
    if bias.array is not None:
        bias_shape(spec(bias.array), sizes, str(bias.array.device), grad=False)
    if bias.slopes is not None:
        slopes_shape(spec(bias.slopes), B, Hq, str(bias.slopes.device))
    if bias.table is not None:
        table_shape(spec(bias.table), B, Hq, str(bias.table.device))


def bias_of(bias: Bias, heads: slice, log_f: Tensor | None) -> Bias:
    """The bias of some query heads, with their gates."""
    array = bias.array
    if array is not None and len(array.shape) > 2 and array.shape[-3] > 1:
        array = array[..., heads, :, :]
    slopes = None if bias.slopes is None else bias.slopes[..., heads]
    table = None if bias.table is None else bias.table[..., heads, :]
    return replace(bias, array=array, slopes=slopes, table=table, log_f=log_f)


def joined(shares: Sequence[tuple[Run, ...]]) -> tuple[tuple[Run, ...], tuple[tuple[Run, ...], ...]]:
    """The runs of several ranks as those of one, sorted and joined; and the runs of each rank among these."""
    ordered = sorted((run, rank) for rank, runs in enumerate(shares) for run in runs)
    union: list[Run] = []
    at, places = 0, [dict[Run, Run]() for _ in shares]
    for run, rank in ordered:
        places[rank][run] = Run(at, 1, run.length)
        at += run.length
        last = union[-1] if union else None
        if last is not None and last.step == run.step and last.start + last.step * last.length == run.start:
            union[-1] = Run(last.start, last.step, last.length + run.length)
        else:
            union.append(run)
    into = tuple(tuple(places[rank][run] for run in runs) for rank, runs in enumerate(shares))
    return tuple(union), into
