"""The paged cache: random sequences of its verbs against plain lists of keys, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from saccade import PagedKeys, PagedKVCache, mask, paged_attention
from saccade.caches.prefixes import PrefixCache

PAGES = 12


class Pool(RuleBasedStateMachine):
    """The contents of each sequence as lists of numbers and positions, next to a cache whose keys are those numbers.

    The number of a key encodes its token, 0 or 1, and all tokens before it, on which a model's keys depend.
    """

    @initialize(page=st.integers(1, 5))
    def make(self, page: int) -> None:
        self.cache = PagedKVCache(PAGES, page, 2, 3, v_dim=1, fill=np.nan)
        self.begins = PrefixCache([self.cache])
        self.held: dict[int, list[int]] = {}
        self.places: dict[int, list[int]] = {}
        # for each number the previous number and its token; for each stored sequence its tokens
        self.made: list[tuple[int, int]] = []
        self.kept: dict[int, list[int]] = {}

    def numbers(self, before: list[int], tokens: list[int]) -> list[int]:
        found = [before[-1] if before else -1]
        for token in tokens:
            if (found[-1], token) not in self.made:
                self.made.append((found[-1], token))
            found.append(self.made.index((found[-1], token)))
        return found[1:]

    def shortened(self, s: int) -> bool:
        return self.cache.position(s) != len(self.held[s])

    @rule()
    def add(self) -> None:
        s = self.cache.add()
        self.held[s], self.places[s] = [], []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, min_size=1))
        counts = data.draw(st.lists(st.integers(0, 7), min_size=len(chosen), max_size=len(chosen)))
        drawn = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in counts]
        numbers = [self.numbers(self.held[s], tokens) for s, tokens in zip(chosen, drawn, strict=True)]
        new = np.array([number for some in numbers for number in some], np.int64)
        k = np.broadcast_to(new[:, None, None], (len(new), 2, 3)).astype(np.float32)
        before, free = self.seen(), self.cache.free_pages
        refused = ""
        try:
            self.cache.append(chosen, k, -k[..., :1], np.cumsum([0, *counts]))
        except ValueError as error:
            refused = str(error)
        if refused:
            assert "are free" in refused
            assert self.seen() == before
            assert self.cache.free_pages == free
            return
        for s, part in zip(chosen, np.split(new, np.cumsum(counts)[:-1]), strict=True):
            self.held[s] += part.tolist()
            begin = self.places[s][-1] + 1 if self.places[s] else 0
            self.places[s] += range(begin, begin + len(part))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(sorted(self.held)))
        n = data.draw(st.integers(0, len(self.held[s])))
        free = self.cache.free_pages
        new = self.cache.fork(s, n)
        self.held[new], self.places[new] = self.held[s][:n], self.places[s][:n]
        assert self.cache.free_pages == free

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(sorted(self.held)))
        n = data.draw(st.integers(0, len(self.held[s])))
        self.cache.crop(s, n)
        del self.held[s][n:], self.places[s][n:]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), sinks=st.integers(0, 4), window=st.integers(1, 6))
    def evict(self, data: st.DataObject, sinks: int, window: int) -> None:
        s = data.draw(st.sampled_from(sorted(self.held)))
        refused = ""
        try:
            self.cache.evict(s, sinks, window)
        except ValueError as error:
            refused = str(error)
        if refused:
            assert "are free" in refused or "as when the sequence was shortened" in refused
            return
        gone = slice(sinks, max(sinks, len(self.held[s]) - window))
        del self.held[s][gone], self.places[s][gone]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(sorted(self.held)))
        n = data.draw(st.integers(0, len(self.held[s])))
        tokens = [self.made[number][1] for number in self.held[s][:n]]
        free = self.cache.free_pages
        if self.shortened(s):
            with pytest.raises(ValueError, match="that was not shortened"):
                self.begins.keep(s, tokens)
            return
        self.begins.keep(s, tokens)
        self.kept |= {
            new: tokens[: n - n % self.cache.page_size] for new in self.begins.sequences if new not in self.kept
        }
        # its prefixes are forgotten
        self.kept = {new: self.kept[new] for new in self.begins.sequences}
        assert self.cache.free_pages == free

    @rule(tokens=st.lists(st.integers(0, 1), max_size=12))
    def begin(self, tokens: list[int]) -> None:
        same = [alike(tokens, kept) for kept in self.kept.values()]
        s, n = self.begins.begin(tokens)
        assert n == max(same, default=0)
        self.held[s] = self.numbers([], tokens[:n])
        self.places[s] = list(range(n))
        assert sorted(self.begins.sequences) == sorted(self.kept)

    @rule(pages=st.integers(0, PAGES))
    def free(self, pages: int) -> None:
        order = self.begins.sequences
        assert self.begins.free(pages) == (self.cache.free_pages >= pages)
        assert self.cache.free_pages >= pages or not self.begins.sequences
        # the least recently used ones are removed
        assert order[len(order) - len(self.begins.sequences) :] == self.begins.sequences
        self.kept = {s: self.kept[s] for s in self.begins.sequences}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.remove(s)
        del self.held[s], self.places[s]

    def seen(self) -> dict[int, list[float]]:
        found = {}
        for s in self.held:
            view = self.cache.view([s])
            slots = view.block_table[0].repeat(self.cache.page_size)[: view.lengths[0]]
            at = slots, np.arange(len(slots)) % self.cache.page_size
            assert (view.k[at] == -view.v[at]).all()
            found[s] = view.k[at][:, 1, 2].tolist()
        return found

    @invariant()
    def holds_what_was_given(self) -> None:
        if not hasattr(self, "held"):
            return
        assert self.seen() == self.held
        assert all(self.cache.position(s) == (x[-1] + 1 if x else 0) for s, x in self.places.items())
        assert set(self.cache.sequences) == {*self.held, *self.kept}
        used = {int(p) for s in self.cache.sequences for p in self.cache.view([s]).block_table[0]}
        assert self.cache.free_pages == PAGES - len(used)


def alike(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=17, deadline=None)
TestPool = Pool.TestCase


def tokens(n: int, first: int = 0) -> np.ndarray:
    return np.broadcast_to(np.arange(first, first + n, dtype=np.float32)[:, None, None], (n, 1, 4)).copy()


def test_writers_of_a_shared_page_copy_it_until_one_is_left() -> None:
    cache = PagedKVCache(3, 4, 1, 4)
    a = cache.add()
    cache.append([a], tokens(2), tokens(2))
    b = cache.fork(a)
    c = cache.fork(a)
    # of three writers two copy, and the last owns the page
    cache.append([a, b, c], tokens(3, 10), tokens(3, 10))
    assert cache.free_pages == 0
    assert [cache.view([s]).k[cache.view([s]).block_table[0, 0], :3, 0, 0].tolist() for s in (a, b, c)] == [
        [0, 1, 10], [0, 1, 11], [0, 1, 12],
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["float32", "torch"])
def test_both_frameworks(kind: str) -> None:
    torch = pytest.importorskip("torch") if kind == "torch" else None
    put = torch.tensor if torch else np.asarray
    cache = PagedKVCache(4, 3, 1, 4, dtype=torch.float32 if torch else kind, fill=np.nan)
    s = cache.add()
    cache.append([s], put(tokens(5)), put(tokens(5)))
    f = cache.fork(s, 4)
    cache.append([f], put(tokens(1, 9)), put(tokens(1, 9)))
    o = paged_attention(put(np.zeros((2, 1, 4), np.float32)), cache.view([s, f]), mask=mask.causal())
    np.testing.assert_allclose(np.asarray(o)[:, 0, 0], [2, 3], rtol=1e-6)
    assert type(o) is (torch.Tensor if torch else np.ndarray)


REFUSED = {
    "no page": (lambda c, s: PagedKVCache(-1, 4, 1, 4), ValueError, "pages is -1; expected at least 0"),
    "no slot": (lambda c, s: PagedKVCache(2, 0, 1, 4), ValueError, "page_size is 0; expected at least 1"),
    "unknown": (lambda c, s: c.view([99]), ValueError, "sequence 99 is not in this cache"),
    "removed": (lambda c, s: (c.remove(s), c.length(s)), ValueError, "is not in this cache"),
    "longer fork": (lambda c, s: c.fork(s, 6), ValueError, "length is 6; expected 0 to 5"),
    "negative crop": (lambda c, s: c.crop(s, -1), ValueError, "length is -1; expected 0 to 5"),
    "full": (lambda c, s: c.append([s], tokens(9), tokens(9)), ValueError, "need 2 pages of 4 and 1 of 3 are free"),
    "twice": (lambda c, s: c.append([s, s], tokens(2), tokens(2)), ValueError, "expected each of them once"),
    "dtype": (
        lambda c, s: c.append([s], *[tokens(1).astype(np.float64)] * 2), TypeError, "expected ndarray of float32",
    ),
    "heads": (
        lambda c, s: c.append([s], *[np.zeros((1, 2, 4), np.float32)] * 2), ValueError, r"expected \[tokens, 1, 4\]",
    ),
    "counts": (lambda c, s: c.append([s], tokens(1), tokens(2)), ValueError, "k has 1 tokens and v 2"),
    "cu shape": (lambda c, s: c.append([s], tokens(1), tokens(1), [0]), ValueError, r"expected integers \[2\]"),
    "cu end": (lambda c, s: c.append([s], tokens(1), tokens(1), [0, 2]), ValueError, "expected numbers from 0 to 1"),
    "uneven": (lambda c, s: c.append([s, c.add()], tokens(1), tokens(1)), ValueError, "divide them with cu"),
    "4-D": (lambda c, s: paged_attention(tokens(1)[None], c.view([s])), ValueError, r"expected \[tokens, Hq, D\]"),
    "too new": (lambda c, s: paged_attention(tokens(6), c.view([s])), ValueError, "6 queries and 5 tokens"),
    "no view": (lambda c, s: paged_attention(tokens(1), c), TypeError, r"expected PagedKeys, as cache.view\(sequences"),
    "text": (lambda c, s: paged_attention(tokens(1), c.view([s]), mask="causal"), TypeError, "the text 'causal'"),
    "data": (
        lambda c, s: paged_attention(tokens(1), c.view([s]), mask=mask.documents(np.zeros(5, np.int32))), ValueError,
        "expected one without arrays",
    ),
    "astray": (
        lambda c, s: paged_attention(tokens(1), c.view([s])._replace(block_table=np.array([[0, 3]], np.int32))),
        ValueError, r"block_table\[0, 1\] is 3; expected 0 <= page < 3",
    ),
    "short table": (
        lambda c, s: paged_attention(tokens(1), c.view([s])._replace(block_table=np.array([[0]], np.int32))),
        ValueError, "expected 0 <= length <= its capacity, 4",
    ),
    "table dtype": (
        lambda c, s: paged_attention(tokens(1), c.view([s])._replace(block_table=np.array([[0, 1]]))), ValueError,
        r"block_table is int64 \[1, 2\]; expected int32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_changes_nothing(name: str) -> None:
    call, kind, words = REFUSED[name]
    cache = PagedKVCache(3, 4, 1, 4)
    s = cache.add()
    cache.append([s], tokens(5), tokens(5))
    with pytest.raises(kind, match=words):
        call(cache, s)
    if name != "removed":
        assert cache.length(s) == 5
        assert cache.k[cache.view([s]).block_table[0]].reshape(-1, 4)[:5, 0].tolist() == [0, 1, 2, 3, 4]


def test_a_page_astray_is_named_by_its_sequence_of_the_call() -> None:
    # sequences with one query are a problem of their own, in which the second one is the first
    x = np.zeros((4, 3, 1, 4), np.float32)
    keys = PagedKeys(x, x, np.array([[0, 1], [2, -1]], np.int32), np.array([5, 4], np.int32))
    with pytest.raises(ValueError, match=r"block_table\[1, 1\] is -1; expected 0 <= page < 4"):
        paged_attention(np.zeros((3, 1, 4), np.float32), keys, [0, 2, 3])


def test_pools_that_differ_in_a_sequence_are_left_alone() -> None:
    pools = [PagedKVCache(3, 2, 1, 4) for _ in range(2)]
    begins = PrefixCache(pools)
    s, _ = begins.begin([])
    for pool in pools:
        pool.append([s], tokens(4), tokens(4))
    pools[1].crop(s, 1)
    with pytest.raises(ValueError, match="holds 1 tokens, and 4 are given"):
        begins.keep(s, [1, 2, 3, 4])
    for call in (lambda: begins.keep(s, [0.5, 1]), lambda: begins.begin([0.5])):
        with pytest.raises((TypeError, ValueError), match=r"that is not an integer|holds 1 tokens"):
            call()
    assert [pool.sequences for pool in pools] == [(s,), (s,)]
    assert begins.sequences == ()


def test_gradients_are_refused() -> None:
    torch = pytest.importorskip("torch")
    cache = PagedKVCache(3, 4, 1, 4, dtype=torch.float32)
    s = cache.add()
    x = torch.ones(2, 1, 4)
    cache.append([s], x, x)
    with pytest.raises(Exception, match=r"no gradient: call it under torch\.no_grad"):
        paged_attention(x.requires_grad_(), cache.view([s]))
