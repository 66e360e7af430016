"""The products of the forward, and how their sums are rescaled and added."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .pipeline import wait_full


class Accumulator(NamedTuple):
    """The sums of 64 rows after the scores of key tile step - 1.

    o: [64, D] without the product of that tile, by columns of `Form.columns`. Maxima m [64], sums l [64, 8] per thread,
    and the weights p [64, BN] of the tile, in fp32 or rounded to an operand. With `Form.every`, o is in fp32, and
    `more` has its factor [64] at the next addition and, if it outlives a tile, the sum in the tensor cores since the
    last one.
    """

    step: Any
    o: Any
    m: Any
    l: Any
    p: Any
    more: Any


@gluon.constexpr_function
def product_layout(dtype: gl.dtype, n: int) -> gl.NVMMADistributedLayout:
    """The layout of a warpgroup's sums [64, n]; one step of a product takes 32 bytes of each operand."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 256 // dtype.primitive_bitwidth])


@gluon.jit
def operand(p, D: gl.constexpr, dtype: gl.constexpr):
    """p as the first operand of a product with D columns; every thread keeps its elements."""
    p = p.to(dtype)
    if dtype.primitive_bitwidth == 8:
        # of 16 keys a thread has two pairs; the operand layout assigns it four neighbours
        BN: gl.constexpr = p.shape[1]
        p = gl.reshape(gl.permute(gl.reshape(p, [64, BN // 16, 2, 4, 2]), [0, 1, 3, 2, 4]), [64, BN])
    return gl.convert_layout(p, gl.DotOperandLayout(0, product_layout(dtype, D), 32 // dtype.primitive_bitwidth))


@gluon.jit
def scores_of(q, ring, stage):
    """q · k for the key tile of a stage."""
    BN: gl.constexpr = ring.tiles.shape[3]
    D: gl.constexpr = ring.tiles.shape[4]
    k = ring.tiles.index(stage).reshape([BN, D]).permute([1, 0])
    zero = gl.zeros([64, BN], gl.float32, product_layout(q.dtype, BN))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def no_sums(D: gl.constexpr, dtype: gl.constexpr, FORM: gl.constexpr):
    """Zeros [64, D], by columns of `Form.columns`."""
    WIDTH: gl.constexpr = FORM.columns or D
    zero = gl.zeros([64, WIDTH], gl.float32, product_layout(dtype, WIDTH))
    o = (zero,)
    for _ in gl.static_range(D // WIDTH - 1):
        o = o + (zero,)
    return o


@gluon.jit
def _weighted(p, o, ring, stage, c: gl.constexpr, use_acc=True):
    # o + p v for the key tile of a stage and columns c of v
    WIDTH: gl.constexpr = o.shape[1]
    v = ring.tiles.index(stage).reshape([ring.tiles.shape[3], ring.tiles.shape[4]])
    if ring.tiles.dtype.primitive_bitwidth == 8:
        if v.shape[0] != WIDTH:
            v = v.slice(c * WIDTH, WIDTH, 0)
        return warpgroup_mma(p, v.permute([1, 0]), o, use_acc=use_acc, is_async=True)
    else:
        return warpgroup_mma(p, v, o, use_acc=use_acc, is_async=True)


@gluon.jit
def add_values(p, sums, ring, FORM: gl.constexpr):
    """Issues p v of the key tile of step - 1: the sum in the tensor cores of the first columns, and its stage."""
    stage = wait_full(ring, sums.step - 1)
    if FORM.every == 0:
        return _weighted(p, sums.o[0], ring, stage, 0), stage
    elif FORM.every == 1:
        return _weighted(p, gl.zeros_like(sums.o[0]), ring, stage, 0, False), stage
    else:
        return _weighted(p, sums.more[1], ring, stage, 0, (sums.step - 1) % FORM.every != 0), stage


@gluon.jit
def _plus(o, part, beta):
    return o * gl.expand_dims(gl.convert_layout(beta, gl.SliceLayout(1, o.type.layout)), 1) + part


@gluon.jit
def with_values(product, p, sums, ring, stage, D: gl.constexpr):
    """o with the product of step - 1 in float32; the columns after the first ones are multiplied here, one by one."""
    WIDTH: gl.constexpr = product.shape[1]
    o = (_plus(sums.o[0], product, sums.more[0]),)
    for c in gl.static_range(1, D // WIDTH):
        part = _weighted(p, gl.zeros_like(product), ring, stage, c, False)
        part = warpgroup_mma_wait(0, deps=[part])
        o = o + (_plus(sums.o[c], part, sums.more[0]),)
    return o


@gluon.jit
def _side_by_side(a, b):
    return gl.reshape(gl.permute(gl.join(a, b), [0, 2, 1]), [64, 2 * a.shape[1]])


@gluon.jit
def joined(o, D: gl.constexpr, dtype: gl.constexpr):
    """Sums by columns as one array [64, D]."""
    PARTS: gl.constexpr = D // o[0].shape[1]
    if PARTS == 1:
        whole = o[0]
    elif PARTS == 2:
        whole = gl.convert_layout(_side_by_side(o[0], o[1]), product_layout(dtype, D))
    else:
        whole = _side_by_side(_side_by_side(o[0], o[1]), _side_by_side(o[2], o[3]))
        whole = gl.convert_layout(whole, product_layout(dtype, D))
    return whole


@gluon.constexpr_function
def _turn_asm(verb: str, which: int) -> str:
    # barriers below 8 are Triton's; 256 threads: the warpgroup whose turn it is, and the one before it
    return f"bar.{verb} {8 + which}, 256; mov.u32 $0, $1;"


@gluon.jit
def take_turn(which: gl.constexpr, step):
    """Wait until the warpgroup before `which` has issued its products."""
    asm: gl.constexpr = _turn_asm("sync", which)
    gl.inline_asm_elementwise(asm, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(which: gl.constexpr, step):
    """Let warpgroup `which` issue its products. Every turn is taken and passed once per key tile, so none is lost."""
    asm: gl.constexpr = _turn_asm("arrive", which)
    gl.inline_asm_elementwise(asm, "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _rescale_asm(n: int) -> tuple[str, str]:
    # n numbers of a thread, in two rows, and their factors: numbers 0 and 1 are of the first row, 2 and 3 of the second
    # NaN is not 1, so it takes the multiplications
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
def rescaled(o, alpha, SLACK: gl.constexpr):
    """o [64, D] times alpha [64] by row; with slack, a warp whose factors are all 1 jumps over the multiplications."""
    factor = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout)), 1)
    if SLACK == 0:
        o = o * factor
    else:
        N: gl.constexpr = o.shape[1] // 2
        asm: gl.constexpr = _rescale_asm(N)
        o = gl.inline_asm_elementwise(asm[0], asm[1], [o, factor], gl.float32, False, N)
    return o
