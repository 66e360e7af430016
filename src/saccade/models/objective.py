"""What training minimises and how: the loss of a batch in the dtype of a run, its blocks, its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import mask as masks
from ..distributed.context import ContextParallel, Where
from ..mask import Mask
from .blocks import Decoder, summed_losses
from .data import IGNORED, Batch
from .settings import Settings
from .transfers import sent


def set_up(model: Decoder, settings: Settings) -> None:
    """Make the blocks of a model compute as the settings say.

    recompute: each block keeps only its input for the backward. compile: torch.compile fuses what a block does around
    its matrix products and its attention, and the losses of the logits; blocks of one kind share a graph.
    """
    if settings.compile:
        model.summed = torch.compile(summed_losses, dynamic=False)
    for block in model.blocks:
        if settings.recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if settings.compile:
            block.compile(dynamic=False)


class Objective:
    """The mean cross-entropy in nats of the rows of a batch, with products in the dtype of the settings."""

    def __init__(self, model: Decoder, settings: Settings, device: torch.device, backend: Where) -> None:
        self.model, self.device, self.backend = model, device, backend
        self.rows = settings.batch
        self.precision: dict[str, Any] = {
            "device_type": device.type,
            "dtype": getattr(torch, settings.dtype),
            "enabled": settings.dtype != "float32",
        }

    def mask_of(self, batch: Batch, device: torch.device | None) -> Mask:
        """What each token of a batch attends to: the tokens before it in its document. None leaves ids on the host."""
        return masks.causal() & masks.documents(sent(torch.from_numpy(batch.documents), device))

    def loss(self, batch: Batch) -> Tensor:
        """The mean over the targets of a batch."""
        return self.sum(batch) / targets_of(batch)

    def sum(self, batch: Batch, ranks: ContextParallel | None = None) -> Tensor:
        """The sum over the targets of a batch, or over those of this rank's slices."""

        def mine(x: np.ndarray) -> Tensor:
            whole = torch.from_numpy(x)
            return sent(whole if ranks is None else ranks.shard(whole), self.device)

        # a ring plans its steps on the host
        mask = self.mask_of(batch, self.device if ranks is None else None)
        tokens, positions, targets = (mine(x) for x in (batch.tokens, batch.positions, batch.targets))
        with torch.autocast(**self.precision):
            return self.model(tokens, positions, mask, backend=ranks or self.backend, targets=targets)

    @torch.no_grad()
    def mean(self, batch: Batch) -> Tensor:
        """The mean over a batch of any number of rows, a step's rows at a time."""
        return torch.stack([self.sum(part) for part in self.parts(batch)]).sum() / targets_of(batch)

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """A step's rows of a batch at a time."""
        for start in range(0, len(batch.tokens), self.rows):
            yield Batch(*(x[start : start + self.rows] for x in batch))


def targets_of(batch: Batch) -> int:
    """How many tokens of a batch have a target."""
    return int((batch.targets != IGNORED).sum())


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
