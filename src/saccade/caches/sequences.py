"""The state of one sequence of a paged cache, and how the tokens of a call are divided among sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..frameworks.source import host

Ints = NDArray[np.int64]


@dataclass
class Tokens:
    """The tokens of one sequence: their pages and their number.

    gone: tokens that `evict` removed after the first `sinks` tokens.
    """

    pages: list[int]
    length: int = 0
    sinks: int = 0
    gone: int = 0

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens; evicted tokens still count if there are tokens after them."""
        self.length, self.gone = length, self.gone if length > self.sinks else 0

    def last_slot(self, page_size: int) -> int:
        """The slot of the last token, numbered over all pages; -1 for none."""
        last = self.length - 1
        return self.pages[last // page_size] * page_size + last % page_size if self.length else -1


def bounds_of(what: str, name: str, cu: Any, rows: int, tokens: int) -> Ints:
    """cu as int64 [rows + 1]; None divides the tokens equally. ValueError unless it rises from 0 to `tokens`."""
    if cu is None:
        if tokens % max(rows, 1) or (tokens and not rows):
            raise ValueError(f"{what} has {tokens} tokens for {rows} sequences: divide them with {name}")
        return np.arange(rows + 1) * (tokens // max(rows, 1))
    bounds = host(cu)
    if bounds.dtype.kind not in "iu" or bounds.shape != (rows + 1,):
        raise ValueError(f"{name} is {bounds.dtype} {list(bounds.shape)}; expected integers [{rows + 1}]")
    bounds = bounds.astype(np.int64)
    if bounds[0] or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise ValueError(f"{name} is {bounds.tolist()}; expected numbers from 0 to {tokens} that never decrease")
    return bounds
