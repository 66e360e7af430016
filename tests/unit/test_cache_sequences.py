"""Random sequences of operations on caches, compared with plain lists of their contents: 6 000, 100 per case."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import takewhile
from random import Random
from typing import Any

import numpy as np
import pytest

from saccade import PagedKVCache
from saccade.caches.prefixes import PrefixCache

from .cache_models import DV, Contiguous, D, Held, Paged, bytes_of, torch

CASES, EACH = 60, 100


class Prefixes(Held):
    """Keys follow from all tokens up to theirs, as a model's do, so that a wrong page shows."""

    def __init__(self, draw: Random) -> None:
        super().__init__(draw)
        self.page, self.codes = draw.randrange(1, 4), None
        self.options |= {"quantised": None, "dtype": torch.float32 if self.torch else "float32"}
        self.pools = [
            PagedKVCache(14, self.page, 1, 1, **self.options | {"v_dim": 1}) for _ in range(draw.choice([1, 2]))
        ]
        self.cache = PrefixCache(self.pools)
        self.held: dict[int, list[int]] = {}
        self.kept: dict[int, list[int]] = {}

    def frozen(self) -> Any:
        lengths = [{s: pool.length(s) for s in pool.sequences} for pool in self.pools]
        arrays = [bytes_of(x) for pool in self.pools for x in pool.arrays]
        return arrays, lengths, [pool.free_pages for pool in self.pools], self.cache.sequences

    def number(self, tokens: list[int]) -> float:
        return float(zlib.crc32(bytes(tokens)) % 10**6)

    def step(self) -> None:
        verbs = ["begin", "begin", "read", "read", "keep", "keep", "remove", "forget", "free", "bad"]
        verb = self.draw.choice(verbs)
        getattr(self, "begin" if verb in ("read", "keep", "remove") and not self.held else verb)()

    def common(self, tokens: list[int]) -> int:
        pairs = (zip(tokens, kept, strict=False) for kept in self.kept.values())
        return max((sum(1 for _ in takewhile(lambda x: x[0] == x[1], pair)) for pair in pairs), default=0)

    def begin(self) -> None:
        tokens = [self.draw.randrange(2) for _ in range(self.draw.randrange(10))]
        s, n = self.cache.begin(self.draw.choice([tokens, np.array(tokens, np.int64), tuple(tokens)]))
        assert n == self.common(tokens)
        self.held[s] = tokens[:n]
        self.read(s)

    def read(self, s: int | None = None) -> None:
        s = self.draw.choice(sorted(self.held)) if s is None else s
        new = [self.draw.randrange(2) for _ in range(self.draw.randrange(6))]
        whole = self.held[s] + new
        numbers = [self.number(whole[: n + 1]) for n in range(len(self.held[s]), len(whole))]
        k = np.array(numbers, np.float32).reshape(-1, 1, 1)
        k = torch.from_numpy(k) if self.torch else k
        if not self.cache.free(-(-len(new) // self.page) + 1):
            # nothing is kept any more
            self.kept = {}
            return
        self.kept = {kept: self.kept[kept] for kept in self.cache.sequences}
        for pool in self.pools:
            pool.append([s], k, -k)
        self.held[s] = whole

    def keep(self) -> None:
        s = self.draw.choice(sorted(self.held))
        tokens = self.held[s][: self.draw.randint(0, len(self.held[s]))]
        before, free = set(self.cache.sequences), [pool.free_pages for pool in self.pools]
        self.cache.keep(s, tokens)
        for new in set(self.cache.sequences) - before:
            self.kept[new] = tokens[: len(tokens) - len(tokens) % self.page]
        self.kept = {kept: self.kept[kept] for kept in self.cache.sequences}
        # it takes no page; prefixes of the new one may be forgotten
        assert all(pool.free_pages >= n for pool, n in zip(self.pools, free, strict=True))
        assert self.common(tokens) >= len(tokens) - len(tokens) % self.page

    def remove(self) -> None:
        s = self.draw.choice(sorted(self.held))
        for pool in self.pools:
            pool.remove(s)
        del self.held[s]

    def forget(self) -> None:
        if self.kept:
            s = self.draw.choice(sorted(self.kept))
            self.cache.forget(s)
            del self.kept[s]

    def free(self) -> None:
        pages = self.draw.randrange(16)
        enough = self.cache.free(pages)
        assert enough == (min(pool.free_pages for pool in self.pools) >= pages)
        self.kept = {kept: self.kept[kept] for kept in self.cache.sequences}

    def bad(self) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: self.cache.begin(self.draw.choice([[0.5], [[1, 0], [0, 1]], ["a"], 3])),
            lambda: self.cache.keep(10**6, [0]),
            lambda: self.cache.forget(10**6),
        ]
        for s, held in self.held.items():
            calls += [lambda s=s, held=held: self.cache.keep(s, [*held, 1])]
            if len(held) >= self.page:
                calls += [lambda s=s, held=held: self.cache.keep(s, [x + 0.0 for x in held])]
            if len(self.pools) > 1:
                calls += [lambda s=s: self.apart(s)]
        self.refused(self.draw.choice(calls))

    def apart(self, s: int) -> None:
        # a sequence that one pool lacks
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(self.pools[1]._sequences, s)
            self.cache.keep(s, self.held[s])

    def check(self) -> None:
        assert sorted(self.cache.sequences) == sorted(self.kept)
        for pool in self.pools:
            assert set(pool.sequences) == {*self.held, *self.kept}
            for s, tokens in [*self.held.items(), *self.kept.items()]:
                table = np.asarray(pool.view([s]).block_table)[0]
                assert pool.length(s) == len(tokens)
                found = [float(pool.k[int(table[t // self.page]), t % self.page, 0, 0]) for t in range(len(tokens))]
                assert found == [self.number(tokens[: n + 1]) for n in range(len(tokens))]
            used = {int(p) for s in pool.sequences for p in np.asarray(pool.view([s]).block_table)[0]}
            assert pool.free_pages == len(pool.k) - len(used)


class InPlace(Held):
    """flash_attn_with_kvcache, whose caller keeps the lengths."""

    def __init__(self, draw: Random) -> None:
        super().__init__(draw)
        self.torch, self.codes, self.dtype = True, None, "float32"
        self.batch, self.page = draw.randrange(1, 4), draw.randrange(1, 7)
        self.kind = draw.choice(["rows", "chosen rows", "pages"])
        columns = draw.randrange(1, 4) if self.kind == "pages" else 1
        count = self.batch * columns + draw.randrange(3)
        order = draw.sample(range(count), self.batch * columns)
        self.table = torch.tensor(order, dtype=torch.int32).reshape(self.batch, columns)
        if self.kind == "rows":
            self.table = torch.arange(self.batch, dtype=torch.int32)[:, None]
        self.capacity = columns * self.page
        self.arrays = [self.tokens(count, self.page), self.tokens(count, self.page, size=DV)]
        self.want = [x.clone() for x in self.arrays]
        self.held = [0] * self.batch

    def frozen(self) -> Any:
        return [bytes_of(x) for x in self.arrays]

    def call(self, k: Any = None, v: Any = None, **changes: Any) -> Any:
        from saccade.integrations.flash_attn import flash_attn_with_kvcache

        given: dict[str, Any] = {"q": self.tokens(self.batch, 1), "cache_seqlens": torch.tensor(self.held)}
        if self.kind == "pages":
            given["block_table"] = self.table
        if self.kind == "chosen rows":
            given["cache_batch_idx"] = self.table[:, 0]
        given |= changes
        return given, flash_attn_with_kvcache(given.pop("q"), *self.arrays, k, v, **given)

    def step(self) -> None:
        getattr(self, self.draw.choice(["append", "append", "append", "crop", "bad", "bad"]))()

    def append(self) -> None:
        T = self.draw.randrange(0, 4)
        k, v = self.tokens(self.batch, T), self.tokens(self.batch, T, size=DV)
        if max(self.held) + T > self.capacity:
            return self.refused(lambda: self.call(k, v))
        q = self.tokens(self.batch, 1)
        _, o = self.call(k, v, q=q)
        for b, n in enumerate(self.held):
            for t in range(T):
                at = int(self.table[b, (n + t) // self.page]), (n + t) % self.page
                self.want[0][at], self.want[1][at] = k[b, t], v[b, t]
            self.held[b] += T
            seen = [x[self.table[b].long()].flatten(0, 1)[: n + T].double() for x in self.want]
            p = (torch.einsum("hd,jhd->hj", q[b, 0].double(), seen[0]) * D**-0.5).softmax(-1)
            torch.testing.assert_close(o[b, 0].double(), torch.einsum("hj,jhd->hd", p, seen[1]), rtol=1e-4, atol=1e-5)
        return None

    def crop(self) -> None:
        self.held = [self.draw.randint(0, n) for n in self.held]

    def bad(self) -> None:
        T = self.draw.randrange(1, 3)
        k, v = self.tokens(self.batch, T), self.tokens(self.batch, T, size=DV)
        held = torch.tensor(self.held)
        calls: list[Callable[[], Any]] = [
            lambda: self.call(*self.wrong(k, v)),
            lambda: self.call(k, v[:, :-1]),
            lambda: self.call(k, None),
            lambda: self.call(None, v),
            lambda: self.call(k, v, q=self.tokens(self.batch, 1, heads=3)),
            lambda: self.call(k, v, q=self.tokens(self.batch, 1).half()),
            lambda: self.call(k, v, softcap=-1.0),
            lambda: self.call(k, v, window_size=(0.5, 1)),
            lambda: self.call(k, v, cache_seqlens=self.draw.choice(
                [held.float(), held > 0, held[:, None], held - 9, held + self.capacity, self.held, 1.0])),
            lambda: self.call(k, v, cache_leftpad=self.draw.choice([2, held - 9, held.float()])),
        ]  # fmt: skip
        if self.kind != "rows":
            # in use by the first of the new tokens
            astray = self.table.clone()
            b = self.draw.randrange(self.batch)
            column = min(self.held[b] // self.page, astray.shape[1] - 1)
            astray[b, column] = self.draw.choice([-1, len(self.arrays[0]), -(10**6)])
            name = "block_table" if self.kind == "pages" else "cache_batch_idx"
            calls += [lambda: self.call(k, v, **{name: astray if self.kind == "pages" else astray[:, 0]})] * 3
        self.refused(self.draw.choice(calls))

    def check(self) -> None:
        assert [bytes_of(x) for x in self.arrays] == [bytes_of(x) for x in self.want]


KINDS = [Contiguous, Paged, Prefixes, InPlace]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", range(CASES))
def test_random_sequences_of_operations(case: int, seed: int) -> None:
    for n in range(EACH):
        draw = Random(f"{seed} {n}")
        both = KINDS[n % len(KINDS)](draw)
        for _ in range(draw.randrange(4, 14)):
            both.step()
            both.check()
