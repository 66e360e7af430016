"""Gradients of attention on Hopper: five products in one kernel, whose CTAs take tiles of keys.

With s = scale q·k (capped where softcap > 0), P = exp(s - lse), dP = dO Vᵀ and dS = P (dP - delta):
dV = Pᵀ dO, dK = scale dSᵀ Q, dQ = scale dS K. A CTA keeps K and V of a key tile in shared memory and visits the row
tiles that see them, for all query heads of the key head, so dK and dV stay in registers and need no atomics. Scores are
computed transposed, keys × queries, so that Pᵀ and dSᵀ leave the tensor cores as the register operand of dV and dK.

dQ is a sum over key tiles, that is over CTAs, which add their terms to an fp32 buffer in L2. In fixed order (the
default) row tile m counts the key tiles that have added to it; a key tile adds when the count reaches its rank. It
waits only for earlier places of the same head, which have smaller tickets. A CTA takes its tickets in ascending order,
so the key tile of the smallest unfinished ticket waits for nothing, and there is no deadlock.

Two warpgroups compute, one warp loads (TMA), and two warps keep the order. `backward_by_keys.py` and
`backward_by_columns.py` are the two ways in which the warpgroups share a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....problem import Problem
from ..chip import multiprocessors
from ..launch import Array, AttentionLaunch, array
from . import backward_by_columns as by_columns
from . import backward_by_keys as by_keys
from .backward_pipeline import Config, Inputs
from .masking import MaskOfKeys
from .schedule import BackwardSchedule, ForwardSchedule
from .sizes import size_of
from .softmax import Scores
from .staging import SumTile, convert, prepare
from .tile_scheduler import BackwardSizes
from .tiles import padded


@gluon.jit
def _backward(q, k, v, do, stat, dk, dv, sums, counts, schedule, bands, scores, sizes, CONFIG: gl.constexpr):
    """Grid: by keys, at most one CTA for each multiprocessor; by columns, one for each key tile of every head."""
    inputs, results = Inputs(q, k, v, do, stat), (dk, dv, sums, counts)
    mask = MaskOfKeys(bands, schedule.key_lo, schedule.key_hi, sizes.Tk)
    # tiles of 64 keys leave no room for a second dS and for dQ
    if k.block_shape[1] == 128:
        by_keys.partition(inputs, results, schedule, mask, scores, sizes, CONFIG)
    else:
        by_columns.partition(inputs, results, schedule, mask, scores, sizes, CONFIG)


class Tile(NamedTuple):
    """Rows and keys of a tile, and the number of row tiles in the ring."""

    BM: int
    BN: int
    stages: int


# in a mask's blocks a tile of rows lies inside one block
TILES = {64: Tile(128, 128, 2), 128: Tile(64, 128, 2), 192: Tile(64, 64, 2), 256: Tile(64, 64, 2)}
IN_BLOCKS = {**TILES, 64: Tile(64, 128, 4)}


def tile_of(D: int, blocks: bool) -> Tile:
    """The tile for a head size, for masks with or without blocks."""
    return (IN_BLOCKS if blocks else TILES)[D]


def section_of(p: Problem, key_tiles: int, by_keys: bool) -> int:
    """Key heads whose key tiles start next to each other.

    Few, because their sums then stay in the L2 cache; but several, because the long tiles of the last section should
    not end the call alone, and because in a fixed order the key tiles of one head wait for one another.
    """
    if p.deterministic:
        few = 16 if by_keys else max(1024 // key_tiles, 8)
    else:
        few = max(512 // key_tiles, 1)
    return min(p.B * p.Hk, 16, few)


def backward(
    call: AttentionLaunch,
    schedules: tuple[ForwardSchedule, BackwardSchedule],
    rows: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Compute the gradients of attention into dq, dk, dv.

    call: with q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv], bfloat16 or float16, of `sizes.SIZES`, as `fits`
    allows. schedules: of its plan. rows: do [B, Tq, Hq, Dv]; lse and delta float32 [B, Tq, Hq]. gradients: dq, dk, dv
    like q, k, v, or float32 and contiguous. Without `deterministic`, key tiles add to dQ in any order.
    """
    p, (q, k, v), (do, lse, delta), (dq, dk, dv) = call.problem, (x.p for x in call.qkv), rows, gradients
    ((_, lists, _, _, _, blocks), schedule), (BM, BN, stages) = schedules, tile_of(size_of(p), schedules[0].blocks)
    M, N = -(-p.Tq // BM), -(-p.Tk // BN)
    keys = BN == 128
    # by keys, sums have the columns of the kernel; by columns, they are taken 64 or a power of two at a time
    columns = padded(p.D) if keys else p.D
    # in a fixed order the first key tile stores dQ; row tiles that have two orders may lack one of the two
    added = not (keys and p.deterministic and schedule.order is None)
    kinds = 1 if schedule.order is None else 2
    tiles, sum_tile = p.B * p.Hq * M, SumTile(BM, columns, kinds, columns & -columns, p.D, added)
    stat, sums = call.scratch(tiles * 2 * BM, like=q), call.scratch(sum_tile.KINDS * tiles * BM * columns, like=q)
    counts = call.scratch(sum_tile.KINDS * tiles + 1, like=q, dtype=torch.int32)
    grid, wide = (M, p.Hq, p.B), dk.dtype is torch.float32
    lse, delta = (Array(x, *x.stride()) for x in (lse, delta))
    call.run(prepare, grid, lse, delta, stat, sums, counts, (p.Hq, p.Tq), TILE=sum_tile)
    inputs = _tiles(q, BM), _tiles(k, BN), _tiles(v, BN), _tiles(do, BM)
    line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    stats = TensorDescriptor(stat, list(stat.shape), [1], [2 * BM], line)
    # by keys, each warpgroup stores its half, and 64 columns of dk at a time
    outputs = (dk, dv) if wide else (_tiles(dk, 64, 64 if keys else 0), _tiles(dv, 64))
    bands_b, rows_b = (x is not None and x.shape[0] > 1 for x in (lists.bands, schedule.key_lo))
    lists_b = len(schedule.ptr) - 1 > N
    rest = p.G, lists.bands.shape[1], lists_b, bands_b, rows_b, blocks, p.deterministic, wide, added
    config = Config(stages, p.D, p.Dv, *rest)
    scores, sizes = (
        Scores(p.scores.scale, p.scores.softcap or None),
        BackwardSizes(p.B, p.Hk, p.Tk, M, N, section_of(p, N, keys)),
    )
    to = _sums(sums, BM, columns) if keys else sums
    arguments = *inputs, stats, *outputs, to, counts, schedule, lists.bands, scores, sizes
    tickets = N * p.B * p.Hk
    programs = min(tickets, multiprocessors(str(q.device))) if keys else tickets
    call.run(_backward, (programs,), *arguments, CONFIG=config, num_warps=4 if keys else 8)
    call.run(convert, grid, sums, counts, array(dq), p.scores.scale, (p.Hq, p.Tq), TILE=sum_tile, ROWS=keys)


def _sums(x: Tensor, BM: int, D: int) -> TensorDescriptor:
    # tiles of BM rows of sums, as warpgroups write them to shared memory
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, [x.numel() // D, D], [D, 1], [BM, D], layout)


def _tiles(x: Tensor, rows: int, columns: int = 0) -> TensorDescriptor:
    # columns are padded to a power of two, with zeros; a dimension of size 1 may have any stride, and gets one that the
    # copy engine takes
    block = [1, rows, 1, columns or padded(x.shape[3])]
    strides = [s if n > 1 else x.shape[3] for n, s in zip(x.shape, x.stride(), strict=True)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block, layout)
