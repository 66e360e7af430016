"""A small cache of results by mask: by its structure and integers, and by the identity (not contents) of arrays."""

from __future__ import annotations

import weakref
from typing import Any

from .algebra import Mask


class Memo:
    """Values by (mask, rest of the key). An entry is removed when its mask's arrays die or after `size` newer ones."""

    def __init__(self, size: int = 256) -> None:
        self.size = size
        self.table: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def get(self, mask: Mask | None, rest: Any) -> tuple[Any, Any]:
        """(key, value or None). The key is None if nothing may be cached."""
        if mask is None:
            key = (None, rest)
            entry = self.table.get(key)
            return key, None if entry is None else entry[1]
        key = (mask.key, rest)
        if any(version < 0 for _, version in key[0][2]):
            return None, None
        entry = self.table.get(key)
        if entry is None:
            return key, None
        if entry[0]:
            data = mask.flatten()[2]
            if any(ref() is not array for ref, array in zip(entry[0], data, strict=True)):
                return key, None
        return key, entry[1]

    def put(self, mask: Mask | None, key: Any, value: Any) -> None:
        """Store a value under a key that `get` returned."""
        if key is None:
            return
        table = self.table
        refs: tuple[Any, ...] = ()
        if mask is not None and mask.has_data:
            refs = tuple(weakref.ref(array, lambda _: table.pop(key, None)) for array in mask.flatten()[2])
        while len(table) >= self.size:
            # remove the oldest entry; another thread may have removed it already
            table.pop(next(iter(list(table)), None), None)
        table[key] = (refs, value)
