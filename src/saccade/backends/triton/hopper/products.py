"""The products of the forward, and how their sums are rescaled."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .pipeline import wait_full


@gluon.constexpr_function
def product_layout(dtype: gl.dtype, n: int) -> gl.NVMMADistributedLayout:
    """The layout of a warpgroup's sums [64, n]; one step of a product takes 32 bytes of each operand."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 256 // dtype.primitive_bitwidth])


@gluon.jit
def operand(p, layout: gl.constexpr, dtype: gl.constexpr):
    """p as the first operand of a product; every thread keeps its elements."""
    p = p.to(dtype)
    if dtype.primitive_bitwidth == 8:
        # of 16 keys a thread has two pairs; the operand layout assigns it four neighbours
        BN: gl.constexpr = p.shape[1]
        p = gl.reshape(gl.permute(gl.reshape(p, [64, BN // 16, 2, 4, 2]), [0, 1, 3, 2, 4]), [64, BN])
    return gl.convert_layout(p, gl.DotOperandLayout(0, layout, 32 // dtype.primitive_bitwidth))


@gluon.jit
def scores_of(queries, n, keys, stage):
    """Issue q · k for tile n of the ring of queries and the key tile of a stage."""
    BN: gl.constexpr = keys.tiles.shape[3]
    D: gl.constexpr = keys.tiles.shape[4]
    PIECES: gl.constexpr = keys.tiles.shape[0] // keys.full.shape[0]
    s = gl.zeros([64, BN], gl.float32, product_layout(keys.tiles.dtype, BN))
    for piece in gl.static_range(PIECES):
        q = queries.tiles.index(n * PIECES + piece).reshape([64, D])
        k = keys.tiles.index(stage * PIECES + piece).reshape([BN, D]).permute([1, 0])
        s = warpgroup_mma(q, k, s, use_acc=piece > 0, is_async=True)
    return s


@gluon.jit
def add_values(p, o, ring, step, EVERY: gl.constexpr):
    """Issue o + p v for the key tile of a step; the first of EVERY tiles starts from 0."""
    v = ring.tiles.index(wait_full(ring, step)).reshape([ring.tiles.shape[3], ring.tiles.shape[4]])
    if ring.tiles.dtype.primitive_bitwidth == 8:
        v = v.permute([1, 0])
    use_acc = True
    if EVERY > 0:
        use_acc = step % EVERY != 0
    return warpgroup_mma(p, v, o, use_acc=use_acc, is_async=True)


@gluon.jit
def by_row(x, o):
    """x [64] as a column that multiplies o [64, D]."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, o.type.layout)), 1)


@gluon.constexpr_function
def _rescale_asm(n: int) -> tuple[str, str]:
    # n numbers of a thread, in two rows, and their factors: numbers 0 and 1 are of the first row, 2 and 3 of the second
    # setp.neu is also true for NaN
    lines = [
        "{ .reg .pred p;",
        f"setp.neu.f32 p, ${2 * n}, 0f3F800000;",
        f"setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra.uni kept;",
        *(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)),
        "kept: }",
    ]
    return "\n".join(lines), ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescaled(o, alpha, RARELY: gl.constexpr):
    """o [64, D] times alpha [64] by row; RARELY: a warp whose factors are all 1 skips the multiplications."""
    if RARELY:
        N: gl.constexpr = o.shape[1] // 2
        asm: gl.constexpr = _rescale_asm(N)
        o = gl.inline_asm_elementwise(asm[0], asm[1], [o, by_row(alpha, o)], gl.float32, False, N)
    else:
        o = o * by_row(alpha, o)
    return o
