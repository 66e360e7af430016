"""Keys and values in pages that sequences share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import Array, ArrayOrList
from ..rope import rope, turning
from . import gates
from .choice import arrays_for
from .contiguous import Rotation
from .sequences import Ints, PagedKeys, Tokens, alone, bounds_of, new_positions, path_of
from .storage import Storage, at_least


class PagedKVCache(Storage):
    """A pool of pages of keys and values; sequences take pages as they grow and return them when they are removed.

    A sequence is a number that `add` or `fork` returns. Forks share pages; a shared page is copied when one of its
    sequences writes to it. A cache has no gradient.

    Args:
        pages: the number of pages.
        page_size: tokens per page.
        kv_heads, head_dim, v_dim, dtype, device, fill, quantised, group, gate_heads: as in `KVCache`.

    Attributes:
        k, v: [pages, page_size, kv_heads, head_dim], with v_dim for v; or the codes.

    Examples:
        >>> cache = saccade.PagedKVCache(256, 16, 8, 64, dtype=torch.float32)
        >>> cache.append([first := cache.add()], *torch.randn(2, 20, 8, 64))  # k and v of 20 tokens
        >>> o = saccade.decode(torch.randn(1, 1, 8, 64), cache.view([first]))
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        v_dim: int | None = None,
        dtype: Any = "float32",
        device: Any = None,
        fill: float = 0.0,
        quantised: str | None = None,
        group: int | None = None,
        gate_heads: int | None = None,
    ) -> None:
        at_least("pages", pages, 0)
        at_least("page_size", page_size, 1)
        arrays = arrays_for(dtype, device)
        super().__init__((pages, page_size), kv_heads, (head_dim, v_dim), arrays, fill, quantised, group)
        if gate_heads is not None:
            gates.add_room(self, gate_heads)
        self._free = list(range(pages - 1, -1, -1))
        # how many sequences use each page
        self._shares = np.zeros(pages, np.int64)
        self._sequences: dict[int, Tokens] = {}
        self._next = 0

    def __repr__(self) -> str:
        counts = {"free_pages": self.free_pages, "sequences": len(self._sequences)}
        return self.shown(pages=len(self._shares), page_size=self.page_size, **counts)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return int(self.k.shape[1])

    @property
    def free_pages(self) -> int:
        """The number of pages that no sequence uses."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """All sequences of the cache."""
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        """The number of tokens of a sequence in the cache."""
        return self.known(sequence).length

    def position(self, sequence: int) -> int:
        """The position of a sequence's next token: its length plus the number of tokens that `evict` removed."""
        return self.known(sequence).length + self.known(sequence).gone

    def add(self) -> int:
        """Add an empty sequence and return its number."""
        self._next += 1
        self._sequences[self._next] = Tokens([])
        return self._next

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Add a sequence that shares the first `length` tokens of another, or all for None; return its number."""
        length, source = self.known(sequence).part(sequence, length), self.known(sequence)
        new = self.add()
        fork = self._sequences[new] = replace(source, pages=source.pages[: self._count(length)])
        self._shares[fork.pages] += 1
        fork.cut(length)
        return new

    def crop(self, sequence: int, length: int) -> None:
        """Remove the tokens from `length` on."""
        length, one = self.known(sequence).part(sequence, length), self.known(sequence)
        self._give_back(one.pages[self._count(length) :])
        del one.pages[self._count(length) :]
        one.cut(length)

    def remove(self, sequence: int) -> None:
        """Remove a sequence; pages that no other sequence uses become free."""
        self._give_back(self.known(sequence).pages)
        del self._sequences[sequence]

    def evict(self, sequence: int, sinks: int, window: int, *, rotation: Rotation | None = None) -> None:
        """Keep the first `sinks` and the last `window` tokens of a sequence, as `KVCache.evict` does.

        Tokens that move are copied to pages that only this sequence uses. This also raises ValueError if sinks differs
        from an earlier call's, or if too few pages are free. If it raises an error, nothing has changed.
        """
        self.in_memory("evict")
        one = self.known(sequence)
        self.check_rotation(rotation)
        at_least("sinks", sinks, 0)
        at_least("window", window, 1)
        if one.gone and one.sinks != sinks:
            raise ValueError(f"sinks is {sinks}; expected {one.sinks}, as when the sequence was shortened before")
        less = one.length - sinks - window
        if less <= 0:
            return
        later = self._slots(one, one.length - window)
        new = self._rejoined(sequence, sinks, later, None if rotation is None else (-less, rotation))
        self._sequences[sequence] = replace(new, sinks=sinks, gone=one.gone + less * (rotation is None), shortened=True)

    def accept(self, sequence: int, tokens: int, path: Sequence[int]) -> None:
        """Of a sequence's last `tokens` tokens keep only those of a path, as `KVCache.accept` does.

        Tokens are copied as in `evict`. If too few pages are free, it raises ValueError and changes nothing.
        """
        self.in_memory("accept")
        one, at = self.known(sequence), path_of(path, tokens)
        if one.length < tokens:
            raise ValueError(f"tokens is {tokens}; expected at most {one.length}, those of sequence {sequence}")
        start, still = one.length - tokens, at == np.arange(len(at))
        if still.all():
            self.crop(sequence, start + len(at))
            return
        gates.check_path(self)
        first = start + int(still.argmin())
        later = self._slots(one, start)[at[first - start :]]
        self._sequences[sequence] = self._rejoined(sequence, first, later)

    def append(
        self,
        sequences: Sequence[int],
        k: Array,
        v: Array,
        cu: ArrayOrList | None = None,
        *,
        rotation: Rotation | None = None,
        log_f: Array | None = None,
    ) -> None:
        """Append new tokens to each sequence. If it raises an error, nothing has changed.

        Args:
            sequences: the numbers of R different sequences.
            k, v: [n, kv_heads, head_dim] and [n, kv_heads, v_dim], in the dtype and on the device of the cache.
            cu: int [R + 1], sequence r takes the tokens cu[r] to cu[r + 1]; None if all take the same number.
            rotation: options of `rope`, with which k is first rotated to its positions.
            log_f: [n, gate_heads], floating, the logarithms of the tokens' forget gates; required if and only if
                the cache has gate_heads.

        Raises:
            ValueError: shapes do not fit, a sequence is missing or named twice, or too few pages are free.
            TypeError: k or v has another dtype or framework.
            Unsupported: k or v requires grad or has a tangent; or rotation on a WebGPU device.
        """
        if isinstance(sequences, int):
            raise alone(sequences)
        sequences, turn = list(sequences), None
        chosen = [self.known(s) for s in sequences]
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences are {sequences}; expected each of them once")
        self.check_tokens(k, v, "tokens", ())
        if log_f is not self.gates:
            gates.check(self, log_f, (int(k.shape[0]),))
        bounds, before = bounds_of("k", "cu", cu, len(sequences), int(k.shape[0])), [one.length for one in chosen]
        if rotation is not None:
            self.in_memory("rotation")
            turn = turning(k, new_positions(chosen, bounds), **rotation)
        sums = None if log_f is None else gates.sums_of_sequences(self, log_f, chosen, bounds)
        try:
            first, second = map(self._arrays.indices, np.divmod(self.reserve(sequences, bounds), self.page_size))
            self._arrays.write_slots(self, k, v, first, second, turn)
            if sums is not None:
                gates.write(self, sums, first, second)
        except BaseException:
            for sequence, length in zip(sequences, before, strict=True):
                if self.length(sequence) > length:
                    self.crop(sequence, length)
            raise

    def view(self, sequences: Iterable[int]) -> PagedKeys:
        """Keys and values of these sequences, for `decode` and `paged_attention`; later appends do not change them."""
        if isinstance(sequences, int):
            raise alone(sequences)
        chosen = [self.known(s) for s in sequences]
        table: Any = np.full((len(chosen), max((len(one.pages) for one in chosen), default=0)), -1, np.int32)
        for row, one in zip(table, chosen, strict=True):
            row[: len(one.pages)] = one.pages
        lengths: Any = np.array([one.length for one in chosen], np.int32)
        parts = self._arrays.on_host(table), self._arrays.on_host(lengths), self.k_scale, self.v_scale
        return PagedKeys(self.k, self.v, *parts, self.quantised, self.sizes, self.gates, self.aliased)

    def reserve(self, sequences: Sequence[int], bounds: Ints) -> Ints:
        """Lengthen sequences, r by the tokens bounds[r] to bounds[r + 1]; returns their slots, over all pages.

        The slots have no keys until the caller writes them. Raises ValueError if too few pages are free.
        """
        more = [(self._sequences[s], int(n)) for s, n in zip(sequences, np.diff(bounds), strict=True)]
        wanted = self._wanted(more)
        if wanted > len(self._free):
            raise ValueError(
                f"the new tokens need {wanted} pages of {self.page_size} and {len(self._free)} of {len(self.k)} are "
                f"free: remove or crop sequences, append fewer tokens, or make a larger cache"
            )
        return np.concatenate([np.zeros(0, np.int64), *(self._extended(one, n) for one, n in more)])

    def _rejoined(self, sequence: int, first: int, later: Ints, turn: tuple[int, Rotation] | None = None) -> Tokens:
        # the first tokens of a sequence, and copies of those in the slots `later`, with keys rotated by turn[0]
        slots, source = self._arrays.indices(later), self.known(sequence)
        moved = [x.reshape(-1, *x.shape[2:])[slots] for x in self.arrays]
        if turn is not None:
            at = ..., self.rotary
            moved[0][at] = rope(moved[0][at], np.full(len(later), turn[0]), **dict(turn[1], factor=1.0))
        new = self.fork(sequence, first)
        self._give_back(source.pages)
        try:
            slots = self._arrays.indices(self.reserve([new], np.array([0, len(later)])))
            for array, x in zip(self.arrays, moved, strict=True):
                array.reshape(-1, *array.shape[2:])[slots] = x
        except BaseException:
            self.remove(new)
            self._shares[source.pages] += 1
            self._free = [page for page in self._free if not self._shares[page]]
            raise
        return replace(self._sequences.pop(new), gone=source.gone, shortened=source.shortened)

    def _wanted(self, more: Iterable[tuple[Tokens, int]]) -> int:
        # pages that an append needs: new ones, and copies of a shared page until one sequence alone uses it
        wanted, left = 0, dict[int, int]()
        for one, n in more:
            wanted += self._count(one.length + n) - len(one.pages)
            if n and one.length % self.page_size:
                page = one.pages[-1]
                shares = left.get(page, int(self._shares[page]))
                wanted += shares > 1
                left[page] = shares - 1
        return wanted

    def _extended(self, one: Tokens, n: int) -> Ints:
        # the slots of n new tokens, in pages that only this sequence uses; a copy comes first, because it may raise
        first = one.length
        shared = n > 0 and first % self.page_size > 0 and self._shares[one.pages[-1]] > 1
        for array in self.arrays if shared else ():
            self._arrays.copy_block(array, one.pages[-1], self._free[-1])
        new = [self._free.pop() for _ in range(self._count(first + n) - len(one.pages) + shared)]
        self._shares[new] = 1
        if shared:
            self._shares[one.pages.pop()] -= 1
        one.pages += new
        one.length += n
        return self._slots(one, first)

    def _slots(self, one: Tokens, first: int) -> Ints:
        # the slots of the tokens from `first` on, numbered over all pages
        page, slot = np.divmod(np.arange(first, one.length), self.page_size)
        return np.array(one.pages, np.int64)[page] * self.page_size + slot

    def _give_back(self, pages: list[int]) -> None:
        self._shares[pages] -= 1
        self._free += [page for page in pages if not self._shares[page]]

    def _count(self, length: int) -> int:
        return -(-length // self.page_size)

    def known(self, sequence: int) -> Tokens:
        """The tokens of a sequence; raises ValueError if there is none of this number."""
        if sequence not in self._sequences:
            raise ValueError(f"sequence {sequence!r} is not in this cache; expected one that add or fork returned")
        return self._sequences[sequence]
