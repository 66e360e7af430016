"""Keys and values in pages that sequences share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import is_torch
from ..quantised import Quantised
from ..rope import turning
from .contiguous import Rotation, turned
from .storage import Storage, at_least, bounds_of, whole

Ints = NDArray[np.int64]


class PagedKeys(NamedTuple):
    """Keys and values of R sequences in pages, as `decode` and `paged_attention` read them.

    k [pages, page_size, kv_heads, head_dim], v [pages, page_size, kv_heads, v_dim]; token j of sequence r lies in page
    block_table[r, j // page_size], slot j % page_size. block_table int32 [R, n], lengths int32 [R]; what stands in the
    table or in slots behind a sequence's length is not read into a result. A table and lengths on the host are checked
    at every call; on a GPU, where looking would wait for it, they are trusted. quantised: how k and v are codes, which
    k_scale and v_scale [pages, page_size, kv_heads, groups] belong to; sizes: what head_dim and v_dim are then, where
    they are rows on a WebGPU device that hold their scales.
    """

    k: Any
    v: Any
    block_table: Any
    lengths: Any
    k_scale: Any = None
    v_scale: Any = None
    quantised: Quantised | None = None
    sizes: tuple[int, int] | None = None


class PagedKVCache(Storage):
    """A pool of pages of keys and values, taken and given back by sequences that grow, fork and end (S26).

    A sequence is a number, of `add` or `fork`. Forks share pages; a shared page is copied when one of its sequences
    writes to it. pages of page_size tokens each; the other arguments are those of `KVCache`.
    k [pages, page_size, kv_heads, head_dim], v [pages, page_size, kv_heads, v_dim]. No gradient runs through a cache.
    """

    def __init__(
        self, pages: int, page_size: int, kv_heads: int, head_dim: int, *, v_dim: int | None = None,
        dtype: Any = "float32", device: Any = None, fill: float = 0.0, quantised: str | None = None,
        group: int | None = None,
    ) -> None:  # fmt: skip
        at_least("pages", pages, 0)
        at_least("page_size", page_size, 1)
        super().__init__((pages, page_size), kv_heads, (head_dim, v_dim), dtype, device, fill, quantised, group)
        self._free = list(range(pages - 1, -1, -1))
        self._shares = np.zeros(pages, np.int64)
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        # of sequences that `evict` shortened: how many tokens stand before the gap, and how many are gone
        self._gaps: dict[int, tuple[int, int]] = {}
        self._next = 0

    def __repr__(self) -> str:
        return self.shown(
            pages=len(self._shares), page_size=self.page_size, free_pages=self.free_pages, sequences=len(self._pages)
        )

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.k.shape[1])

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences there are."""
        return tuple(self._pages)

    def length(self, sequence: int) -> int:
        """How many tokens a sequence holds."""
        self._known(sequence)
        return self._lengths[sequence]

    def position(self, sequence: int) -> int:
        """The position of a sequence's next token: its length, and what `evict` took from before it."""
        return self.length(sequence) + self._gaps.get(sequence, (0, 0))[1]

    def add(self) -> int:
        """A new, empty sequence."""
        self._next += 1
        self._pages[self._next], self._lengths[self._next] = [], 0
        return self._next

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence of the first `length` tokens of another, all unless given; their pages are shared."""
        length = self._cut(sequence, length)
        new = self.add()
        self._pages[new] = self._pages[sequence][: self._count(length)]
        self._shares[self._pages[new]] += 1
        self._lengths[new] = length
        self._keep_gap(new, self._gaps.get(sequence, (0, 0)))
        return new

    def crop(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        length = self._cut(sequence, length)
        keep = self._count(length)
        self._give_back(self._pages[sequence][keep:])
        del self._pages[sequence][keep:]
        self._lengths[sequence] = length
        self._keep_gap(sequence, self._gaps.get(sequence, (0, 0)))

    def remove(self, sequence: int) -> None:
        """Forget a sequence; pages that no other shares are free again."""
        self._known(sequence)
        self._give_back(self._pages.pop(sequence))
        del self._lengths[sequence]
        self._gaps.pop(sequence, None)

    def evict(self, sequence: int, sinks: int, window: int, *, rotation: Rotation | None = None) -> None:
        """Keep the first `sinks` tokens and the last `window` of a sequence, as `KVCache.evict` does.

        Those that move are written anew, to pages of the sequence's own. Raises ValueError for negative sinks, an empty
        window, other sinks than an earlier call's, and shared pages that leave too few free, Unsupported for keys on a
        WebGPU device, and for rotation where they are quantised; nothing is then changed.
        """
        self.in_memory("evict")
        self._known(sequence)
        self.check_turning(rotation)
        at_least("sinks", sinks, 0)
        at_least("window", window, 1)
        before, gone = self._gaps.get(sequence, (sinks, 0))
        if before != sinks:
            raise ValueError(f"sinks is {sinks}; expected {before}, as when the sequence was shortened before")
        n, old = self._lengths[sequence], self._pages[sequence]
        less = n - sinks - window
        if less <= 0:
            return
        slots = self._indices(self._slots(sequence, n - window, n))
        moved = [x.reshape(-1, *x.shape[2:])[slots] for x in self.arrays]
        if rotation is not None:
            moved[0] = turned(moved[0], np.full(window, -less), rotation)
        new = self.fork(sequence, sinks)
        self._give_back(old)
        try:
            slots = self._indices(self._taken([new], np.array([0, window])))
        except ValueError:
            self.remove(new)
            self._shares[old] += 1
            self._free = [page for page in self._free if not self._shares[page]]
            raise
        for held, x in zip(self.arrays, moved, strict=True):
            held.reshape(-1, *held.shape[2:])[slots] = x
        self._pages[sequence], self._lengths[sequence] = self._pages.pop(new), self._lengths.pop(new)
        self._keep_gap(sequence, (sinks, gone + (less if rotation is None else 0)))

    def append(
        self, sequences: Sequence[int], k: Any, v: Any, cu: Any = None, *, rotation: Rotation | None = None
    ) -> None:  # fmt: skip
        """Write new tokens behind those of each sequence, and lengthen it.

        k [n, kv_heads, head_dim] and v [n, kv_heads, v_dim], in the cache's dtype and place, hold the tokens of one
        sequence after the other: of sequence r those from cu[r] to cu[r + 1]. cu, int [R + 1], may be left out where
        every sequence takes as many. rotation: options of `rope`, by which k is then turned at the positions that it
        takes.

        Raises ValueError for shapes that do not fit, sequences that are not there or stand twice, and too few free
        pages; TypeError for another dtype or framework; Unsupported for k or v that require grad. Nothing is then
        changed.
        """
        sequences = list(sequences)
        bounds, turn = self._check(sequences, k, v, cu), None
        if rotation is not None:
            self.in_memory("rotation")
            turn = turning(k, self.positions_of(sequences, bounds), **rotation)
        slots = self._taken(sequences, bounds)
        self.write(k, v, self._indices(slots // self.page_size), self._indices(slots % self.page_size), turn)

    def positions_of(self, sequences: Sequence[int], cu: Any) -> Ints:
        """int64 [n]: the positions that new tokens take, those of sequence r from cu[r] to cu[r + 1]."""
        cu = np.asarray(cu, np.int64)
        begin = [self.position(s) - first for s, first in zip(sequences, cu[:-1].tolist(), strict=True)]
        return np.repeat(np.array(begin, np.int64), np.diff(cu)) + np.arange(cu[-1])

    def _taken(self, sequences: Sequence[int], bounds: Ints) -> Ints:
        # the slots that new tokens take, counted over all pages
        wanted = self._wanted(sequences, bounds)
        if wanted > len(self._free):
            raise ValueError(
                f"the new tokens need {wanted} pages of {self.page_size} and {len(self._free)} of {len(self.k)} are "
                f"free: remove or crop sequences, append fewer tokens, or make a larger cache"
            )
        taken = [self._extend(s, int(more)) for s, more in zip(sequences, np.diff(bounds), strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *taken])

    def view(self, sequences: Iterable[int]) -> PagedKeys:
        """The keys and values of these sequences, for `decode` and `paged_attention`; it stays as it is now."""
        chosen = list(sequences)
        for s in chosen:
            self._known(s)
        longest = max((len(self._pages[s]) for s in chosen), default=0)
        table = np.full((len(chosen), longest), -1, np.int32)
        for row, s in zip(table, chosen, strict=True):
            row[: len(self._pages[s])] = self._pages[s]
        lengths: Any = np.array([self._lengths[s] for s in chosen], np.int32)
        where: tuple[Any, Any] = table, lengths
        if is_torch(self.k):
            torch = sys.modules["torch"]
            where = torch.from_numpy(table), torch.from_numpy(lengths)
        return PagedKeys(self.k, self.v, *where, self.k_scale, self.v_scale, self.quantised, self.sizes)

    def _indices(self, slots: Ints) -> Any:
        # where the keys lie
        return sys.modules["torch"].from_numpy(slots).to(self.k.device) if is_torch(self.k) else slots

    def _keep_gap(self, sequence: int, gap: tuple[int, int]) -> None:
        # it matters while there are tokens behind it
        self._gaps.pop(sequence, None)
        if gap[1] and self._lengths[sequence] > gap[0]:
            self._gaps[sequence] = gap

    def _wanted(self, sequences: Sequence[int], bounds: Ints) -> int:
        # pages that an append takes: new ones, and copies of shared ones until one writer is left
        wanted, left = 0, dict[int, int]()
        for s, more in zip(sequences, np.diff(bounds), strict=True):
            wanted += self._count(self._lengths[s] + int(more)) - len(self._pages[s])
            if more and self._lengths[s] % self.page_size:
                page = self._pages[s][-1]
                shares = left.get(page, int(self._shares[page]))
                wanted += shares > 1
                left[page] = shares - 1
        return wanted

    def _extend(self, s: int, more: int) -> Ints:
        # the slots of `more` new tokens, in pages of the sequence's own
        if more and self._lengths[s] % self.page_size and self._shares[self._pages[s][-1]] > 1:
            old, new = self._pages[s][-1], self._take()
            self.copy_block(old, new)
            self._shares[old] -= 1
            self._pages[s][-1] = new
        first = self._lengths[s]
        while len(self._pages[s]) < self._count(first + more):
            self._pages[s].append(self._take())
        self._lengths[s] = first + more
        return self._slots(s, first, first + more)

    def _slots(self, s: int, first: int, stop: int) -> Ints:
        # of tokens first .. stop - 1, counted over all pages
        at = np.arange(first, stop)
        return np.array(self._pages[s], np.int64)[at // self.page_size] * self.page_size + at % self.page_size

    def _take(self) -> int:
        page = self._free.pop()
        self._shares[page] = 1
        return page

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            self._shares[page] -= 1
            if not self._shares[page]:
                self._free.append(page)

    def _count(self, length: int) -> int:
        return -(-length // self.page_size)

    def _known(self, sequence: int) -> None:
        if sequence not in self._pages:
            raise ValueError(f"sequence {sequence!r} is not in this cache; expected one that add or fork returned")

    def _cut(self, sequence: int, length: int | None) -> int:
        self._known(sequence)
        held = self._lengths[sequence]
        length = held if length is None else whole("length", length)
        if not 0 <= length <= held:
            raise ValueError(f"length is {length}; expected 0 to {held}, the tokens that sequence {sequence} holds")
        return length

    def _check(self, sequences: Sequence[int], k: Any, v: Any, cu: Any) -> Ints:
        for s in sequences:
            self._known(s)
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences are {sequences}; expected each of them once")
        self.check_tokens(k, v, "tokens", ())
        return bounds_of("k", "cu", cu, len(sequences), int(k.shape[0]))
