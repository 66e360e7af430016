"""Attention over other keys, folded into what rows have so far."""

from __future__ import annotations

import triton.language as tl

import triton


@triton.jit
def fold(
    o, lse, more_o, more_lse, o_b, lse_b, more_o_b, more_lse_b, n,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """o [B, n, DV] and lse [B, n] become attention over both sets of keys; n rows of heads lie side by side.

    A side without a key has lse = -inf, and its o is not read into the result.
    """
    b = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BLOCK_DV)
    here = rows < n
    at = rows.to(tl.int64)[:, None] * DV + d[None, :]
    inside = here[:, None] & (d < DV)[None, :]
    l1 = tl.load(lse + b * lse_b + rows, here, float("-inf"))
    l2 = tl.load(more_lse + b * more_lse_b + rows, here, float("-inf"))
    top = tl.maximum(l1, l2)
    top = tl.where(top == float("-inf"), 0.0, top)
    w1, w2 = tl.exp(l1 - top), tl.exp(l2 - top)
    total = w1 + w2
    floor = tl.where(total == 0.0, 1.0, total)
    o1 = tl.load(o + b * o_b + at, inside, 0.0)
    o2 = tl.load(more_o + b * more_o_b + at, inside, 0.0)
    o1 = tl.where((w1 == 0.0)[:, None], 0.0, o1) * (w1 / floor)[:, None]
    o2 = tl.where((w2 == 0.0)[:, None], 0.0, o2) * (w2 / floor)[:, None]
    tl.store(o + b * o_b + at, o1 + o2, inside)
    tl.store(lse + b * lse_b + rows, tl.where(total == 0.0, float("-inf"), top + tl.log(floor)), here)
