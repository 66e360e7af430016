"""Arrays to a device and numbers from it, without waiting for what a GPU still computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device | None) -> Tensor:
    """x of the host on a device, or x itself for None. The host does not wait for a GPU."""
    if device is None or device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def later(numbers: Sequence[Tensor]) -> Callable[[], list[float]]:
    """A function that returns numbers [] of an NVIDIA GPU, and waits for nothing that is computed after this call."""
    copied = torch.empty(len(numbers), pin_memory=True)
    # an event is recorded on the current GPU
    with torch.cuda.device(numbers[0].device):
        copied.copy_(torch.stack([x.detach().float() for x in numbers]), non_blocking=True)
        event = torch.cuda.Event()
        event.record()

    def read() -> list[float]:
        event.synchronize()
        return copied.tolist()

    return read
