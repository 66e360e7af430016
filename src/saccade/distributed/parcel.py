"""A message: several tensors in one buffer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# bytes of the header; each tensor starts at a multiple of this
ALIGN = 128
# int64 words in the header: mark, hash of the signature, number of the call, hash of the kind, rank that wrote it
WORDS = 5
MARK = 0x5ACCADE


class Like(NamedTuple):
    """Shape and dtype of a tensor to receive."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Parcel:
    """A message: a header and tensors, which are views of one buffer. It starts empty, or is filled by `pack`.

    room: a buffer of at least `size` bytes to use. origin: the rank that writes the header when it first sends the
    message; others pass it on. None if it is unknown, or the neighbour from which the message is received.
    """

    def __init__(
        self, likes: Sequence[Like], device: torch.device, room: Tensor | None = None, origin: int | None = None
    ) -> None:
        size, places = _places(tuple(likes))
        if room is None:
            room = torch.empty(size, dtype=torch.uint8, device=device)
        self.origin, self.buffer = origin, room if room.numel() == size else room[:size]
        # offsets count from the start of the storage
        first = self.buffer.storage_offset()
        typed = {dtype: self.buffer.view(dtype) for dtype in (torch.int64, *{like.dtype for like in likes})}
        self.head = typed[torch.int64].as_strided((WORDS,), (1,), first // 8)
        self.tensors = [
            typed[like.dtype].as_strided(like.shape, strides, (first + at) // like.dtype.itemsize)
            for like, (strides, at) in zip(likes, places, strict=True)
        ]


def pack(tensors: Sequence[Tensor]) -> Parcel:
    """A parcel with copies of these tensors, which are on one device."""
    parcel = Parcel([Like(tuple(x.shape), x.dtype) for x in tensors], tensors[0].device)
    with torch.no_grad():
        for to, x in zip(parcel.tensors, tensors, strict=True):
            to.copy_(x)
    return parcel


def size_of(likes: Sequence[Like]) -> int:
    """Bytes of a parcel of these tensors."""
    return _places(tuple(likes))[0]


@lru_cache(1024)
def hashed(text: str) -> int:
    """63 bits of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@lru_cache(256)
def _places(likes: tuple[Like, ...]) -> tuple[int, list[tuple[tuple[int, ...], int]]]:
    # the total number of bytes; strides and first byte of each tensor
    at, places = ALIGN, list[tuple[tuple[int, ...], int]]()
    for like in likes:
        strides = [1]
        for size in reversed(like.shape):
            strides.append(strides[-1] * size)
        places.append((tuple(strides[-2::-1]), at))
        at += -(-strides[-1] * like.dtype.itemsize // ALIGN) * ALIGN
    return at, places


def refuse_gradient(name: str, tensors: Sequence[Tensor], instead: str) -> None:
    """Raise ValueError if a gradient is asked for, which a call that packs its tensors does not return."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(f"{name} has no gradient; call it on x.detach(), or {instead}")
