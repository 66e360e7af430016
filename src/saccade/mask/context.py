"""The context in which a node is lowered: the sizes, the offset of its `&` chain, and the tables of rows and grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .algebra import Leaf, Mask
from .contents import FAR, host
from .forms import Grid, Rows
from .rows import Documents
from .size import Size
from .terms import BITS, Term, Terms, term

# rows, grids, and a dict from the key of each to its column in a term and its bit in that column
Parts = tuple[list[Rows], list[Grid], dict[Any, tuple[int, int]]]


class Context(NamedTuple):
    """The context in which a node is lowered.

    union: (mask, context, negate) -> the terms of the mask, or of its complement; nodes call it for their children.
    size: Tq and Tk. parts: the rows and grids of the whole mask. stop: the end of the keys in the `&` chain. inside:
    the documents of `documents(each=...)`; they take the place of the batch while the mask inside each is lowered, so
    sizes are arrays over documents.
    """

    union: Callable[[Mask, Context, bool], Terms]
    size: Size
    parts: Parts
    stop: Any = None
    inside: Documents | None = None

    def offset(self, explicit: Leaf = None) -> Any:
        """i - t: `explicit` if given, else bottom-right in the keys of the enclosing keys(stop), else in all keys."""
        if explicit is not None:
            return number(explicit)
        return (self.size.Tk if self.stop is None else self.stop) - self.size.Tq

    def part(self, key: Any, build: Callable[[], Rows | Grid]) -> Term:
        """The term of a Rows or Grid. `build` is called once per key."""
        rows, grids, places = self.parts
        if key not in places:
            part = build()
            table: list[Any] = rows if isinstance(part, Rows) else grids
            places[key] = BITS if isinstance(part, Rows) else BITS + 2, 1 << len(table)
            table.append(part)
        column, bit = places[key]
        of_part = term()
        of_part[column] = bit
        return of_part


def number(leaf: Leaf) -> Any:
    """A leaf as an int within ±`FAR` if it is an integer or an array of at most one entry, else as int64 [B]."""
    if type(leaf) is not int:
        array = host(leaf)
        if array.size > 1:
            return array.astype(np.int64)
        leaf = int(array.reshape(-1)[0]) if array.size else 0
    return max(-FAR, min(FAR, leaf))


def label(offset: Any) -> Any:
    """An offset in hashable form, for keys of `Context.part`."""
    return offset if type(offset) is int else offset.tobytes()
