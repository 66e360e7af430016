"""Sparse patterns from papers, as expressions of the mask algebra.

i is the position of a query and j that of a key, as in `positions`. Combine patterns that are not causal with
`& causal()` if needed. Chunked local attention is `chunked`, any layout of blocks `tiles`, and a window with global
tokens `window(w // 2, w // 2) | global_tokens(indices)` (Longformer, Beltagy et al., 2020).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, is_torch, namespace
from .algebra import Mask
from .layouts import columns, tiles
from .positions import causal, chunked, strided, window


def strided_factors(s: int) -> Mask:
    """The strided pattern of Sparse Transformers: keys j <= i with i - j < s or (i - j) mod s = 0 (Child et al., 2019).

    To give heads one factor each, use `per_head` with `causal() & window(s - 1, None)` and `causal() & strided(s)`.

    Args:
        s: the stride.

    Raises:
        ValueError: s is less than 1.

    Examples:
        >>> print(mask.patterns.strided_factors(3).draw(8, 8))
        █·······
        ██······
        ███·····
        ████····
        ·████···
        ··████··
        █··████·
        ·█··████
    """
    column = strided(s)
    return causal() & (window(s - 1, None) | column)


def fixed_factors(s: int, c: int, Tk: int) -> Mask:
    """The fixed pattern of Sparse Transformers: keys j <= i in the chunk of i, or with j mod s >= s - c.

    All later queries see the last c keys of each chunk (Child et al., 2019).

    Args:
        s: the size of a chunk.
        c: the keys of each chunk that all later queries see.
        Tk: the number of keys, including those in a cache.

    Raises:
        ValueError: unless 1 <= c <= s and Tk >= 1.

    Examples:
        >>> print(mask.patterns.fixed_factors(3, 1, 8).draw(8, 8))
        █·······
        ██······
        ███·····
        ··██····
        ··███···
        ··████··
        ··█··██·
        ··█··███
    """
    if not (1 <= c <= s and Tk >= 1):
        raise ValueError(f"fixed_factors: s {s}, c {c} and Tk {Tk} given, expected 1 <= c <= s and Tk >= 1")
    summary = np.arange(Tk) % s >= s - c
    # stop 0 means that no row sees the column
    return causal() & (chunked(s) | columns(stop=np.where(summary, 1 << 30, 0)))


def big_bird(T: int, block: int, *, near: int = 1, ends: int = 1, random: int = 3, seed: int = 0) -> Mask:
    """BigBird: blocks in a window, global blocks at both ends, and random blocks (Zaheer et al., 2020).

    Args:
        T: the number of queries and of keys; the last block may be short.
        block: tokens per block.
        near: window blocks on each side; 1 for a window of three blocks.
        ends: global blocks at each end; all blocks see them, and they see all blocks.
        random: random blocks for each row of blocks, among those that are not seen otherwise; fewer if fewer are left.
        seed: the same seed gives the same mask.

    Raises:
        ValueError: T or block is less than 1, or another number is negative.

    Examples:
        >>> pattern = mask.patterns.big_bird(4096, 64)
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


def top_blocks(q: Array, k: Array, block: int | tuple[int, int], n: int, *, of_the_past: bool = False) -> Mask:
    """For each query block, the n key blocks whose mean keys have the largest products with its mean query.

    Products are summed over the heads, which share the choice; Mixture of Block Attention (Lu et al., 2025) chooses in
    the same way for each head. The choice has no gradient. In a decode, call this function again for the new queries.

    Args:
        q: [B, Tq, Hq, D], a NumPy array or torch tensor on any device.
        k: [B, Tk, Hk, D]. The last query is aligned with the last key.
        block: tokens per block, or (queries, keys).
        n: key blocks per query block.
        of_the_past: choose only among blocks that start before the query block ends, and always take the last of them.
            Add `& causal()` to hide later keys inside a block.

    Returns:
        A `tiles` mask on the device of q.

    Raises:
        ValueError: the shapes do not fit, or n is less than 1.

    Examples:
        >>> q, k = torch.randn(2, 1, 1024, 8, 64)
        >>> pattern = mask.causal() & mask.patterns.top_blocks(q, k, 64, 4, of_the_past=True)
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
    xp = namespace(q)
    # the heads of a group share a key head, so their queries add up
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
    # [B, T, H, D] -> [B, blocks, H, D] in float32, without a gradient; the last block may be short
    xp, T = namespace(x), x.shape[1]
    x = x.detach().float() if is_torch(x) else x.astype(np.float32)
    return xp.stack([x[:, start : start + block].mean(1) for start in range(0, T, block)], 1)


def _count(x: Any, n: int) -> Any:
    # 0 to n - 1 on the device of x
    return namespace(x).arange(n, device=x.device) if is_torch(x) else np.arange(n)
