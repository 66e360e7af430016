"""Launching the products of a model's step for one new token.

Weights, norms and angles are read while the kernel before still runs, so that kernel must not write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .chip import chip_of, early, on, overlaps
from .kernels import one_row as kernels
from .kernels.one_row import Cache, Heads, Projections, Row, Sizes, Weight
from .launches import PLAIN
from .tiles import Tile, block

# numbers of a row that a warp reads at once; bytes of weights that it reads before it waits, and at a time after that
PIECE, FIRST, LATER = 256, 8192, 4096
WARPS = 4
TILE = Tile(WARPS, PIECE, WARPS, 1)


def product(x: Row, weight: Weight, out: Tensor, added: Tensor | None = None) -> None:
    """Write weight · x, plus `added` [m], to out [m]."""
    m = len(weight.p)
    _run(kernels.product, -(-m // WARPS), x, weight, added, out, m, _sizes(x, 1))


def gated(x: Row, gate: Weight, up: Weight, out: Tensor) -> None:
    """Write silu(gate · x) · (up · x) to out [m]."""
    m = len(gate.p)
    _run(kernels.gated, -(-m // (2 * WARPS)), x, gate, up, out, m, _sizes(x, 4))


def project(x: Row, qkv: Sequence[Weight], turn: Sequence[Tensor], cached: Sequence[Tensor], out: Tensor) -> None:
    """Write the rotated queries of x to out [Hq, D], and its rotated keys and its values to the last slot of a cache.

    turn: cosines and sines, float32 [positions, D / 2] each. cached: keys and values [1, capacity, Hk, D] whose last
    axis is contiguous, and the length, int32 [1], which includes the new token.
    """
    k, v, length = cached
    heads = Heads(len(out), *k.shape[2:])
    grid = (heads.Hq + 2 * heads.Hk) * -(-heads.D // 2 // WARPS)
    cache = Cache(k, k.stride(1), k.stride(2), v, v.stride(1), v.stride(2), length, k.shape[1])
    _run(kernels.project, grid, x, Projections(*qkv, *turn), cache, out, _sizes(x, 2), heads)


def _sizes(x: Row, matrices: int) -> Sizes:
    n = len(x.p)
    piece = min(block(n), PIECE)
    first, later = (max(1, most // (matrices * piece * x.p.itemsize)) for most in (FIRST, LATER))
    first = min(first, -(-n // piece))
    ragged = n % piece > 0 or max(0, n - first * piece) % (later * piece) > 0
    return Sizes(n, piece, first, later, ragged, WARPS, overlaps(_chip(x)))


def _run(kernel: Any, grid: int, x: Row, *args: Any) -> None:
    with on(x.p):
        PLAIN.start(kernel, grid, x, *args, tile=TILE, **early(_chip(x)))


def _chip(x: Row) -> str:
    return chip_of(str(x.p.device))
