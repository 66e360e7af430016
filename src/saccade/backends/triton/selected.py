"""Selected keys: their lists as kernels read them, sorted and without repetitions. Nothing is read back."""

from __future__ import annotations

import torch

from ...problem import Problem
from .chip import upload
from .kernels.decode import Lists

# sorts after every index
LAST = 2**31 - 1


def lists_of(p: Problem, device: torch.device) -> Lists:
    """The lists of a problem with selected keys, on its device."""
    selection = p.selection
    assert selection is not None
    blocks = -(-p.Tk // selection.block)
    indices = selection.indices
    tensor = isinstance(indices, torch.Tensor)
    indices = indices.to(device, torch.int32, non_blocking=True) if tensor else upload(indices, device)
    # entries out of range are never read: they become no block
    indices = torch.where((indices < 0) | (indices >= blocks), LAST, indices).sort(-1).values
    again = indices[..., 1:] == indices[..., :-1]
    indices[..., 1:] = torch.where(again, LAST, indices[..., 1:])
    indices = indices.sort(-1).values
    batch, heads, groups, n = indices.shape
    counts = (indices != LAST).sum(-1, dtype=torch.int32)
    return Lists(indices, counts, heads * groups if batch > 1 else 0, groups, n, selection.block, selection.rows)
