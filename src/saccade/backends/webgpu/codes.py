"""Keys and values that are codes (quantised.py), as kernels bind them: each row its codes, its scales behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...problem import Problem
from ...quantised import Quantised

Array = NDArray[Any]


class Row(NamedTuple):
    """One head of one token: `words` of 4 numbers, or of 8 by int4, then `scales`, two a word; `size` words in all.

    Number i has the scale i // group. By int4 the low bits of all words come before the high bits.
    """

    kind: str
    group: int
    words: int
    scales: int
    size: int


class Rows(NamedTuple):
    """Of k and of v."""

    k: Row
    v: Row


def row_of(how: Quantised, n: int) -> Row:
    """The row of a head of n numbers."""
    words, scales = -(-n // (8 if how.kind == "int4" else 4)), how.scales(n)
    return Row(how.kind, how.group, words, scales, words + -(-scales // 2))


def rows_of(problem: Problem) -> Rows | None:
    """The rows of a problem whose keys and values are codes."""
    how = problem.quantised
    return None if how is None else Rows(row_of(how, problem.D), row_of(how, problem.Dv))


def joined(codes: Array, scales: Array, how: Quantised) -> Array:
    """Rows uint32 [..., size] of codes [..., width] and scales, bfloat16 as uint16."""
    n = how.numbers(codes.shape[-1])
    row = row_of(how, n)
    found = np.zeros((*codes.shape[:-1], 4 * row.size), np.uint8)
    codes = codes.view(np.uint8)
    if n % 8 and how.kind == "int4":
        # halves that end within four numbers, cut anew at the end of the words; 8 codes a zero
        each = np.full((*codes.shape[:-1], 8 * row.words), 8, np.uint8)
        each[..., : n // 2], each[..., n // 2 : n] = codes & 15, codes >> 4
        codes = each[..., : 4 * row.words] | each[..., 4 * row.words :] << 4
    found[..., : codes.shape[-1]] = codes
    found.view(np.uint16)[..., 2 * row.words : 2 * row.words + row.scales] = scales
    return found.view(np.uint32)
