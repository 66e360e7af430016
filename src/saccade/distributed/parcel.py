"""Tensors of a message in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# bytes before the tensors, and what each of them begins at a multiple of
ALIGN = 128
# of int64 in the header
WORDS = 5


class Like(NamedTuple):
    """Shape and dtype of a tensor to receive."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Parcel:
    """A message: tensors, views of one buffer behind its header. Made empty, or filled by `pack`.

    room: bytes to lie in, `size` of them or more. origin: the rank that writes the header, when it first sends this;
    others pass it on as it came. None where that is not known yet, or the neighbour that it is received from.
    """

    def __init__(
        self, likes: Sequence[Like], device: torch.device, room: Tensor | None = None, origin: int | None = None
    ) -> None:
        sizes = [_bytes(like) for like in likes]
        starts = [ALIGN]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGN) * ALIGN)
        if room is None:
            room = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self.origin, self.buffer = origin, room[: starts[-1]]
        self.head = self.buffer[: 8 * WORDS].view(torch.int64)
        self.tensors = [
            self.buffer[start : start + size].view(like.dtype).view(like.shape)
            for like, start, size in zip(likes, starts, sizes, strict=False)
        ]


def pack(tensors: Sequence[Tensor]) -> Parcel:
    """A parcel that holds copies of these tensors, which live on one device."""
    parcel = Parcel([Like(tuple(x.shape), x.dtype) for x in tensors], tensors[0].device)
    with torch.no_grad():
        for to, x in zip(parcel.tensors, tensors, strict=True):
            to.copy_(x)
    return parcel


def size_of(likes: Sequence[Like]) -> int:
    """Bytes of a parcel of these tensors."""
    return ALIGN + sum(-(-_bytes(like) // ALIGN) * ALIGN for like in likes)


def _bytes(like: Like) -> int:
    n = like.dtype.itemsize
    for size in like.shape:
        n *= size
    return n
