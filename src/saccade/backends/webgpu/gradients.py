"""The steps of a backward pass: the statistics of rows, dQ, dK and dV, and the gradient of a bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...plan import Part
from ..plan_encoding import Encoded, far_from_zero
from .memory import Buffer
from .shapes import line, spans, vectors
from .texts import BINDING
from .tiled import AttentionLaunch, bias_of

# workgroups that fill a large device; if there are fewer, each head of a group gets its own key gradients
FEW = 1024
# the most bytes of such key gradients
MOST = 1 << 28


class GradientBuffers(NamedTuple):
    """Buffers of zeros that a backward pass adds to; dslopes: one per part; dkeys: dS summed over rows, [B, Hq, Tk]."""

    dq: Buffer
    dk: Buffer
    dv: Buffer
    dbias: Buffer = None
    ddistances: Buffer = None
    dkeys: Buffer = None
    dslopes: Sequence[Buffer] = ()


def statistics(launch: AttentionLaunch, o: Buffer, lse: Buffer, dlse: Buffer, stats: Buffer) -> None:
    """stats [B, Tq, Hq, 4]: lse in log2 units in two parts, rowsum(do * o) - dlse, rowsum(do * o)."""
    _delta(launch, o, lse, dlse, stats)
    if launch.problem.few_pairs or far_from_zero(launch.problem):
        _refine(launch, stats)


def _delta(launch: AttentionLaunch, o: Buffer, lse: Buffer, dlse: Buffer, stats: Buffer) -> None:
    p, arrays = launch.problem, launch.arrays
    constants = launch.options((), dlse=dlse is not None) | {"DV4": vectors(p.Dv)}
    limit = int(launch.gpu.limits[BINDING])
    for span in spans(limit, p.B, p.Tq, max(launch.widths["do"], launch.widths["o"])):
        (do, mine), base = launch.rows(p.Tq, span, do=arrays.do, o=o)
        first, last = ((b * p.Tq + t) * p.Hq for b, t in ((span.b0, span.t0), (span.b1 - 1, span.t1)))
        uniform = launch.uniform({"n_tiles": 0}, q_lo=first, q_hi=last, q_base=base)
        bindings = [do, mine, lse, stats, uniform, *([] if dlse is None else [dlse])]
        launch.add("delta", constants, bindings, line(-(-(last - first) // 64)))


def _refine(launch: AttentionLaunch, stats: Buffer) -> None:
    p, arrays = launch.problem, launch.arrays
    sums = launch.gpu.buffer(p.B * p.Tq * p.Hq * 8)
    launch.owned.append(sums)
    for part in launch.plan.parts:
        words, lists = launch.lists(part, transposed=True)
        for a, c in launch.pieces(("q", "do"), ("k", "v"), part):
            # spans of keys are in ascending order, and every part contains every row
            last = part is launch.plan.parts[-1] and c.t1 == p.Tk
            options = {"fine": True, "last": last, "sinks": p.scores.sinks, "far": not p.few_pairs}
            constants = launch.options(lists.forms, **options) | launch.shape()._asdict()
            (q, do), q_base = launch.rows(p.Tq, a, q=arrays.q, do=arrays.do)
            keys, k_base = launch.keys(c)
            tiles = launch.tiles(a, p.Tq, part.n_tiles)
            where = {"k_lo": c.t0, "k_hi": c.t1, "first_batch": a.b0, "q_base": q_base, "k_base": k_base}
            uniform = launch.uniform(lists.numbers, **tiles, **where)
            grid = (p.Hq, tiles["tile_count"] * lists.numbers["n_classes"], a.b1 - a.b0)
            launch.add("refine", constants, [q, *keys, do, stats, sums, words, uniform, *bias_of(arrays)], grid)


def backward(launch: AttentionLaunch, stats: Buffer, grads: GradientBuffers) -> None:
    """Add the steps of every gradient; with dkeys the last column of stats becomes dS summed over keys."""
    p, arrays = launch.problem, launch.arrays
    for n, part in enumerate(launch.plan.parts):
        words, lists = launch.lists(part, transposed=True)
        slopes = [grads.dslopes[n]] if grads.dslopes else []
        of_dq = {"slopes_grad": bool(slopes), "gates_grad": grads.dkeys is not None}
        of_dq = launch.options(lists.forms, **of_dq, fine=True) | launch.shape()._asdict()
        pieces = list(launch.pieces(("q", "do", "dq"), ("k", "v", "dk", "dv"), part))
        groups = lists.numbers["t_tiles"] * lists.numbers["n_classes"] * p.Hk * p.B
        spread = len(pieces) == 1 and _spread(launch, groups)
        of_dkdv = launch.options(lists.forms, fine=True, spread=spread) | launch.shape()._asdict()
        partial = _partial(launch, grads) if spread else grads
        for a, c in pieces:
            (q, do, dq), q_base = launch.rows(p.Tq, a, q=arrays.q, do=arrays.do, dq=grads.dq)
            (k, v, dk, dv), k_base = launch.keys(c, dk=partial.dk, dv=partial.dv)
            where = {"first_batch": a.b0, "q_base": q_base, "k_base": k_base}
            tiles = launch.tiles(a, p.Tq, part.n_tiles)
            uniform = launch.uniform(lists.numbers, **where, **tiles, k_lo=c.t0, k_hi=c.t1)
            bindings = [q, k, v, do, stats, dq, words, uniform, *bias_of(arrays), *slopes]
            grid = (p.Hq, tiles["tile_count"] * lists.numbers["n_classes"], a.b1 - a.b0)
            launch.add("dq", of_dq | {"first": n == 0 and c.t0 == 0}, bindings, grid)
            tiles = launch.tiles(c, p.Tk, lists.numbers["t_tiles"])
            rows = p.B * p.Tk * p.Hk
            uniform = launch.uniform(lists.numbers, **where, **tiles, q_lo=a.t0, q_hi=a.t1, rows=rows)
            bindings = [q, k, v, do, stats, dk, dv, words, uniform, *bias_of(arrays)]
            grid = (p.Hq if spread else p.Hk, tiles["tile_count"] * lists.numbers["n_classes"], a.b1 - a.b0)
            launch.add("dkdv", of_dkdv, bindings, grid)
        if spread:
            for parts, sums, D in ((partial.dk, grads.dk, p.D), (partial.dv, grads.dv, p.Dv)):
                _gather(launch, parts, sums, p.B * p.Tk * p.Hk * vectors(D))
        shape, of_keys = p.scores.bias, (p.B, p.Hq, 1, p.Tk)
        for sums, of in ((grads.dbias, shape), (grads.dkeys, of_keys)):
            if sums is not None and of is not None:
                _bias_gradient(launch, part, of, (words, lists), [stats, sums])
        if grads.ddistances is not None:
            _distances_gradient(launch, (words, lists), [stats, grads.ddistances])


def _spread(launch: AttentionLaunch, groups: int) -> bool:
    p = launch.problem
    largest = p.B * p.Tk * p.Hq * vectors(max(p.D, p.Dv)) * 16
    return p.G > 1 and groups < FEW and largest <= min(MOST, int(launch.gpu.limits[BINDING]))


def _partial(launch: AttentionLaunch, grads: GradientBuffers) -> GradientBuffers:
    """The same buffers, but with separate key gradients for each head of a group."""
    p = launch.problem
    partial = [launch.gpu.buffer(p.B * p.Tk * p.Hq * vectors(D) * 16) for D in (p.D, p.Dv)]
    launch.owned += partial
    return grads._replace(dk=partial[0], dv=partial[1])


def _gather(launch: AttentionLaunch, parts: Buffer, sums: Buffer, n: int) -> None:
    uniform = launch.uniform({"n_tiles": 0}, rows=n)
    launch.add("gather", {"kind": launch.arrays.kind}, [parts, sums, uniform], line(-(-n // 64)))


def _bias_gradient(
    launch: AttentionLaunch, part: Part, shape: tuple[int, ...], of_part: tuple[Buffer, Encoded], rows: list[Buffer]
) -> None:
    # rows: the buffers of the statistics and of the gradient, which has this shape
    p, arrays, tile, (words, lists) = launch.problem, launch.arrays, launch.shape(), of_part
    own = shape[2] > 1 or p.Tq == 1
    owners = {"rows_own": own, "each_b": shape[0] > 1, "each_h": shape[1] > 1}
    constants = launch.options(lists.forms, **owners, fine=True) | tile._asdict()
    tiles = -(-int(part.nk.max()) // (4 * tile.CG))
    uniform = launch.uniform(lists.numbers, tile_count=tiles)
    grid = (tiles * lists.numbers["n_classes"], part.n_tiles if own else 1, shape[0] * shape[1])
    bindings = [arrays.q, arrays.k, arrays.v, arrays.do, *rows, words, uniform, *bias_of(arrays)]
    launch.add("dbias", constants, bindings, grid)


def _distances_gradient(launch: AttentionLaunch, of_part: tuple[Buffer, Encoded], rows: list[Buffer]) -> None:
    p, arrays, (words, lists) = launch.problem, launch.arrays, of_part
    assert p.scores.relative is not None
    each = p.scores.relative[0] > 1
    constants = launch.options(lists.forms, each_b=each, fine=True) | launch.shape()._asdict()
    bindings = [arrays.q, arrays.k, arrays.v, arrays.do, *rows, words, launch.uniform(lists.numbers), *bias_of(arrays)]
    launch.add("distances", constants, bindings, (-(-lists.numbers["distances_row"] // 64), p.Hq, p.B if each else 1))
