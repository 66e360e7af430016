"""The chip that a call runs on, and copies of small host arrays to it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch

from ..tested import CHIPS

# the chip of plans without a device
DEFAULT = "sm_90"


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def elsewhere(device: str) -> list[str]:
    """Reasons why no kernel can read arrays on this device."""
    kind = device.partition(":")[0]
    here = kind == "cuda" or (kind == "cpu" and interpreted())
    return [] if here else [f"its arrays live on {device}: move them to an NVIDIA GPU by .cuda()"]


@cache
def chip_of(device: str) -> str:
    """The chip of a device, as "sm_90" or "gfx942"; "cuda:sm_80" names a chip that need not be present."""
    chip = device.partition(":")[2]
    if chip in CHIPS:
        return chip
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return DEFAULT
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def overlaps(chip: str) -> bool:
    """Whether a kernel can start before the one before has ended, as those that begin with `kernels.overlap` do."""
    return chip.startswith("sm_") and int(chip[3:]) >= 90 and not interpreted()


def early(chip: str) -> dict[str, bool]:
    """Options of the launch of such a kernel."""
    return {"launch_pdl": True} if overlaps(chip) else {}


@cache
def multiprocessors(device: str) -> int:
    """The number of multiprocessors of a device."""
    if device.partition(":")[2] in CHIPS or not device.startswith("cuda") or not torch.cuda.is_available():
        return CHIPS[chip_of(device)][1]
    return torch.cuda.get_device_properties(device).multi_processor_count


def on(x: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels that read x can be launched: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def upload(numbers: Any, device: torch.device) -> torch.Tensor:
    """Copy numbers of the host to the device as int32, without waiting.

    Raises RuntimeError while a CUDA graph is captured: its replays would copy from memory that is freed by then.
    """
    host = torch.from_numpy(np.ascontiguousarray(numbers, np.int32))
    if device.type != "cuda":
        return host
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph captures this call before it was ever made, and its mask's lists are on the host: "
            "make the call once with the same shapes and mask before the capture"
        )
    return host.pin_memory().to(device, non_blocking=True)
