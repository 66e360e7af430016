"""A leaf of booleans that stores one bit for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Bits:
    """Booleans [..., n], eight to a byte; `host` reads them as a NumPy array.

    packed: uint8 [..., ceil(n / 8)], a leaf itself (NumPy or torch); element j is bit j mod 8 of byte j div 8. Bits
    after the last element are 0.
    """

    __slots__ = ("n", "packed")
    dtype = np.dtype(np.bool_)

    def __init__(self, packed: Any, n: int) -> None:
        self.packed, self.n = packed, n

    @staticmethod
    def of(array: NDArray[Any]) -> Bits:
        """The bits of an array of booleans, or of integers that count as True unless they are 0."""
        packed = np.packbits(array, axis=-1, bitorder="little")
        packed.flags.writeable = False
        return Bits(packed, array.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the booleans."""
        return (*self.packed.shape[:-1], self.n)


def unpacked(packed: NDArray[np.uint8], begin: int, end: int) -> NDArray[np.bool_]:
    """The elements [begin, end) of the last dimension, as booleans."""
    some = np.unpackbits(packed[..., begin // 8 : -(-end // 8)], axis=-1, bitorder="little")
    return some[..., begin % 8 : begin % 8 + end - begin].view(np.bool_)
