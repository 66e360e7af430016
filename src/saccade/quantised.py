"""Keys and values quantised to small codes with scales. Each token is quantised once, from its own numbers only.

Neighbouring numbers of one head of one token form a group with a common scale: number = code * scale.

    kind   codes                                                        bytes of n numbers
    int8   int8, from -127 to 127                                       n     + 2 per group
    fp8    uint8, the bits of float8 e4m3fn, up to 448                  n     + 2 per group
    int4   uint8, two numbers per byte, i in the low bits and           n / 2 + 2 per group
           i + n / 2 in the high bits; each is its code -8 to 7, plus 8

Scales are bfloat16 (in NumPy their bits, uint16), rounded away from 0 so that no code overflows. The number of the
largest size in a group gets the largest code in int8 and fp8, and the code -8 in int4. So in int4 a number of the
opposite sign and the same size errs by up to one scale, all other numbers by half a scale. A group with NaN or an
infinity becomes NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .arrays import is_torch, namespace

# default numbers per scale; 0 for a whole head
GROUPS = {"int8": 0, "int4": 32, "fp8": 0}
# the code of the number of largest size in a group, and the range of codes
_TOP = {"int8": 127.0, "int4": -8.0, "fp8": 448.0}
_RANGE = {"int8": (-127, 127), "int4": (-8, 7)}
# the smallest normal bfloat16
_TINY = 2.0**-126


class Quantised(NamedTuple):
    """How keys and values are stored: a kind, and how many numbers share a scale."""

    kind: str
    group: int

    def width(self, n: int) -> int:
        """Bytes of the codes of n numbers."""
        return n // 2 if self.kind == "int4" else n

    def numbers(self, width: int) -> int:
        """How many numbers `width` bytes of codes hold."""
        return 2 * width if self.kind == "int4" else width

    def scales(self, n: int) -> int:
        """Number of scales of n numbers."""
        return -(-n // self.group)


def quantised(kind: str, group: int | None, *sizes: int) -> Quantised:
    """How heads of these sizes are stored; group None for the default of the kind. Raises ValueError if impossible."""
    if kind not in GROUPS:
        raise ValueError(f"quantised is {kind!r}; expected None or one of {', '.join(GROUPS)}")
    if group is not None and (not isinstance(group, int | np.integer) or isinstance(group, bool)):
        raise TypeError(f"group is {group!r}; expected an integer")
    if group is not None and group < 1:
        raise ValueError(f"group is {group}; expected at least 1 number, or None: a whole head, and 32 for int4")
    if kind == "int4" and any(n % 2 for n in sizes):
        raise ValueError(f"head sizes are {list(sizes)}; expected even ones for int4, which has two numbers per byte")
    return Quantised(kind, group or GROUPS[kind] or max(sizes))


def encode(x: Any, how: Quantised) -> tuple[Any, Any]:
    """(codes [..., width(n)], scales [..., scales(n)]) of floating x [..., n], in the framework of x."""
    xp, lead, n = namespace(x), tuple(x.shape[:-1]), int(x.shape[-1])
    wide = x.float() if is_torch(x) else x.astype(np.float32)
    missing = how.scales(n) * how.group - n
    if missing:
        zeros = wide.new_zeros((*lead, missing)) if is_torch(x) else np.zeros((*lead, missing), np.float32)
        wide = xp.concatenate([wide, zeros], -1)
    each = wide.reshape((*lead, how.scales(n), how.group))
    high, low = (each.amax(-1), each.amin(-1)) if is_torch(x) else (each.max(-1), each.min(-1))
    top = xp.where(high >= -low, high, low)
    scale = _scale(top if how.kind == "int4" else abs(top), _TOP[how.kind])
    usable = xp.isfinite(scale) & (scale != 0)
    divisor = xp.where(usable, scale, xp.ones_like(scale))[..., None]
    ratio = xp.where(usable[..., None], each, xp.zeros_like(each)) / divisor
    code = _float8(ratio) if how.kind == "fp8" else xp.clip(xp.round(ratio), *_RANGE[how.kind])
    code = code.reshape((*lead, how.scales(n) * how.group))[..., :n]
    if how.kind == "int4":
        code = (code[..., : n // 2] + 8) + 16 * (code[..., n // 2 :] + 8)
    kind = xp.int8 if how.kind == "int8" else xp.uint8
    if is_torch(x):
        return code.to(kind), scale.to(xp.bfloat16)
    return code.astype(kind), (scale.view(np.uint32) >> 16).astype(np.uint16)


def decode(codes: Any, scales: Any, how: Quantised) -> Any:
    """The numbers [..., n] of codes and scales that `encode` returned, float32 and exact."""
    xp, n = namespace(codes), how.numbers(int(codes.shape[-1]))
    if how.kind == "int4":
        code = xp.concatenate([codes & 15, codes >> 4], -1)
        wide = (code.float() if is_torch(code) else code.astype(np.float32)) - 8
    elif how.kind == "int8":
        wide = codes.float() if is_torch(codes) else codes.astype(np.float32)
    elif is_torch(codes):
        wide = codes.view(xp.float8_e4m3fn).float()
    else:
        wide = _FLOAT8[codes]
    if is_torch(scales):
        return wide * scales.float().repeat_interleave(how.group, -1)[..., :n]
    return wide * np.repeat((scales.astype(np.uint32) << 16).view(np.float32), how.group, -1)[..., :n]


def _scale(top: Any, code: float) -> Any:
    # top / code, rounded away from 0 to bfloat16, in float32
    xp = namespace(top)
    scale = top / code
    small = abs(scale) < _TINY
    scale = xp.where(small, xp.sign(scale) * _TINY, scale)
    scale = xp.where(xp.isfinite(scale), scale, xp.full_like(scale, float("nan")))
    bits = scale.view(xp.int32)
    # the lower bits of NaN are zero
    return ((bits + 0xFFFF) & ~0xFFFF).view(xp.float32)


def _float8(x: Any) -> Any:
    # the bits of e4m3fn, rounded to nearest even, of numbers in its range: 8 codes per power of two, 8 subnormal ones
    xp = namespace(x)
    exponent = xp.where(x == 0, -6, xp.clip(xp.frexp(x)[1] - 1, -6, None))
    code = (exponent + 6) * 8 + xp.round(xp.ldexp(abs(x), 3 - exponent))
    return xp.where(xp.signbit(x), code + 128, code)


def _float8_values() -> np.ndarray[Any, np.dtype[np.float32]]:
    code = np.arange(128)
    value = np.where(code < 8, code * 2.0**-9, (8 + code % 8) * 2.0 ** (code // 8 - 10.0))
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


_FLOAT8 = _float8_values()
