"""Views of sequences in a paged cache, the state of one, and how the tokens of a call are divided among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..frameworks.source import host
from ..quantised import Quantised
from .storage import at_least, whole

Ints = NDArray[np.int64]


class PagedKeys(NamedTuple):
    """Keys and values of R sequences in pages, for `decode` and `paged_attention`.

    Attributes:
        k: [pages, page_size, kv_heads, head_dim].
        v: [pages, page_size, kv_heads, v_dim].
        block_table: int32 [R, n]; token j of sequence r is in page block_table[r, j // page_size], slot j % page_size.
        lengths: int32 [R]. No result depends on slots or table entries beyond a sequence's length. A table and lengths
            on the host are checked in every call; those on a GPU are not, because reading them would wait for it.
        k_scale, v_scale: [pages, page_size, kv_heads, groups], the scales of codes in k and v, or None.
        quantised: the kind of codes in k and v, or None.
        sizes: (head_dim, v_dim), for rows of codes with scales on a WebGPU device, or None.
        gates: float64 [pages, page_size, Hq], the running sums of log_f, or None.
        aliased: whether v is a view of k, as in `PagedLatentKVCache`.

    Examples:
        >>> k = v = np.ones((4, 16, 8, 64), np.float32)  # 4 pages of 16 tokens
        >>> table, lengths = np.array([[2, 0]], np.int32), np.array([20], np.int32)
        >>> keys = saccade.PagedKeys(k, v, table, lengths)  # 16 tokens in page 2, 4 in page 0
        >>> o = saccade.decode(np.ones((1, 1, 8, 64), np.float32), keys)
    """

    k: Any
    v: Any
    block_table: Any
    lengths: Any
    k_scale: Any = None
    v_scale: Any = None
    quantised: Quantised | None = None
    sizes: tuple[int, int] | None = None
    gates: Any = None
    aliased: bool = False


@dataclass
class Tokens:
    """The tokens of one sequence: their pages and their number.

    shortened: whether `evict` removed tokens after the first `sinks` tokens. gone: how many, if it moved no others.
    """

    pages: list[int]
    length: int = 0
    sinks: int = 0
    gone: int = 0
    shortened: bool = False

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens; evicted tokens still count if there are tokens after them."""
        self.length, self.gone = length, self.gone if length > self.sinks else 0
        self.shortened &= length > self.sinks

    def last_slot(self, page_size: int) -> int:
        """The slot of the last token, numbered over all pages; -1 for none."""
        last = self.length - 1
        return self.pages[last // page_size] * page_size + last % page_size if self.length else -1

    def part(self, sequence: int, length: int | None) -> int:
        """length, or all tokens for None; raises unless it is an integer from 0 to their number."""
        length = self.length if length is None else whole("length", length)
        if not 0 <= length <= self.length:
            most = f"{self.length}, the tokens that sequence {sequence} holds"
            raise ValueError(f"length is {length}; expected 0 to {most}")
        return length


def new_positions(chosen: Sequence[Tokens], cu: Any) -> Ints:
    """int64 [n]: the positions of new tokens, those of sequence r from cu[r] to cu[r + 1]."""
    cu = np.asarray(cu, np.int64)
    begin = [one.length + one.gone - first for one, first in zip(chosen, cu[:-1].tolist(), strict=True)]
    return np.repeat(np.array(begin, np.int64), np.diff(cu)) + np.arange(cu[-1])


def alone(sequence: int) -> TypeError:
    """The error for a sequence where several are expected."""
    return TypeError(f"sequences is {sequence}; expected several numbers, such as [{sequence}]")


def path_of(path: Sequence[int], tokens: int) -> Ints:
    """path as int64 [m]; raises ValueError unless its numbers ascend from 0 or more and are below `tokens`."""
    at_least("tokens", tokens, 0)
    at = np.asarray(path)
    if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
        raise ValueError(f"a path is {at.dtype} {list(at.shape)}; expected integers, the numbers of the tokens to keep")
    at = at.astype(np.int64)
    if (np.diff(at, prepend=-1, append=tokens) < 1).any():
        raise ValueError(f"a path is {at.tolist()}; expected ascending numbers from 0 to {tokens - 1}")
    return at


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
