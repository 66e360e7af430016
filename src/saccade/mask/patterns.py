"""Sparse patterns that papers name, as expressions of the mask algebra.

i is a query's position and j a key's, as in `positions`; `&` with `causal()` where a pattern is not causal itself.
Chunked local attention is `chunked`, any layout of blocks `tiles`, a window with global tokens
`window(w // 2, w // 2) | global_tokens(indices)` (Longformer, Beltagy et al., 2020).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import is_torch, namespace
from .algebra import Mask
from .layouts import columns, tiles
from .positions import causal, chunked, strided, window


def strided_factors(s: int) -> Mask:
    """Sparse Transformer's strided pattern: keys j <= i of which i - j < s or (i - j) mod s = 0 (Child et al., 2019).

    Their two factors apart, for `per_head`: `causal() & window(s - 1, None)` and `causal() & strided(s)`.
    Raises ValueError unless s >= 1.
    """
    column = strided(s)
    return causal() & (window(s - 1, None) | column)


def fixed_factors(s: int, c: int, Tk: int) -> Mask:
    """Sparse Transformer's fixed pattern: keys j <= i of i's own chunk of s, or with j mod s >= s - c.

    Child et al., 2019. Tk: keys that there are, those of a cache among them; the last c of each chunk are seen by all
    that follow. Raises ValueError unless 1 <= c <= s and Tk >= 1.
    """
    if not (1 <= c <= s and Tk >= 1):
        raise ValueError(f"fixed_factors: s {s}, c {c} and Tk {Tk} given, expected 1 <= c <= s and Tk >= 1")
    summary = np.arange(Tk) % s >= s - c
    # a column that no row sees begins and stops at row 0
    return causal() & (chunked(s) | columns(stop=np.where(summary, 1 << 30, 0)))


def big_bird(T: int, block: int, *, near: int = 1, ends: int = 1, random: int = 3, seed: int = 0) -> Mask:
    """BigBird's blocks: near on both sides, the first and last as rows and columns, some drawn (Zaheer et al., 2020).

    T: queries and keys, the last block may be short; block: tokens of one; near: neighbours on each side, 1 for a
    window of three; ends: global blocks at each end; random: blocks drawn for each row from the seed, among those that
    the rest leaves out, fewer where fewer are left. The same seed gives the same mask.
    Raises ValueError for T or block below 1, or another number below 0.
    """
    if min(T, block) < 1 or min(near, ends, random) < 0:
        raise ValueError(
            f"big_bird: T {T}, block {block}, near {near}, ends {ends}, random {random} given, expected T and block "
            "of at least 1 and the others of at least 0"
        )
    count = -(-T // block)
    number = np.arange(count)
    layout = abs(number[:, None] - number) <= near
    at_end = (number < ends) | (number >= count - ends)
    layout |= at_end[:, None] | at_end
    draw = np.random.default_rng(seed)
    for row in layout:
        left = np.flatnonzero(~row)
        row[draw.choice(left, min(random, len(left)), replace=False)] = True
    return tiles(layout, block)


def top_blocks(q: Any, k: Any, block: int | tuple[int, int], n: int, *, of_the_past: bool = False) -> Mask:
    """The n key blocks of each query block whose mean keys have the largest products with its mean query.

    q [B, Tq, Hq, D], k [B, Tk, Hk, D], NumPy arrays or torch tensors, which stay where they are; block: tokens of a
    block, or (queries, keys). Products are summed over the heads, which share the choice, as Mixture of Block Attention
    (Lu et al., 2025) does within a head; no gradient runs through it. of_the_past: choose among blocks that begin no
    later than the query block ends, the last of them always; queries meet the last keys, and `& causal()` cuts what
    lies ahead inside a block. Short rows of queries against a cache are chosen for likewise: decode calls this anew.
    Raises ValueError for shapes that do not fit, or n below 1.
    """
    shapes = tuple(q.shape), tuple(k.shape)
    if len(shapes[0]) != 4 or len(shapes[1]) != 4 or shapes[0][::3] != shapes[1][::3] or shapes[0][2] % shapes[1][2]:
        raise ValueError(
            f"top_blocks: q {shapes[0]} and k {shapes[1]} given, expected [B, Tq, Hq, D] and [B, Tk, Hk, D]"
        )
    if n < 1:
        raise ValueError(f"top_blocks: n {n} given, expected at least 1 key block")
    bq, bk = block if isinstance(block, tuple) else (block, block)
    Tq, Tk, Hk = shapes[0][1], shapes[1][1], shapes[1][2]
    if is_torch(q):
        q, k = q.detach(), k.detach()
    xp = namespace(q)
    # the heads of a group meet one key: their queries add up
    groups = _means(q, bq).reshape(shapes[0][0], -1, Hk, shapes[0][2] // Hk, shapes[0][3]).sum(3)
    scores = xp.einsum("bqhd,bkhd->bqk", groups, _means(k, bk))
    number = _count(scores, scores.shape[2])
    # the key block of the last query of each query block
    ends = ((_count(scores, scores.shape[1]) + 1) * bq).clip(max=Tq) - 1 + Tk - Tq
    last = (ends.clip(min=0) // bk if of_the_past else 0 * ends + len(number))[:, None]
    scores = xp.where(number > last, -xp.inf, xp.where(number == last, xp.inf, scores))
    order = scores.argsort(-1)[..., -n:]
    layout = xp.zeros_like(scores > 0)
    if is_torch(layout):
        layout.scatter_(-1, order, True)
    else:
        np.put_along_axis(layout, order, True, -1)
    return tiles(layout & (number <= last), (bq, bk))


def _means(x: Any, block: int) -> Any:
    # [B, T, H, D] -> [B, blocks, H, D] in float32, the last of what it has
    xp, T = namespace(x), x.shape[1]
    x = x.float() if is_torch(x) else x.astype(np.float32)
    return xp.stack([x[:, start : start + block].mean(1) for start in range(0, T, block)], 1)


def _count(x: Any, n: int) -> Any:
    # 0 to n - 1 where x is
    return namespace(x).arange(n, device=x.device) if is_torch(x) else np.arange(n)
