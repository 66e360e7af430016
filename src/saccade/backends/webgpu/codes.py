"""How kernels read quantised keys and values (quantised.py): the codes of a row, followed by its scales.

Rows are assembled from NumPy arrays; numbers on the device are encoded by a kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...problem import Problem
from ...quantised import Quantised
from .arrays import GpuArray
from .shapes import line
from .step import Step
from .texts import render

Array = NDArray[Any]


class CodedRow(NamedTuple):
    """One head of one token: `words` words of 4 codes (int4: 8), then `scales` scales, two per word; `size` words.

    Number i has the scale i // group. For int4, the low bits of all words are the first half of the numbers.
    """

    kind: str
    group: int
    words: int
    scales: int
    size: int


class CodedRows(NamedTuple):
    """The layouts of k and of v."""

    k: CodedRow
    v: CodedRow


def row_of(how: Quantised, n: int) -> CodedRow:
    """The row of a head of n numbers."""
    words, scales = -(-n // (8 if how.kind == "int4" else 4)), how.scales(n)
    return CodedRow(how.kind, how.group, words, scales, words + -(-scales // 2))


def rows_of(problem: Problem) -> CodedRows | None:
    """The layouts of a problem's rows; None unless its keys and values are codes."""
    how = problem.quantised
    return None if how is None else CodedRows(row_of(how, problem.D), row_of(how, problem.Dv))


def encoded(x: GpuArray, how: Quantised) -> GpuArray:
    """x [..., n], float32 or float16, encoded on its device as rows uint32 [..., size]. TypeError for another dtype."""
    if x.dtype.name not in ("float32", "float16"):
        raise TypeError(f"dtype is {x.dtype}; expected float32 or float16, which are then encoded")
    *lead, n = x.shape
    row = row_of(how, n)
    count = int(np.prod(lead))
    gpu = x.gpu
    result = GpuArray(gpu, gpu.buffer(4 * count * row.size), (*lead, row.size), np.uint32)
    if count:
        kernel = gpu.kernel(encoder(row, n, x.dtype == np.float16), "encode")
        rows = gpu.uniform(np.array([count, 0, 0, 0], np.uint32).tobytes())
        gpu.run([Step(kernel, [x.buffer, result.buffer, rows], line(count))])
    return result


@lru_cache(maxsize=64)
def encoder(row: CodedRow, n: int, halves: bool) -> str:
    """The text of the kernel that encodes rows of n numbers, float16 or float32."""
    return render("encode", row=row, N=n, halves=halves)


def parted(rows: Array, how: Quantised, n: int) -> tuple[Array, Array]:
    """(codes, scales) of rows of n numbers, NumPy arrays: the inverse of `joined`."""
    row = row_of(how, n)
    codes = rows.view(np.uint8)[..., : 4 * row.words]
    scales = rows.view(np.uint16)[..., 2 * row.words : 2 * row.words + row.scales]
    if how.kind == "int4":
        each = np.concatenate([codes & 15, codes >> 4], -1)
        codes = each[..., : n // 2] | each[..., n // 2 : n] << 4
    codes = np.ascontiguousarray(codes[..., : how.width(n)])
    return codes.view(np.int8) if how.kind == "int8" else codes, scales


def joined(codes: Array, scales: Array, how: Quantised) -> Array:
    """Rows uint32 [..., size] of codes [..., width] and scales, bfloat16 as uint16."""
    n = how.numbers(codes.shape[-1])
    row = row_of(how, n)
    rows = np.zeros((*codes.shape[:-1], 4 * row.size), np.uint8)
    codes = codes.view(np.uint8)
    if n % 8 and how.kind == "int4":
        # a half may end inside a word, so pad both to whole words; the code of zero is 8
        each = np.full((*codes.shape[:-1], 8 * row.words), 8, np.uint8)
        each[..., : n // 2], each[..., n // 2 : n] = codes & 15, codes >> 4
        codes = each[..., : 4 * row.words] | each[..., 4 * row.words :] << 4
    rows[..., : codes.shape[-1]] = codes
    rows.view(np.uint16)[..., 2 * row.words : 2 * row.words + row.scales] = scales
    return rows.view(np.uint32)
