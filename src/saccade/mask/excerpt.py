"""A lowered mask restricted to some rows and keys: which keys of one rank the queries of another rank may see.

Local row t is row `q.at[t]` of the whole problem, and local key j is key `k.at[j]`. Both ascend, so every interval of
keys is an interval of local keys, with any gaps. Strides and grids need evenly spaced places; otherwise they become a
grid of single elements.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .forms import D_HI, D_LO, INF, K_HI, K_LO, PHASE, Q_HI, Q_LO, STRIDE, Grid, LoweredHeads, Rows
from .lowering import finish, terms_of
from .size import Size
from .terms import BITS, Term, Terms, high, term, tidy

Ints = NDArray[np.int64]


class Places:
    """Ascending positions `at`, int64 [n]. step: their distance if it is constant, else 0."""

    def __init__(self, at: Ints, step: int = 0) -> None:
        self.at, self.step, self.n = at, step, len(at)
        self.start = int(at[0]) if self.n else 0

    def cut(self, begin: int, end: int) -> Places:
        """The places at indices begin to end."""
        return Places(self.at[begin:end], self.step)

    def below(self, position: Any) -> Any:
        """How many places lie before a position, an int or an array; the index of the first that does not."""
        if self.step:
            count = np.clip(-((self.start - position) // self.step), 0, self.n)
        else:
            count = np.searchsorted(self.at, position)
        return int(count) if np.ndim(count) == 0 else count


class Hull(NamedTuple):
    """Rows [q_begin, q_end) and keys [k_begin, k_end) that contain all allowed pairs.

    pairs: an upper bound of the allowed pairs, the mean over batch and heads; it ignores strides and blocks.
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    pairs: float


def excerpt(heads: LoweredHeads, q: Places, k: Places) -> tuple[LoweredHeads, Hull | None]:
    """The masks of the heads between places q and k, and their hull, None if they allow nothing.

    Raises TooManyBands if the places have too many gaps for the lowered form; the caller then cuts them.
    """
    masks: list[Any] = []
    hulls: list[Hull] = []
    shares = np.bincount(heads.head, minlength=len(heads.masks)) / max(1, len(heads.head))
    for mask, share in zip(heads.masks, shares, strict=True):
        cut = _Excerpt(mask.rows, mask.grids, q, k)
        terms: Terms = []
        for one in terms_of(mask):
            local = cut.local(one)
            hull = None if local is None else cut.hull(local)
            if local is not None and hull is not None:
                terms.append(local)
                hulls.append(hull._replace(pairs=hull.pairs * share))
        masks.append(finish(tidy(terms, Size(q.n, k.n)), cut.rows, cut.grids))
    if not hulls:
        return LoweredHeads(tuple(masks), heads.head), None
    bounds = zip((min, max, min, max, sum), zip(*hulls, strict=True), strict=True)
    return LoweredHeads(tuple(masks), heads.head), Hull(*(f(x) for f, x in bounds))


class _Excerpt:
    """The local terms of one mask; `rows` and `grids` collect the local tables that they use."""

    def __init__(self, rows: tuple[Rows, ...], grids: tuple[Grid, ...], q: Places, k: Places) -> None:
        self.tables: tuple[tuple[Any, ...], tuple[Any, ...]] = rows, grids
        self.q, self.k = q, k
        self.rows: list[Rows] = []
        self.grids: list[Grid] = []
        self.known: dict[tuple[int, int], int] = {}

    def local(self, of: Term) -> Term | None:
        """A term in local rows and keys; None if its stride test never holds."""
        q, k = self.q, self.k
        local = term(k_lo=k.below(of[K_LO]), k_hi=k.below(of[K_HI]), q_lo=q.below(of[Q_LO]), q_hi=q.below(of[Q_HI]))
        for column in range(4):
            for n in range(int(of[BITS + column]).bit_length()):
                if of[BITS + column] >> n & 1:
                    local[BITS + column] |= 1 << self._known(column // 2, n)
        if not (type(of[D_LO]) is type(of[D_HI]) is int and (of[D_LO], of[D_HI]) == (-INF, INF)):
            if q.step and q.step == k.step:
                away = q.start - k.start
                local[D_LO] = _whole(-((away - of[D_LO]) // q.step))
                local[D_HI] = _whole((of[D_HI] - away) // q.step)
            else:
                self._by_rows(local, of[D_LO], of[D_HI])
        return self._stride(local, of[STRIDE], of[PHASE]) if of[STRIDE] != 1 else local

    def _by_rows(self, local: Term, d_lo: Any, d_hi: Any) -> None:
        # bounds of t - j as an interval of keys per row, or as a local band if that is equivalent
        at, n = self.q.at[None], self.k.n
        lo, hi = self.k.below(at - _column(d_hi)), self.k.below(at - _column(d_lo) + 1)
        t = np.arange(self.q.n)
        if len(lo) == len(hi) == 1 and self.q.n:
            if (lo == lo[0, 0]).all():
                local[K_LO], lo = high(local[K_LO], int(lo[0, 0])), np.zeros_like(lo)
            elif (difference := _line(lo[0], t, n)) is not None:
                local[D_HI], lo = difference, np.zeros_like(lo)
            if (hi == hi[0, 0]).all():
                local[K_HI], hi = -high(-local[K_HI], -int(hi[0, 0])), np.full_like(hi, n)
            elif (difference := _line(hi[0], t + 1, n)) is not None:
                local[D_LO], hi = difference, np.full_like(hi, n)
        if lo.any() or (hi < n).any():
            shape = np.broadcast_shapes(lo.shape, hi.shape)
            lo, hi = (np.broadcast_to(a, shape).astype(np.int32, order="C") for a in (lo, hi))
            local[BITS] |= 1 << len(self.rows)
            self.rows.append(Rows("q", lo, hi, True))

    def _stride(self, local: Term, s: int, phase: Any) -> Term | None:
        q, k, size = self.q, self.k, abs(s)
        if not (q.step and q.step == k.step and isinstance(phase, int)):
            away = (q.at - k.at[:, None])[None]
            states = away % size == (phase if isinstance(phase, int) else phase[:, None, None])
            local[BITS + (2 if s > 0 else 3)] |= 1 << len(self.grids)
            self.grids.append(Grid.of(1, 1, states.transpose(0, 2, 1)))
            return local
        step, away = q.step, phase - (q.start - k.start)
        common = gcd(size, step)
        left = size // common
        if away % common or left == 1:
            # all differences of local numbers have the same remainder
            return local if (away % common == 0) == (s > 0) else None
        local[STRIDE] = left if s > 0 else -left
        local[PHASE] = away // common * pow(step // common, -1, left) % left
        return local

    def _known(self, table: int, n: int) -> int:
        # the local index of rows (table 0) or grid (table 1) n, which is made local on first use
        if (table, n) not in self.known:
            local: list[Any] = self.grids if table else self.rows
            self.known[table, n] = len(local)
            source = self.tables[table][n]
            local.append(_grid(source, self.q, self.k) if table else _rows(source, self.q, self.k))
        return self.known[table, n]

    def hull(self, of: Term) -> Hull | None:
        """A hull of the pairs that a local term allows; None if it allows nothing."""
        t = np.arange(self.q.n)[None]
        lo = np.maximum(_column(of[K_LO]), t - _column(of[D_HI]))
        hi = np.minimum(_column(of[K_HI]), t - _column(of[D_LO]) + 1)
        here = (t >= _column(of[Q_LO])) & (t < _column(of[Q_HI]))
        least, most = 0, self.k.n
        for n, rows in enumerate(self.rows):
            if not of[BITS] >> n & 1:
                continue
            if rows.axis == "q":
                lo, hi = np.maximum(lo, rows.lo), np.minimum(hi, rows.hi)
                continue
            keys = np.flatnonzero((rows.lo < rows.hi).any(0))
            if not len(keys):
                return None
            least, most = max(least, int(keys[0])), min(most, int(keys[-1]) + 1)
            some = rows.lo < rows.hi
            here = here & (t >= rows.lo[some].min()) & (t < rows.hi[some].max())
        lo, hi = np.maximum(lo, least), np.minimum(hi, most)
        inside = (lo < hi) & here
        seen = np.flatnonzero(inside.any(0))
        if not len(seen) or any(of[BITS + 2] >> n & 1 and not g.bits.any() for n, g in enumerate(self.grids)):
            return None
        shape = inside.shape
        first, last = np.broadcast_to(lo, shape)[inside].min(), np.broadcast_to(hi, shape)[inside].max()
        pairs = float(np.where(inside, hi - lo, 0).sum()) / len(inside)
        return Hull(int(seen[0]), int(seen[-1]) + 1, int(first), int(last), pairs)


def _whole(value: Any) -> Any:
    return max(-INF, min(INF, value)) if isinstance(value, int) else value


def _column(value: Any) -> Any:
    # an int, or an array [B] as [B, 1]
    return value if isinstance(value, int) else np.asarray(value).reshape(-1, 1)


def _line(bound: Ints, t: Ints, n: int) -> int | None:
    # c such that bound = t - c, clipped to 0 and n; None if there is no such c
    inner = np.flatnonzero((bound > 0) & (bound < n))
    if not len(inner):
        return None
    c = int(t[inner[0]] - bound[inner[0]])
    return c if (np.clip(t - c, 0, n) == bound).all() else None


def _rows(of: Rows, q: Places, k: Places) -> Rows:
    mine, other = (q, k) if of.axis == "q" else (k, q)
    # order="C", because indexing columns transposes the memory and kernels read row by row
    lo, hi = (other.below(a[:, mine.at].astype(np.int64)).astype(np.int32, order="C") for a in (of.lo, of.hi))
    return Rows(of.axis, lo, hi, of.monotone)


def _grid(of: Grid, q: Places, k: Places) -> Grid:
    (block_q, in_q), (block_k, in_k) = _blocks(of.block_q, q), _blocks(of.block_k, k)
    return Grid.of(block_q, block_k, of.states[:, in_k][:, :, in_q].transpose(0, 2, 1))


def _blocks(block: int, places: Places) -> tuple[int, Ints]:
    # the size of local blocks, and for each of them the index of the block that contains it
    if places.step and block % places.step == 0:
        units, first = block // places.step, places.start // places.step
        size = gcd(units, first)
        return size, (first + np.arange(0, places.n, size)) // units
    return 1, places.at // block
