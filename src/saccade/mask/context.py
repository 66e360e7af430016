"""What the terms of a node are made from: the sizes, the offset of its `&` chain, and the tables of rows and grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .algebra import Leaf, Mask
from .contents import host
from .forms import Grid, Rows
from .rows import Documents
from .size import Size
from .terms import BITS, Term, Terms, term

# rows, grids, and for each key the column of its bits in a term and its bit
Parts = tuple[list[Rows], list[Grid], dict[Any, tuple[int, int]]]


class Context(NamedTuple):
    """Where a node is lowered.

    union: the terms of any node in a context, or of its complement, for the children of one.
    size: Tq and Tk. inside: the documents of `documents(each=...)`, which stand for the batch while the mask inside
    each is lowered, so that sizes are arrays over them. stop: the end of the keys in the `&` chain.
    parts: the rows and grids of the whole mask, and where each stands among them.
    """

    union: Callable[[Mask, Context, bool], Terms]
    size: Size
    parts: Parts
    stop: Any = None
    inside: Documents | None = None

    def offset(self, explicit: Leaf = None) -> Any:
        """i - t: what the node says, else bottom-right of the enclosing keys(stop), else of the array."""
        if explicit is not None:
            return number(explicit)
        return (self.size.Tk if self.stop is None else self.stop) - self.size.Tq

    def part(self, key: Any, build: Callable[[], Rows | Grid]) -> Term:
        """The term of a Rows or Grid, which `build` makes once for each key."""
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
    """An integer leaf as int, an array [B] as int64, an array of one entry or none as int."""
    if type(leaf) is int:
        return leaf
    array = host(leaf)
    if array.size < 2:
        return int(array.reshape(-1)[0]) if array.size else 0
    return array.astype(np.int64)


def label(offset: Any) -> Any:
    """An offset as part of a key of `Context.part`."""
    return offset if type(offset) is int else offset.tobytes()
