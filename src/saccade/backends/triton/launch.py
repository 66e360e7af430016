"""Launching the portable kernels: arguments in the order of their named tuples, tiles from the table, a grid a part."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...mask import Mask
from ...mask.forms import INF
from ...philox import drop_words
from ...plan import Part, Plan, positions
from ...problem import Problem
from .. import Extras
from . import encoding, tiles
from .chip import chip_of
from .kernels import backward as kernels_backward
from .kernels import decode as kernels_decode
from .kernels import forward as kernels_forward
from .kernels.common import Bias, Scores
from .kernels.masks import BOUNDS
from .kernels.rows import Array
from .on_device import Intervals

# of kernels that read each number once
SMALL = tiles.Tile(32, 0, 4, 1)


class Shape(NamedTuple):
    """Of a bias gradient: batches, heads, rows."""

    b: int
    h: int
    t: int


class Launches:
    """How kernels are launched and scratch is made; replay.py keeps both."""

    def run(self, kernel: Any, grid: tuple[int, ...], *args: Any, **given: Any) -> Any:
        """Launch a kernel over a grid; what Triton compiled for it."""
        return kernel[grid](*args, **given)

    def scratch(self, *shape: int, like: Tensor, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
        """An array of a call beside its results, on the device of `like`."""
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=like.device)


PLAIN = Launches()


class AttentionLaunch(Launches):
    """What all launches of one call share."""

    def __init__(self, problem: Problem, plan: Plan, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> None:
        self.problem, self.plan, self.device = problem, plan, q.device
        self.chip = chip_of(problem.device)
        self.order = encoding.order_of(plan, q.device)
        if self.order is not None:
            k, v = (x.index_select(1, self.order.there) for x in (k, v))
        scales = (extras.k_scale, extras.v_scale)
        self.qkv = array(q), *(_stored(problem, x, s, extras) for x, s in zip((k, v), scales, strict=True))
        self.lengths, self.descale = extras.lengths, extras.descale
        self.sinks = None if extras.sinks is None else extras.sinks.contiguous()
        self.scores = _scores(problem, plan, extras, q.device)
        self.drop = _drop(problem, extras.seed)
        block, block_v = tiles.blocks(problem.D, problem.Dv)
        self.heads = {
            "D": problem.D, "DV": problem.Dv, "BLOCK_D": block, "BLOCK_DV": block_v,
            # of few pairs, the bits that three products of tf32 leave out are the largest error
            "EXACT": 0 if problem.dtype != "float32" else 2 if problem.few_pairs else 1,
        }  # fmt: skip

    def start(self, kernel: Any, grid: int, *args: Any, tile: tiles.Tile, **constants: Any) -> Any:
        """Launch a kernel over a line of programs."""
        return self.run(kernel, (grid,), *args, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages)

    def tile(self, kernel: str, part: Part | None = None) -> tiles.Tile:
        """The tile of a kernel: rows are the plan's, or with `part` keys are what its masks' blocks hold."""
        return tiles.of_plan(kernel, self.chip, self.problem, self.plan, part)

    def tiles_of_keys(self, part: Part, BN: int) -> tuple[Array, ...]:
        """q, k and v for a kernel that reads the part's keys BN at a time."""
        q, *keys = self.qkv
        long = part.step == 1 and (keys[0].page or 0) >= BN
        return q, *(x._replace(long=1) if long else x for x in keys)

    def given_order(self, x: Tensor) -> Tensor:
        """Gradients of keys or values where the caller has those."""
        return x if self.order is None else x.index_select(1, self.order.back)

    def lists(self, n: int, tile_k: int = 0) -> encoding.Lists:
        """The lists of part n on the device."""
        return encoding.of_part(self.plan.parts[n], self.plan, self.device, tile_k)


def array(x: Tensor) -> Array:
    """A tensor [B, T, H, n] as kernels take it."""
    b, t, h, _ = x.stride()
    return Array(x, b, t, h)


def _stored(p: Problem, x: Tensor, scale: Tensor | None, extras: Extras) -> Array:
    # k or v as a cache may hold them
    if p.quantised is not None and scale is not None:
        x = x.view(torch.float8_e4m3fn) if p.quantised.kind == "fp8" else x
        n, group = p.quantised.numbers(x.shape[-1]), p.quantised.group
        even = 1 if n & (n - 1) == 0 and (group >= n or group & (group - 1) == 0) else None
        b, t, h, _ = scale.stride()
        found = array(x)._replace(
            scale=scale, scale_b=b, scale_t=t, scale_h=h, even=even, group=tl.constexpr(group) if group < n else None
        )
    else:
        found = array(x)
    return found if extras.block_table is None else _paged(found, extras)


def _paged(x: Array, extras: Extras) -> Array:
    table = torch.as_tensor(extras.block_table, device=x.p.device)
    table = table if table.stride(-1) == 1 and table.stride(0) == table.shape[1] else table.contiguous()
    page = extras.page_size
    shift = page.bit_length() - 1 if page & (page - 1) == 0 else None
    return x._replace(table=table, columns=table.shape[1], page=page, shift=shift)


def forward(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """Every part into o and lse, one after the other."""
    p, tile = call.problem, call.tile("forward")
    last = len(call.plan.parts) - 1
    for n in range(last + 1):
        at = call.lists(n)
        call.start(
            kernels_forward.forward, at.n_tiles * at.n_classes * p.B * p.Hq,
            *call.tiles_of_keys(call.plan.parts[n], tile.BN), array(o), lse,
            call.sinks if n == last else None, call.scores, at.words, *call.drop, **call.heads, BM=tile.BM,
            BN=tile.BN, MASK=at.mask, MERGE=n > 0, tile=tile,
        )  # fmt: skip


def decode(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """The keys in ranges of `plan.split_keys`, and the ranges into o and lse."""
    p, plan = call.problem, call.plan
    tile = tiles.decode_tile(call.chip, p, call.qkv[1].page or 0, plan.split_keys)
    at = call.lists(0)
    rows, splits = p.G * p.Tq, plan.num_splits
    mask, reach = (at.mask, (0, 0)) if call.lengths is None else (BOUNDS.value, reach_of(p.mask) or (0, 0))
    BM = min(64, tiles.block(rows))
    n = p.B * p.Tq * p.Hq
    parts = call.scratch(n * splits * (p.Dv + 2), like=lse) if splits > 1 else None
    call.start(
        kernels_decode.decode, p.B * p.Hk * splits * -(-rows // BM), *call.tiles_of_keys(plan.parts[0], tile.BN),
        array(o), lse, call.sinks, parts, call.lengths, *reach, call.scores, at.words, *call.drop, plan.split_keys,
        splits, **call.heads, BM=BM, BN=tile.BN, MASK=mask, SPLIT=splits > 1, tile=tile,
    )  # fmt: skip
    if splits > 1:
        call.start(
            kernels_decode.combine, n, o, lse, call.sinks, parts, n, splits, p.Hq, DV=p.Dv, BLOCK_DV=tiles.block(p.Dv),
            BS=tiles.block(splits), tile=SMALL,
        )  # fmt: skip


def reach_of(mask: Mask | None) -> tuple[int, int] | None:
    """How far before and after its position a row sees, for masks that say no more than that; else None."""
    if mask is None:
        return INF, INF
    if mask.kind not in ("causal", "window") or mask.args[-1] is not None:
        return None
    left, right = (None, 0) if mask.kind == "causal" else mask.args[:2]
    return INF if left is None else int(left), INF if right is None else int(right)


def delta(call: AttentionLaunch, do: Tensor, o: Tensor, dlse: Tensor | None) -> Tensor:
    """Σ do · o - dlse, [B, Tq, Hq] float32."""
    p = call.problem
    out = call.scratch(p.B, p.Tq, p.Hq, like=do)
    rows = out.numel()
    if rows:
        call.start(
            kernels_backward.delta, -(-rows // SMALL.BM), array(do), array(o),
            None if dlse is None else dlse.contiguous(), out, rows, p.Tq, p.Hq, DV=p.Dv, BLOCK_DV=tiles.block(p.Dv),
            BM=SMALL.BM, tile=SMALL,
        )  # fmt: skip
    return out


def refine(call: AttentionLaunch, do: Tensor, lse: Tensor, delta: Tensor, dlse: Tensor | None) -> Tensor | None:
    """What the weights of each row are to be multiplied with, [B, Tq, Hq], and a better delta in its place.

    For float32 alone: the rounding of lse and of o is the largest error that its gradients would have.
    """
    p, tile = call.problem, call.tile("dq")
    if not call.heads["EXACT"] or not lse.numel() or not p.Tk:
        return None
    share, weighed = (call.scratch(*lse.shape, like=lse) for _ in range(2))
    last = len(call.plan.parts) - 1
    for n in range(last + 1):
        at = call.lists(n)
        call.start(
            kernels_backward.refine, at.n_tiles * at.n_classes * p.B * p.Hq, *call.qkv, array(do), lse, share, weighed,
            delta, None if dlse is None else dlse.contiguous(), call.sinks, call.scores, at.words, *call.drop,
            **call.heads, BM=tile.BM, BN=tile.BN, MASK=at.mask, ADD=n > 0, LAST=n == last, tile=tile,
        )  # fmt: skip
    return share


def backward(
    call: AttentionLaunch, do: Tensor, lse: Tensor, share: Tensor | None, delta: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dbias: Tensor | None, want_slopes: Any,
) -> Tensor | None:  # fmt: skip
    """Every part into dq, dk, dv and dbias; the gradient of the slopes [B, Hq], or None. share: of `refine`."""
    p = call.problem
    if not lse.numel() or not p.Tk:
        return lse.new_zeros((p.B, p.Hq)) if want_slopes else None
    given = *call.qkv, array(do)
    rows = lse, share, delta, call.scores
    found: list[Tensor] = []
    for n in range(len(call.plan.parts)):
        slopes = _dq(call, n, given, dq, rows, want_slopes)
        if slopes is not None:
            found.append(slopes.reshape(p.B, p.Hq, -1).double().sum(-1))
        _dkdv(call, n, given, dk, dv, rows)
        if dbias is not None:
            _dbias(call, n, given, dbias, rows)
    return torch.stack(found).sum(0).float() if found else None


def _dq(call: AttentionLaunch, n: int, given: Any, dq: Tensor, rows: Any, want_slopes: Any) -> Tensor | None:
    p, tile, at = call.problem, call.tile("dq"), call.lists(n)
    lse, share, delta, scores = rows
    slopes = call.scratch(p.B, p.Hq, at.n_classes, at.n_tiles, like=lse) if want_slopes else None
    call.start(
        kernels_backward.dq, at.n_tiles * at.n_classes * p.B * p.Hq, *given, array(dq), lse, share, delta, slopes,
        scores, at.words, *call.drop, **call.heads, BM=tile.BM, BN=tile.BN, MASK=at.mask, ADD=n > 0, tile=tile,
    )  # fmt: skip
    return slopes


def _dkdv(call: AttentionLaunch, n: int, given: Any, dk: Tensor, dv: Tensor, rows: Any) -> None:
    p, tile = call.problem, call.tile("dkdv", call.plan.parts[n])
    at = call.lists(n, tile.BN)
    call.start(
        kernels_backward.dkdv, at.n_tiles * at.n_classes * p.B * p.Hk, *given, array(dk), array(dv), *rows, at.words,
        *call.drop, **call.heads, BN=tile.BN, BM=tile.BM, MASK=at.mask, ADD=n > 0, tile=tile,
    )  # fmt: skip


def _dbias(call: AttentionLaunch, n: int, given: Any, dbias: Tensor, rows: Any) -> None:
    tile = call.tile("dbias", call.plan.parts[n])
    at = call.lists(n, tile.BN)
    shape = Shape(*dbias.shape[:3])
    by_row = shape.t > 1
    blocks = -(-int(call.plan.parts[n].nq.max()) // tile.BM) if by_row else 1
    call.start(
        kernels_backward.dbias, at.n_tiles * at.n_classes * blocks * shape.b * shape.h, *given, dbias, *rows, at.words,
        shape, *call.drop, **call.heads, BN=tile.BN, BM=tile.BM, MASK=at.mask, BY_ROW=by_row, tile=tile,
    )  # fmt: skip


def _scores(problem: Problem, plan: Plan, extras: Extras, device: torch.device) -> Scores:
    found: Any = Scores(problem.scores.scale, problem.scores.softcap or None)
    if extras.bias is not None:
        bias = extras.bias
        steps = (s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
        found = found._replace(bias=Bias(bias, *steps))
    if extras.slopes is not None:
        offset = _positions(problem, plan, device)
        found = found._replace(
            slopes=extras.slopes.contiguous(), slopes_b=problem.Hq if extras.slopes.shape[0] > 1 else 0, offset=offset,
            offset_b=int(offset.numel() > 1),
        )  # fmt: skip
    return found


def _positions(problem: Problem, plan: Plan, device: torch.device) -> Tensor:
    part: Any = plan.parts[0]
    if isinstance(part, Intervals):
        return part.offset.reshape(-1).to(torch.int32)
    return torch.from_numpy(positions(problem)).to(device)


def _drop(problem: Problem, seed: int) -> tuple[Any, ...]:
    # words of 32 bits as int32
    if not problem.scores.dropout:
        return None, 0, 0, 1.0
    words = (w - (1 << 32) if w >> 31 else w for w in drop_words(problem.scores.dropout, seed))
    return *words, 1.0 / (1.0 - problem.scores.dropout)
