"""Prefixes that are already in the pages of a cache, found by their tokens, so that sequences can share them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ..arrays import Array
from .paged import PagedKVCache

Page = tuple[int, ...]


class _Node:
    # a page of tokens after those of its parent; sequences: those that start with these pages, the last used one last
    def __init__(self, parent: _Node | None, tokens: Page) -> None:
        self.parent, self.tokens = parent, tokens
        self.children: dict[Page, _Node] = {}
        self.sequences: dict[int, None] = {}


class PrefixCache:
    """Prefixes in paged caches, which later sequences that start with the same tokens can share.

    A key depends on its token and on all tokens before it, so a page is looked up by its own tokens and those of all
    pages before it. If only the first tokens of the next page match, these are used. The stored prefixes are sequences
    in the pools, forks of whole pages, and they occupy pages like all others.

    Args:
        pools: the `PagedKVCache` of each layer of one model, or a single one. They must add, fork and remove sequences
            together, so that each sequence has the same number in all of them.

    Raises:
        ValueError: there are no pools, or they differ in page_size.

    Examples:
        >>> from saccade.caches.prefixes import PrefixCache
        >>> cache, tokens = saccade.PagedKVCache(256, 16, 8, 64), list(range(100))
        >>> prefixes, prompt = PrefixCache([cache]), cache.add()
        >>> cache.append([prompt], *np.ones((2, 100, 8, 64), np.float32))
        >>> prefixes.keep(prompt, tokens)
        >>> sequence, n = prefixes.begin(tokens[:50] + [7])  # the new sequence has the first n tokens
        >>> n
        50
    """

    def __init__(self, pools: PagedKVCache | Sequence[PagedKVCache]) -> None:
        pools = [pools] if isinstance(pools, PagedKVCache) else pools
        sizes = {pool.page_size for pool in pools}
        if len(sizes) != 1:
            raise ValueError(f"pools have page sizes {sorted(sizes)}; expected one or more pools of one page_size")
        self._pools, self._page_size = list(pools), sizes.pop()
        self._root = _Node(None, ())
        # the last page of each stored sequence, the least recently used one first
        self._last: dict[int, _Node] = {}

    def __repr__(self) -> str:
        return f"PrefixCache(pools={len(self._pools)}, page_size={self._page_size}, sequences={len(self._last)})"

    @property
    def sequences(self) -> tuple[int, ...]:
        """The stored sequences, the least recently used one first."""
        return tuple(self._last)

    def begin(self, tokens: Sequence[int] | Array) -> tuple[int, int]:
        """Add to every pool a sequence with as many of these tokens as are stored.

        Args:
            tokens: integers [T]. Omit the last token if you need its logits, because the model does not read a token
                in the cache again.

        Returns:
            (sequence, n): the number of the sequence, which has the first n tokens.
        """
        chain, left = self._walk(_integers(tokens))
        node, n = chain[-1], (len(chain) - 1) * self._page_size
        # the equal tokens at the start of the next page
        rest = left[0] if left else ()
        near = max(node.children.values(), key=lambda child: _common(child.tokens, rest), default=None)
        if near is not None and _common(near.tokens, rest):
            node, n = near, n + _common(near.tokens, rest)
        if not n:
            return self._each("add"), 0
        source = next(reversed(node.sequences))
        self._use(source)
        return self._each("fork", source, n), n

    def keep(self, sequence: int, tokens: Sequence[int] | Array) -> None:
        """Store the full pages of a sequence that starts with these tokens; they stay when it is removed.

        This takes no additional pages while the sequence exists.

        Raises:
            ValueError: the sequence does not exist, has fewer tokens, or was shortened by `evict`, because its keys
                then depend on other tokens than these.
        """
        tokens = _integers(tokens)
        n = len(tokens)
        for pool in self._pools:
            one = pool.known(sequence)
            if n > one.length or one.shortened:
                after = " after evict" if one.shortened else ""
                raise ValueError(
                    f"sequence {sequence} holds {one.length} tokens{after}, and {n} are given; expected the first "
                    f"tokens of one that was not shortened"
                )
        whole = n - n % self._page_size
        chain, left = self._walk(tokens[:whole])
        if not left:
            if whole:
                self._use(next(reversed(chain[-1].sequences)))
            return
        new = self._each("fork", sequence, whole)
        for page in left:
            chain[-1].children[page] = _Node(chain[-1], page)
            chain.append(chain[-1].children[page])
        for node in chain[1:]:
            node.sequences[new] = None
        self._last[new] = chain[-1]
        # sequences that are prefixes of the new one need not be stored themselves
        inner = set(map(id, chain[:-1]))
        for other in [other for other, last in self._last.items() if id(last) in inner]:
            self.forget(other)

    def forget(self, sequence: int) -> None:
        """Remove a stored sequence; pages that only it uses become free. Raises ValueError if it is not stored."""
        if sequence not in self._last:
            raise ValueError(f"sequence {sequence!r} is not stored; expected one of {list(self._last)}")
        node = self._last.pop(sequence)
        while node.parent is not None:
            del node.sequences[sequence]
            if not node.sequences:
                del node.parent.children[node.tokens]
            node = node.parent
        self._each("remove", sequence)

    def free(self, pages: int) -> bool:
        """Remove the least recently used prefixes until every pool has `pages` free pages; return whether it has."""
        while (short := min(pool.free_pages for pool in self._pools) < pages) and self._last:
            self.forget(next(iter(self._last)))
        return not short

    def _walk(self, tokens: list[int]) -> tuple[list[_Node], list[Page]]:
        # the root and the nodes of stored pages, and the remaining pages, the last of which may be short
        size, chain = self._page_size, [self._root]
        pages = [tuple(tokens[n : n + size]) for n in range(0, len(tokens), size)]
        for page in pages:
            if page not in chain[-1].children:
                break
            chain.append(chain[-1].children[page])
        return chain, pages[len(chain) - 1 :]

    def _use(self, sequence: int) -> None:
        node = self._last[sequence] = self._last.pop(sequence)
        while node.parent is not None:
            node.sequences[sequence] = node.sequences.pop(sequence)
            node = node.parent

    def _each(self, verb: str, *args: int) -> int:
        # call the same method of every pool; the numbers of sequences must agree
        numbers = [getattr(pool, verb)(*args) for pool in self._pools]
        if len(set(numbers)) > 1:
            for pool, new in zip(self._pools, numbers, strict=True):
                pool.remove(new)
            raise ValueError(f"the pools number a new sequence {numbers}; expected one number: use the pools together")
        return numbers[0]


def _integers(tokens: Sequence[int] | Any) -> list[int]:
    # operator.index accepts integers of any kind, but no fractions
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise TypeError(f"tokens has an entry that is not an integer ({error}); expected integers [n]") from error


def _common(a: Page, b: Page) -> int:
    # the number of equal tokens at the start of two pages
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
