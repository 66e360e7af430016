"""States of recurrences over matrix states: where their blocks are, and how kernels read and write them.

The caller's states are [N, H, K, W], where W is V, plus one column for a normaliser. Between kernels they are `States`,
with a slot per chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .recurrent import extent, first_slot


class States(NamedTuple):
    """States between chunks: p [slots, H, K, V]; a normaliser's column [slots, H, K], float32, or None."""

    p: Any
    sums: Any


class Ends(NamedTuple):
    """The caller's states [N, H, K, W] or their gradients: `start` is read and may be None, `end` is written."""

    start: Any
    end: Any


class Block(NamedTuple):
    """Rows f [BK] and columns w [BV] of the state of head h."""

    h: Any
    f: Any
    w: Any


@triton.jit
def state_at(p, at, block, size, K: tl.constexpr, W: tl.constexpr):
    """Pointers to a Block of states [.., H, K, W]."""
    return p + ((at.to(tl.int64) * size.H + block.h) * K + block.f[:, None]) * W + block.w[None, :]


@triton.jit
def inside(block, K: tl.constexpr, V: tl.constexpr):
    """Which rows and columns of a Block exist."""
    return (block.f < K)[:, None] & (block.w < V)[None, :]


@triton.jit
def state_owner(cu, size, config: tl.constexpr):
    """(n, Block, batch entry, first token, end, slot of the first chunk) of a program that owns BK rows and BV columns
    of the state of a head of sequence n."""
    tiles: tl.constexpr = (config.K + config.BK - 1) // config.BK
    columns: tl.constexpr = (config.V + config.BV - 1) // config.BV
    program = tl.program_id(0)
    w = (program % columns) * config.BV + tl.arange(0, config.BV)
    f = (program // columns % tiles) * config.BK + tl.arange(0, config.BK)
    h = program // (columns * tiles) % size.H
    n = program // (columns * tiles * size.H)
    b, first, stop = extent(cu, n, size)
    return n, Block(h, f, w), b, first, stop, first_slot(cu, n, size, config.C)


@triton.jit
def read_state(x, n, block, size, config: tl.constexpr):
    """(which numbers of a Block exist, the numbers in float32) in states x [N, H, K, W]; 0 for None."""
    there = inside(block, config.K, config.V)
    s = tl.zeros([block.f.shape[0], block.w.shape[0]], tl.float32)
    if x is not None:
        s = tl.load(state_at(x, n, block, size, config.K, config.W), mask=there, other=0.0).to(tl.float32)
    return there, s


@triton.jit
def sums_at(p, at, block, size, K: tl.constexpr, W: tl.constexpr):
    """Pointers to a normaliser's column: the last of states [.., H, K, W], or an array of its own with W = 1."""
    return p + ((at.to(tl.int64) * size.H + block.h) * K + block.f) * W + W - 1


@triton.jit
def read_sums(x, n, block, size, config: tl.constexpr):
    """The normaliser's column [BK] of states x [N, H, K, W], 0 for None."""
    z = tl.zeros([block.f.shape[0]], tl.float32)
    if (x is not None) and (config.W > config.V):
        z = tl.load(sums_at(x, n, block, size, config.K, config.W), mask=block.f < config.K, other=0.0).to(tl.float32)
    return z


@triton.jit
def write_state(x, n, block, state, size, config: tl.constexpr):
    """Write (numbers, normaliser's column, which exist) to states x [N, H, K, W]; the column as in `write_slot`."""
    s, z, there = state
    tl.store(state_at(x, n, block, size, config.K, config.W), s.to(x.dtype.element_ty), mask=there)
    if config.W > config.V:
        at = sums_at(x, n, block, size, config.K, config.W)
        tl.store(at, z.to(x.dtype.element_ty), mask=(block.f < config.K) & (tl.min(block.w, 0) == 0))


@triton.jit
def write_slot(states, at, block, state, size, config: tl.constexpr):
    """Write such a tuple to slot `at` of States; the owner of the first columns of V writes the normaliser's column."""
    s, z, there = state
    to = state_at(states.p, at, block, size, config.K, config.V)
    tl.store(to, s.to(states.p.dtype.element_ty), mask=there)
    if states.sums is not None:
        to = sums_at(states.sums, at, block, size, config.K, 1)
        tl.store(to, z, mask=(block.f < config.K) & (tl.min(block.w, 0) == 0))
