"""Sparse patterns by name at any length, as benchmarks measure them, with the sizes of their papers or similar ones."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import numpy as np

from ..mask import Mask, causal, chunked, global_tokens, parse, patterns, tiles, window

BLOCK = 64


def _block_sparse(T: int) -> Mask:
    # an eighth of the blocks of the past, and the diagonal
    count = -(-T // BLOCK)
    layout = np.random.default_rng(0).random((count, count)) < 1 / 8
    return tiles(layout | np.eye(count, dtype=bool), BLOCK) & causal()


def _top_blocks(T: int) -> Mask:
    # 16 of the past for each block of queries, by random queries and keys of one head
    q, k = (np.random.default_rng(n).standard_normal((1, T, 1, 16), np.float32) for n in range(2))
    return patterns.top_blocks(q, k, BLOCK, 16, of_the_past=True) & causal()


PATTERNS: dict[str, Callable[[int], Mask]] = {
    "longformer": lambda T: window(256, 256) | global_tokens(16),
    "big-bird": lambda T: patterns.big_bird(T, BLOCK),
    "sparse-transformer-strided": lambda T: patterns.strided_factors(isqrt(T)),
    "sparse-transformer-fixed": lambda T: patterns.fixed_factors(128, 8, T),
    "chunked-local": lambda T: causal() & chunked(512),
    "block-sparse": _block_sparse,
    "top-blocks": _top_blocks,
}


def named(text: str, T: int) -> Mask | None:
    """The pattern of this name for T queries and keys, else what `mask.parse` reads; None for an empty text."""
    if text in PATTERNS:
        return PATTERNS[text](T)
    return parse(text) if text else None
