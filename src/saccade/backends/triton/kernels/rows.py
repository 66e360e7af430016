"""How kernels find and read rows of arrays, contiguous or in pages, of numbers or of codes and scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.runtime.jit import constexpr_function

import triton


class Array(NamedTuple):
    """An array [B, T, H, n]: its pointer and the strides of its first three axes; the last one is contiguous.

    With a block table int32 [B, columns] the array is pages [N, page, H, n], and b is the stride of a page: row t of
    batch entry b is in page table[b, t // page]. shift: log2 of a page if it is a power of two, because a division
    costs more than a row. long: not None if a tile of consecutive rows lies in at most two pages, which are then looked
    up once per tile.

    For codes, scale is [B, T, H, groups] in bfloat16 with strides like those. group: numbers per scale, None where a
    row has one scale; that scale multiplies scores and weights instead of numbers. even: not None where n, and
    group if there is one, are powers of two.
    """

    p: Any
    b: Any
    t: Any
    h: Any
    table: Any = None
    columns: Any = None
    page: Any = None
    shift: Any = None
    long: Any = None
    scale: Any = None
    scale_b: Any = None
    scale_t: Any = None
    scale_h: Any = None
    group: Any = None
    even: Any = None


class Rows(NamedTuple):
    """Rows of a head: pointers to them, which of them exist, and their numbers.

    tail: the numbers after the first BLOCK if a row has more; otherwise the same as tile.
    """

    p: Any
    ok: Any
    tile: Any
    tail: Any


class CodedRows(NamedTuple):
    """Rows of codes, like Rows, and pointers to the scales of each row."""

    p: Any
    ok: Any
    tile: Any
    tail: Any
    scale: Any


class Blocks(NamedTuple):
    """The constants of kernels of whole rows: numbers of a row, the same padded, and rows per program."""

    n: Any
    BLOCK: Any
    ROWS: Any


@triton.jit
def _pages(x, b, t, start):
    """(page, slot) of rows t, the first of which is `start`; for unused rows beyond the last one any page."""
    table = x.table + b.to(tl.int64) * x.columns
    if x.long is not None and start is not None:
        n = start // x.page
        border = (n + 1) * x.page
        here = tl.load(table + tl.minimum(n, x.columns - 1))
        there = tl.load(table + tl.minimum(n + 1, x.columns - 1))
        page, slot = tl.where(t < border, here, there), tl.where(t < border, t - n * x.page, t - border)
    else:
        if x.shift is not None:
            n, slot = t >> x.shift, t & (x.page - 1)
        else:
            n, slot = t // x.page, t % x.page
        page = tl.load(table + tl.minimum(n, x.columns - 1))
    return page, slot


@triton.jit
def _pointers(x, at, start):
    b, h, t = at
    if x.table is not None:
        b, t = _pages(x, b, t, start)
    return x.p + b.to(tl.int64) * x.b + h.to(tl.int64) * x.h + t.to(tl.int64) * x.t


@triton.jit
def load_rows(x, at, ok, n: tl.constexpr, BLOCK: tl.constexpr, start=None):
    """The rows `at`, [len(t), BLOCK]; zeros where not ok (None: all are) and beyond n.

    at: (batch entry, head or one head per row, rows t). start: the first row, if they are known to be consecutive.
    """
    return _numbers(_pointers(x, at, start), ok, 0, n, BLOCK)


@triton.jit
def _numbers(p, ok, first: tl.constexpr, n: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of rows of n numbers that start at p, from number `first` on."""
    d = first + tl.arange(0, BLOCK)
    p = p[:, None] + d[None, :]
    if ok is None:
        if n >= first + BLOCK:
            rows = tl.load(p)
        else:
            rows = tl.load(p, mask=(d < n)[None, :], other=0.0)
    elif n >= first + BLOCK:
        rows = tl.load(p, mask=ok[:, None], other=0.0)
    else:
        rows = tl.load(p, mask=ok[:, None] & (d < n)[None, :], other=0.0)
    return rows


@triton.jit
def rows_of(x, at, ok, n: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, start=None):
    """The rows `at` as Rows, or as CodedRows for codes; without MASKED all of them exist."""
    if x.scale is not None:
        rows = _rows_of_codes(x, at, ok, n, BLOCK, MASKED, start)
    else:
        p = _pointers(x, at, start)
        if MASKED:
            tile = _numbers(p, ok, 0, n, BLOCK)
        else:
            tile = _numbers(p, None, 0, n, BLOCK)
        if n <= BLOCK:
            rows = Rows(p, ok, tile, tile)
        elif MASKED:
            rows = Rows(p, ok, tile, _numbers(p, ok, BLOCK, n, _rest(n, BLOCK)))
        else:
            rows = Rows(p, ok, tile, _numbers(p, None, BLOCK, n, _rest(n, BLOCK)))
    return rows


@constexpr_function
def _rest(n, BLOCK):
    """Numbers of a row of n after the first BLOCK, padded."""
    return max(min(64, BLOCK), 1 << (n - BLOCK - 1).bit_length())


@triton.jit
def load_codes(x, p, scale, d, ok, n: tl.constexpr):
    """Numbers d of rows of n codes that start at p, [len(p), len(d)]; zeros where not ok (None: all are) and beyond n.

    Where rows have one scale, integers and 8-bit floats are returned unscaled. Elsewhere the result is float32,
    multiplied by the scales that start at `scale`.
    """
    there = (d < n)[None, :]
    if ok is not None:
        there = there & ok[:, None]
    if p.dtype.element_ty == tl.uint8:
        byte = tl.load(p[:, None] + tl.where(d < n // 2, d, d - n // 2)[None, :], mask=there, other=0x88)
        code = tl.where((d < n // 2)[None, :], byte & 15, byte >> 4).to(tl.int8) - 8
    else:
        code = tl.load(p[:, None] + d[None, :], mask=there, other=0.0)
    if x.group is not None:
        factor = tl.load(scale[:, None] + (d // x.group)[None, :], mask=there, other=0.0)
        code = code.to(tl.float32) * factor.to(tl.float32)
    return code


@triton.jit
def _load_groups(x, p, scale, ok, n: tl.constexpr):
    """`load_codes` where n and the group are powers of two: each byte and each scale is read once."""
    R: tl.constexpr = p.shape[0]
    WIDTH: tl.constexpr = n // 2 if p.dtype.element_ty == tl.uint8 else n
    at = p[:, None] + tl.arange(0, WIDTH)[None, :]
    if ok is None:
        code = tl.load(at)
    else:
        code = tl.load(at, mask=ok[:, None], other=0.0)
    if p.dtype.element_ty == tl.uint8:
        both = tl.join((code & 15).to(tl.int8) - 8, (code >> 4).to(tl.int8) - 8)
        code = tl.reshape(tl.permute(both, (0, 2, 1)), [R, n])
    if x.group is not None:
        GROUPS: tl.constexpr = n // x.group
        at = scale[:, None] + tl.arange(0, GROUPS)[None, :]
        if ok is None:
            factor = tl.load(at)
        else:
            factor = tl.load(at, mask=ok[:, None], other=0.0)
        wide = tl.reshape(code.to(tl.float32), [R, GROUPS, x.group]) * factor.to(tl.float32)[:, :, None]
        code = tl.reshape(wide, [R, n])
    return code


@triton.jit
def _rows_of_codes(x, at, ok, n: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, start):
    b, h, t = at
    if x.table is not None:
        b, t = _pages(x, b, t, start)
    b, h, t = b.to(tl.int64), h.to(tl.int64), t.to(tl.int64)
    p = x.p + b * x.b + h * x.h + t * x.t
    scale = x.scale + b * x.scale_b + h * x.scale_h + t * x.scale_t
    if n == BLOCK and x.even is not None:
        if MASKED:
            tile = _load_groups(x, p, scale, ok, n)
        else:
            tile = _load_groups(x, p, scale, None, n)
    elif MASKED:
        tile = load_codes(x, p, scale, tl.arange(0, BLOCK), ok, n)
    else:
        tile = load_codes(x, p, scale, tl.arange(0, BLOCK), None, n)
    if n <= BLOCK:
        rows = CodedRows(p, ok, tile, tile, scale)
    elif MASKED:
        rows = CodedRows(p, ok, tile, load_codes(x, p, scale, BLOCK + tl.arange(0, _rest(n, BLOCK)), ok, n), scale)
    else:
        rows = CodedRows(p, ok, tile, load_codes(x, p, scale, BLOCK + tl.arange(0, _rest(n, BLOCK)), None, n), scale)
    return rows


@triton.jit
def scaled(x, rows, of):
    """x [.., rows], scores or weights, multiplied by the scale of each row if the rows of `of` have one scale each."""
    if of.scale is not None and of.group is None:
        x = x * tl.load(rows.scale, mask=rows.ok, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def store_rows(x, at, ok, value, n: tl.constexpr, BLOCK: tl.constexpr):
    """Write the rows `at` where ok."""
    d = tl.arange(0, BLOCK)
    p = _pointers(x, at, None)[:, None] + d[None, :]
    tl.store(p, value.to(x.p.dtype.element_ty), mask=ok[:, None] & (d < n)[None, :])
