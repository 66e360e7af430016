"""Launching the portable kernels: arguments as named tuples, tiles from the table, one grid per part of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...philox import drop_words
from ...plan import Part, Plan, positions
from ...problem import Problem
from .. import Extras, Inputs, Outputs
from . import bias_gradient, encoding, tiles
from .chip import chip_of, multiprocessors
from .kernels import backward as kernels_backward
from .kernels import forward as kernels_forward
from .kernels import selected_backward as kernels_selected
from .kernels.backward import KeyGradients, Products, RowGradients
from .kernels.common import Arrays, Bias, Config, Distances, Drop, Scores
from .kernels.forward import Results
from .kernels.rows import Array, Blocks
from .launches import SMALL, Launches
from .on_device import Intervals
from .selected import chunks_of, lists_of
from .stored import array, same_rows, stored


class Gradients(NamedTuple):
    """Where gradients go: dq, dk, dv have the shapes of q, k, v; the others are None, or float32 and initially zero.

    dbias: [1 | B, 1 | Hq, 1 | Tq, Tk]. distances: [1 | B, Hq, n]. rows [B, Hq, Tq] and keys [B, Hq, Tk]: sums of dS.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    distances: Tensor | None = None
    rows: Tensor | None = None
    keys: Tensor | None = None


class AttentionLaunch(Launches):
    """What all launches of one call share; more: from `more_results`."""

    def __init__(self, problem: Problem, plan: Plan, inputs: Inputs, more: Sequence[Any] = (None, None)) -> None:
        q, k, v, extras = inputs
        self.more = more
        self.problem, self.plan, self.device = problem, plan, q.device
        self.chip = chip_of(problem.device)
        self.order = encoding.order_of(plan, q.device)
        if self.order is not None:
            k, v = (x.index_select(1, self.order.there) for x in (k, v))
        scales = (extras.k_scale, extras.v_scale)
        keys, values = (stored(problem, x, s, extras) for x, s in zip((k, v), scales, strict=True))
        self.columns = tiles.columns(problem.D, problem.Dv, same_rows(k, v))
        if self.columns.SHARED:
            # of codes, in the groups of k's numbers
            values = keys._replace(p=keys.p[..., : v.shape[-1]])
        lists = None if problem.selection is None else lists_of(problem, q.device)
        self.arrays = Arrays(array(q), keys, values, None, extras.lengths, lists)
        self.descale = extras.descale
        self.distances_shape = None if extras.distances is None else extras.distances.shape
        self.sinks = None if extras.sinks is None else extras.sinks.contiguous()
        self.scores = _scores(problem, plan, extras, q.device)
        self.drop = _drop(problem, extras.seed)
        self.heads = problem.D, problem.Dv, *tiles.blocks(problem.D, problem.Dv)
        # with few pairs, the bits that three products of tf32 leave out would be the largest error
        self.exact = 0 if problem.dtype != "float32" else 2 if problem.few_pairs else 1

    @property
    def qkv(self) -> tuple[Array, Array, Array]:
        """q, k and v."""
        return self.arrays[:3]

    def tile(self, kernel: str, part: Part | None = None) -> tiles.Tile:
        """The tile of a kernel: with the plan's rows or, given `part`, with as many keys as fit its masks' blocks."""
        return tiles.of_plan(kernel, self.chip, self.problem, self.plan, part)

    def config(self, tile: tiles.Tile, mask: int, **more: bool) -> Config:
        """The constants that a kernel is compiled with."""
        return Config(*self.heads, tile.BM, tile.BN, mask, self.exact, **more)

    def arrays_of(self, part: Part, words: Tensor, BN: int) -> Arrays:
        """The arrays of a forward kernel that reads the part's keys BN at a time."""
        q, k, v = self.qkv
        if part.step == 1 and (k.page or 0) >= BN:
            k, v = k._replace(long=1), v._replace(long=1)
        return Arrays(q, k, v, words, self.arrays.lengths)

    def scores_of(self, n: int) -> Scores:
        """The scores of part n: sinks count once, in the last."""
        if self.sinks is None or n < len(self.plan.parts) - 1:
            return self.scores
        return self.scores._replace(sinks=self.sinks)

    def linear(self, extras: Extras) -> Scores:
        """The tangents of the terms of the scores."""
        terms = replace(self.problem, scores=replace(self.problem.scores, softcap=0.0))
        sinks = None if extras.sinks is None else extras.sinks.contiguous()
        return _scores(terms, self.plan, extras, self.device)._replace(sinks=sinks)

    def caller_order(self, x: Tensor) -> Tensor:
        """Gradients of keys or values, back in the caller's order."""
        return x if self.order is None else x.index_select(1, self.order.back)

    def lists(self, n: int, tile_k: int = 0, tile_q: int = 0) -> encoding.Lists:
        """The lists of part n on the device: of its rows, or of tiles of tile_k keys that read tile_q rows at once."""
        scattered, rows = self.arrays.lists is not None, tile_q if self.problem.batch_invariant else 0
        return encoding.of_part(self.plan.parts[n], self.plan, self.device, tile_k, scattered=scattered, rows=rows)

    def row_tiles(self, kernel: str, n: int) -> tuple[tiles.Tile, encoding.Lists, int]:
        """The tile of a kernel whose programs own rows, the lists of part n, and the number of programs."""
        p, at, of = self.problem, self.lists(n), self.arrays.lists
        if of is None:
            return self.tile(kernel), at, at.n_tiles * at.n_classes * p.B * p.Hq
        tile = tiles.tile_of(kernel, self.chip, p).of(rows=self.rows_of_group)
        return tile, at, self.blocks_of_groups(tile.BM) * p.B * p.Hk

    @property
    def rows_of_group(self) -> int:
        """The rows of a tile of a group with selected keys: all query heads of a key head, as many as fit a tile."""
        return min(tiles.LEAST, tiles.block(self.problem.G * self.arrays.lists.rows))

    def blocks_of_groups(self, BM: int) -> int:
        """How many blocks of BM rows the groups of a key head have."""
        of = self.arrays.lists
        return of.groups * -(-of.rows * self.problem.G // BM)


def more_results(problem: Problem, lse: Tensor) -> list[Tensor | None]:
    """New arrays like lse for max and entropy; None where the problem does not ask for them."""
    return [torch.empty_like(lse) if wanted else None for wanted in (problem.return_max, problem.return_entropy)]


def forward(call: AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    """Compute every part into o, lse and the other results, in order."""
    p, tile, results = call.problem, call.tile("forward"), Results(array(o), lse, None, *call.more)
    for n, part in enumerate(call.plan.parts):
        at = call.lists(n)
        arrays, config = call.arrays_of(part, at.words, tile.BN), call.config(tile, at.mask, ADD=n > 0)
        config = config._replace(**call.columns._asdict(), ENTROPY=p.return_entropy)
        args = arrays, results, call.scores_of(n), *call.drop, config
        call.start(kernels_forward.forward, at.n_tiles * at.n_classes * p.B * p.Hq, *args, tile=tile)


def delta(call: Launches, outputs: Outputs) -> Tensor:
    """Σ do · o - dlse + dentropy · entropy, [B, Tq, Hq] float32."""
    do = outputs.do
    _, Tq, Hq, Dv = do.shape
    out = call.scratch(*do.shape[:3], like=do)
    rows = out.numel()
    if rows:
        of_rows = (_whole(x) for x in (outputs.dlse, outputs.entropy, outputs.dentropy))
        products = Products(array(do), array(outputs.o), *of_rows)
        # 32 rows of more than 256 numbers would spill
        tile = SMALL._replace(BM=SMALL.BM * 256 // max(256, tiles.block(Dv)))
        args = products, out, rows, Tq, Hq, Blocks(Dv, tiles.block(Dv), tile.BM)
        call.start(kernels_backward.delta, -(-rows // tile.BM), *args, tile=tile)
    return out


def refine(call: AttentionLaunch, outputs: Outputs, delta: Tensor) -> Tensor | None:
    """Factors of the weights of each row, [B, Tq, Hq]; also replaces `delta` by a more accurate one.

    For float32 only: without this the rounding of lse and of o would be the largest error of its gradients.
    """
    p, lse = call.problem, outputs.lse
    if not call.exact or not lse.numel() or not p.Tk:
        return None
    share, weighed = (call.scratch(*lse.shape, like=lse) for _ in range(2))
    arrays = call.arrays._replace(do=array(outputs.do), lse=lse, share=share, delta=delta)
    arrays = arrays._replace(dlse=_whole(outputs.dlse), dentropy=_whole(outputs.dentropy))
    last = len(call.plan.parts) - 1
    for n in range(last + 1):
        tile, at, programs = call.row_tiles("dq", n)
        config = call.config(tile, at.mask, ADD=n > 0, LAST=n == last)
        args = arrays._replace(words=at.words), weighed, call.scores_of(n), *call.drop, config
        call.start(kernels_backward.refine, programs, *args, tile=tile)
    return share


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def backward(call: AttentionLaunch, arrays: Arrays, grads: Gradients, want_slopes: Any) -> Tensor | None:
    """Compute every part into the gradients; returns that of the slopes [B, Hq], or None. arrays: has do and lse."""
    p, lse = call.problem, arrays.lse
    if not lse.numel() or not p.Tk:
        return lse.new_zeros((p.B, p.Hq)) if want_slopes else None
    sums: list[Tensor] = []
    for n in range(len(call.plan.parts)):
        slopes = _dq(call, n, arrays, grads, want_slopes)
        if slopes is not None:
            sums.append(slopes.reshape(p.B, p.Hq, -1).double().sum(-1))
        (_dkdv if arrays.lists is None else _dkdv_of_chunks)(call, n, arrays, grads)
        if grads.dbias is not None:
            bias_gradient.launch(call, n, arrays, grads.dbias)
        if grads.distances is not None:
            bias_gradient.launch_by_distance(call, n, arrays, grads.distances, positions_of(p, call.plan).tolist())
    return torch.stack(sums).sum(0).float() if sums else None


def _dq(call: AttentionLaunch, n: int, arrays: Arrays, grads: Gradients, want_slopes: Any) -> Tensor | None:
    p, (tile, at, programs) = call.problem, call.row_tiles("dq", n)
    slopes = call.scratch(p.B, p.Hq, at.n_classes, at.n_tiles, like=arrays.lse) if want_slopes else None
    arrays, results = arrays._replace(words=at.words), RowGradients(array(grads.dq), slopes, grads.rows)
    args = arrays, results, call.scores, *call.drop, call.config(tile, at.mask, ADD=n > 0)
    call.start(kernels_backward.dq, programs, *args, tile=tile)
    return slopes


def _dkdv(call: AttentionLaunch, n: int, arrays: Arrays, grads: Gradients) -> None:
    p, tile = call.problem, call.tile("dkdv", call.plan.parts[n])
    at = call.lists(n, tile.BN, tile.BM)
    arrays, results = arrays._replace(words=at.words), KeyGradients(array(grads.dk), array(grads.dv), grads.keys)
    args = arrays, results, call.scores, *call.drop, call.config(tile, at.mask, ADD=n > 0)
    call.start(kernels_backward.dkdv, at.n_tiles * at.n_classes * p.B * p.Hk, *args, tile=tile)


def _dkdv_of_chunks(call: AttentionLaunch, n: int, arrays: Arrays, grads: Gradients) -> None:
    p, at, lists = call.problem, call.lists(n), arrays.lists
    tile = tiles.of_selected_keys(call.chip, p)
    # a chunk is a quarter of a multiprocessor's share of the rows that all entries have
    rows = p.B * p.Hk * lists.groups * lists.n * lists.rows * p.G // (4 * multiprocessors(p.device))
    chunks = chunks_of(lists, p, tile.BN, max(8 * tile.BM, rows), p.D + p.Dv)
    config = call.config(tile, at.mask)
    args = arrays._replace(words=at.words), chunks, call.scores, *call.drop, config
    call.start(kernels_selected.dkdv_of_chunks, chunks.tiles * chunks.n * len(chunks.parts), *args, tile=tile)
    results = KeyGradients(array(grads.dk), array(grads.dv), None)
    programs = chunks.tiles * chunks.cells * len(chunks.parts)
    call.start(kernels_selected.add_chunks, programs, at.words, chunks, results, config, tile=tile)


def _scores(problem: Problem, plan: Plan, extras: Extras, device: torch.device) -> Scores:
    keep = 1.0 / (1.0 - problem.scores.dropout)
    scores: Any = Scores(problem.scores.scale, problem.scores.softcap or None, keep=keep)
    if extras.bias is not None:
        bias = extras.bias
        steps = (s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
        scores = scores._replace(bias=Bias(bias, *steps))
    if extras.slopes is extras.distances is extras.gates is None:
        return scores
    offset = positions_of(problem, plan).to(device)
    scores = scores._replace(offset=offset, offset_b=int(offset.numel() > 1))
    if extras.slopes is not None:
        slopes = extras.slopes.contiguous()
        scores = scores._replace(slopes=slopes, slopes_b=problem.Hq if slopes.shape[0] > 1 else 0)
    if extras.distances is not None:
        distances = extras.distances.contiguous()
        entries, heads, n = distances.shape
        steps = heads * n if entries > 1 else 0, n
        scores = scores._replace(distances=Distances(distances[..., n - problem.Tk :], *steps))
    if extras.gates is not None:
        sums = extras.gates.transpose(1, 2).contiguous()
        high = sums.float()
        scores = scores._replace(gates=torch.stack([high, (sums - high).float()]))
    return scores


def positions_of(problem: Problem, plan: Plan) -> Tensor:
    """The position of query row 0, int32 [1 | B]; on the device if the mask's arrays are."""
    part: Any = plan.parts[0]
    if isinstance(part, Intervals):
        return part.offset.reshape(-1).to(torch.int32)
    return torch.from_numpy(positions(problem))


def _drop(problem: Problem, seed: int) -> Drop:
    # kernels take 32-bit words as int32
    if not problem.scores.dropout:
        return Drop(None, 0, 0)
    words = (w - (1 << 32) if w >> 31 else w for w in drop_words(problem.scores.dropout, seed))
    return Drop(*words)
