"""The head sizes that the kernels for Hopper compute."""

from __future__ import annotations

from ....problem import Problem

# by the sizes of a row of q and k, and of v: the size of the kernel, whose further columns are zeros
SIZES = {
    (64, 64): 64,
    (80, 80): 128,
    (96, 96): 128,
    (128, 128): 128,
    (192, 128): 192,
    (192, 192): 256,
    (256, 256): 256,
}


def size_of(p: Problem) -> int:
    """The head size of the kernel for a problem."""
    return SIZES[p.D, p.Dv]
