"""Writes new tokens into a cache: rotates them by their positions' angles, and encodes them in a quantised cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

# adding and subtracting this rounds float32 numbers below 2**22 to integers, to nearest even
WHOLE = tl.constexpr(12582912.0)
# the code of a group's largest number
TOPS = {"int8": 127.0, "int4": -8.0, "fp8": 448.0}


@triton.jit
def scale_of(top, code, finite):
    """top / code as a bfloat16, rounded away from 0; NaN where the group is not finite."""
    scale = tl.div_rn(top, code)
    small = tl.where(scale < 0, -1.1754943508222875e-38, 1.1754943508222875e-38)
    scale = tl.where(tl.abs(scale) < 1.1754943508222875e-38, tl.where(scale == 0.0, 0.0, small), scale)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    return tl.where(finite & (tl.abs(scale) < float("inf")), bits.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _float8(x):
    # |x| <= 448 to the bits of e4m3, to nearest even; subnormal numbers are multiples of 2^-9
    bits = x.to(tl.int32, bitcast=True)
    body = bits & 0x7FFFFFFF
    small = ((tl.abs(x) * 512.0 + WHOLE) - WHOLE).to(tl.int32)
    normal = ((body + 0x7FFFF + ((body >> 20) & 1)) >> 20) - 960
    return (tl.where(body < 0x3C800000, small, normal) | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def encoded(x, there, KIND: tl.constexpr, CODE: tl.constexpr):
    """(codes, scales) of groups of numbers [.., GROUP] along the last axis; scales have a last axis of length 1."""
    axis: tl.constexpr = len(x.shape) - 1
    wrong = tl.max(((x != x) & there).to(tl.int32), axis, keep_dims=True) != 0
    high = tl.max(tl.where(there, x, float("-inf")), axis, keep_dims=True)
    low = tl.min(tl.where(there, x, float("inf")), axis, keep_dims=True)
    top = tl.where(high >= -low, high, low)
    scale = scale_of(top if KIND == "int4" else tl.abs(top), tl.full(top.shape, CODE, tl.float32), ~wrong)
    usable = (scale == scale) & (scale != 0.0)
    ratio = tl.where(usable & there, tl.div_rn(x, tl.where(usable, scale, 1.0)), 0.0)
    if KIND == "fp8":
        code = _float8(ratio)
    else:
        code = (ratio + WHOLE) - WHOLE
        code = tl.minimum(tl.maximum(code, -8.0 if KIND == "int4" else -127.0), 7.0 if KIND == "int4" else 127.0)
    return code, scale


class Tokens(NamedTuple):
    """Rows [n, heads, D]: their pointer and the strides of the first two axes; the last one is contiguous."""

    p: Any
    t: Any
    h: Any


class Slots(NamedTuple):
    """An array of a cache [.., .., heads, n]: its pointer and the strides of the first three axes."""

    p: Any
    a: Any
    b: Any
    h: Any


class Places(NamedTuple):
    """int64 [n] each: indices of tokens along two axes of Slots; tokens with a negative second are skipped."""

    first: Any
    second: Any


class Angles(NamedTuple):
    """float32 [n, D / 2] each, the cosines and sines of each token, or None."""

    cos: Any
    sin: Any


class Config(NamedTuple):
    """The constants that the kernel is compiled with.

    D: numbers of a row, loaded as its two halves [2, HALF]. GROUP: numbers that share a scale: D, or a power of two if
    D is one. KIND: of code, "" for none. CODE: the code of a group's largest number. INTERLEAVED: pairs of
    neighbours are rotated.
    """

    D: Any
    HALF: Any
    GROUP: Any
    KIND: Any
    CODE: Any
    INTERLEAVED: Any


class Copied(NamedTuple):
    """Tokens [B, T, heads, D] and the array of a cache [B, capacity, heads, D]: pointers, strides of the first axes."""

    p: Any
    b: Any
    t: Any
    h: Any
    out: Any
    out_b: Any
    out_t: Any
    out_h: Any
    capacity: Any


class Sizes(NamedTuple):
    """The constants of `append_rows`: how many numbers a row of k and one of v have, and a power of two for both."""

    D: Any
    DV: Any
    BLOCK: Any


@triton.jit
def _copy(x, b, t, h, slot, D: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    row = tl.load(x.p + b * x.b + t * x.t + h * x.h + d, mask=d < D)
    there = (d < D) & (slot >= 0) & (slot < x.capacity)
    tl.store(x.out + b * x.out_b + slot * x.out_t + h * x.out_h + d, row, mask=there)


@triton.jit
def append_rows(k, v, starts, T, heads, sizes: tl.constexpr):
    """Write token t of each row b to slot starts[b] + t, unless the cache has no such slot; v: None for a part of k.

    Grid: rows x tokens x heads, k and v.
    """
    h, token = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    slot = tl.load(starts + b).to(tl.int64) + t
    if tl.program_id(1) == 0:
        _copy(k, b, t, h, slot, sizes.D, sizes.BLOCK)
    elif v is not None:
        _copy(v, b, t, h, slot, sizes.DV, sizes.BLOCK)


@triton.jit
def append(x, out, scales, places, angles, heads, config: tl.constexpr):
    """Write each row of x to its place in out; scales: Slots, or None without codes. Grid: tokens x heads."""
    D: tl.constexpr = config.D
    HALF: tl.constexpr = config.HALF
    GROUP: tl.constexpr = config.GROUP
    KIND: tl.constexpr = config.KIND
    t, h = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    a, b = tl.load(places.first + t).to(tl.int64), tl.load(places.second + t).to(tl.int64)
    if b >= 0:
        side, i = tl.arange(0, 2)[:, None], tl.arange(0, HALF)[None, :]
        d = side * (D // 2) + i
        there = (i < D // 2) & (side >= 0)
        row = x.p + t.to(tl.int64) * x.t + h * x.h
        y = tl.load(row + d, mask=there, other=0.0).to(tl.float32)
        if angles.cos is not None:
            other = d ^ 1 if config.INTERLEAVED else (1 - side) * (D // 2) + i
            pair = d // 2 if config.INTERLEAVED else i + 0 * side
            at = t.to(tl.int64) * (D // 2) + pair
            c, s = tl.load(angles.cos + at, mask=there, other=0.0), tl.load(angles.sin + at, mask=there, other=0.0)
            s = tl.where((d % 2 if config.INTERLEAVED else side + 0 * i) == 0, -s, s)
            y = y * c + tl.load(row + other, mask=there, other=0.0).to(tl.float32) * s
        to = out.p + a * out.a + b * out.b + h * out.h
        if KIND == "":
            tl.store(to + d, y.to(out.p.dtype.element_ty), mask=there)
        else:
            factor = scales.p + a * scales.a + b * scales.b + h * scales.h
            if GROUP >= D:
                code, scale = encoded(tl.reshape(y, [2 * HALF]), tl.reshape(there, [2 * HALF]), KIND, config.CODE)
                tl.store(factor + tl.arange(0, 1), scale.to(tl.bfloat16))
            else:
                shape: tl.constexpr = [2 * HALF // GROUP, GROUP]
                code, scale = encoded(tl.reshape(y, shape), tl.reshape(there, shape), KIND, config.CODE)
                at = tl.arange(0, 2 * HALF // GROUP)[:, None]
                tl.store(factor + at, scale.to(tl.bfloat16))
            code = tl.reshape(code, [2, HALF])
            if KIND == "int4":
                byte = tl.sum((code + 8.0).to(tl.int32) << (4 * side), 0)
                tl.store(to + tl.arange(0, HALF), byte.to(tl.uint8), mask=tl.arange(0, HALF) < D // 2)
            elif KIND == "int8":
                tl.store(to + d, code.to(tl.int8), mask=there)
            else:
                tl.store(to + d, code, mask=there)
