"""Prefixes by their tokens: pages that outlive their sequence, refusals; `test_paged_cache` tests random ones."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import PagedKVCache
from saccade.prefixes import PrefixCache  # the name in the README


def tokens(n: int, first: int = 0) -> np.ndarray:
    return np.broadcast_to(np.arange(first, first + n, dtype=np.float32)[:, None, None], (n, 1, 4)).copy()


def test_begins_are_found_by_their_tokens_after_their_end() -> None:
    pools = [PagedKVCache(6, 4, 1, 4) for _ in range(2)]
    begins = PrefixCache(pools)
    s, n = begins.begin(range(10))
    assert n == 0
    for pool in pools:
        pool.append([s], tokens(10), tokens(10))
    begins.keep(s, range(10))
    for pool in pools:
        pool.remove(s)
        # two whole pages stay
        assert pool.free_pages == 4
    other, n = begins.begin([0, 1, 2, 3, 4, 5, 9, 9])
    assert n == 6
    for pool in pools:
        pool.append([other], tokens(2, 20), tokens(2, 20))
        view = pool.view([other])
        assert view.k[view.block_table[0]].reshape(-1, 4)[:8, 0].tolist() == [0, 1, 2, 3, 4, 5, 20, 21]
    assert begins.begin(range(9))[1] == 8
    assert begins.free(3)
    assert begins.sequences
    assert not begins.free(5)
    assert begins.begin(range(9))[1] == 0


def test_bad_prefixes() -> None:
    cache = PagedKVCache(6, 4, 1, 4)
    with pytest.raises(ValueError, match=r"page sizes \[3, 4\]; expected one or more pools"):
        PrefixCache([cache, PagedKVCache(6, 3, 1, 4)])
    with pytest.raises(ValueError, match=r"page sizes \[\]"):
        PrefixCache([])
    begins, s = PrefixCache(cache), cache.add()
    cache.append([s], tokens(8), tokens(8))
    with pytest.raises(ValueError, match="holds 8 tokens, and 9 are given"):
        begins.keep(s, range(9))
    with pytest.raises(ValueError, match="sequence 9 is not in this cache"):
        begins.keep(9, [])
    with pytest.raises(ValueError, match=r"sequence 1 is not stored; expected one of \[\]"):
        begins.forget(s)
    for rotation in (None, {}):
        moved = cache.fork(s)
        cache.evict(moved, 1, 4, rotation=rotation)
        with pytest.raises(ValueError, match="holds 5 tokens after evict, and 5 are given"):
            begins.keep(moved, range(5))
        cache.remove(moved)
    uneven = PagedKVCache(6, 4, 1, 4)
    with pytest.raises(ValueError, match=r"number a new sequence \[6, 1\]; expected one number"):
        PrefixCache([cache, uneven]).begin([])
    assert (cache.sequences, uneven.sequences) == ((s,), ())
