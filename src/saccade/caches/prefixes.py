"""Begins that sequences have in common, found by their tokens: which pages of a cache hold them already."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from .paged import PagedKVCache

Page = tuple[int, ...]


class _Node:
    # one page of tokens behind another; `kept` are the sequences whose pages begin so, the one used last at the end
    def __init__(self, before: _Node | None, tokens: Page) -> None:
        self.before, self.tokens = before, tokens
        self.after: dict[Page, _Node] = {}
        self.kept: dict[int, None] = {}


class PrefixCache:
    """What was read into paged caches, kept to be shared by sequences that begin alike (S26).

    pools: the `PagedKVCache` of each layer of one model, which add, fork and remove their sequences together, and so
    number them alike; one pool will do. A key depends on its token and on all before it: a page is found by its tokens
    and those of the pages before it, whole pages one after the other by their hash, and of the next as many tokens as
    are the same. Tokens are integers of any meaning to the caller.

    What is kept are sequences of the pools, forks that hold whole pages: `sequences` names them, and they count as any
    other. Raises ValueError where pools are none or differ in page_size.
    """

    def __init__(self, pools: Sequence[PagedKVCache]) -> None:
        sizes = {pool.page_size for pool in pools}
        if len(sizes) != 1:
            raise ValueError(f"pools have page sizes {sorted(sizes)}; expected one or more pools of one page_size")
        self._pools, self._page_size = list(pools), sizes.pop()
        self._root = _Node(None, ())
        # of each kept sequence its last page, the one used longest ago first
        self._last: dict[int, _Node] = {}

    def __repr__(self) -> str:
        return f"PrefixCache(pools={len(self._pools)}, page_size={self._page_size}, sequences={len(self._last)})"

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that are kept, the one used longest ago first."""
        return tuple(self._last)

    def begin(self, tokens: Sequence[int] | Any) -> tuple[int, int]:
        """(sequence, n): a new sequence in every pool, which holds the first n of these tokens, as many as are kept.

        Whoever wants the logits behind the last token leaves it out, for a token that is held is not read again.
        """
        found, tokens = self._root, _integers(tokens)
        chain, _ = self._walk(tokens)
        if chain:
            found = chain[-1]
        n, rest = len(chain) * self._page_size, tuple(tokens[len(chain) * self._page_size :])
        near = max(found.after.values(), key=lambda node: _common(node.tokens, rest), default=None)
        if near is not None and _common(near.tokens, rest):
            found, n = near, n + _common(near.tokens, rest)
        if not n:
            return self._each("add"), 0
        source = next(reversed(found.kept))
        self._use(source)
        return self._each("fork", source, n), n

    def keep(self, sequence: int, tokens: Sequence[int] | Any) -> None:
        """Keep the whole pages of a sequence, which holds these tokens first, beyond its own end.

        Costs no page while the sequence is there. Raises ValueError for a sequence that is not there, holds fewer
        tokens, or was shortened by `evict`, for its keys then follow others than these.
        """
        given = len(tokens)
        for pool in self._pools:
            held, position = pool.length(sequence), pool.position(sequence)
            if given > held or position != held:
                raise ValueError(
                    f"sequence {sequence} holds {held} tokens up to position {position}, and {given} are given; "
                    f"expected the first tokens of one that was not shortened"
                )
        whole = _integers(tokens[: given - given % self._page_size])
        chain, left = self._walk(whole)
        if not left:
            if chain:
                self._use(next(reversed(chain[-1].kept)))
            return
        new = self._each("fork", sequence, len(whole))
        for page in left:
            before = chain[-1] if chain else self._root
            before.after[page] = _Node(before, page)
            chain.append(before.after[page])
        for node in chain:
            node.kept[new] = None
        self._last[new] = chain[-1]
        # what the new one begins with needs no keeping of its own
        inner = set(map(id, chain[:-1]))
        for other in [other for other, last in self._last.items() if id(last) in inner]:
            self.forget(other)

    def forget(self, sequence: int) -> None:
        """Keep this one no longer; pages that no other sequence holds are free again. ValueError if it is not kept."""
        if sequence not in self._last:
            raise ValueError(f"sequence {sequence!r} is not kept; expected one of {list(self._last)}")
        node = self._last.pop(sequence)
        while node.before is not None:
            del node.kept[sequence]
            if not node.kept:
                del node.before.after[node.tokens]
            node = node.before
        self._each("remove", sequence)

    def free(self, pages: int) -> bool:
        """Forget what was used longest ago until so many pages are free in every pool; whether they are."""
        while self._last and self._free_pages() < pages:
            self.forget(next(iter(self._last)))
        return self._free_pages() >= pages

    def _free_pages(self) -> int:
        return min(pool.free_pages for pool in self._pools)

    def _walk(self, tokens: list[int]) -> tuple[list[_Node], list[Page]]:
        # the known nodes of the whole pages of tokens, and the pages behind them
        size, chain = self._page_size, list[_Node]()
        pages = [tuple(tokens[n : n + size]) for n in range(0, len(tokens) - size + 1, size)]
        node = self._root
        for page in pages:
            if page not in node.after:
                break
            node = node.after[page]
            chain.append(node)
        return chain, pages[len(chain) :]

    def _use(self, sequence: int) -> None:
        node = self._last[sequence] = self._last.pop(sequence)
        while node.before is not None:
            node.kept[sequence] = node.kept.pop(sequence)
            node = node.before

    def _each(self, verb: str, *args: int) -> int:
        # the same in every pool; they number their sequences alike
        found = [getattr(pool, verb)(*args) for pool in self._pools]
        if len(set(found)) > 1:
            for pool, new in zip(self._pools, found, strict=True):
                pool.remove(new)
            raise ValueError(f"the pools call a new sequence {found}; expected one number: pools of one history")
        return found[0]


def _integers(tokens: Sequence[int] | Any) -> list[int]:
    # operator.index takes integers of any kind, and no fraction
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise TypeError(f"tokens hold something that is no integer ({error}); expected integers [n]") from error


def _common(a: Page, b: Page) -> int:
    # how many tokens two pages begin with alike
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
