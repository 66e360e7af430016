"""From slices of the sequence with all heads to all of the sequence with some heads, and back (Jacobs et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..mask import Mask
from .comm import Peers
from .layout import Run, count
from .parcel import Like, Parcel, pack
from .sharding import put, take


class Exchange(NamedTuple):
    """Heads for positions among ranks. into: where each rank's positions lie among those of all; Hq: query heads."""

    peers: Peers
    into: tuple[tuple[Run, ...], ...]
    Hq: int
    signature: str

    def heads(self, H: int, rank: int) -> slice:
        """The heads of a rank, of H query or key heads: those of keys that its query heads read."""
        share, group = self.Hq // self.peers.world, self.Hq // H
        return slice(rank * share // group, ((rank + 1) * share - 1) // group + 1)

    def others(self) -> list[int]:
        """The ranks but this one."""
        return [r for r in range(self.peers.world) if r != self.peers.rank]

    def gather(self, what: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[B, n, H, ...] of this rank's positions to [B, T, h, ...] of its heads."""
        me, counts = self.peers.rank, [count(runs) for runs in self.into]
        parts = {r: [x[:, :, self.heads(x.shape[2], r)] for x in tensors] for r in range(self.peers.world)}
        receives = {
            r: Parcel([Like((x.shape[0], counts[r], *x.shape[2:]), x.dtype) for x in parts[me]], tensors[0].device)
            for r in self.others()
        }
        self._exchange(what, {r: pack(parts[r]) for r in receives}, receives)
        whole = [x.new_empty((x.shape[0], sum(counts), *x.shape[2:])) for x in parts[me]]
        for r, runs in enumerate(self.into):
            for x, part in zip(whole, parts[me] if r == me else receives[r].tensors, strict=True):
                put(x, part, runs, 1)
        return whole

    def scatter(self, what: str, tensors: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        """[B, T, h, ...] back to [B, n, H, ...], H of `heads`; key heads that several ranks have are added by rank."""
        me = self.peers.rank
        parts = {r: [take(x, runs, 1) for x in tensors] for r, runs in enumerate(self.into)}
        spans = {r: [self.heads(H, r) for H in heads] for r in parts}
        receives = {
            r: Parcel(
                [
                    Like((*x.shape[:2], span.stop - span.start, *x.shape[3:]), x.dtype)
                    for x, span in zip(parts[me], spans[r], strict=True)
                ],
                tensors[0].device,
            )
            for r in self.others()
        }
        self._exchange(what, {r: pack(parts[r]) for r in receives}, receives)
        found: list[Tensor] = []
        for n, (x, H) in enumerate(zip(parts[me], heads, strict=True)):
            wide = torch.promote_types(x.dtype, torch.float32)
            whole = x.new_zeros((*x.shape[:2], H, *x.shape[3:]), dtype=wide)
            for r in range(self.peers.world):
                whole[:, :, spans[r][n]] += x if r == me else receives[r].tensors[n]
            found.append(whole.to(x.dtype))
        return found

    def _exchange(self, what: str, sends: dict[int, Parcel], receives: dict[int, Parcel]) -> None:
        device = next(iter(sends.values())).buffer.device if sends else torch.device("cpu")
        self.peers.begin(what, f"{what}; {self.signature}", device).post("exchange", sends, receives).wait()


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


def mask_of(mask: Mask | None, heads: slice) -> Mask | None:
    """The mask of some query heads."""
    if mask is None:
        return None
    if mask.kind == "per_head":
        return Mask(mask.kind, (), mask.children[heads])
    children = tuple(part for child in mask.children if (part := mask_of(child, heads)) is not None)
    same = all(a is b for a, b in zip(children, mask.children, strict=True))
    return mask if same else Mask(mask.kind, mask.args, children)


def joined(shares: Sequence[tuple[Run, ...]]) -> tuple[tuple[Run, ...], tuple[tuple[Run, ...], ...]]:
    """The runs of several ranks as those of one, by their starts and neighbours made one; and where each rank's lie."""
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
