"""Merging attention over other keys into the results so far."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton


class Partial(NamedTuple):
    """Attention over some of the keys: o [B, n, DV] and lse [B, n] of n rows of heads, and their strides over B."""

    o: Any
    lse: Any
    o_b: Any
    lse_b: Any


@triton.jit
def fold(x, y, n, blocks: tl.constexpr):
    """Turn x into attention over both sets of keys. A side without keys has lse = -inf; its o is not used."""
    DV: tl.constexpr = blocks.n
    # one axis, because others end at 65535
    tiles = tl.cdiv(n, blocks.ROWS)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * blocks.ROWS + tl.arange(0, blocks.ROWS)
    d = tl.arange(0, blocks.BLOCK)
    here = rows < n
    at = rows.to(tl.int64)[:, None] * DV + d[None, :]
    inside = here[:, None] & (d < DV)[None, :]
    l1 = tl.load(x.lse + b * x.lse_b + rows, here, float("-inf"))
    l2 = tl.load(y.lse + b * y.lse_b + rows, here, float("-inf"))
    top = tl.maximum(l1, l2)
    top = tl.where(top == float("-inf"), 0.0, top)
    w1, w2 = tl.exp(l1 - top), tl.exp(l2 - top)
    total = w1 + w2
    floor = tl.where(total == 0.0, 1.0, total)
    o1 = tl.load(x.o + b * x.o_b + at, inside, 0.0)
    o2 = tl.load(y.o + b * y.o_b + at, inside, 0.0)
    o1 = tl.where((w1 == 0.0)[:, None], 0.0, o1) * (w1 / floor)[:, None]
    o2 = tl.where((w2 == 0.0)[:, None], 0.0, o2) * (w2 / floor)[:, None]
    tl.store(x.o + b * x.o_b + at, o1 + o2, inside)
    # one warp stores lse, which other warps may still have to read for their rows of o
    tl.debug_barrier()
    tl.store(x.lse + b * x.lse_b + rows, tl.where(total == 0.0, float("-inf"), top + tl.log(floor)), here)
