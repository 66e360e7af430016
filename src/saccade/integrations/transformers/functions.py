"""Read a mask function of transformers by calling it once on symbols instead of indices.

A function takes indices of the batch, the head, a query and a key, and returns a boolean. Called with `Entry` for the
first two, and with a `Position` for the query and the key, it returns an `Allowed`: an expression of `saccade.mask`
that allows the same pairs. Nothing is as large as a mask, and torch.compile can trace the call.
Operations that these symbols do not define raise `saccade.Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...mask import Mask, causal, documents, full, window
from .described import INSTEAD, Place, refuse

Function = Callable[..., Any]


def read(function: Function, at: Place) -> Allowed:
    """The pairs that `function` describes. Raises Unsupported if it uses operations that symbols do not define."""
    try:
        with _Lookups():
            result = function(Entry(), Entry(), Position("query", at), Position("key", at))
    except (TypeError, AttributeError, IndexError) as error:
        _refuse(function, f"cannot be read ({error})")
    if not isinstance(result, Allowed):
        _refuse(function, f"gives {type(result).__name__}")
    if result.runs is not None:
        _refuse(function, "compares position_ids outside packed sequences")
    return result


def _refuse(function: Function, why: str) -> NoReturn:
    # functions that torch.compile traces have no name
    name = "" if torch.compiler.is_compiling() else getattr(function, "__qualname__", "").replace(".<locals>", "")
    refuse(f"the mask function {name} {why}: pass a 4-D mask, or {INSTEAD}")


def require(condition: Tensor, reason: str) -> None:
    """Raise Unsupported unless the 0-d `condition` holds; inside a compiled graph the check runs with the graph."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, reason)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif not bool(condition):
        refuse(reason)


class _Lookups(TorchFunctionMode):
    """A mode that handles `x[symbols]`, which torch.Tensor would treat as indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1]
            if isinstance(index, Entry):
                return PerEntry(args[0])
            if (
                type(index) is tuple
                and len(index) == 2
                and isinstance(index[0], Entry)
                and isinstance(index[1], Position)
            ):
                return index[1].in_table(args[0])
        return func(*args, **(kwargs or {}))


class _Symbol:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{getattr(func, '__name__', func)} of an index")

    def __bool__(self) -> bool:
        raise TypeError("the truth value of an index")

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Entry(_Symbol):
    """The index of the batch entry, or of the head."""


class PerEntry(_Symbol):
    """One number per batch entry: values [B]."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Numbers(_Symbol):
    """One number per query or per key: values [B, T]. packed: whether they are the numbers of packed sequences."""

    def __init__(self, axis: str, values: Tensor, packed: bool = False) -> None:
        self.axis, self.values, self.packed = axis, values, packed

    def __floordiv__(self, size: int) -> Numbers:
        return Numbers(self.axis, self.values.div(size, rounding_mode="floor"))

    def __eq__(self, other: Any) -> Allowed:  # type: ignore[override]
        return _same(self, other)


class Position(_Symbol):
    """The position of the query or of the key, plus `shift`; or, with `table` [B, n], the table's entry there."""

    def __init__(self, axis: str, at: Place, shift: int = 0, table: Tensor | None = None) -> None:
        self.axis, self.at, self.shift, self.table = axis, at, shift, table

    def in_table(self, table: Tensor) -> Position:
        """table[b, position]."""
        if self.table is not None or self.shift or table.dim() != 2:
            raise TypeError("an index of an index")
        return Position(self.axis, self.at, 0, table)

    def numbers(self) -> Numbers:
        """The positions as values [B, T]."""
        here = self.at.positions(self.axis)
        values = here[None] if self.table is None else self.table[:, here]
        return Numbers(self.axis, values + self.shift, self.table is not None)

    def new_ones(self, *_: Any, **__: Any) -> Allowed:
        """True, the value with which transformers starts to combine functions by `and`."""
        return Allowed(full())

    def new_zeros(self, *_: Any, **__: Any) -> Allowed:
        """False, the value with which transformers starts to combine functions by `or`."""
        return Allowed(~full())

    def __add__(self, n: int) -> Position:
        return Position(self.axis, self.at, self.shift + n, self.table)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Position):
            return Distance(self, other)
        if not isinstance(other, PerEntry):
            return self + -other
        if self.table is not None:
            raise TypeError("chunks inside packed sequences")
        return Numbers(self.axis, self.numbers().values - other.values[:, None])

    def __floordiv__(self, size: int) -> Numbers:
        if self.table is not None:
            raise TypeError("chunks inside packed sequences")
        return self.numbers() // size

    def __eq__(self, other: Any) -> Allowed:  # type: ignore[override]
        return _same(self.numbers(), other.numbers())

    def __ge__(self, other: Any) -> Allowed:
        return _at_least(self, other, 0)

    def __gt__(self, other: Any) -> Allowed:
        return _at_least(self, other, 1)

    def __le__(self, other: Any) -> Allowed:
        return _at_least(other, self, 0)

    def __lt__(self, other: Any) -> Allowed:
        return _at_least(other, self, 1)


class Distance(_Symbol):
    """first - second, of positions of a query and a key; or its absolute value."""

    def __init__(self, first: Position, second: Position, absolute: bool = False) -> None:
        self.first, self.second, self.absolute = first, second, absolute

    def __abs__(self) -> Distance:
        return Distance(self.first, self.second, True)

    def __neg__(self) -> Distance:
        if self.absolute:
            raise TypeError("a negative distance")
        return Distance(self.second, self.first)

    def __le__(self, n: int) -> Allowed:
        allowed = _at_least(self.second, self.first, -n)
        return allowed & _at_least(self.first, self.second, -n) if self.absolute else allowed

    def __lt__(self, n: int) -> Allowed:
        return self <= n - 1

    def __ge__(self, n: int) -> Allowed:
        if self.absolute:
            raise TypeError("distances that are large enough")
        return _at_least(self.first, self.second, n)

    def __gt__(self, n: int) -> Allowed:
        return self >= n + 1


class Allowed(_Symbol):
    """Pairs for which a test holds.

    Attributes:
        mask: the pairs.
        runs: position_ids [B, T] if the test compares them: the mask is correct inside runs in which they rise by 1.
        ids: [B, T] if the test is that the ids of query and key are equal.
        packed: whether no pair is of two packed sequences.
    """

    def __init__(self, mask: Mask, runs: Tensor | None = None, ids: Tensor | None = None, packed: bool = False) -> None:
        self.mask, self.runs, self.ids, self.packed = mask, runs, ids, packed

    @property
    def device(self) -> None:
        """None: a symbol is on no device."""

    def to(self, _: Any) -> Allowed:
        """Itself, on every device."""
        return self

    def __and__(self, other: Allowed) -> Allowed:
        ids = self.ids if other.ids is None else other.ids
        runs = self.runs if other.runs is None else other.runs
        if ids is not None and runs is not None:
            whole = (runs.diff(dim=1) == 1) | (ids.diff(dim=1) != 0)
            require(whole.all(), "position_ids jump inside a packed sequence: start each at 0, and count by 1")
            runs = None
        return Allowed(_and(self.mask, other.mask), runs, ids, self.packed or other.packed)

    def __or__(self, other: Allowed) -> Allowed:
        runs = self.runs if other.runs is None else other.runs
        return Allowed(_or(self.mask, other.mask), runs, None, self.packed and other.packed)


def _and(a: Mask, b: Mask) -> Mask:
    return b if a.kind == "full" else a if b.kind == "full" else a & b


def _or(a: Mask, b: Mask) -> Mask:
    none = "not", "full"
    if a.kind == "not" and (a.kind, a.children[0].kind) == none:
        return b
    return a | b


def _at_least(a: Any, b: Any, n: int) -> Allowed:
    # a - b >= n
    if isinstance(b, int):
        if isinstance(a, Position) and a.table is None and b + n - a.shift <= 0:
            return Allowed(full())
        raise TypeError("a position compared with a number")
    if not (isinstance(a, Position) and isinstance(b, Position)) or a.axis == b.axis:
        raise TypeError("a comparison that is not of a query and a key")
    if a.table is not b.table:
        raise TypeError("a comparison of entries in two tables")
    least, offset = n - a.shift + b.shift, a.at.offset()
    if a.axis == "query":
        return Allowed(causal(offset - least), a.table)
    # a window whose left end is after the query is expressed by shifting the place
    most = -least
    mask = window(most, None, offset) if most >= 0 else window(0, None, offset - most)
    return Allowed(mask, a.table)


def _same(a: Numbers, b: Any) -> Allowed:
    if not isinstance(b, Numbers) or a.axis == b.axis:
        raise TypeError("an equality that is not of a query and a key")
    q, k = (a, b) if a.axis == "query" else (b, a)
    of_q, of_k = (x.values.to(torch.int32) for x in (q, k))
    for ids in (of_q, of_k):
        require((ids.diff(dim=1) >= 0).all(), f"sequences or chunks whose ids decrease: {INSTEAD}")
    return Allowed(documents(of_q, of_k), None, of_k, q.packed and k.packed)
