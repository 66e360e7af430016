"""Plans: which tiles of keys each tile of queries visits, and how keys are split. A plan is data without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .mask.forms import D_LO, K_HI, Q_LO, LoweredHeads
from .mask.gathering import gathered
from .mask.lowering import lower
from .mask.memo import Memo
from .mask.strides import Cut, cut
from .mask.tiling import FULL, PARTIAL, fitting
from .plan_parts import Limits, Part, part_of_cut, part_of_sequences

if TYPE_CHECKING:
    from .problem import Problem

Int32 = NDArray[np.int32]
_PLANS = Memo()
# keys are copied into another order if that reduces the number of visited tiles by at least this factor
GATHERED = 2


@dataclass(frozen=True, eq=False)
class Plan:
    """What a backend runs: parts whose partial results are merged by lse, and a split of the keys for few queries.

    parts: at most 4, disjoint in (t, j). num_splits, split_keys: number and size of the ranges of keys that decode
    processes in parallel; split_keys is 0 if it does not split. owners: work items that share the gradient of one key
    head. All these depend on the shapes and the mask alone, so results have the same bits with any number of threads.
    order: int32 [Tk] or None; key j of the plan is key order[j] of the call.
    """

    tile_q: int
    tile_k: int
    parts: tuple[Part, ...]
    num_splits: int
    split_keys: int
    owners: int
    B: int
    Hq: int
    Hk: int
    Tq: int
    Tk: int
    order: Int32 | None = None

    @cached_property
    def visited_pairs(self) -> int:
        """(query, key) pairs in visited segments, over the batch and all query heads."""
        return sum(part.pairs(part.ranges.keys(), self.tile_q, self.B) for part in self.parts)

    @cached_property
    def full_pairs(self) -> int:
        """The visited pairs that need no element test."""
        return sum(part.pairs(part.ranges.keys(FULL), self.tile_q, self.B) for part in self.parts)

    @cached_property
    def visited_tiles(self) -> int:
        """Tiles of tile_q × tile_k that are visited, over the batch and all query heads."""
        return sum(part.total(part.ranges.tiles(self.tile_k), self.B) for part in self.parts)

    @cached_property
    def allowed_upper(self) -> int:
        """Upper bound of the allowed pairs: pairs that one-row tiles visit; exact without grids and element strides."""
        return sum(part.pairs(part.tiled(1, 1, 1).keys(), 1, self.B) for part in self.parts)

    def __str__(self) -> str:
        pairs = self.B * self.Hq * self.Tq * self.Tk
        share = 1 - self.visited_pairs / pairs if pairs else 0.0
        skipped = f"{share:.1%} of the pairs skipped" if share else "no pair skipped"
        lines = [f"tiles of {self.tile_q} queries × {self.tile_k} keys, {skipped}"]
        if self.order is not None:
            lines.append("  keys copied into another order: those that few rows see, then the columns of the mask")
        for part in self.parts:
            kind = part.ranges.seg[:, 2]
            where = f"stride {part.step}, {len(part.nq)} classes" if part.step > 1 else "all rows and keys"
            bands = ", ".join(str(m.nb) for m in part.masks)
            lines.append(
                f"  {where}: bands {bands} · {part.n_tiles} query tile{'s' * (part.n_tiles != 1)} · "
                f"{int((kind == FULL).sum())} full and {int((kind == PARTIAL).sum())} partial segments"
            )
        if self.num_splits > 1:
            lines.append(f"  keys in {self.num_splits} splits of {self.split_keys}")
        return "\n".join(lines)


def make_plan(problem: Problem, limits: Limits, parts: tuple[Part, ...] | LoweredHeads | None = None) -> Plan:
    """The plan of a problem on a device with these limits, cached by the mask's structure, integers and arrays.

    parts: given by a backend that lowers the mask on the device of its arrays; or a lowered mask that replaces the
    problem's. Raises ValueError if the mask's arrays do not fit, or for more than 8 bands after simplification.
    """
    p = problem
    sizes = p.B, p.Hq, p.Hk, p.Tq, p.Tk, p.D, p.Dv
    # the rows of a list of selected keys are not divided by strides
    whole = p.selection is not None
    asked = *sizes, p.accumulator, limits, whole, p.batch_invariant, p.scores.gates
    key, plan = (None, None) if parts else _PLANS.get(p.others, asked)
    if plan is None:
        heads = lower(p.others, p.B, p.Hq, p.Tq, p.Tk) if parts is None else parts
        plan = _plan(p, limits, heads)
        moved = None
        if limits.gathers and isinstance(heads, LoweredHeads):
            moved = gathered(heads, p.Tq, p.Tk, limits.tile_k)
        if moved is not None:
            other = _plan(p, limits, moved.heads, moved.order)
            plan = other if GATHERED * other.visited_tiles <= plan.visited_tiles else plan
        _PLANS.put(p.others, key, plan)
    return plan


def _plan(p: Problem, limits: Limits, parts: tuple[Part, ...] | LoweredHeads, order: Int32 | None = None) -> Plan:
    tile_q = limits.tile_q
    if isinstance(parts, LoweredHeads):
        heads, tile_q = parts, fitting(tile_q, limits.least_q, parts.masks)
        if p.batch_invariant:
            parts = (part_of_sequences(heads, p, limits, tile_q),)
        else:
            cuts = [Cut(1, 0, heads.masks)] if p.selection is not None else cut(heads, p.Tq, p.Tk)
            parts = tuple(part_of_cut(c, heads, p, limits, tile_q) for c in cuts)
    if limits.stage and len(parts) == 1 and p.selection is None and p.Tq > limits.few_queries:
        parts = (parts[0].in_stages(p.Tk, limits.stage),)
    sizes = p.B, p.Hq, p.Hk, p.Tq, p.Tk
    return Plan(tile_q, limits.tile_k, parts, *_split(p, limits, parts), _owners(p, limits, parts), *sizes, order)


def _split(p: Problem, limits: Limits, parts: Sequence[Part]) -> tuple[int, int]:
    if p.Tq > limits.few_queries or (p.Tq > 1 and p.Tk < limits.split_from):
        return 1, 0
    if len(parts) > 1 or parts[0].step > 1 or len(parts[0].masks) > 1:
        # kernels that split the keys read one list of keys for all heads
        return 1, 0
    if p.batch_invariant:
        # ranges of fixed size, of one sequence per batch entry
        one = len(parts[0].nq) == (1 if parts[0].entry is None else p.B)
        return (max(1, -(-p.Tk // limits.split_least)), limits.split_least) if one else (1, 0)
    wanted = max(1, limits.lanes // max(1, p.B * p.Hk))
    keys = max(limits.split_least, -(-p.Tk // wanted // 64) * 64)
    return max(1, -(-p.Tk // keys)), keys


def _owners(p: Problem, limits: Limits, parts: Sequence[Part]) -> int:
    if p.batch_invariant:
        # as for one batch entry; more owners than tiles would only add zeros
        return max(1, min(limits.owners // p.Hk, limits.most_owners, parts[0].n_tiles))
    heads = max(1, p.B * p.Hk)
    keys = max(part.rows_of_sums(p.Tk) for part in parts) if limits.stage else p.Tk
    sums = heads * keys * (p.D + p.Dv + 32) * np.dtype(p.accumulator).itemsize
    if p.scores.gates:
        sums += p.B * p.Hq * p.Tk * 8
    tiles = max(part.n_tiles for part in parts) // 8
    return max(1, min(limits.owners // heads, limits.most_owners, tiles, limits.owner_bytes // max(1, sums)))


def positions(p: Problem) -> Int32:
    """[1 | B]: the position of query row 0."""
    offset = p.Tk - p.Tq if p.mask is None else p.mask.offset(p.B, p.Tq, p.Tk)
    return np.ascontiguousarray(offset, np.int32).reshape(-1)


def sees_later_keys(p: Problem) -> bool:
    """Whether some row may see a key after its own position, judged by the bounds of the mask's bands."""
    offset = positions(p)[:, None]
    for mask in lower(p.others, p.B, p.Hq, p.Tq, p.Tk).masks:
        bands = mask.bands.astype(np.int64)
        nearest = np.maximum(bands[..., Q_LO], 0) - (np.minimum(bands[..., K_HI], p.Tk) - 1)
        if (np.maximum(bands[..., D_LO], nearest) + offset < 0).any():
            return True
    return False
