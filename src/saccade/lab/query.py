"""What a view is asked: the fields of a query, checked, each with what it may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..cost import Shape
from ..mask import Mask, parse
from ..operands import Request, Spec
from ..problem import Problem, describe

Query = Mapping[str, str]
LONGEST = 4096
# how the page labels the fields
LABELS = {
    "tq": "Queries",
    "tk": "Keys",
    "head": "Head",
    "t": "Tokens",
    "d": "Head size",
    "bq": "Queries a tile",
    "bk": "Keys a tile",
    "heads": "Heads",
    "kv": "KV heads",
    "batch": "Sequences",
    "tokens": "Tokens each",
    "seed": "Seed",
    "device": "Device",
    "dtype": "Dtype",
    "model": "Model",
    "example": "Example",
    "set": "Kernels",
    "direction": "Direction",
    "backend": "Backend",
}


def label(name: str) -> str:
    """What the page calls a field."""
    return LABELS.get(name, name)


def whole(query: Query, name: str, default: int, low: int, high: int) -> int:
    """The integer of this name. Raises ValueError outside low .. high."""
    text = query.get(name, str(default))
    digits = text.removeprefix("-")
    n = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 16 else low - 1
    if not low <= n <= high:
        raise ValueError(f"{label(name)} is {text[:40]!r}; expected an integer from {low} to {high}")
    return n


def chosen(query: Query, name: str, known: Sequence[str]) -> str:
    """The word of this name, by default the first of those known. Raises ValueError for another."""
    word = query.get(name, known[0])
    if word not in known:
        raise ValueError(f"{label(name)} is {word[:40]!r}; expected one of {', '.join(known)}")
    return word


def mask_of(query: Query, default: str = "causal()") -> Mask:
    """The mask that `mask` describes, full() for an empty text. Raises ValueError as `saccade.mask.parse`."""
    return parse(query.get("mask", default).strip() or "full()")


def heads_of(query: Query, heads: int, kv_heads: int, most: int = 256) -> tuple[int, int]:
    """Query heads and key heads. Raises ValueError where the second do not divide the first."""
    Hq, Hk = whole(query, "heads", heads, 1, most), whole(query, "kv", kv_heads, 1, most)
    if Hq % Hk:
        raise ValueError(f"{label('kv')} is {Hk} for {Hq} query heads; expected a number that divides them")
    return Hq, Hk


def problem_of(mask: Mask | None, shape: Shape, device: str = "cpu") -> Problem:
    """The problem of a shape whose values are as long as its keys. Raises ValueError as any call would."""
    q = Spec((shape.B, shape.Tq, shape.Hq, shape.D), shape.dtype, device)
    k = Spec((shape.B, shape.Tk, shape.Hk, shape.D), shape.dtype, device)
    return describe(q, k, k, Request(mask))


def shape_of(Tq: int, Tk: int, heads: int) -> Shape:
    """The shape of one sequence with heads of 64, for what depends on a mask alone."""
    return Shape(1, Tq, Tk, heads, heads, 64, 64)


def plain(x: Any) -> Any:
    """What JSON has words for: NumPy's numbers and arrays as Python's, infinities and NaN as None."""
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, Mapping):
        return {str(name): plain(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, float):
        return x if abs(x) < float("inf") else None
    return x
