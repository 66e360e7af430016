"""Which tokens a paged cache holds of a sequence, and which of new tokens belong to which sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..frameworks.source import host

Ints = NDArray[np.int64]


@dataclass
class Tokens:
    """The tokens of one sequence: their pages, and how many they are."""

    # after `evict` there is a gap behind the first `sinks` tokens, of the `gone` tokens that it removed
    pages: list[int]
    length: int = 0
    sinks: int = 0
    gone: int = 0

    def cut(self, length: int) -> None:
        """Leave the first `length` tokens; a gap counts while there are tokens behind it."""
        self.length, self.gone = length, self.gone if length > self.sinks else 0


def bounds_of(what: str, name: str, cu: Any, rows: int, tokens: int) -> Ints:
    """cu as int64 [rows + 1], or equal shares of the tokens; ValueError unless it goes from 0 up to `tokens`."""
    if cu is None:
        if tokens % max(rows, 1) or (tokens and not rows):
            raise ValueError(f"{what} has {tokens} tokens for {rows} sequences: say by {name} whose they are")
        return np.arange(rows + 1) * (tokens // max(rows, 1))
    bounds = host(cu)
    if bounds.dtype.kind not in "iu" or bounds.shape != (rows + 1,):
        raise ValueError(f"{name} is {bounds.dtype} {list(bounds.shape)}; expected integers [{rows + 1}]")
    bounds = bounds.astype(np.int64)
    if bounds[0] or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise ValueError(f"{name} is {bounds.tolist()}; expected numbers from 0 to {tokens}, the tokens, never down")
    return bounds
