"""The kernels that the library uses (row S15): their texts by shape and options, and the launches of one call.

Not responsible for arrays (__init__.py makes and frees them), nor for which keys a tile visits (plan.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

from ...errors import Unsupported
from ...mask import causal, documents, strided, tiles
from ...plan import Limits, Part, Plan, make_plan
from ...problem import Problem
from .. import Extras
from . import side
from .device import Gpu, Step
from .memory import Buffer
from .shapes import PORTABLE_MEMORY, ROWS, Shape, Span, shape, spans, vectors
from .texts import MEMORY, render

BINDING = "max-storage-buffer-binding-size"


class Arrays(NamedTuple):
    """Buffers of a call. q, k, v, do: rows padded to vectors; the rest float32. kind: how the four are stored."""

    kind: str
    q: Buffer
    k: Buffer
    v: Buffer
    bias: Buffer = None
    do: Buffer = None


def options(problem: Problem, forms: tuple[side.Form, ...], kind: str, **more: Any) -> dict[str, Any]:
    """What the text of a kernel depends on beside its shape."""
    one = len(forms) == 1 and forms[0].one_band
    plain = not (problem.softcap or problem.bias or problem.alibi)
    return {
        "kind": kind, "masks": () if one else forms, "one_band": one, "plain": plain, "softcap": bool(problem.softcap),
        "bias": bool(problem.bias), "alibi": bool(problem.alibi), "dropout": bool(problem.dropout),
        "fine": False, **more,
    }  # fmt: skip


@lru_cache(maxsize=512)
def _text(template: str, items: tuple[tuple[str, Any], ...]) -> str:
    return render(template, **dict(items))


def text(template: str, constants: dict[str, Any]) -> str:
    """The kernel's text, rendered once for equal constants."""
    return _text(template, tuple(sorted(constants.items())))


class Launch:
    """The steps of one call on one device, in order."""

    def __init__(self, gpu: Gpu, problem: Problem, plan: Plan, arrays: Arrays, extras: Extras):
        self.gpu, self.problem, self.plan, self.arrays, self.extras = gpu, problem, plan, arrays, extras
        self.steps: list[Step] = []
        self.owned: list[Buffer] = []
        self.memory = int(gpu.limits[MEMORY])
        size = 4 if arrays.kind == "f32" else 2
        p = problem
        self.widths = {"q": p.Hq * vectors(p.D) * 4 * size, "do": p.Hq * vectors(p.Dv) * 4 * size}
        self.widths |= {"k": p.Hk * vectors(p.D) * 4 * size, "v": p.Hk * vectors(p.Dv) * 4 * size}
        self.widths |= {"o": p.Hq * vectors(p.Dv) * 16, "dq": p.Hq * vectors(p.D) * 16}
        self.widths |= {"dk": p.Hk * vectors(p.D) * 16, "dv": p.Hk * vectors(p.Dv) * 16}

    def shape(self) -> Shape:
        """The tile of this call's kernels."""
        return shape(self.problem.D, self.problem.Dv, self.memory, self.gpu.software)

    def side(self, part: Part, transposed: bool = False) -> tuple[Buffer, side.Side]:
        """The lists of a part on the device."""
        found = side.with_scores(side.of_part(part, ROWS, transposed), self.problem, self.extras)
        buffer = self.gpu.upload(found.words)
        self.owned.append(buffer)
        return buffer, found

    def add(
        self, template: str, constants: dict[str, Any], bindings: Sequence[Any], grid: tuple[int, int, int]
    ) -> None:
        """One dispatch, unless it is empty."""
        if all(grid):
            kernel = self.gpu.kernel(text(template, constants), template)
            self.steps.append(Step(kernel, bindings, grid))

    def rows(self, T: int, span: Span, **buffers: Buffer) -> tuple[list[Any], int]:
        """Bindings of a span of arrays [B, T, ...] by their names, and the row of [B * T] that all of them start at."""
        first, last = span.b0 * T + span.t0, (span.b1 - 1) * T + span.t1
        unit = 256 // gcd(256, *(self.widths[name] for name in buffers))
        base = first // unit * unit
        if (base, last) == (0, self.problem.B * T):
            return list(buffers.values()), 0
        widths = [self.widths[name] for name in buffers]
        return [(x, base * w, (last - base) * w) for x, w in zip(buffers.values(), widths, strict=True)], base

    def pieces(
        self, queries: Sequence[str], keys: Sequence[str], part: Part, multiple: int = ROWS
    ) -> Iterator[tuple[Span, Span]]:
        """Pairs of spans, of query rows and of key rows, that bindings can hold; keys ascend within a query span."""
        p, limit = self.problem, int(self.gpu.limits[BINDING])
        of_q = spans(limit, p.B, p.Tq, max(self.widths[n] for n in queries))
        of_k = spans(limit, p.B, p.Tk, max(self.widths[n] for n in keys), multiple)
        if len(of_q) == len(of_k) == 1:
            yield of_q[0], of_k[0]
            return
        if part.step > 1:
            reason = f"strided masks want each array in one binding, which holds {limit} bytes here: split the batch"
            raise Unsupported("webgpu", [reason])
        for b in range(p.B):
            mine = [[s._replace(b0=b, b1=b + 1) for s in found if s.b0 <= b < s.b1] for found in (of_q, of_k)]
            for a in mine[0]:
                for c in mine[1]:
                    yield a, c

    def tiles(self, span: Span, T: int, n_tiles: int) -> dict[str, int]:
        """Which tiles of a part lie in a span."""
        if (span.t0, span.t1) == (0, T):
            return {"first_tile": 0, "tile_count": n_tiles}
        return {"first_tile": span.t0 // ROWS, "tile_count": -(-(span.t1 - span.t0) // ROWS)}

    def uniform(self, at: dict[str, int], **more: int) -> Buffer:
        """The numbers of one dispatch."""
        return self.gpu.uniform(side.dims(self.problem, at, self.extras, **more))


def forward(launch: Launch, o: Buffer, lse: Buffer) -> None:
    """Steps that fill o and lse."""
    p, arrays = launch.problem, launch.arrays
    launches = [(x, pair) for x in launch.plan.parts for pair in launch.pieces(("q", "o"), ("k", "v"), x)]
    last_of = {(pair[0].b0, pair[0].t0): n for n, (_, pair) in enumerate(launches)}
    seen: set[tuple[int, int]] = set()
    sides = {id(part): launch.side(part) for part in launch.plan.parts}
    for n, (part, (a, c)) in enumerate(launches):
        words, found = sides[id(part)]
        key = (a.b0, a.t0)
        sinks = p.sinks and last_of[key] == n
        made = options(p, found.forms, arrays.kind, merge=key in seen, sinks=sinks)
        constants = {**made, **launch.shape()._asdict()}
        seen.add(key)
        (q, out), q_base = launch.rows(p.Tq, a, q=arrays.q, o=o)
        keys, k_base = launch.rows(p.Tk, c, k=arrays.k, v=arrays.v)
        tiles = launch.tiles(a, p.Tq, part.n_tiles)
        where = {"k_lo": c.t0, "k_hi": c.t1, "first_batch": a.b0, "q_base": q_base, "k_base": k_base}
        uniform = launch.uniform(found.at, **tiles, **where)
        grid = (tiles["tile_count"] * found.at["classes"], p.Hq, a.b1 - a.b0)
        launch.add("forward", constants, [q, *keys, out, lse, words, uniform, *_bias(arrays)], grid)


def _bias(arrays: Arrays) -> list[Buffer]:
    return [] if arrays.bias is None else [arrays.bias]


# invocations a workgroup of the split decode
WG = 256
# of kernels that compute no scores
_NO_SCORES = {"plain": True, "softcap": False, "bias": False, "alibi": False, "dropout": False}


def decode_shape(p: Problem, kind: str, shuffle: int, software: bool) -> dict[str, int]:
    """Constants of the split decode: R rows a workgroup, PER invocations a key for scores, LANES a key for values.

    shuffle: invocations in a row that exchange numbers without workgroup memory (`Gpu.shuffle`).
    """
    D4, DV4 = vectors(p.D), vectors(p.Dv)
    eights = kind == "packed" and D4 % 2 == DV4 % 2 == 0
    DU, DVU = (D4 // 2, DV4 // 2) if eights else (D4, DV4)
    lanes = next(n for n in (4, 8, 16) if n >= (max(DU, DVU) if shuffle > 1 else DVU) or n == 16)
    if shuffle > 1:
        lanes = min(lanes, shuffle)
        per, loads = lanes, -(-max(DU, DVU) // lanes)
        keys = WG // lanes * max(1, (2 if software else 8) // loads)
    else:
        keys, per = {4: (256, 2), 8: (128, 4), 16: (128 if DVU <= 32 else 64, 4)}[lanes]
    sizes = {"WG": WG, "KEYS": keys, "PER": per, "LANES": lanes, "SETS": WG // lanes, "EACH": keys * lanes // WG}
    sizes |= {"OWN": keys * per // WG, "NK": -(-DU // per), "NV": -(-DVU // lanes), "D4": D4, "DV4": DV4}
    rows = next(r for r in (1, 2, 4) if r >= min(2 if software else 4, p.G * p.Tq))
    return sizes | {"R": rows, "rolled": software, "shuffle": shuffle > 1, "eights": eights}


def combine_shape(p: Problem) -> dict[str, int]:
    """Constants of the combine: LANES invocations a range."""
    return {"DV4": vectors(p.Dv), "LANES": max(4, 1 << (vectors(p.Dv) - 1).bit_length())}


def splits(p: Problem, plan: Plan) -> bool:
    """Whether the split decode computes this; its kernel drops no weights."""
    return plan.split_keys > 0 and not p.dropout


def decode(launch: Launch, o: Buffer, lse: Buffer) -> None:
    """Steps of the split decode and its combine."""
    p, plan, arrays = launch.problem, launch.plan, launch.arrays
    words, found = launch.side(plan.parts[0])
    # words arrive faster than halves, and the bytes are the same
    kind = "f32" if arrays.kind == "f32" else "packed"
    made = decode_shape(p, kind, launch.gpu.shuffle, launch.gpu.software)
    constants = options(p, found.forms, kind) | made
    rows, chunks = p.G * p.Tq, plan.num_splits
    partial = launch.gpu.buffer(p.B * p.Hk * rows * chunks * (made["DV4"] + 1) * 16)
    launch.owned.append(partial)
    more = {"chunks": chunks, "chunk_keys": plan.split_keys}
    groups = -(-rows // made["R"])
    for a, c in launch.pieces(("q", "o"), ("k", "v"), plan.parts[0], plan.split_keys):
        (q,), q_base = launch.rows(p.Tq, a, q=arrays.q)
        (k, v), k_base = launch.rows(p.Tk, c, k=arrays.k, v=arrays.v)
        # of all ranges those in this piece: none ends in the middle of one
        mine = {"first_tile": c.t0 // plan.split_keys, "tile_count": -(-(c.t1 - c.t0) // plan.split_keys)}
        where = {"k_lo": c.t0, "k_hi": c.t1, "first_batch": a.b0, "q_base": q_base, "k_base": k_base}
        uniform = launch.uniform(found.at, **more, **where, **mine)
        bindings = [q, k, v, partial, words, uniform, *_bias(arrays)]
        launch.add("decode", constants, bindings, (groups * p.Hk, mine["tile_count"], a.b1 - a.b0))
    ending = options(p, found.forms, arrays.kind, sinks=p.sinks) | combine_shape(p) | _NO_SCORES
    uniform = launch.uniform(found.at, **more)
    launch.add("combine", ending, [partial, o, lse, words, uniform], (rows, p.Hk, p.B))


class Gradients(NamedTuple):
    """Buffers, all zero, that a backward adds into; dslopes one a part."""

    dq: Buffer
    dk: Buffer
    dv: Buffer
    dbias: Buffer = None
    dslopes: Sequence[Buffer] = ()


def delta(launch: Launch, o: Buffer, lse: Buffer, dlse: Buffer, stats: Buffer) -> None:
    """stats [B, Tq, Hq, 2]: (lse log2 e, rowsum(do * o) - dlse)."""
    p, arrays = launch.problem, launch.arrays
    constants = options(p, (), arrays.kind, dlse=dlse is not None) | {"DV4": vectors(p.Dv)}
    limit = int(launch.gpu.limits[BINDING])
    for span in spans(limit, p.B, p.Tq, max(launch.widths["do"], launch.widths["o"])):
        (do, mine), base = launch.rows(p.Tq, span, do=arrays.do, o=o)
        first, last = ((b * p.Tq + t) * p.Hq for b, t in ((span.b0, span.t0), (span.b1 - 1, span.t1)))
        uniform = launch.uniform({"n_tiles": 0}, q_lo=first, q_hi=last, q_base=base)
        groups = -(-(last - first) // 64)
        bindings = [do, mine, lse, stats, uniform, *([] if dlse is None else [dlse])]
        launch.add("delta", constants, bindings, (min(groups, 32768), -(-groups // 32768), 1))


def backward(launch: Launch, stats: Buffer, grads: Gradients) -> None:
    """Steps that add every gradient."""
    p, arrays = launch.problem, launch.arrays
    for n, part in enumerate(launch.plan.parts):
        words, found = launch.side(part, transposed=True)
        slopes = [grads.dslopes[n]] if grads.dslopes else []
        of_dq = options(p, found.forms, arrays.kind, slopes_grad=bool(slopes), fine=True)
        of_dq |= launch.shape()._asdict()
        of_dkdv = options(p, found.forms, arrays.kind, fine=True) | launch.shape()._asdict()
        for a, c in launch.pieces(("q", "do", "dq"), ("k", "v", "dk", "dv"), part):
            (q, do, dq), q_base = launch.rows(p.Tq, a, q=arrays.q, do=arrays.do, dq=grads.dq)
            (k, v, dk, dv), k_base = launch.rows(p.Tk, c, k=arrays.k, v=arrays.v, dk=grads.dk, dv=grads.dv)
            where = {"first_batch": a.b0, "q_base": q_base, "k_base": k_base}
            tiles = launch.tiles(a, p.Tq, part.n_tiles)
            uniform = launch.uniform(found.at, **where, **tiles, k_lo=c.t0, k_hi=c.t1)
            bindings = [q, k, v, do, stats, dq, words, uniform, *_bias(arrays), *slopes]
            grid = (tiles["tile_count"] * found.at["classes"], p.Hq, a.b1 - a.b0)
            launch.add("dq", of_dq, bindings, grid)
            tiles = launch.tiles(c, p.Tk, found.at["t_tiles"])
            uniform = launch.uniform(found.at, **where, **tiles, q_lo=a.t0, q_hi=a.t1)
            bindings = [q, k, v, do, stats, dk, dv, words, uniform, *_bias(arrays)]
            grid = (tiles["tile_count"] * found.at["classes"], p.Hk, a.b1 - a.b0)
            launch.add("dkdv", of_dkdv, bindings, grid)
        if grads.dbias is not None:
            _bias_gradient(launch, part, words, found, stats, grads.dbias)


def _bias_gradient(launch: Launch, part: Part, words: Buffer, found: side.Side, stats: Buffer, dbias: Buffer) -> None:
    p, arrays, tile = launch.problem, launch.arrays, launch.shape()
    assert p.bias is not None
    own = p.bias[2] > 1 or p.Tq == 1
    constants = options(p, found.forms, arrays.kind, rows_own=own, fine=True) | tile._asdict()
    tiles = -(-int(part.nk.max()) // (4 * tile.CG))
    uniform = launch.uniform(found.at, tile_count=tiles)
    grid = (tiles * found.at["classes"], part.n_tiles if own else 1, p.bias[0] * p.bias[1])
    bindings = [arrays.q, arrays.k, arrays.v, arrays.do, stats, dbias, words, uniform, arrays.bias]
    launch.add("dbias", constants, bindings, grid)


def catalogue() -> dict[str, str]:
    """Texts of every kernel for two tiles and the options that change them most, by name."""
    problems = {
        "causal": Problem(1, 100, 100, 4, 2, 64, 64, mask=causal()),
        "wide": Problem(1, 100, 100, 4, 2, 256, 256),
        "scores": Problem(2, 20, 20, 4, 2, 40, 24, mask=causal() | documents(cu_seqlens=[0, 7, 20]), softcap=2.0,
                          sinks=True, bias=(2, 4, 20, 20), dropout=0.5),
        "slopes": Problem(2, 20, 20, 4, 2, 64, 128, mask=strided(3) | tiles([[True]], 32), alibi=(1, 4)),
    }  # fmt: skip
    found: dict[str, str] = {}
    for name, problem in problems.items():
        plan = make_plan(problem, Limits("webgpu", ROWS, ROWS))
        forms = side.of_part(plan.parts[0], ROWS, False).forms
        for memory in (PORTABLE_MEMORY, 2 * PORTABLE_MEMORY):
            made = options(problem, forms, "packed" if name == "wide" else "f32")
            for template, more in _texts(problem, memory, made["kind"]).items():
                head = "enable subgroups;\n" if more.get("shuffle") else ""
                found[f"{template}, {name}, {memory} bytes"] = head + text(template.partition(" ")[0], made | more)
    return found


def _texts(p: Problem, memory: int, kind: str) -> dict[str, dict[str, Any]]:
    one = shape(p.D, p.Dv, memory, False)._asdict()
    slopes = {"slopes_grad": p.alibi is not None, "fine": True}
    found: dict[str, dict[str, Any]] = {
        "forward": one | {"merge": True, "sinks": p.sinks}, "dq": one | slopes, "dkdv": one | {"fine": True},
        "delta": {"DV4": vectors(p.Dv), "dlse": True}, "decode": decode_shape(p, kind, 1, False),
        "decode by shuffles": decode_shape(p, kind, 16, False),
        "combine": combine_shape(p) | {"sinks": p.sinks} | _NO_SCORES,
    }  # fmt: skip
    return found | ({"dbias": one | {"rows_own": True, "fine": True}} if p.bias else {})
