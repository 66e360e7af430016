"""Context parallelism for models: attention and recurrences of layers whose rows are divided among ranks."""

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
    """Context parallelism of a model: pass it in place of `backend`, with this rank's slices of tokens and positions.

    The model's mask is for the whole rows, not for the slices.

    Args:
        length: tokens of the whole rows, the same on every rank.
        group: a ProcessGroup, a DeviceMesh with one dimension, or None for all ranks.
        layout: as in `shard`. Recurrent layers need "contiguous"; for attention alone "zigzag" balances a causal mask.
        backend: the backend of every rank, as in `ring_attention`.
        piece: the sequences of this rank's slices; `at` sets it.

    Examples:
        >>> from saccade.distributed import ContextParallel  # on every rank, after init_process_group
        >>> from saccade.models.llama import Llama, LlamaConfig
        >>> model, tokens = Llama(LlamaConfig(vocab_size=100)), torch.randint(100, (2, 256))
        >>> ranks = ContextParallel(256, layout="zigzag")
        >>> logits = model(ranks.shard(tokens), mask=saccade.mask.causal(), backend=ranks)  # [2, n, vocab]
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
        """int64 [n]: the positions of this rank's tokens in the whole rows."""
        from .comm import peers_of

        peers = peers_of(self.group)
        places: np.ndarray = positions(runs_of(self.layout, peers.world, self.length)[peers.rank])
        return torch.from_numpy(places)

    def at(self, positions: Tensor) -> ContextParallel:
        """This object for sequences that start at every position 0; positions: of this rank's slices, [B, n] or [n]."""
        return replace(self, piece=Slice.of_positions(positions))

    @property
    def borders(self) -> Tensor:
        """int32 [N + 1]: cu_seqlens of this rank's slices, concatenated; valid after `at`."""
        assert self.piece is not None
        assert self.piece.sequences.cu_seqlens is not None
        return self.piece.sequences.cu_seqlens

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """`saccade.attention` of the whole rows; q [B, n, Hq, D], k and v [B, n, Hk, D] are this rank's slices."""
        from .ring import ring_attention

        # torch.compiler.disable declares the result as a function of a function
        ring: Any = ring_attention
        options = {"layout": self.layout, "group": self.group, "length": self.length, "backend": self.backend}
        return ring(q, k, v, mask, **options)

    def recurrent(self, op: Callable[..., Any], *arrays: Any, **options: Any) -> Tensor:
        """A call of `saccade.recurrent` on the concatenated slices of all rows, [1, B · n, ...].

        Raises ValueError for slices that are not contiguous.
        """
        from .state_passing import bind
        from .states import on_slice

        if self.layout != "contiguous" or self.piece is None:
            raise ValueError(f"layout is {self.layout!r} and layers carry states; expected 'contiguous', and `at`")
        for name in ("initial_state", "return_state", "cu_seqlens"):
            if options.get(name) is not None and options[name] is not False:
                raise ValueError(
                    f"{name} is given; expected none, because a layer's sequences start at the positions of `at`: call "
                    "saccade.distributed.recurrent"
                )
        call = bind(op, arrays, {**options, "backend": self.backend})
        return on_slice(call, self.piece, self.group)[0]


# the argument `backend` of layers: how, and on which ranks, they compute
Where = str | ContextParallel | None
