"""Models on slices of their rows: what a layer does in place of an attention or a recurrence of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..mask import Mask
from .layout import Layout, positions, runs_of
from .slices import Slice


@dataclass(frozen=True)
class ContextParallel:
    """Given to a model in place of `backend`, with this rank's slices of tokens and positions.

    length: tokens of the whole rows, the same on every rank. group: a ProcessGroup, a DeviceMesh with one dimension, or
    None for all ranks. layout: as of `shard`, by which tokens and positions are cut; recurrent layers want
    "contiguous", attention alone is balanced by "zigzag" under a causal mask. backend: of every rank. piece is set by
    `at`. The model's mask is of the whole rows.
    """

    length: int
    group: Any = None
    layout: Layout = "contiguous"
    backend: str | None = None
    piece: Slice | None = None

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's slice of a tensor that every rank has."""
        from .sharding import shard

        if x.shape[dim] != self.length:
            raise ValueError(f"x has {x.shape[dim]} tokens; expected the whole rows of {self.length}")
        return shard(x, layout=self.layout, group=self.group, dim=dim)

    @property
    def positions(self) -> Tensor:
        """int64 [n]: the places of this rank's tokens in the whole rows."""
        from .comm import peers_of

        peers = peers_of(self.group)
        places: np.ndarray = positions(runs_of(self.layout, peers.world, self.length)[peers.rank])
        return torch.from_numpy(places)

    def at(self, positions: Tensor) -> ContextParallel:
        """The same, knowing where sequences begin: at every position 0 of this rank's slices, [B, n] or [n]."""
        return replace(self, piece=Slice.of_positions(positions))

    @property
    def borders(self) -> Tensor:
        """int32 [N + 1]: cu_seqlens of this rank's slices one behind the other; valid after `at`."""
        assert self.piece is not None
        assert self.piece.sequences.cu_seqlens is not None
        return self.piece.sequences.cu_seqlens

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """`saccade.attention` of the whole rows, q [B, n, Hq, D], k and v [B, n, Hk, D] being this rank's slices."""
        from .ring import ring_attention

        # as torch.compiler.disable declares its result, it takes a function
        ring: Any = ring_attention
        options = {"layout": self.layout, "group": self.group, "length": self.length, "backend": self.backend}
        return ring(q, k, v, mask, **options)

    def recurrent(self, op: Callable[..., Any], *arrays: Any, **options: Any) -> Tensor:
        """A call of `saccade.recurrent` on slices of all rows one behind the other, [1, B n, ...].

        Raises ValueError for slices that are not contiguous.
        """
        from .state_passing import bind
        from .states import on_slice

        if self.layout != "contiguous" or self.piece is None:
            raise ValueError(f"layout is {self.layout!r} and layers carry states; expected 'contiguous', and `at`")
        call = bind(op, arrays, {**options, "backend": self.backend})
        return on_slice(call, self.piece, self.group)[0]


# where and how a layer computes
Where = str | ContextParallel | None
