"""Keys and values in pages that sequences share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..frameworks.source import host
from ..quantised import Quantised
from ..rope import rope, turning
from . import gates
from .choice import arrays_for
from .contiguous import Rotation
from .sequences import Tokens
from .storage import Storage, at_least, whole

Ints = NDArray[np.int64]


class PagedKeys(NamedTuple):
    """Keys and values of R sequences in pages, as `decode` and `paged_attention` read them.

    k [pages, page_size, kv_heads, head_dim], v [pages, page_size, kv_heads, v_dim]; token j of sequence r is in page
    block_table[r, j // page_size], slot j % page_size. block_table int32 [R, n], lengths int32 [R]; no result depends
    on entries of the table or on slots beyond a sequence's length. A table and lengths on the host are checked at every
    call; on a GPU they are trusted, because looking at them would wait for it. quantised: which codes k and v hold;
    k_scale and v_scale [pages, page_size, kv_heads, groups] are their scales. sizes: head_dim and v_dim, for rows on a
    WebGPU device that hold codes and scales. gates: float64 [pages, page_size, Hq], running sums of log_f, or None.
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


class PagedKVCache(Storage):
    """A pool of pages of keys and values, which sequences take as they grow and give back when they end.

    A sequence is a number that `add` or `fork` returns. Forks share pages; a shared page is copied when one of its
    sequences writes to it. pages of page_size tokens each; the other arguments are those of `KVCache`.
    k [pages, page_size, kv_heads, head_dim], v [pages, page_size, kv_heads, v_dim]. No gradient runs through a cache.
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
        # how many sequences hold each page
        self._shares = np.zeros(pages, np.int64)
        self._sequences: dict[int, Tokens] = {}
        self._next = 0

    def __repr__(self) -> str:
        counts = {"free_pages": self.free_pages, "sequences": len(self._sequences)}
        return self.shown(pages=len(self._shares), page_size=self.page_size, **counts)

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
        """All sequences of the cache."""
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        """How many tokens a sequence holds."""
        return self._known(sequence).length

    def position(self, sequence: int) -> int:
        """The position of a sequence's next token: its length plus the tokens that `evict` removed."""
        return self._known(sequence).length + self._known(sequence).gone

    def add(self) -> int:
        """A new, empty sequence."""
        self._next += 1
        self._sequences[self._next] = Tokens([])
        return self._next

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence of the first `length` tokens of another, None for all; their pages are shared."""
        length, source = self._checked(sequence, length), self._known(sequence)
        new = self.add()
        fork = self._sequences[new] = replace(source, pages=source.pages[: self._count(length)])
        self._shares[fork.pages] += 1
        fork.cut(length)
        return new

    def crop(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        length, one = self._checked(sequence, length), self._known(sequence)
        self._give_back(one.pages[self._count(length) :])
        del one.pages[self._count(length) :]
        one.cut(length)

    def remove(self, sequence: int) -> None:
        """Forget a sequence; pages that no other shares are free again."""
        self._give_back(self._known(sequence).pages)
        del self._sequences[sequence]

    def evict(self, sequence: int, sinks: int, window: int, *, rotation: Rotation | None = None) -> None:
        """Keep the first `sinks` tokens and the last `window` of a sequence, as `KVCache.evict` does.

        The tokens that move are copied to pages that only this sequence holds. Raises ValueError for negative sinks, an
        empty window, other sinks than in an earlier call, and too few free pages because others share these. Raises
        Unsupported for keys on a WebGPU device, and for rotation of quantised keys. Nothing is then changed.
        """
        self.in_memory("evict")
        one = self._known(sequence)
        self.check_rotation(rotation)
        at_least("sinks", sinks, 0)
        at_least("window", window, 1)
        if one.gone and one.sinks != sinks:
            raise ValueError(f"sinks is {sinks}; expected {one.sinks}, as when the sequence was shortened before")
        less = one.length - sinks - window
        if less <= 0:
            return
        slots = self._arrays.indices(self._slots(one, one.length - window, one.length))
        moved = [x.reshape(-1, *x.shape[2:])[slots] for x in self.arrays]
        if rotation is not None:
            moved[0] = rope(moved[0], np.full(window, -less), **dict(rotation, factor=1.0))
        new = self.fork(sequence, sinks)
        self._give_back(one.pages)
        try:
            slots = self._arrays.indices(self._taken([new], np.array([0, window])))
        except ValueError:
            self.remove(new)
            self._shares[one.pages] += 1
            self._free = [page for page in self._free if not self._shares[page]]
            raise
        for array, x in zip(self.arrays, moved, strict=True):
            array.reshape(-1, *array.shape[2:])[slots] = x
        gone = one.gone + (less if rotation is None else 0)
        self._sequences[sequence] = replace(self._sequences.pop(new), sinks=sinks, gone=gone)

    def append(
        self,
        sequences: Sequence[int],
        k: Any,
        v: Any,
        cu: Any = None,
        *,
        rotation: Rotation | None = None,
        log_f: Any = None,
    ) -> None:
        """Write new tokens behind those of each sequence, and lengthen it.

        k [n, kv_heads, head_dim] and v [n, kv_heads, v_dim], in the cache's dtype and place, hold the tokens of one
        sequence after the other: those of sequence r from cu[r] to cu[r + 1]. cu, int [R + 1], may be left out if every
        sequence takes the same number. rotation: options of `rope`, by which k is first rotated to the positions that
        it takes. log_f: [n, gate_heads], floating, the logarithms of the tokens' forget gates, for a cache that was
        made with gate_heads.

        Raises ValueError for shapes that do not fit, sequences that are missing or named twice, and too few free pages;
        TypeError for another dtype or framework; Unsupported for k or v that require grad. Nothing is then changed.
        """
        sequences, turn = list(sequences), None
        chosen = [self._known(s) for s in sequences]
        if len(set(sequences)) < len(sequences):
            raise ValueError(f"sequences are {sequences}; expected each of them once")
        self.check_tokens(k, v, "tokens", ())
        if log_f is not self.gates:
            gates.check(self, log_f, (int(k.shape[0]),))
        bounds = bounds_of("k", "cu", cu, len(sequences), int(k.shape[0]))
        if rotation is not None:
            self.in_memory("rotation")
            turn = turning(k, self.positions_of(sequences, bounds), **rotation)
        sums = None if log_f is None else gates.sums_of_sequences(self, log_f, chosen, bounds)
        first, second = map(self._arrays.indices, np.divmod(self._taken(sequences, bounds), self.page_size))
        self._arrays.write_slots(self, k, v, first, second, turn)
        if sums is not None:
            gates.write(self, sums, first, second)

    def positions_of(self, sequences: Sequence[int], cu: Any) -> Ints:
        """int64 [n]: the positions that new tokens take, those of sequence r from cu[r] to cu[r + 1]."""
        cu = np.asarray(cu, np.int64)
        begin = [self.position(s) - first for s, first in zip(sequences, cu[:-1].tolist(), strict=True)]
        return np.repeat(np.array(begin, np.int64), np.diff(cu)) + np.arange(cu[-1])

    def view(self, sequences: Iterable[int]) -> PagedKeys:
        """The keys and values of these sequences, for `decode` and `paged_attention`; later appends do not reach it."""
        chosen = [self._known(s) for s in sequences]
        table: Any = np.full((len(chosen), max((len(one.pages) for one in chosen), default=0)), -1, np.int32)
        for row, one in zip(table, chosen, strict=True):
            row[: len(one.pages)] = one.pages
        lengths: Any = np.array([one.length for one in chosen], np.int32)
        table, lengths = self._arrays.on_host(table), self._arrays.on_host(lengths)
        scales = self.k_scale, self.v_scale
        return PagedKeys(self.k, self.v, table, lengths, *scales, self.quantised, self.sizes, self.gates)

    def _taken(self, sequences: Sequence[int], bounds: Ints) -> Ints:
        # the slots that new tokens take, numbered over all pages
        more = [(self._sequences[s], int(n)) for s, n in zip(sequences, np.diff(bounds), strict=True)]
        wanted = self._wanted(more)
        if wanted > len(self._free):
            raise ValueError(
                f"the new tokens need {wanted} pages of {self.page_size} and {len(self._free)} of {len(self.k)} are "
                f"free: remove or crop sequences, append fewer tokens, or make a larger cache"
            )
        return np.concatenate([np.zeros(0, np.int64), *(self._extended(one, n) for one, n in more)])

    def _wanted(self, more: Iterable[tuple[Tokens, int]]) -> int:
        # pages that an append takes: new ones, and copies of shared ones until one writer is left
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
        # the slots of n new tokens, in pages of the sequence's own
        first, one.length = one.length, one.length + n
        shared = n > 0 and first % self.page_size > 0 and self._shares[one.pages[-1]] > 1
        new = [self._free.pop() for _ in range(self._count(one.length) - len(one.pages) + shared)]
        self._shares[new] = 1
        if shared:
            old = one.pages.pop()
            self._shares[old] -= 1
            for array in self.arrays:
                self._arrays.copy_block(array, old, new[0])
        one.pages += new
        return self._slots(one, first, one.length)

    def _slots(self, one: Tokens, first: int, stop: int) -> Ints:
        # of tokens first .. stop - 1, numbered over all pages
        page, slot = np.divmod(np.arange(first, stop), self.page_size)
        return np.array(one.pages, np.int64)[page] * self.page_size + slot

    def _give_back(self, pages: list[int]) -> None:
        self._shares[pages] -= 1
        self._free += [page for page in pages if not self._shares[page]]

    def _count(self, length: int) -> int:
        return -(-length // self.page_size)

    def _known(self, sequence: int) -> Tokens:
        if sequence not in self._sequences:
            raise ValueError(f"sequence {sequence!r} is not in this cache; expected one that add or fork returned")
        return self._sequences[sequence]

    def _checked(self, sequence: int, length: int | None) -> int:
        most = self._known(sequence).length
        length = most if length is None else whole("length", length)
        if not 0 <= length <= most:
            raise ValueError(f"length is {length}; expected 0 to {most}, the tokens that sequence {sequence} holds")
        return length


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
