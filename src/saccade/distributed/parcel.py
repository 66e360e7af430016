"""Tensors of a message in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
        size, places = _places(tuple(likes))
        if room is None:
            room = torch.empty(size, dtype=torch.uint8, device=device)
        self.origin, self.buffer = origin, room if room.numel() == size else room[:size]
        # offsets count from where the storage begins
        first = self.buffer.storage_offset()
        typed = {dtype: self.buffer.view(dtype) for dtype in (torch.int64, *{like.dtype for like in likes})}
        self.head = typed[torch.int64].as_strided((WORDS,), (1,), first // 8)
        self.tensors = [
            typed[like.dtype].as_strided(like.shape, strides, (first + at) // like.dtype.itemsize)
            for like, (strides, at) in zip(likes, places, strict=True)
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
    return _places(tuple(likes))[0]


@lru_cache(256)
def _places(likes: tuple[Like, ...]) -> tuple[int, list[tuple[tuple[int, ...], int]]]:
    # bytes in all; strides of each tensor, and the byte where it begins
    at, places = ALIGN, list[tuple[tuple[int, ...], int]]()
    for like in likes:
        strides = [1]
        for size in reversed(like.shape):
            strides.append(strides[-1] * size)
        places.append((tuple(strides[-2::-1]), at))
        at += -(-strides[-1] * like.dtype.itemsize // ALIGN) * ALIGN
    return at, places
