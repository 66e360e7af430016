"""Recurrences over matrix states by chunks: S = e^g S + k uᵀ in sequence, then o = P u + e^b q S in parallel.

b sums the logarithms g of the decays of a chunk; P = (q kᵀ) ⊙ e^(b_r - b_s) for s <= r; u = beta v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .recurrent import (
    Chunk,
    between,
    chunk_owner,
    entered,
    features,
    left,
    ramps,
    row_at,
    stored_pairs,
    through,
    times,
    values,
    wide,
)
from .recurrent_states import (
    Block,
    inside,
    read_state,
    read_sums,
    state_at,
    state_owner,
    sums_at,
    write_slot,
    write_state,
)


@triton.jit
def states(arrays, sides, slots, ends, size, config: tl.constexpr):
    """Write the state before each chunk, or if not CAUSAL the last one, to `slots` (States), the last state to `ends`.

    A program owns BK rows and BV columns of the state of one head of one sequence. Products are in float32 for all
    inputs, because states are.
    """
    C: tl.constexpr = config.C
    n, block, b, first, stop, slot = state_owner(sides.cu, size, config)
    there, s = read_state(ends.start, n, block, size, config)
    z = read_sums(ends.start, n, block, size, config)
    for c in range(0, tl.cdiv(stop - first, C)):
        if config.CAUSAL:
            write_slot(slots, slot + c, block, (s, z, there), size, config)
        t = first + c * C + tl.arange(0, C)
        chunk = Chunk(slot + c, n, b, block.h, t, t < stop)
        u = values(arrays.v, sides, chunk, block.w, size, config.V)
        keys = left(arrays.k, sides, chunk, block.f, size, config)
        if sides.pairs is not None:
            s = s * through(sides, chunk, block.f, size, config.K)[:, None]
        elif sides.g is not None:
            _start, tail, whole = ramps(sides, chunk, size, C)
            u = u.to(tl.float32) * tail[:, None]
            s = s * whole
        if config.W > config.V:
            z += tl.sum(keys.to(tl.float32), 0)
        s = wide(tl.trans(keys), u, s, config.HOW)
    if not config.CAUSAL:
        write_slot(slots, n, block, (s, z, there), size, config)
    write_state(ends.end, n, block, (s, z, there), size, config)


class Outputs(NamedTuple):
    """o [B, T, H, V] or None. For the backward of normalised rows: inverse [B, T, H], one over the sum of weights, and
    sums [blocks of V, B, T, H], partial gradients of that sum, given do [B, T, H, V], contiguous.
    """

    o: Any
    do: Any = None
    inverse: Any = None
    sums: Any = None


@triton.jit
def outputs(arrays, sides, slots, out, size, scale, config: tl.constexpr):
    """Fill Outputs. A program owns a chunk and BV columns.

    slots: States before each chunk or, if not CAUSAL, the last one of each sequence.
    """
    K: tl.constexpr = config.K
    V: tl.constexpr = config.V
    BV: tl.constexpr = config.BV
    C: tl.constexpr = config.C
    columns: tl.constexpr = (V + BV - 1) // BV
    column, chunk = chunk_owner(sides.cu, size, columns, C)
    w, ok = column * BV + tl.arange(0, BV), chunk.ok
    at = chunk.slot if config.CAUSAL else chunk.n
    acc = tl.zeros([C, BV], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    weight = tl.zeros([C], tl.float32)
    for f0 in range(0, K, config.BK):
        block = Block(chunk.h, f0 + tl.arange(0, config.BK), w)
        queries = entered(arrays.q, sides, chunk, block.f, size, config)
        s = tl.load(state_at(slots.p, at, block, size, K, V), mask=inside(block, K, V), other=0.0)
        acc = times(queries, s, acc, config.HOW)
        if config.W > V:
            z = tl.load(sums_at(slots.sums, at, block, size, K, 1), mask=block.f < K, other=0.0)
            weight += tl.sum(queries.to(tl.float32) * z[None, :], 1)
        if config.CAUSAL and sides.pairs is None:
            keys = features(arrays.k, chunk, block.f, size, config)
            p = times(queries, tl.trans(keys), p, config.HOW)
    if config.CAUSAL:
        if sides.pairs is not None:
            p = stored_pairs(sides, chunk, size, C)
        else:
            if sides.g is not None:
                start, _tail, _whole = ramps(sides, chunk, size, C)
                acc = acc * start[:, None]
            p = p * between(sides, chunk, size, C)
        acc = times(p, values(arrays.v, sides, chunk, w, size, V), acc, config.HOW)
        weight += tl.sum(p, 1)
    row = row_at(chunk, size)
    there = ok[:, None] & (w < V)[None, :]
    if config.W > V:
        inverse = tl.where(weight != 0.0, 1.0 / weight, 0.0)
        acc = tl.where((weight != 0.0)[:, None], acc / weight[:, None], 0.0)
        if out.do is not None:
            do = tl.load(out.do + row[:, None] * V + w[None, :], mask=there, other=0.0).to(tl.float32)
            tl.store(out.inverse + row, inverse, mask=ok & (column == 0))
            share = -tl.sum(do * acc, 1) * inverse
            tl.store(out.sums + column.to(tl.int64) * size.rows + row, share, mask=ok)
    else:
        acc = acc * scale
    if out.o is not None:
        tl.store(out.o + row[:, None] * V + w[None, :], acc.to(out.o.dtype.element_ty), mask=there)
