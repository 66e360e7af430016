"""The fields of a view's query. Each is checked, and errors name it by its label on the page."""

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
    "bq": "Queries per tile",
    "bk": "Keys per tile",
    "heads": "Heads",
    "kv": "KV heads",
    "batch": "Sequences",
    "tokens": "Tokens each",
    "seed": "Seed",
    "device": "Device",
    "dtype": "Dtype",
    "mask": "Mask",
    "text": "Text",
    "scores": "Scores",
    "model": "Model",
    "example": "Example",
    "set": "Kernels",
    "direction": "Direction",
    "backend": "Backend",
}


class Fields(dict[str, str]):
    """A query that knows which of its fields were read."""

    def __init__(self, fields: Query):
        super().__init__(fields)
        self.read: dict[str, None] = {}

    def get(self, name: str, default: Any = None) -> Any:
        self.read[name] = None
        return super().get(name, default)

    def check_read(self) -> None:
        """Raises FieldError for a field that the view has not read, since its answer would ignore it."""
        for name in self:
            if name not in self.read:
                raise FieldError(name, f"{name[:40]!r} is no field of this view; its fields are {', '.join(self.read)}")


class FieldError(ValueError):
    """A wrong value of one field, whose name in the query is `field`."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


def label(name: str) -> str:
    """The page's label for a field."""
    return LABELS.get(name, name)


def whole(query: Query, name: str, default: int, low: int, high: int) -> int:
    """The integer in a field. Raises ValueError unless it is in low .. high."""
    text = query.get(name, str(default))
    digits = text.removeprefix("-")
    n = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 16 else low - 1
    if not low <= n <= high:
        raise FieldError(name, f"{label(name)} is {text[:40]!r}; expected an integer from {low} to {high}")
    return n


def chosen(query: Query, name: str, known: Sequence[str]) -> str:
    """The word in a field, by default the first of `known`. Raises ValueError for a word that is not among them."""
    word = query.get(name, known[0])
    if word not in known:
        raise FieldError(name, f"{label(name)} is {word[:40]!r}; expected one of {', '.join(known)}")
    return word


def mask_of(query: Query, default: str = "causal()") -> Mask:
    """The mask that the field `mask` describes, full() for an empty text. Raises ValueError as `saccade.mask.parse`."""
    try:
        return parse(query.get("mask", default).strip() or "full()")
    except (ValueError, TypeError) as error:
        raise FieldError("mask", str(error)) from None


def heads_of(query: Query, heads: int, kv_heads: int, most: int = 256) -> tuple[int, int]:
    """Query heads and key heads. Raises ValueError if the number of key heads does not divide that of query heads."""
    Hq, Hk = whole(query, "heads", heads, 1, most), whole(query, "kv", kv_heads, 1, most)
    if Hq % Hk:
        raise FieldError("kv", f"{label('kv')} is {Hk} for {Hq} query heads; expected a number that divides them")
    return Hq, Hk


def problem_of(mask: Mask | None, shape: Shape, device: str = "cpu") -> Problem:
    """The problem of a shape; its values are as long as its keys. Raises ValueError as a call would."""
    q = Spec((shape.B, shape.Tq, shape.Hq, shape.D), shape.dtype, device)
    k = Spec((shape.B, shape.Tk, shape.Hk, shape.D), shape.dtype, device)
    try:
        problem = describe(q, k, k, Request(mask))
        if mask is not None:
            mask.check(shape.B, shape.Tq, shape.Tk, shape.Hq)
    except (ValueError, TypeError) as error:
        # the sizes were checked before, so that the mask does not fit them
        raise FieldError("mask", str(error)) from None
    if problem.selection is not None:
        raise FieldError("mask", "select(...) has lists, which are in no plan; give the rest of the mask, without it")
    return problem


def shape_of(Tq: int, Tk: int, heads: int, D: int = 64, dtype: str = "bfloat16") -> Shape:
    """The shape of one sequence; a view that depends on the mask alone leaves out the head size and the dtype."""
    return Shape(1, Tq, Tk, heads, heads, D, D, dtype)


def plain(x: Any) -> Any:
    """x in a form that JSON can express: NumPy's numbers and arrays as Python's, infinities and NaN as None."""
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, Mapping):
        return {str(name): plain(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if isinstance(x, float):
        return x if abs(x) < float("inf") else None
    return x
