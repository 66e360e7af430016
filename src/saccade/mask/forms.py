"""The lowered form of a mask, the only one that kernels read: bands, rows and grids.

allowed(t, j) = OR over bands of (band and its rows and its grids), in row numbers t and key numbers j.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bits import unpacked

# unbounded, in a band
INF = 1 << 30
# columns of a band
D_LO, D_HI, K_LO, K_HI, Q_LO, Q_HI, STRIDE, PHASE = range(8)
# columns of `Lowered.uses`
ROWS_IN, ROWS_OUT, GRIDS_IN, GRIDS_OUT = range(4)
MAX_BANDS, MAX_ROWS, MAX_GRIDS = 8, 8, 4

# side of the blocks in which a large array is transposed
_BLOCK = 512

Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Rows:
    """One interval per row or per key.

    axis "q": row t sees keys lo[b, t] <= j < hi[b, t]; axis "k": key j is seen by rows lo[b, j] <= t < hi[b, j].
    lo, hi: int32 [1 | B, Tq or Tk]; lo >= hi where nothing is inside. monotone: both never decrease along the axis.
    """

    axis: str
    lo: Int32
    hi: Int32
    monotone: bool = False

    @property
    def batch(self) -> int:
        """1 or B."""
        return self.lo.shape[0]

    def transpose(self) -> Rows:
        """The same pairs with queries and keys exchanged."""
        return Rows("k" if self.axis == "q" else "q", self.lo, self.hi, self.monotone)


@dataclass(frozen=True, eq=False)
class Grid:
    """Blocks: (t, j) is inside if bit t div block_q of row j div block_k is set. A dense mask has blocks of 1.

    bits: uint8 [1 | B, key blocks, bytes]; bit n of a row is bit n mod 8 of byte n div 8. n_q: query blocks. Each row
    has three bytes more, so that kernels can read 32 bits from any of them.
    """

    block_q: int
    block_k: int
    bits: NDArray[np.uint8]
    n_q: int

    @staticmethod
    def of(block_q: int, block_k: int, inside: NDArray[Any], packed: int | None = None) -> Grid:
        """The grid of an array [1 | B, query blocks, key blocks] that is not 0 where blocks are inside.

        packed: the number of key blocks, if the last dimension of `inside` is bytes of eight blocks each, as in `Bits`.
        """
        batch, n_q, n_k = inside.shape if packed is None else (*inside.shape[:2], packed)
        bits = np.zeros((batch, n_k, -(-n_q // 8) + 3), np.uint8)
        # blocks that fit in a cache, because reading a large array by columns is slow
        for t in range(0, n_q, _BLOCK):
            for j in range(0, n_k, _BLOCK):
                some, end = inside[:, t : t + _BLOCK], min(j + _BLOCK, n_k)
                part = some[..., j:end] != 0 if packed is None else unpacked(some, j, end)
                part = np.packbits(part.transpose(0, 2, 1), axis=2, bitorder="little")
                bits[:, j : j + _BLOCK, t // 8 : t // 8 + part.shape[2]] = part
        return Grid(block_q, block_k, bits, n_q)

    @property
    def batch(self) -> int:
        """1 or B."""
        return self.bits.shape[0]

    @property
    def states(self) -> NDArray[np.uint8]:
        """The blocks as bytes, 1 where they are inside: [1 | B, key blocks, query blocks]."""
        return unpacked(self.bits, 0, self.n_q).view(np.uint8)

    def columns(self, b: int, begin: int, end: int) -> NDArray[np.bool_]:
        """Whether blocks of a batch entry are inside, [key blocks, end - begin], for the query blocks [begin, end)."""
        return unpacked(self.bits[b if self.batch > 1 else 0], begin, end)

    def holds(self, t: Any, j: Any, b: Any = 0) -> NDArray[np.bool_]:
        """Whether pairs are inside; integers or integer arrays that broadcast."""
        n = t // self.block_q
        return (self.bits[np.minimum(b, self.batch - 1), j // self.block_k, n >> 3] >> (n & 7) & 1).astype(np.bool_)

    def transpose(self) -> Grid:
        """The same pairs with queries and keys exchanged."""
        return Grid.of(self.block_k, self.block_q, self.bits, self.n_q)


@dataclass(frozen=True, eq=False)
class Lowered:
    """A mask in the form that kernels read.

    bands: int32 [1 | B, nb, 8], columns d_lo d_hi k_lo k_hi q_lo q_hi stride phase; a band allows (t, j) iff
        d_lo <= t - j <= d_hi, k_lo <= j < k_hi, q_lo <= t < q_hi and its stride test holds: stride 1 always,
        s > 1 (t - j) mod s = phase, s < -1 (t - j) mod |s| != phase. d is unbounded at -INF and INF. nb <= 8,
        0 allows nothing.
    uses: int32 [nb, 4], bit sets over rows (inside, outside) and grids (inside, outside): bit r is rows[r].
    rows, grids: at most 8 and 4.
    """

    bands: Int32
    uses: Int32
    rows: tuple[Rows, ...] = ()
    grids: tuple[Grid, ...] = ()

    @property
    def nb(self) -> int:
        """Number of bands."""
        return self.bands.shape[1]

    @cached_property
    def batch(self) -> int:
        """1 if every batch entry has the same mask, else B."""
        batch = self.bands.shape[0]
        for part in (*self.rows, *self.grids):
            batch = max(batch, part.batch)
        return batch

    def transpose(self) -> Lowered:
        """The mask with queries and keys exchanged: mask.test(t, j) is mask.transpose().test(j, t)."""
        bands = self.bands[..., [D_HI, D_LO, Q_LO, Q_HI, K_LO, K_HI, STRIDE, PHASE]]
        bands[..., :2] *= -1
        bands[..., PHASE] = -bands[..., PHASE] % np.abs(bands[..., STRIDE])
        rows = tuple(r.transpose() for r in self.rows)
        return Lowered(bands, self.uses, rows, tuple(g.transpose() for g in self.grids))

    def entry(self, b: int) -> Lowered:
        """The mask of one batch entry."""

        def own(a: Any) -> Any:
            return a[b : b + 1] if len(a) > 1 else a

        rows = tuple(replace(r, lo=own(r.lo), hi=own(r.hi)) for r in self.rows)
        grids = tuple(replace(g, bits=own(g.bits)) for g in self.grids)
        return Lowered(own(self.bands), self.uses, rows, grids)

    def test(self, t: Any, j: Any, b: Any = 0) -> NDArray[np.bool_]:
        """Whether row t may see key j in batch entry b; integers or integer arrays that broadcast."""
        t, j, b = np.broadcast_arrays(t, j, b)
        allowed = np.zeros(t.shape, np.bool_)
        for n in range(self.nb):
            band = self.bands[np.minimum(b, self.bands.shape[0] - 1), n].astype(np.int64)
            d, stride = t - j, band[..., STRIDE]
            met = d % np.abs(stride) == band[..., PHASE]
            inside = (d >= band[..., D_LO]) & (d <= band[..., D_HI]) & np.where(stride > 0, met, ~met)
            inside &= (j >= band[..., K_LO]) & (j < band[..., K_HI]) & (t >= band[..., Q_LO]) & (t < band[..., Q_HI])
            allowed |= inside & self._factors(n, t, j, b)
        return allowed

    def keys_of(self, n: int, t: Any) -> tuple[Any, Any]:
        """The range [lo, hi) of keys that rows t see by band n and its rows inside; ignores strides and other factors.

        lo, hi: int64 [1 | B, len(t)], equal for a row that sees no key.
        """
        band = [self.bands[:, n, c].astype(np.int64)[:, None] for c in range(STRIDE)]
        lo, hi = np.maximum(band[K_LO], t - band[D_HI]), np.minimum(band[K_HI], t - band[D_LO] + 1)
        for r, rows in enumerate(self.rows):
            if rows.axis == "q" and self.uses[n, ROWS_IN] >> r & 1:
                lo, hi = np.maximum(lo, rows.lo[:, t]), np.minimum(hi, rows.hi[:, t])
        return lo, np.where((t >= band[Q_LO]) & (t < band[Q_HI]), np.maximum(hi, lo), lo)

    def _factors(self, n: int, t: Any, j: Any, b: Any) -> NDArray[np.bool_]:
        result = np.ones(t.shape, np.bool_)
        use = [int(u) for u in self.uses[n]]
        for r, rows in enumerate(self.rows):
            at, x = (t, j) if rows.axis == "q" else (j, t)
            e = np.minimum(b, rows.batch - 1)
            inside = (rows.lo[e, at] <= x) & (x < rows.hi[e, at])
            if use[ROWS_IN] >> r & 1:
                result &= inside
            if use[ROWS_OUT] >> r & 1:
                result &= ~inside
        for g, grid in enumerate(self.grids):
            inside = grid.holds(t, j, b)
            if use[GRIDS_IN] >> g & 1:
                result &= inside
            if use[GRIDS_OUT] >> g & 1:
                result &= ~inside
        return result


@dataclass(frozen=True, eq=False)
class LoweredHeads:
    """Distinct lowered masks, and the index of the mask of each query head: head, int32 [Hq]."""

    masks: tuple[Lowered, ...]
    head: Int32 = field(default_factory=lambda: np.zeros(1, np.int32))
