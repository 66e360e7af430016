"""The online softmax of the forward on Hopper: maxima, sums and weights of a tile of scores, and the rows' results.

It works on the result registers of a product, and keeps sums per thread until the last tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .masking import masked_scores


class Scores(NamedTuple):
    """The parameters between products and weights; None for options that a call lacks.

    scale, softcap: of q · k. The forward has them in log2 units: softcap · log2 e, and scale · log2 e or, with a
    softcap, 2 log2 e · scale / softcap. sinks: float32 [Hq]. descale: of 8-bit floats, float32 [2, B, Hq], the factors
    of q · k and of v; while the scores of one head are computed, the factor of its v.
    """

    scale: Any
    softcap: Any = None
    sinks: Any = None
    descale: Any = None


class Output(NamedTuple):
    """Results of the forward: o, a `launch.Array` [B, Tq, Hq, D]; lse [B, Tq, Hq] float32; the numbers Tq and Hq."""

    o: Any
    lse: Any
    Tq: Any
    Hq: Any


# log2 of the largest weight of 8-bit floats: e4m3 has few numbers below 2^-6
_LIFT = gl.constexpr(8.0)
# by how many powers of two the maximum of a row of 16-bit floats may rise before its earlier sums are rescaled
_SLACK = gl.constexpr(8.0)


@gluon.jit
def by_thread(x, MAX: gl.constexpr):
    # x [64, BN] to [64, 8], over the columns of one thread: no shuffles, independent chains of operations
    x = gl.reshape(x, [64, x.shape[1] // 8, 8])
    return gl.max(x, 1) if MAX else gl.sum(x, 1)


@gluon.jit
def softmax(s, m, l, keys, block, mask, scores):
    """(p, m, l, alpha): weights p = exp2(s - m + lift) of a key tile, new m and l, factor alpha [64] of earlier sums.

    s [64, BN]: q · k. m [64]: the maximum in use. l [64, 8]: the sums so far. For 16-bit floats m stays until the true
    maximum exceeds it by more than `_SLACK`. Weights are then at most 2^8, alpha is mostly 1, and the results are the
    same except for rounding.
    """
    RARELY: gl.constexpr = scores.descale is None
    LIFT: gl.constexpr = 0.0 if scores.descale is None else _LIFT
    if scores.softcap is not None:
        # cap · tanh(x) = cap - 2 cap / (1 + e^2x)
        s = scores.softcap - 2.0 * scores.softcap / (1.0 + gl.exp2(s * scores.scale))
    if keys.test:
        s = masked_scores(s, keys, block, mask)
    factor = scores.scale if scores.softcap is None else 1.0
    m_new = gl.maximum(m, gl.convert_layout(gl.max(by_thread(s, True), 1), m.type.layout))
    if RARELY:
        # false for NaN, so rows that have seen no key keep -inf
        rises = (m_new - m) * factor > _SLACK
        m_new = gl.where(rises, m_new, m)
    # rows that have seen no key keep m = -inf; 0 in its place gives p = 0
    m_unit = gl.where(m_new == float("-inf"), 0.0, m_new * factor)
    alpha = gl.exp2(m * factor - m_unit)
    if RARELY:
        # exactly 1, which the difference of two roundings may miss
        alpha = gl.where(rises, alpha, 1.0)
    p = gl.exp2(s * factor - gl.expand_dims(m_unit - LIFT, 1))
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1) + by_thread(p, False)
    return p, m_new, l, alpha


@gluon.jit
def after_softmax(l):
    # Never sleeps, since l >= 0. ptxas moves no wait for a product above this branch, so the wait stays after the
    # softmax that is to overlap with the product.
    asm: gl.constexpr = """{
        .reg .pred p;
        .reg .f32 t, u;
        add.f32 t, $4, $5;
        add.f32 u, $6, $7;
        add.f32 t, t, u;
        setp.lt.f32 p, t, 0f00000000;
        @p nanosleep.u32 0;
        mov.b32 $0, $4;
        mov.b32 $1, $5;
        mov.b32 $2, $6;
        mov.b32 $3, $7;
        }"""
    return gl.inline_asm_elementwise(asm, "=f,=f,=f,=f,f,f,f,f", [l], gl.float32, False, 4)


@gluon.constexpr_function
def row_layout(D: int) -> gl.DistributedLinearLayout:
    # [64, D] as a product leaves it, but with 8 neighbouring columns per thread: 16-byte stores, exchanged in a warp
    columns = [[0, 1 << i] for i in range(5, D.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], *columns, [8, 0]]
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, D])


@gluon.jit
def finish(o, m, l, block, scores, output, COLUMNS: gl.constexpr):
    """Store o [64, D] and lse [64] of the rows of a block; a row without keys gets 0 and -inf, or its sink.

    COLUMNS: of o, which are stored; 0 for all.
    """
    LIFT: gl.constexpr = 0.0 if scores.descale is None else _LIFT
    R: gl.constexpr = m.type.layout
    O: gl.constexpr = o.type.layout
    D: gl.constexpr = o.shape[1]
    ROWS: gl.constexpr = row_layout(D)
    b, h, Tq = block.b, block.h, output.Tq
    l = gl.convert_layout(gl.sum(l, 1), R)
    factor = scores.scale if scores.softcap is None else 1.0
    # compared with == 0.0 rather than > 0.0, so that NaN stays NaN
    lse = gl.where(l == 0.0, float("-inf"), m * factor + gl.log2(l) - LIFT)
    share = gl.where(l == 0.0, 0.0, (1.0 if scores.descale is None else scores.descale) / l)
    if scores.sinks is not None:
        sink = gl.load(scores.sinks + h) * 1.4426950408889634
        top = gl.maximum(lse, sink)
        top = gl.where(top == float("-inf"), 0.0, top)
        both = top + gl.log2(gl.exp2(lse - top) + gl.exp2(sink - top))
        share = gl.where(l == 0.0, 0.0, share * gl.exp2(lse - both))
        lse = both
    rows = block.first + gl.arange(0, 64, R)
    gl.store(output.lse + (b.to(gl.int64) * Tq + rows) * output.Hq + h, lse * 0.6931471805599453, mask=rows < Tq)
    o = o * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, O)), 1)
    o = gl.convert_layout(o.to(output.o.p.dtype.element_ty), ROWS)
    rows = block.first + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    columns = gl.arange(0, D, gl.SliceLayout(0, ROWS))
    base = output.o.p + b.to(gl.int64) * output.o.b + h.to(gl.int64) * output.o.h
    at = gl.expand_dims(rows.to(gl.int64) * output.o.t, 1) + gl.expand_dims(columns, 0)
    stored = gl.expand_dims(rows < Tq, 1)
    if COLUMNS > 0:
        stored &= gl.expand_dims(columns < COLUMNS, 0)
    gl.store(base + at, o, mask=stored)
