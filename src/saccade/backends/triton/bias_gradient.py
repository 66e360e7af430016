"""Gradients of the biases that are added to scores: a bias array, and biases by distance."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .kernels import bias_gradient as kernel
from .kernels.common import Arrays

# query rows whose dS is stored at once when its diagonals are summed
ROWS = 256


def launch_by_distance(call: Any, n: int, arrays: Arrays, distances: Tensor, offsets: list[int]) -> None:
    """Add dS of part n of an `AttentionLaunch` to the gradient of biases by distance [1 | B, Hq, n], initially zero.

    offsets: the positions of row 0, [1] or [B].
    """
    p, part = call.problem, call.plan.parts[n]
    step = call.tile("dbias", part).BM * part.step
    most = -(-ROWS // step) * step
    entries = p.B if len(offsets) > 1 else distances.shape[0]
    for start in range(0, p.Tq, most):
        ds = call.scratch(entries, p.Hq, min(most, p.Tq - start), p.Tk, like=distances, zero=True)
        launch(call, n, arrays, ds, start)
        sums = diagonal_sums(ds)
        for b in range(entries):
            # the index of the distance between the first row and the last key
            low = distances.shape[-1] - 2 * p.Tk + 1 + start + offsets[b % len(offsets)]
            distances[b % len(distances), :, low : low + sums.shape[-1]] += sums[b]


def diagonal_sums(x: Tensor) -> Tensor:
    """[..., rows, n] to [..., rows + n - 1]: sums of the elements with the same row + n - 1 - column, in row order."""
    *shape, rows, n = x.shape
    # each row is one number longer than the result, which shifts every row by one place relative to the previous one
    wide = x.new_zeros((*shape, rows, rows + n))
    wide[..., :n] = x.flip(-1)
    return wide.flatten(-2)[..., : rows * (rows + n - 1)].unflatten(-1, (rows, rows + n - 1)).sum(-2)


def launch(call: Any, n: int, arrays: Arrays, dbias: Tensor, start: int = 0) -> None:
    """Add dS of part n of an `AttentionLaunch` to the gradient of a bias [1 | B, 1 | Hq, rows | 1, Tk].

    start: the query row that corresponds to the first row of dbias.
    """
    tile = call.tile("dbias", call.plan.parts[n])
    at = call.lists(n, tile.BN)
    entries, heads, rows = dbias.shape[:3]
    grad = kernel.BiasGradient(dbias, entries, heads, rows, start)
    by_row = grad.t > 1 or call.problem.Tq == 1
    blocks = -(-min(int(call.plan.parts[n].nq.max()), grad.t) // tile.BM) if by_row else 1
    config = call.config(tile, at.mask, BY_ROW=by_row)
    args = arrays._replace(words=at.words), grad, call.scores, *call.drop, config
    call.start(kernel.dbias, at.n_tiles * at.n_classes * blocks * grad.b * grad.h, *args, tile=tile)
