"""Launching decode: few queries, or lists of selected keys, whose keys are divided into ranges."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from torch import Tensor

from ...mask import Mask
from ...mask.forms import INF
from . import tiles
from .chip import early, multiprocessors, overlaps
from .kernels import decode as kernels
from .kernels.common import Arrays
from .kernels.forward import Results
from .kernels.masks import BOUNDS
from .kernels.rows import Blocks
from .launch import AttentionLaunch
from .launches import SMALL
from .stored import array

# with more programs per multiprocessor, the next kernel starts at the end of decode instead of at once: its programs
# would take the places that later programs of decode need, or leave other multiprocessors without any
LATE_FROM = inf
# stages of the pipeline of contiguous keys beyond those of the tile
MORE_STAGES = 0


class Split(NamedTuple):
    """How decode divides its work: blocks of rows per key head, n ranges of `keys` keys, and `reach_of` the mask."""

    blocks: int
    n: int
    keys: int
    reach: tuple[int, int] = (0, 0)


def decode(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """Compute ranges of `plan.split_keys` keys, then merge them into o and lse."""
    p, plan = call.problem, call.plan
    tile = tiles.decode_tile(call.chip, p, call.arrays.k.page or 0, plan.split_keys)
    at, rows = call.lists(0), p.G * p.Tq
    mask, reach = (at.mask, (0, 0)) if call.arrays.lengths is None else (BOUNDS.value, reach_of(p.mask) or (0, 0))
    tile = tile._replace(BM=min(64, tiles.block(rows)))
    if not call.arrays.k.page and p.quantised is None:
        tile = tile._replace(num_stages=tile.num_stages + MORE_STAGES)
    arrays = call.arrays_of(plan.parts[0], at.words, tile.BN)
    _in_ranges(call, arrays, tile, mask, Split(-(-rows // tile.BM), plan.num_splits, plan.split_keys, reach), (o, lse))


def selected(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """Compute the lists of selected keys, in ranges if there are few of them, then merge these into o and lse."""
    p, at = call.problem, call.lists(0)
    assert p.selection is not None
    keys = call.arrays.lists.n * p.selection.block
    tile = tiles.decode_tile(call.chip, p, call.arrays.k.page or 0, keys)
    # a warp for 16 rows
    tile = tile._replace(BM=call.rows_of_group, num_warps=max(tile.num_warps, call.rows_of_group // 16))
    blocks = call.blocks_of_groups(tile.BM)
    wanted = min(2 * multiprocessors(p.device) // max(1, p.B * p.Hk * blocks), keys // tiles.SPLIT_LEAST)
    each = -(-keys // max(1, wanted) // tile.BN) * tile.BN
    split = Split(blocks, max(1, -(-keys // max(1, each))), each)
    _in_ranges(call, call.arrays._replace(words=at.words), tile, at.mask, split, (o, lse))


def _in_ranges(
    call: AttentionLaunch, arrays: Arrays, tile: tiles.Tile, mask: int, split: Split, out: tuple[Tensor, Tensor]
) -> None:
    p, (o, lse) = call.problem, out
    if p.D > tiles.WIDEST and not call.columns.SHARED:
        # a stage has whole rows of both k and v
        tile = tile._replace(num_stages=min(1 if tiles.is_small(call.chip) else 2, tile.num_stages))
    n = p.B * p.Tq * p.Hq
    width = p.Dv + 2 + p.return_entropy
    parts = call.scratch(n * split.n * width, like=lse) if split.n > 1 else None
    programs, early_start = p.B * p.Hk * split.n * split.blocks, overlaps(call.chip)
    late = early_start and programs > LATE_FROM * multiprocessors(p.device)
    more = {"ENTROPY": p.return_entropy, "OVERLAP": early_start, "LATE": late}
    config = call.config(tile, mask)._replace(**call.columns._asdict(), **more)
    args = (
        Results(array(o), lse, parts, *call.more),
        call.scores_of(0),
        *call.drop,
        *split.reach,
        split.keys,
        split.n,
        config,
    )
    call.start(kernels.decode, programs, arrays, *args, tile=tile, **early(call.chip))
    if parts is not None:
        combine(call, parts, split.n, out)


def combine(call: AttentionLaunch, parts: Tensor, n: int, out: tuple[Tensor, Tensor]) -> None:
    """Merge the parts of n ranges into o and lse."""
    p, (o, lse) = call.problem, out
    rows, blocks = p.B * p.Tq * p.Hq, Blocks(p.Dv, tiles.block(p.Dv), tiles.block(n))
    args = Results(o, lse, parts, *call.more), call.sinks, rows, n, p.Hq, blocks, overlaps(call.chip)
    call.start(kernels.combine, rows, *args, tile=SMALL, **early(call.chip))


def reach_of(mask: Mask | None) -> tuple[int, int] | None:
    """How far before and after its position a row sees, for masks that only limit that distance; else None."""
    if mask is None:
        return INF, INF
    if mask.kind not in ("causal", "window") or mask.args[-1] is not None:
        return None
    left, right = (None, 0) if mask.kind == "causal" else mask.args[:2]
    return INF if left is None else int(left), INF if right is None else int(right)
