"""Recurrences over matrix states, chunk by chunk: S = e^g S + k uᵀ in sequence, then o = P u + e^b q S in parallel.

b sums the logarithms g of the decays of a chunk; P = (q kᵀ) ⊙ e^(b_r - b_s) for s <= r; u = beta v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .recurrent import (
    between,
    chunk_owner,
    entered,
    features,
    give_state,
    given_state,
    given_sums,
    keep,
    kept_pairs,
    left,
    ramps,
    state_at,
    state_owner,
    sums_at,
    through,
    times,
    values,
    wide,
)


@triton.jit
def states(
    k, v, sides, initial, kept, final, size, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, MAP: tl.constexpr,
    CAUSAL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The state before each chunk, or where not CAUSAL the last one, into `kept`, the last into `final` [N, H, K, W].

    A program owns BK rows and BV columns of the state of one head of one sequence. Products are of float32 whatever the
    inputs, for states are.
    """
    n, h, f, w, b, first, stop, slot = state_owner(sides.cu, size, K, V, BK, BV, C)
    there, s = given_state(initial, n, h, size, f, w, K, V, W)
    z = given_sums(initial, n, h, size, f, K, V, W)
    for c in range(0, tl.cdiv(stop - first, C)):
        if CAUSAL:
            keep(kept, slot + c, h, size, f, w, s, z, there, K, V)
        t = first + c * C + tl.arange(0, C)
        ok = t < stop
        u = values(v, sides, b, t, ok, h, w, size, V)
        keys = left(k, sides, b, t, ok, h, f, size, K, MAP)
        if sides.pairs is not None:
            s = s * through(sides, b, t, ok, h, f, size, K)[:, None]
        elif sides.g is not None:
            _start, tail, whole = ramps(sides, slot + c, h, size, C)
            u = u.to(tl.float32) * tail[:, None]
            s = s * whole
        if W > V:
            z += tl.sum(keys.to(tl.float32), 0)
        s = wide(tl.trans(keys), u, s)
    if not CAUSAL:
        keep(kept, n, h, size, f, w, s, z, there, K, V)
    give_state(final, n, h, size, f, w, s, z, there, K, V, W)


class Divisors(NamedTuple):
    """Of rows that are divided by their sums of weights, for a backward: the inverse of that sum [B, T, H], and shares
    of its gradient by blocks of V [blocks, B, T, H], for the gradient do [B, T, H, V], contiguous."""

    do: Any
    inverse: Any
    sums: Any


@triton.jit
def outputs(
    q, k, v, sides, kept, o, divisors, size, scale, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, HOW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, V], or, of divided rows, the Divisors in its place. A program owns a chunk and BV columns.

    kept: States before each chunk, or, where not CAUSAL, the last one of each sequence.
    """
    columns: tl.constexpr = (V + BV - 1) // BV
    column, h, slot, n, b, t, ok = chunk_owner(sides.cu, size, columns, C)
    w = column * BV + tl.arange(0, BV)
    at = slot if CAUSAL else n
    acc = tl.zeros([C, BV], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    weight = tl.zeros([C], tl.float32)
    for f0 in range(0, K, BK):
        f = f0 + tl.arange(0, BK)
        queries = entered(q, sides, b, t, ok, h, f, size, K, MAP)
        there = (f < K)[:, None] & (w < V)[None, :]
        s = tl.load(state_at(kept.p, at, h, size, f, w, K, V), mask=there, other=0.0)
        acc = times(queries, s, acc, HOW)
        if W > V:
            z = tl.load(sums_at(kept.sums, at, h, size, f, K, 1), mask=f < K, other=0.0)
            weight += tl.sum(queries.to(tl.float32) * z[None, :], 1)
        if CAUSAL and sides.pairs is None:
            keys = features(k, b, t, ok, h // size.G, f, K, MAP)
            p = times(queries, tl.trans(keys), p, HOW)
    if CAUSAL:
        if sides.pairs is not None:
            p = kept_pairs(sides, b, t, ok, h, size, C)
        else:
            if sides.g is not None:
                start, _tail, _whole = ramps(sides, slot, h, size, C)
                acc = acc * start[:, None]
            p = p * between(sides, slot, h, size, C)
        acc = times(p, values(v, sides, b, t, ok, h, w, size, V), acc, HOW)
        weight += tl.sum(p, 1)
    row = (b.to(tl.int64) * size.T + t) * size.H + h
    inside = ok[:, None] & (w < V)[None, :]
    if W > V:
        inverse = tl.where(weight != 0.0, 1.0 / weight, 0.0)
        acc = tl.where((weight != 0.0)[:, None], acc / weight[:, None], 0.0)
        if divisors.do is not None:
            do = tl.load(divisors.do + row[:, None] * V + w[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(divisors.inverse + row, inverse, mask=ok & (column == 0))
            share = -tl.sum(do * acc, 1) * inverse
            tl.store(divisors.sums + column.to(tl.int64) * size.rows + row, share, mask=ok)
    else:
        acc = acc * scale
    if o is not None:
        tl.store(o + row[:, None] * V + w[None, :], acc.to(o.dtype.element_ty), mask=inside)
