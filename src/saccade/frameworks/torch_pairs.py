"""One block of (query, key) pairs in torch: its parts of the arrays, and mask, dropout and distance of each pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..mask import forms
from ..mask.forms import INF, Lowered, LoweredHeads
from ..mask.lowering import offset_of
from ..philox import drop_words, philox
from ..problem import Problem


class Where(NamedTuple):
    """One block: batch entry, key head, query heads, query rows, keys."""

    b: int
    h: int
    heads: slice
    rows: slice
    keys: slice


class Pairs(NamedTuple):
    """Mask, dropout and distance of the pairs of a block.

    allowed: bool [1 | G, rows, n]. keep: [G, rows, n], 0 or 1 / (1 − dropout). distance: [rows, n], |i − j|.
    """

    allowed: Tensor
    keep: Tensor | None
    distance: Tensor | None


def views(tensors: Sequence[Any], at: Where) -> list[Any]:
    """The parts of a block in (do, dlse, q, k, v, bias, slopes, sinks), or in arrays like them, heads first."""

    def bias_at(x: Tensor) -> Tensor:
        b, heads, rows, keys = (
            slice(None) if n == 1 else index
            for n, index in zip(x.shape, (slice(at.b, at.b + 1), at.heads, at.rows, at.keys), strict=True)
        )
        return x[b, heads, rows, keys][0]

    def slopes_at(x: Tensor) -> Tensor:
        if x.dim() == 1:
            return x[at.heads]
        return x[at.b if x.shape[0] > 1 else 0, at.heads]

    do, dlse, q, k, v, bias, slopes, sinks, *_ = tensors
    return [
        None if do is None else do[at.b, at.rows, at.heads].transpose(0, 1),
        None if dlse is None else dlse[at.b, at.rows, at.heads].T,
        None if q is None else q[at.b, at.rows, at.heads].transpose(0, 1),
        None if k is None else k[at.b, at.keys, at.h],
        None if v is None else v[at.b, at.keys, at.h],
        None if bias is None else bias_at(bias),
        None if slopes is None else slopes_at(slopes),
        None if sinks is None else sinks[at.heads],
    ]


def pairs_of(
    problem: Problem, lowered: LoweredHeads | None, at: Where, bias: Tensor | None, seed: int, wide: torch.dtype
) -> tuple[Where, Pairs | None]:
    """(block, pairs) without keys that no row of the block may see; pairs is None if no keys are left."""
    device = problem.device
    t = torch.arange(at.rows.start, at.rows.stop, device=device)[:, None]
    if lowered is None:
        allowed = torch.ones((1, len(t), at.keys.stop - at.keys.start), dtype=torch.bool, device=device)
    else:
        heads = lowered.head[at.heads]
        used = [lowered.masks[n] for n in (heads[:1] if (heads == heads[0]).all() else heads)]
        at = at._replace(keys=_span(used, at))
        j = torch.arange(at.keys.start, at.keys.stop, device=device)[None]
        allowed = torch.stack([_test(mask, at, t, j) for mask in used])
    if not allowed.any():
        return at, None
    if bias is not None:
        part = views([None] * 5 + [bias, None, None], at)[5]
        allowed = allowed & (part != -torch.inf)
    keep = distance = None
    if problem.scores.dropout:
        keep = torch.from_numpy(_keep(problem, at, seed)).to(device, wide)
    if problem.scores.alibi is not None:
        offset = int(np.broadcast_to(offset_of(problem.mask, problem.Tq, problem.Tk), problem.B)[at.b])
        distance = (t + offset - torch.arange(at.keys.start, at.keys.stop, device=device)).abs().to(wide)
    return at, Pairs(allowed, keep, distance)


def _test(mask: Lowered, at: Where, t: Tensor, j: Tensor) -> Tensor:
    # bool [rows, n]: `Lowered.test` for one batch entry
    d = t - j
    allowed = torch.zeros_like(d, dtype=torch.bool)
    for n, band in enumerate(_bands(mask, at)):
        d_lo, d_hi, k_lo, k_hi, q_lo, q_hi, stride, phase = band
        inside = (j >= k_lo) & (j < k_hi) & (t >= q_lo) & (t < q_hi)
        if d_lo > -INF:
            inside = inside & (d >= d_lo)
        if d_hi < INF:
            inside = inside & (d <= d_hi)
        if stride != 1:
            inside = inside & ((d % abs(stride) == phase) == (stride > 0))
        for factor, wanted in _factors(mask, n, at):
            inside = inside & (factor.to(t.device) == wanted)
        allowed |= inside
    return allowed


def _bands(mask: Lowered, at: Where) -> list[list[int]]:
    return mask.bands[min(at.b, len(mask.bands) - 1)].tolist()


def _factors(mask: Lowered, n: int, at: Where) -> list[tuple[Tensor, bool]]:
    # rows and grids of band n: the pairs of the block inside them, and whether the band allows those or the others
    t, j = np.arange(at.rows.start, at.rows.stop)[:, None], np.arange(at.keys.start, at.keys.stop)[None]

    def rows_hold(rows: forms.Rows) -> Any:
        along, across = (t, j) if rows.axis == "q" else (j, t)
        b = min(at.b, rows.batch - 1)
        return (rows.lo[b][along] <= across) & (across < rows.hi[b][along])

    def grid_holds(grid: forms.Grid) -> Any:
        return grid.holds(t, j, at.b)

    use = mask.uses[n].tolist()
    factors: list[tuple[Tensor, bool]] = []
    holds = [(0, bit, rows_hold(rows)) for bit, rows in enumerate(mask.rows) if (use[0] | use[1]) >> bit & 1]
    holds += [(2, bit, grid_holds(grid)) for bit, grid in enumerate(mask.grids) if (use[2] | use[3]) >> bit & 1]
    for column, bit, inside in holds:
        for wanted in (True, False):
            if use[column + (not wanted)] >> bit & 1:
                factors.append((torch.from_numpy(inside), wanted))
    return factors


def _span(masks: Sequence[Lowered], at: Where) -> slice:
    # a range of keys that contains all keys that rows of the block see, in closed form
    first, last = at.keys.stop, 0
    for mask in masks:
        for n, band in enumerate(_bands(mask, at)):
            d_lo, d_hi, k_lo, k_hi = band[:4]
            begin, end = max(k_lo, at.rows.start - d_hi), min(k_hi, at.rows.stop - d_lo)
            for r, rows in enumerate(mask.rows):
                if rows.axis == "q" and int(mask.uses[n, forms.ROWS_IN]) >> r & 1:
                    b = min(at.b, rows.batch - 1)
                    begin, end = max(begin, int(rows.lo[b, at.rows].min())), min(end, int(rows.hi[b, at.rows].max()))
            if begin < end:
                first, last = min(first, begin), max(last, end)
    first = max(first, at.keys.start)
    return slice(first, max(min(last, at.keys.stop), first))


def _keep(problem: Problem, at: Where, seed: int) -> Any:
    # [G, rows, n], 0 or 1 / (1 - dropout): the part of `dropout_kept` in this block
    first, last = at.keys.start // 4, (at.keys.stop + 3) // 4
    bh = at.b * problem.Hq + np.arange(at.heads.start, at.heads.stop)
    grid = np.meshgrid(bh, np.arange(at.rows.start, at.rows.stop), np.arange(first, last), indexing="ij")
    words = philox(np.stack([grid[1], grid[2], grid[0], np.zeros_like(grid[0])], -1), seed)
    words = words.reshape(*words.shape[:2], -1)[..., at.keys.start - 4 * first : at.keys.stop - 4 * first]
    return (words >= drop_words(problem.scores.dropout, seed)[0]) / (1 - problem.scores.dropout)
