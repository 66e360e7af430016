"""Random surroundings of one sequence: batches, padding, documents, chunks, pages; results in the sequence's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import saccade

from ..arrays import numpy_dtype
from ..biases import alibi
from ..mask import Mask, causal, documents, padding, prefix, window

Array = NDArray[Any]
# o and lse, or gradients of q, k and v
Results = tuple[Array, ...]


class Sequence(NamedTuple):
    """The arrays [1, T, H, D | Dv] of one sequence; do is the cotangent of o."""

    q: Array
    k: Array
    v: Array
    do: Array


@dataclass(frozen=True)
class Composition:
    """One sequence and the rest of a batch.

    mask: of each sequence. options: of the scores. others: sequences of random lengths. quantised: of caches. left:
    whether padding may be on the left.
    """

    name: str
    one: Sequence
    others: list[Sequence]
    mask: Mask
    options: dict[str, Any]
    quantised: str | None
    left: bool
    random: np.random.Generator

    @property
    def T(self) -> int:
        """The length of the sequence."""
        return self.one.q.shape[1]

    def alone(self, backend: str) -> Results:
        """(o, lse) of the sequence alone."""
        call: dict[str, Any] = {"return_lse": True, "backend": backend, **self.options}
        return saccade.attention(*self.one[:3], self.mask, **call)

    def outputs(self, backend: str) -> Iterator[tuple[str, slice, Results]]:
        """(surroundings, rows of the sequence, their o and lse) of one random place in each kind of surroundings."""
        call: dict[str, Any] = {"return_lse": True, "backend": backend, **self.options}
        everything = slice(0, self.T)
        for name, arrays, mask, where in self._batches():
            o, lse = saccade.attention(*arrays[:3], mask, **call)
            yield name, everything, (o[where], lse[where])
        alone = dict(call)
        alone["return_lse"] = False
        yield "without lse", everything, (saccade.attention(*self.one[:3], self.mask, **alone),)
        yield from self._chunks(call)

    def gradients(self, backend: str) -> Iterator[tuple[str, Results]]:
        """(surroundings, gradients of q, k and v in the rows of the sequence); the first is the sequence alone."""
        yield "alone", self._gradients(self.one, self.mask, backend)
        for name, arrays, mask, where in self._batches():
            yield name, tuple(x[where] for x in self._gradients(arrays, mask, backend))

    def _gradients(self, arrays: Sequence, mask: Mask, backend: str) -> Results:
        call: dict[str, Any] = {"backend": backend, **self.options}
        o, lse = saccade.attention(*arrays[:3], mask, return_lse=True, **call)
        return saccade.attention_backward(arrays.do, *arrays[:3], o, lse, mask, grads=(), **call)[:3]

    def _batches(self) -> Iterator[tuple[str, Sequence, Mask, Any]]:
        # (name, arrays, mask, index of the sequence's rows) of calls with whole sequences
        place = int(self.random.integers(len(self.others) + 1))
        all_of = [*self.others[:place], self.one, *self.others[place:]]
        lengths = np.array([s.q.shape[1] for s in all_of])
        same = Sequence(*(self._batch(x, place) for x in self.one))
        yield "batch", same, self.mask, np.s_[place : place + 1]
        longest = int(lengths.max()) + int(self.random.integers(9))
        for name in ("padding right", "padding left"):
            if name.endswith("left") and (self.mask_counts_keys or not self.left):
                continue
            first = longest - lengths if name.endswith("left") else 0 * lengths
            arrays = Sequence(*(self._padded(parts, first, longest) for parts in zip(*all_of, strict=True)))
            j = np.arange(longest)
            tokens = (j >= first[:, None]) & (j < (first + lengths)[:, None])
            rows = slice(int(first[place]), int(first[place] + self.T))
            yield name, arrays, self.mask & padding(tokens), np.s_[place : place + 1, rows]
        if not self.mask_counts_keys:
            cu = np.append(0, np.cumsum(lengths))
            packed = Sequence(*(np.concatenate(parts, 1) for parts in zip(*all_of, strict=True)))
            yield (
                "documents",
                packed,
                self.mask & documents(cu_seqlens=cu),
                np.s_[:, int(cu[place]) : int(cu[place + 1])],
            )

    @property
    def mask_counts_keys(self) -> bool:
        """Whether the mask names positions, which documents and padding move."""
        return "prefix" in str(self.mask) or "chunked" in str(self.mask)

    def _batch(self, x: Array, place: int) -> Array:
        more = [self._noise(x.shape, x.dtype) for _ in range(len(self.others) + 1)]
        more[place] = x
        return np.concatenate(more)

    def _padded(self, parts: tuple[Array, ...], first: Array, longest: int) -> Array:
        out = np.zeros((len(parts), longest, *parts[0].shape[2:]), parts[0].dtype)
        for b, x in enumerate(parts):
            out[b, first[b] : first[b] + x.shape[1]] = x[0]
        return out

    def _noise(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.random.standard_normal(shape).astype(dtype)

    def _chunks(self, call: dict[str, Any]) -> Iterator[tuple[str, slice, Results]]:
        # prompts in chunks and single tokens, over caches with other sequences
        cuts = {int(x) for x in self.random.integers(1, self.T + 1, 3)} | {self.T}
        for stop in sorted(cuts):
            rows = slice(max(0, stop - int(self.random.choice([1, 1, 2, 5, 8, 40, 700]))), stop)
            for make in (self._contiguous, self._paged):
                cache, b, q = make(rows)
                o, lse = saccade.decode(q, cache, mask=self.mask, causal=False, **call)
                yield make.__name__.strip("_"), rows, (o[b : b + 1], lse[b : b + 1])
            if "bias" not in call:
                cache, b, q = self._paged(rows)
                n = rows.stop - rows.start
                flat = q.reshape(-1, *q.shape[2:])
                o, lse = saccade.paged_attention(flat, cache, mask=self.mask, causal=False, **call)
                yield "paged_attention", rows, (o[None, b * n : (b + 1) * n], lse[None, b * n : (b + 1) * n])

    def _neighbours(self, rows: slice) -> tuple[list[int], int, Array]:
        # lengths of the sequences of a cache, the place of the composition's, and the queries of all
        n, others = rows.stop - rows.start, int(self.random.integers(3))
        place = int(self.random.integers(others + 1))
        lengths = [int(self.random.integers(n, n + 600)) for _ in range(others)]
        lengths.insert(place, rows.stop)
        q = self._noise((others + 1, n, *self.one.q.shape[2:]), self.one.q.dtype)
        q[place] = self.one.q[0, rows]
        return lengths, place, q

    def _keys(self, length: int, ours: bool) -> tuple[Array, Array]:
        k, v = (x[0, :length] for x in self.one[1:3])
        return (
            (k, v)
            if ours
            else (self._noise((length, *k.shape[1:]), k.dtype), self._noise((length, *v.shape[1:]), v.dtype))
        )

    def _contiguous(self, rows: slice) -> tuple[Any, int, Array]:
        lengths, place, q = self._neighbours(rows)
        (_, _, Hk, D), Dv, dtype = self.one.k.shape, self.one.v.shape[3], self.one.k.dtype
        capacity = max(lengths) + int(self.random.integers(99))
        cache = saccade.KVCache(
            len(lengths), capacity, Hk, D, v_dim=Dv, dtype=dtype.name, fill=np.nan, quantised=self.quantised
        )
        k, v = (np.zeros((len(lengths), max(lengths), Hk, n), dtype) for n in (D, Dv))
        for b, length in enumerate(lengths):
            k[b, :length], v[b, :length] = self._keys(length, b == place)
        cache.append(k, v, np.array(lengths))
        return cache, place, q

    def _paged(self, rows: slice) -> tuple[Any, int, Array]:
        lengths, place, q = self._neighbours(rows)
        (_, _, Hk, D), Dv, dtype = self.one.k.shape, self.one.v.shape[3], self.one.k.dtype
        page = int(self.random.choice([1, 7, 16, 32, 48, 64, 100, 256]))
        pages = sum(-(-n // page) for n in lengths) + 2
        cache = saccade.PagedKVCache(
            pages, page, Hk, D, v_dim=Dv, dtype=dtype.name, fill=np.nan, quantised=self.quantised
        )
        sequences = [cache.add() for _ in lengths]
        for at in self.random.permutation(len(lengths)):
            k, v = self._keys(lengths[at], at == place)
            half = int(self.random.integers(lengths[at] + 1))
            for part in (slice(0, half), slice(half, lengths[at])):
                cache.append([sequences[at]], k[part], v[part])
        return cache.view(sequences), place, q


def composition(number: int, dtypes: tuple[str, ...], longest: int = 700, *, left: bool = True) -> Composition:
    """The composition of that number, of a sequence of up to `longest` tokens."""
    random = np.random.default_rng([number, 47])

    def pick(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    dtype, D, Dv = pick(*dtypes), pick(8, 16, 24, 40, 64, 96, 128), pick(8, 16, 20, 64, 80, 128)
    Hk, G, T = pick(1, 2, 3), pick(1, 1, 2, 4, 7), int(min(longest, pick(20, 100, 300, 700)) * random.random()) + 1
    kind = numpy_dtype(dtype)

    def sequence(length: int) -> Sequence:
        shapes = (Hk * G, D), (Hk, D), (Hk, Dv), (Hk * G, Dv)
        return Sequence(*(random.standard_normal((1, length, *shape)).astype(kind) for shape in shapes))

    masks: dict[str, Callable[[], Mask]] = {
        "causal": causal,
        "window": lambda: causal() & window(int(random.integers(1, 200)), 0),
        "sinks of tokens": lambda: (
            causal() & (window(int(random.integers(1, 90)), 0) | prefix(int(random.integers(1, 9))))
        ),
        "chunked": lambda: causal() & saccade.mask.chunked(int(random.integers(3, 100))),
    }
    name = pick(*masks)
    options: dict[str, Any] = {"deterministic": "batch", "scale": pick(None, 0.3, 2.0)}
    option = pick("", "", "", "softcap", "sinks", "alibi")
    if option == "softcap":
        options["softcap"] = 5.0
    if option == "sinks":
        options["sinks"] = random.standard_normal(Hk * G).astype(np.float32)
    if option == "alibi":
        options["bias"] = alibi(random.random(Hk * G).astype(np.float32))
    others = [sequence(int(random.integers(1, min(longest, 400)))) for _ in range(int(random.integers(1, 4)))]
    words = f"{number}: {dtype} T {T} heads {Hk} × {G} D {D} {Dv}, {name}, {option}"
    quantised = pick(None, None, None, "int8", "fp8") if dtype in ("bfloat16", "float32") else None
    return Composition(
        f"{words} {quantised or ''}", sequence(T), others, masks[name](), options, quantised, left, random
    )
