"""Caches compared with plain lists of their expected contents, after random operations.

Some operations must be refused: every byte and number of the cache is then as before.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from saccade import KVCache, PagedKVCache, Unsupported, quantised

torch = pytest.importorskip("torch")

HEADS, D, DV = 2, 8, 8
REFUSALS = (TypeError, ValueError, Unsupported)
LENGTHS = {"list": list, "array": np.array, "array of 8 bits": lambda x: np.array(x, np.uint8), "tensor": torch.tensor}


def bytes_of(x: Any) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(x, torch.Tensor) else x.tobytes()


class Held:
    """A cache of random framework, dtype and codes, and the tokens that go into it."""

    def __init__(self, draw: Random) -> None:
        self.draw, self.rng = draw, np.random.default_rng(draw.getrandbits(32))
        self.torch, self.codes = draw.random() < 0.5, draw.choice([None, None, "int8", "int4", "fp8"])
        self.dtype = draw.choice(["float32", "float16"])
        self.options: dict[str, Any] = {
            "v_dim": DV, "fill": np.nan, "quantised": self.codes,
            "dtype": getattr(torch, self.dtype) if self.torch else self.dtype,
        }  # fmt: skip
        if self.codes is not None:
            self.options["fill"] = 0.0

    def tokens(self, *lead: int, heads: int = HEADS, size: int = D) -> Any:
        x = self.rng.standard_normal((*lead, heads, size)).astype(self.dtype)
        return torch.from_numpy(x) if self.torch else x

    def rows(self, k: Any, v: Any) -> list[tuple[bytes, ...]]:
        """What the arrays of the cache hold of each token k, v [n, heads, size]."""
        how = None if self.codes is None else quantised.quantised(self.codes, None, D, DV)
        parts = [(k,), (v,)] if how is None else [quantised.encode(x, how) for x in (k, v)]
        arrays = [part[i] for i in range(len(parts[0])) for part in parts]
        return [tuple(bytes_of(x[n]) for x in arrays) for n in range(len(k))]

    def wrong(self, k: Any, v: Any) -> tuple[Any, Any]:
        """k and v of which one does not fit."""
        x = [k, v]
        at = self.draw.randrange(2)
        breaks: list[Callable[[Any], Any]] = [
            lambda a: a[..., :1, :], lambda a: a[..., :-1], lambda a: a[:1] if len(a) > 1 else a[None],
            lambda a: a.double() if self.torch else a.astype(np.float64),
            lambda a: a.numpy() if self.torch else torch.from_numpy(a), lambda a: a.tolist(), lambda a: a[None],
        ]  # fmt: skip
        if self.torch:
            breaks += [lambda a: a.clone().requires_grad_(), lambda a: a.to("meta"), lambda a: a.to_sparse()]
        x[at] = self.draw.choice(breaks)(x[at])
        return x[0], x[1]

    def refused(self, call: Callable[[], Any]) -> None:
        before = self.frozen()
        with pytest.raises(REFUSALS):
            call()
        assert self.frozen() == before

    def frozen(self) -> Any:
        """Every byte and number of the cache."""
        raise NotImplementedError

    def step(self) -> None:
        """One operation on both."""
        raise NotImplementedError

    def check(self) -> None:
        """The cache holds what the lists do."""
        raise NotImplementedError


class Contiguous(Held):
    def __init__(self, draw: Random) -> None:
        super().__init__(draw)
        self.batch, self.capacity = draw.randrange(1, 4), draw.randrange(1, 10)
        self.cache = KVCache(self.batch, self.capacity, HEADS, D, **self.options)
        self.held: list[list[tuple[bytes, ...]]] = [[] for _ in range(self.batch)]
        self.positions = [0] * self.batch

    def frozen(self) -> Any:
        numbers = [np.asarray(x).tolist() for x in (self.cache.lengths, self.cache.positions)]
        return [bytes_of(x) for x in self.cache.arrays], numbers

    def step(self) -> None:
        getattr(self, self.draw.choice(["append"] * 5 + ["bad"] * 3 + ["evict", "evict", "reset"]))()

    def append(self) -> None:
        T = self.draw.randrange(0, 5)
        k, v = self.tokens(self.batch, T), self.tokens(self.batch, T, size=DV)
        counts = None if self.draw.random() < 0.5 else [self.draw.randint(0, T) for _ in range(self.batch)]
        lengths = None if counts is None else LENGTHS[self.draw.choice(list(LENGTHS))](counts)
        taken = [T] * self.batch if counts is None else counts
        if any(len(x) + n > self.capacity for x, n in zip(self.held, taken, strict=True)):
            return self.refused(lambda: self.cache.append(k, v, lengths))
        self.cache.append(k, v, lengths)
        for b, n in enumerate(taken):
            self.held[b] += self.rows(k[b, :n], v[b, :n])
            self.positions[b] += n
        return None

    def bad(self) -> None:
        T = self.draw.randrange(1, 4)
        k, v = self.tokens(self.batch, T), self.tokens(self.batch, T, size=DV)
        lengths = self.draw.choice(
            [[1.0] * self.batch, [[1]] * self.batch, [True] * self.batch, [T + 1] * self.batch, [-1] * self.batch, 1,
             [1] * (self.batch + 1)]
        )  # fmt: skip
        calls = [
            lambda: self.cache.append(*self.wrong(k, v)),
            lambda: self.cache.append(k, v[:, :-1]),
            lambda: self.cache.append(k, v, LENGTHS[self.draw.choice(["list", "array", "tensor"])](lengths)
                                      if isinstance(lengths, list) else lengths),
            lambda: self.cache.append(k, v, rotation={"bass": 10.0}),
            lambda: self.cache.evict(self.draw.choice([-1, 1.5]), 1),
            lambda: self.cache.evict(0, self.draw.choice([0, 2.0, True])),
        ]  # fmt: skip
        self.refused(self.draw.choice(calls))

    def evict(self) -> None:
        sinks, window = self.draw.randrange(0, 5), self.draw.randrange(1, 6)
        self.cache.evict(sinks, window)
        for held in self.held:
            del held[sinks : max(sinks, len(held) - window)]

    def reset(self) -> None:
        self.cache.reset()
        self.held, self.positions = [[] for _ in range(self.batch)], [0] * self.batch

    def check(self) -> None:
        assert np.asarray(self.cache.lengths).tolist() == [len(x) for x in self.held]
        assert np.asarray(self.cache.positions).tolist() == self.positions
        for b, held in enumerate(self.held):
            assert [tuple(bytes_of(x[b, t]) for x in self.cache.arrays) for t in range(len(held))] == held


class Paged(Held):
    def __init__(self, draw: Random) -> None:
        super().__init__(draw)
        self.page = draw.randrange(1, 5)
        self.cache = PagedKVCache(draw.randrange(1, 9), self.page, HEADS, D, **self.options)
        self.held: dict[int, list[tuple[bytes, ...]]] = {}
        self.positions: dict[int, int] = {}
        self.sinks: dict[int, int] = {}

    def frozen(self) -> Any:
        return [bytes_of(x) for x in self.cache.arrays], self.tables(), self.cache.free_pages

    def tables(self) -> dict[int, Any]:
        found = {}
        for s in self.cache.sequences:
            view = self.cache.view([s])
            table = np.asarray(view.block_table)[0].tolist()
            found[s] = table, int(view.lengths[0]), self.cache.length(s), self.cache.position(s)
        return found

    def step(self) -> None:
        verbs = ["append"] * 5 + ["bad"] * 3 + ["fork", "crop", "evict", "evict", "remove", "add"]
        getattr(self, self.draw.choice(verbs) if self.held else "add")()

    def done(self, call: Callable[[], Any]) -> bool:
        """Whether there were pages enough for this; if not, nothing is changed."""
        before, message = self.frozen(), ""
        try:
            call()
        except ValueError as error:
            message = str(error)
        assert not message or ("are free" in message and self.frozen() == before)
        return not message

    def some(self) -> int:
        return self.draw.choice(sorted(self.held))

    def add(self) -> None:
        s = self.cache.add()
        self.held[s], self.positions[s] = [], 0

    def append(self) -> None:
        chosen = self.draw.sample(sorted(self.held), self.draw.randint(1, len(self.held)))
        counts = [self.draw.randrange(0, 6) for _ in chosen]
        cu = np.cumsum([0, *counts])
        k, v = self.tokens(cu[-1]), self.tokens(cu[-1], size=DV)
        given = self.draw.choice([cu, cu.tolist(), torch.from_numpy(cu)])
        free = self.cache.free_pages
        if not self.done(lambda: self.cache.append(chosen, k, v, given)):
            # tokens that share no page would not fit either
            assert sum(-(-(len(self.held[s]) + n) // self.page) for s, n in zip(chosen, counts, strict=True)) > free
            return
        rows = self.rows(k, v)
        for s, first, stop in zip(chosen, cu[:-1], cu[1:], strict=True):
            self.held[s] += rows[first:stop]
            self.positions[s] += int(stop - first)

    def bad(self) -> None:
        s, n = self.some(), self.draw.randrange(1, 4)
        k, v, held = self.tokens(n), self.tokens(n, size=DV), len(self.held[s])
        calls: list[Callable[[], Any]] = [
            lambda: self.cache.append([s], *self.wrong(k, v)),
            lambda: self.cache.append([s], k, v[:-1]),
            lambda: self.cache.append([s, s], k, v, [0, 0, n]),
            lambda: self.cache.append([s, 10**6], k, v, [0, 0, n]),
            lambda: self.cache.append([s], k, v, self.draw.choice([[0.0, n], [[0, n]], [0, n + 1], [0], [1, n]])),
            lambda: self.cache.append([s], k, v, rotation={"bass": 10.0}),
            lambda: self.cache.append([s], self.tokens(self.page * 9), self.tokens(self.page * 9, size=DV)),
            lambda: self.cache.fork(s, self.draw.choice([held + 1, -1, 0.5])),
            lambda: self.cache.crop(s, self.draw.choice([held + 1, -1, True])),
            lambda: self.cache.remove(10**6),
            lambda: self.cache.evict(s, self.draw.choice([-1, 0.5]), 1),
            lambda: self.cache.evict(s, 0, self.draw.choice([0, 1.0])),
        ]
        self.refused(self.draw.choice(calls))

    def fork(self) -> None:
        s = self.some()
        n = self.draw.choice([None, self.draw.randint(0, len(self.held[s]))])
        new = self.cache.fork(s, n)
        self.held[new], self.positions[new] = list(self.held[s]), self.positions[s]
        self.sinks |= {new: self.sinks[s]} if s in self.sinks else {}
        self.cut(new, len(self.held[s]) if n is None else n)

    def crop(self) -> None:
        s = self.some()
        n = self.draw.randint(0, len(self.held[s]))
        self.cache.crop(s, n)
        self.cut(s, n)

    def cut(self, s: int, n: int) -> None:
        gone = self.positions[s] - len(self.held[s])
        del self.held[s][n:]
        if n <= self.sinks.get(s, 0):
            # there are no tokens behind a gap
            gone = 0
            self.sinks.pop(s, None)
        self.positions[s] = n + gone

    def evict(self) -> None:
        s, sinks, window = self.some(), self.draw.randrange(0, 4), self.draw.randrange(1, 5)
        if self.sinks.get(s, sinks) != sinks:
            return self.refused(lambda: self.cache.evict(s, sinks, window))
        # pages that are shared with others are not given back
        if self.done(lambda: self.cache.evict(s, sinks, window)) and len(self.held[s]) > sinks + window:
            del self.held[s][sinks : len(self.held[s]) - window]
            self.sinks[s] = sinks
        return None

    def remove(self) -> None:
        s = self.some()
        self.cache.remove(s)
        del self.held[s], self.positions[s]
        self.sinks.pop(s, None)

    def check(self) -> None:
        tables, used = self.tables(), set[int]()
        assert {s: (x[1], x[2], x[3]) for s, x in tables.items()} == {
            s: (len(x), len(x), self.positions[s]) for s, x in self.held.items()
        }
        for s, held in self.held.items():
            table = tables[s][0]
            used |= set(table)
            places = [(table[t // self.page], t % self.page) for t in range(len(held))]
            assert [tuple(bytes_of(x[at]) for x in self.cache.arrays) for at in places] == held
        assert self.cache.free_pages == len(self.cache.k) - len(used)
