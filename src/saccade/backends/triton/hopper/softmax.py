"""The online softmax of the forward on Hopper: the mask's test of a tile of scores, maxima, sums and weights.

It works on what a product leaves in registers, and keeps its sums apart by thread until the last tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _interval(rows, n: gl.constexpr, mask_b, mask, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # the keys [lo, hi) that band n lets each of rows [64, 1] see
    bands_ptr, bands_b, row_lo_ptr, row_hi_ptr, rows_b, Tq, Tk = mask
    band = bands_ptr + (bands_b * mask_b * NB + n) * 8
    lo = gl.maximum(rows - gl.load(band + 1), gl.load(band + 2))
    hi = gl.minimum(rows - gl.load(band) + 1, gl.minimum(gl.load(band + 3), Tk))
    hi = gl.where((rows >= gl.load(band + 4)) & (rows < gl.load(band + 5)), hi, 0)
    if HAS_ROWS:
        at = rows_b * mask_b * Tq + rows
        lo = gl.maximum(lo, gl.load(row_lo_ptr + at, mask=rows < Tq, other=0))
        hi = gl.minimum(hi, gl.load(row_hi_ptr + at, mask=rows < Tq, other=0))
    return lo, hi


@gluon.jit
def place_of(first_row, mask_b, mask, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # of 64 rows: the first, their entry of the mask, and the first and the end of the keys that all of them see
    low = 0
    high = 0
    if NB == 1:
        # every warp holds all 64
        rows = first_row + gl.arange(0, 64, gl.BlockedLayout([2], [32], [4], [0]))
        lo, hi = _interval(rows, 0, mask_b, mask, NB, HAS_ROWS)
        real = rows < mask[5]
        low = gl.max(gl.where(real, lo, 0), 0)
        high = gl.min(gl.where(real, hi, mask[6]), 0)
    return first_row, mask_b, low, high


@gluon.jit
def _masked(s, j, place, mask, NB: gl.constexpr, HAS_ROWS: gl.constexpr):
    # s [64, BN] of the keys from j on, with -inf where no band lets a row see a key
    first_row, mask_b, low, high = place
    BN: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    rows = gl.expand_dims(first_row + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    # a thread's columns are its lane's (bits 1 and 2) and constants, which comparisons hold in themselves
    column = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
    lane = j + (column & 6)
    column = column & ~6
    lo, hi = _interval(rows, 0, mask_b, mask, NB, HAS_ROWS)
    if NB == 1:
        # few tiles are cut on both sides: an end that all rows have passed costs nothing
        if j < low:
            s = gl.where(column >= lo - lane, s, float("-inf"))
        if high < j + BN:
            s = gl.where(column < hi - lane, s, float("-inf"))
        return s
    else:
        allowed = (column >= lo - lane) & (column < hi - lane)
        for n in gl.static_range(1, NB):
            lo, hi = _interval(rows, n, mask_b, mask, NB, HAS_ROWS)
            allowed = allowed | ((column >= lo - lane) & (column < hi - lane))
        return gl.where(allowed, s, float("-inf"))


@gluon.jit
def by_thread(x, MAX: gl.constexpr):
    # x [64, BN] to [64, 8], over the columns that one thread holds: no shuffles, chains that run side by side
    x = gl.reshape(x, [64, x.shape[1] // 8, 8])
    return gl.max(x, 1) if MAX else gl.sum(x, 1)


@gluon.jit
def softmax(
    s, m, l, j, test, place, mask, factors,
    NB: gl.constexpr, HAS_ROWS: gl.constexpr, SOFTCAP: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    # s [64, BN]: q · k of the keys from j on. m [64]: maximum so far, l [64, 8]: sums so far. Returns p = exp2(s - m +
    # LIFT) in units of log2, the new m and l, and the factor alpha [64] of what was summed before
    unit, cap, _ = factors
    if SOFTCAP:
        # cap · tanh(x) = cap - 2 cap / (1 + e^2x)
        s = cap - 2.0 * cap / (1.0 + gl.exp2(s * unit))
    if test:
        s = _masked(s, j, place, mask, NB, HAS_ROWS)
    factor = 1.0 if SOFTCAP else unit
    m_new = gl.maximum(m, gl.convert_layout(gl.max(by_thread(s, True), 1), m.type.layout))
    # a row without a key yet keeps m = -inf; 0 in its place gives p = 0
    m_unit = gl.where(m_new == float("-inf"), 0.0, m_new * factor)
    alpha = gl.exp2(m * factor - m_unit)
    p = gl.exp2(s * factor - gl.expand_dims(m_unit - LIFT, 1))
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout)), 1) + by_thread(p, False)
    return p, m_new, l, alpha


@gluon.jit
def after_softmax(l):
    # never sleeps, as l >= 0; ptxas moves no wait for a product above this branch, into the softmax meant to hide it
    return gl.inline_asm_elementwise(
        """{
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
        }""",
        "=f,=f,=f,=f,f,f,f,f", [l], gl.float32, False, 4,
    )  # fmt: skip
