"""How much of a machine's peak a training run reaches, and how much memory it takes."""

from __future__ import annotations

import time
from functools import cached_property

import torch
from torch import nn

from saccade.memory import resident

from .blocks import Decoder
from .data import Batch
from .settings import Settings

# rows and columns of the matrices by which the peak is measured, on a CPU and on another device
SIDES = {"cpu": 1536}
SIDE, REPEATS = 8192, 5
# seconds of a small product after which a large one, 64 times as long, is not tried
SLOW = 0.01
# steps that are not timed
FIRST = 2


def peak(dtype: torch.dtype, device: torch.device) -> float:
    """The measured rate of a product of square matrices, in FLOP/s: the best of a few.

    Small matrices are first. Where they are slow already, as with bfloat16 on most CPUs, large ones take 45 s.
    """
    side, rate = SIDES.get(device.type, SIDE), 0.0
    for n in (side // 4, side):
        seconds = product_seconds(n, dtype, device)
        rate = max(rate, 2 * n**3 / seconds)
        if seconds > SLOW:
            break
    return rate


def product_seconds(n: int, dtype: torch.dtype, device: torch.device) -> float:
    """The least seconds of a few products of matrices of n rows and columns."""
    # not the global generator, whose state is part of a run
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(REPEATS):
        wait(device)
        start = time.perf_counter()
        torch.mm(a, b)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def wait(device: torch.device) -> None:
    """Until the device has computed all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matrix_parameters(model: Decoder, tied: bool) -> int:
    """The parameters that every token is multiplied with: all matrices, without tables that are only read."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    read = {id(table.weight) for table in tables}
    count = sum(x.numel() for x in model.parameters() if x.ndim > 1 and id(x) not in read)
    # the first table has the tokens, and serves as the head of a tied model
    return count + (tables[0].weight.numel() if tied else 0)


class Meter:
    """The share of the machine's peak that the steps of this process reach.

    The operations of a step are those of its forward and backward, without what is recomputed: six for each parameter
    of a matrix and token, twelve for each number of a query head and allowed pair. The states of recurrent layers are
    not counted.
    """

    def __init__(self, model: Decoder, settings: Settings, device: torch.device) -> None:
        layers, _, size = model.cached
        self.per_token = 6.0 * matrix_parameters(model, settings.tie)
        self.per_pair = 12.0 * layers * settings.heads * size
        self.dtype, self.device = getattr(torch, settings.dtype), device
        self.flops = self.seconds = 0.0
        self.steps = 0

    def flops_of(self, batch: Batch) -> float:
        """The floating-point operations of a step."""
        return self.per_token * batch.tokens.size + self.per_pair * int((batch.positions + 1).sum())

    def add(self, batch: Batch, seconds: float) -> None:
        """Count a step; the first ones are left out, because they compile and allocate."""
        self.steps += 1
        if self.steps > FIRST:
            self.flops += self.flops_of(batch)
            self.seconds += seconds

    @cached_property
    def peak(self) -> float:
        """The measured rate of the machine's matrix products, in FLOP/s."""
        return peak(self.dtype, self.device)

    @property
    def share(self) -> float | None:
        """The share of the peak that was reached, None before there are steps to tell."""
        return self.flops / self.seconds / self.peak if self.seconds else None


def memory(device: torch.device) -> int:
    """The most bytes that the process has had so far, on a GPU there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident()[1]
