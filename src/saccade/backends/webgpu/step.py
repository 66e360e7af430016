"""Requests to a device: dispatches and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import DTypeLike

from .memory import Buffer
from .texts import Kernel

Binding = Buffer | tuple[Buffer, int, int]
# (buffer, dtype, shape)
Read = tuple[Buffer, DTypeLike, tuple[int, ...]]


@dataclass
class Step:
    """One dispatch: a kernel, its workgroups, and its bindings from 0 on: whole buffers or (buffer, offset, size)."""

    kernel: Kernel
    bindings: Sequence[Binding]
    grid: tuple[int, int, int]
