"""The kernels for Hopper, in Gluon: which problems they compute, and their lists on the device.

The portable kernels compute all other problems; `why_not` gives the reasons, and `saccade explain` prints them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ....captures import keep_captured
from ....mask.forms import ROWS_IN, ROWS_OUT, STRIDE, Lowered
from ....plan import Plan
from ....plan_parts import Ranges
from ....problem import OPTIONS, Problem
from ...plan_encoding import longest_first
from .. import versions
from ..chip import interpreted, upload
from ..launch import AttentionLaunch
from ..on_device import Intervals, every_pair, segments
from . import sizes
from .band_sets import MAX_BANDS, all_seen, backward_sets, forward_sets
from .schedule import (
    BackwardSchedule,
    ForwardSchedule,
    TileLists,
    long_ones,
    rows_of_keys,
    schedule_of_intervals,
    schedule_of_ranges,
)

if TYPE_CHECKING:
    from .tiles import Tiles

# a dtype that only these kernels compute, and only in the forward
EIGHT_BITS = "float8_e4m3fn"
CHIP = "sm_90"
DTYPES = ("bfloat16", "float16", EIGHT_BITS)
# the options of a problem that they compute
TAKES = {"softcap", "sinks"}
# the most programs along the second and the third axis of a grid
MOST = 65535

# per plan, data derived from it
_derived: weakref.WeakKeyDictionary[Plan, dict[Any, Any]] = weakref.WeakKeyDictionary()


def why_not(p: Problem, plan: Plan, chip: str) -> list[str]:
    """The reasons why these kernels do not compute a problem; empty if they do.

    Reasons that concern the mask are given only where there are no others.
    """
    reasons: list[str] = []
    if chip != CHIP:
        reasons.append(f"the chip is {chip}, and they are made for {CHIP}")
    if version := versions.why_not():
        reasons.append(version)
    if p.dtype not in DTYPES:
        reasons.append(f"the dtype is {p.dtype}, and they take {', '.join(DTYPES)}")
    if (p.D, p.Dv) not in sizes.SIZES:
        known = ", ".join(f"{D} and {Dv}" for D, Dv in sizes.SIZES)
        reasons.append(f"head sizes are D = {p.D} and Dv = {p.Dv}, and they take {known}")
    if p.scores.scale <= 0:
        reasons.append(f"the scale is {p.scores.scale}, and they need one above 0")
    if max(p.B, p.Hq) > MOST:
        reasons.append(f"there are {p.B} batch entries and {p.Hq} heads, and they take at most {MOST} of each")
    reasons += [f"they compute no call with {OPTIONS.get(name, name)}" for name in sorted(p.uses - TAKES)]
    return reasons or _cached(plan, ("mask", p.dtype), lambda: _by_parts(p, plan))


def _by_parts(p: Problem, plan: Plan) -> list[str]:
    part: Any = plan.parts[0]
    if isinstance(part, Intervals):
        unknown = "the mask's arrays are on the device, and its form leaves open whether some query or key is left out"
        return [] if part.whole else [unknown]
    if len(plan.parts) > 1 or part.step > 1:
        return ["the mask has strides"]
    if len(part.masks) > 1:
        return ["heads have masks of their own"]
    return _by_mask(p, plan, part.masks[0])


def _by_mask(p: Problem, plan: Plan, low: Lowered) -> list[str]:
    uses = low.uses
    if not 1 <= low.nb <= MAX_BANDS:
        return [f"the mask has {low.nb} bands, and they test 1 to {MAX_BANDS}"]
    if (np.abs(low.bands[..., STRIDE]) != 1).any():
        return ["the mask has element strides"]
    tiles = tiles_for(p, plan)
    if tiles is None:
        from .tiles import known_tiles

        blocks = ", ".join(f"{g.block_q} × {g.block_k}" for g in low.grids)
        least = known_tiles(_dtype(p), sizes.size_of(p))[-1]
        return [f"the mask has blocks of {blocks}, and they take multiples of {least.BM} × {least.BN}"]
    if (
        len(low.rows) > 1
        or uses[:, ROWS_OUT].any()
        or any(r.axis != "q" for r in low.rows)
        or len(set(uses[:, ROWS_IN])) > 1
    ):
        return ["the bands of the mask differ in their row intervals"]
    if not all(r.monotone for r in low.rows):
        return ["the ends of the mask's row intervals decrease somewhere"]
    if not all_seen(plan.parts[0], tiles.BM, tiles.BN, p.Tq, p.Tk):
        return ["some query sees no key, or some key is seen by no query: such rows may contain NaN"]
    return []


def fits(*tensors: Tensor) -> bool:
    """Whether the copy engine can read these tensors: contiguous rows on 16-byte boundaries."""
    for x in tensors:
        if x.data_ptr() % 16 or x.stride(-1) != 1:
            return False
        step = 16 // x.element_size()
        if any(s % step or s <= 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1):
            return False
    return True


def tiles_for(p: Problem, plan: Plan) -> Tiles | None:
    """The forward's tiles, which lie inside the mask's blocks; None where no known tiles do."""
    from .tiles import tiles_of

    # the part of a mask on the device has intervals and no grids
    masks = plan.parts[0].masks
    return tiles_of(_dtype(p), sizes.size_of(p), masks[0].grids if masks else ())


def _dtype(p: Problem) -> torch.dtype:
    return getattr(torch, p.dtype)


def _cached(plan: Plan, key: Any, make: Any) -> Any:
    cache = _derived.setdefault(plan, {})
    if key not in cache:
        cache[key] = make()
    return cache[key]


def forward_schedule(problem: Problem, plan: Plan, device: torch.device) -> ForwardSchedule:
    """The forward's schedule of a plan, cached with the plan per dtype, because tile sizes depend on the dtype."""

    def make() -> ForwardSchedule:
        tiles = tiles_for(problem, plan)
        assert tiles
        return schedule_for(plan, tiles, device)

    return keep_captured(_cached(plan, ("forward", device, problem.dtype), make), device)


def schedule_for(plan: Plan, tiles: Tiles, device: torch.device) -> ForwardSchedule:
    """The forward's schedule of a plan for these tiles."""
    part: Any = plan.parts[0]
    # the keys of a tile of 8-bit values lie in an order that starts at a multiple of BN
    from_first = tiles.every == 0
    if not part.masks:
        ptr, seg, keys = segments(part, tiles.BM, tiles.BN, from_first=from_first)
        n_tiles = keys.shape[1]
        # the longest first, later tiles first among those of equal length
        order = n_tiles - 1 - torch.sort(keys, dim=1, descending=True, stable=True).indices.to(torch.int32)
        lists = TileLists(order, ptr, seg, every_pair(device), part.lo, part.hi)
        return ForwardSchedule(tiles, lists, n_tiles, part.Bm)
    low, n_tiles = part.masks[0], -(-plan.Tq // tiles.BM)
    ptr, seg = forward_sets(part, tiles.BM, tiles.BN, from_first)
    rows = (low.rows[0].lo, low.rows[0].hi) if low.rows else (None, None)
    keys = Ranges(ptr, seg).keys().reshape(part.Bm, n_tiles)
    long = int(long_ones(keys).sum(1).max(initial=0))
    arrays = longest_first(keys).reshape(-1), ptr, seg if len(seg) else np.zeros((1, 3)), low.bands, *rows
    lists = TileLists(*(None if a is None else upload(a, device) for a in arrays))
    return ForwardSchedule(tiles, lists, n_tiles, part.Bm, long, bool(low.grids))


def backward_schedule(problem: Problem, plan: Plan, device: torch.device) -> BackwardSchedule:
    """The backward's schedule of a plan, cached with it."""

    def make() -> BackwardSchedule:
        from .backward import tile_of

        part = plan.parts[0]
        tile = tile_of(sizes.size_of(problem), bool(part.masks and part.masks[0].grids))
        if isinstance(part, Intervals):
            return schedule_of_intervals(part, tile.BN, tile.BM)
        plain = schedule_of_ranges(part.transposed(tile.BN, tile.BM), part.Bm, plan.Tq, tile.BM)
        arrays = backward_sets(part, plain, tile.BM, tile.BN)
        if rows := part.masks[0].rows:
            key_lo, key_hi = rows_of_keys(rows[0], plan.Tk)
            arrays = arrays._replace(key_lo=key_lo, key_hi=key_hi)
        return BackwardSchedule(*(None if a is None else upload(a, device) for a in arrays))

    return keep_captured(_cached(plan, ("backward", device), make), device)


def run_forward(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """Compute o and lse of a problem that these kernels take, for tensors that `fits` allows."""
    from .forward import forward

    forward(call, forward_schedule(call.problem, call.plan, call.device), o, lse)


def decodes_rows_of(p: Problem, chip: str) -> bool:
    """Whether the kernel for latent rows decodes a problem whose keys are those of a latent cache."""
    if interpreted() or chip != CHIP or versions.why_not():
        return False
    from . import latent

    return latent.computes(p)


def decodes(call: AttentionLaunch) -> bool:
    """Whether the kernel for latent rows decodes a call."""
    if not decodes_rows_of(call.problem, call.chip):
        return False
    from . import latent

    return latent.takes(call) and fits(*(x.p for x in call.qkv))


def run_decode(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """Compute o and lse of a call that is decoded here."""
    from . import latent

    latent.decode(call, o, lse)


def run_backward(
    call: AttentionLaunch, do: Tensor, lse: Tensor, delta: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) as dtype, of a problem that these kernels take, for tensors that `fits` allows."""
    from .backward import backward

    at = call.problem, call.plan, call.device
    dq, dk, dv = (torch.empty(x.p.shape, dtype=dtype, device=x.p.device) for x in call.qkv)
    backward(call, (forward_schedule(*at), backward_schedule(*at)), (do, lse, delta), (dq, dk, dv))
    return dq, dk, dv
