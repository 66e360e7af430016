"""The weights of attention, for tests; the kernels of backends never store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..mask.lowering import lower
from ..problem import Problem
from .torch_pairs import Where, pairs_of, views
from .torch_second import scores_of


def signed_weights(problem: Problem, q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    """`_signed_weights` with products in at least float32, also under autocast."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return _signed_weights(problem, q, k, *rest)


def _signed_weights(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    slopes: Tensor | None,
    lse: Tensor,
    seed: int,
    blocks: Sequence[tuple[int, slice, slice]],
) -> Tensor:
    """exp(s - lse) of each pair before dropout; negative if dropout removes the pair, 0 if the mask does.

    q: [B, Tq, Hq, D]. k: [B, Tk, Hk, D]. slopes: [Hq] or [B, Hq]. lse: [B, Tq, Hq], of the forward with this seed.
    blocks: (b, rows, keys) for each entry of the result; the rows must see no key outside of their block. Returns
    [len(blocks), Hq, most rows, most keys] in the dtype of q, 0 beyond the size of a block: O(Tq·Tk) memory and time.
    """
    wide = torch.float64 if problem.dtype == "float64" else torch.float32
    lowered = None if problem.mask is None else lower(problem.mask, problem.B, problem.Hq, problem.Tq, problem.Tk)
    sizes = [(rows.stop - rows.start, keys.stop - keys.start) for _, rows, keys in blocks]
    most = [max(of, default=0) for of in zip(*sizes, strict=True)] or [0, 0]
    result = q.new_zeros(len(blocks), problem.Hq, *most)
    for n, (b, rows, keys) in enumerate(blocks):
        for h in range(problem.Hk if min(sizes[n]) else 0):
            heads = slice(h * problem.G, (h + 1) * problem.G)
            at, pairs = pairs_of(problem, lowered, Where(b, h, heads, rows, keys), None, seed, wide)
            if pairs is None:
                continue
            parts: list[Any] = views([None, lse, q, k, None, None, slopes, None], at)
            own, of_q, of_k = (x.to(wide) for x in parts[1:4])
            slope = None if slopes is None else parts[6].to(wide)
            s, _, _ = scores_of(problem, of_q, of_k, None, slope, pairs.distance)
            p = torch.where(pairs.allowed, torch.exp(torch.where(pairs.allowed, s - own[..., None], 0)), 0)
            p = p if pairs.keep is None else torch.where(pairs.keep > 0, p, -p)
            here = slice(at.keys.start - keys.start, at.keys.stop - keys.start)
            result[n, heads, : p.shape[1], here] = p.to(q.dtype)
    return result
