"""Selected keys: their lists as kernels read them, and the same lists transposed. Nothing is read back."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from ...problem import Problem
from .chip import interpreted, upload
from .kernels.selected import Lists
from .kernels.selected_backward import Chunks

# sorts after every index
LAST = 2**31 - 1


def lists_of(p: Problem, device: torch.device) -> Lists:
    """The lists of a problem with selected keys, on its device."""
    selection = p.selection
    assert selection is not None
    blocks = -(-p.Tk // selection.block)
    indices = selection.indices
    if isinstance(indices, torch.Tensor):
        narrow = indices.dtype is torch.int32 or indices.dtype.itemsize < 4
        indices = indices.to(device, torch.int32 if narrow else torch.int64, non_blocking=True)
    else:
        indices = upload(indices, device)
    # entries out of range are never read: they become no block, before numbers of 64 bits are cut to 32
    indices = torch.where((indices < 0) | (indices >= blocks), LAST, indices).to(torch.int32).sort(-1).values
    again = indices[..., 1:] == indices[..., :-1]
    indices[..., 1:] = torch.where(again, LAST, indices[..., 1:])
    indices = indices.sort(-1).values
    batch, heads, groups, n = indices.shape
    counts = (indices != LAST).sum(-1, dtype=torch.int32)
    # a group has no more rows than there are
    rows = max(1, min(selection.rows, p.Tq))
    return Lists(indices, counts, heads * groups if batch > 1 else 0, groups, n, _constant(selection.block), rows)


def _constant(n: int) -> Any:
    # the interpreter has plain numbers, with which an operator of a constant on the right fails
    return n if interpreted() else tl.constexpr(n)


def chunks_of(lists: Lists, p: Problem, BN: int, rows: int, columns: int) -> Chunks:
    """The lists transposed, for tiles of BN keys, in chunks of at least `rows` rows, and sums of `columns` numbers."""
    batch, heads, groups, n = lists.p.shape
    # bits of 64 blocks are one number
    assert p.selection is not None
    blocks = max(1, min(64, BN // p.selection.block))
    keys = blocks * p.selection.block
    per_head, tiles = -(-p.Tk // keys), -(-keys // BN)
    cells, size = batch * heads * per_head, -(-rows // (lists.rows * p.G))
    cell, bits = lists.p // blocks, None
    if blocks > 1:
        # the entries of a list are in order; those in one cell become the first of them
        first = torch.ones_like(cell, dtype=torch.bool)
        first[..., 1:] = cell[..., 1:] != cell[..., :-1]
        at = first.cumsum(-1) - 1
        bits = torch.zeros_like(at).scatter_add_(-1, at, 1 << (lists.p % blocks).long())
        cell = torch.full_like(cell, LAST).scatter_(-1, at, cell)
    head = torch.arange(batch * heads, device=cell.device).view(batch, heads, 1, 1) * per_head
    # without room for more entries, one sort of numbers of cells has the groups of each cell in order
    of, order = torch.where(cell < per_head, head + cell, cells).flatten().sort(stable=True)
    ptr = torch.searchsorted(of, torch.arange(cells + 1, device=of.device))
    first = torch.nn.functional.pad(((ptr.diff() + size - 1) // size).cumsum(0), (1, 0))
    most = cells + of.numel() // size
    chunk = torch.searchsorted(first[1:], torch.arange(most, device=of.device), right=True).clamp_(max=cells - 1)
    parts = torch.empty((1 if batch > 1 else p.B, most, tiles, BN, columns), device=of.device)
    where = (order // max(n, 1) % groups).int(), None if bits is None else bits.flatten()[order]
    of_entry = _constant(lists.rows * p.G), _constant(p.G)
    return Chunks(*where, ptr, first, chunk, most, size, cells, per_head, keys, tiles, *of_entry, parts)
