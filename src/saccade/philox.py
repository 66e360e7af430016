"""Philox-4x32-10 in NumPy, and the dropout pattern that every backend computes from it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def philox(counter: Array, seed: int) -> Array:
    """Counter-based random words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    counter: [..., 4], uint32 values. seed: the 64-bit key, whose low word comes first. Returns [..., 4], 32-bit words
    in uint64.
    """
    low = np.uint64(0xFFFFFFFF)
    c = [counter[..., n].astype(np.uint64) for n in range(4)]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, -1)


def drop_words(dropout: float, seed: int) -> tuple[int, int, int]:
    """(threshold, low word of the seed, high word of the seed). A random word below the threshold drops its weight."""
    return int(dropout * 2**32), seed & 0xFFFFFFFF, seed >> 32


def dropout_kept(shape: tuple[int, int, int, int], dropout: float, seed: int) -> Array:
    """Which pairs dropout keeps, bool [B, Hq, Tq, Tk].

    Query i keeps key j in head h of entry b if word j & 3 of counter (i, j >> 2, b * Hq + h, 0) is at least
    dropout * 2**32.
    """
    B, Hq, Tq, Tk = shape
    groups = (Tk + 3) // 4
    bh, i, j = np.meshgrid(np.arange(B * Hq), np.arange(Tq), np.arange(groups), indexing="ij")
    words = philox(np.stack([i, j, bh, np.zeros_like(bh)], -1), seed)
    return words.reshape(B, Hq, Tq, groups * 4)[..., :Tk] >= drop_words(dropout, seed)[0]
