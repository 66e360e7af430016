"""The kernels that the library uses: their texts by shape and options, and the launches of one call.

__init__.py manages arrays, plan.py decides which keys a tile visits, and gradients.py adds the steps of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

from ...errors import Unsupported
from ...plan import Part, Plan
from ...problem import Problem
from .. import Extras, plan_encoding
from ..plan_encoding import TERMS, Encoded, Form
from .codes import rows_of
from .device import Gpu
from .memory import Buffer
from .shapes import ROWS, Span, Tile, combine_shape, decode_shape, shape, spans, vectors
from .step import Step
from .texts import BINDING, MEMORY, render


class AttentionBuffers(NamedTuple):
    """Buffers of a call: q, k, v and do with rows padded to vectors and stored as `kind` says; the others are float32.

    k and v may also be codes, in rows with the layout of codes.py.
    """

    kind: str
    q: Buffer
    k: Buffer
    v: Buffer
    bias: Buffer = None
    do: Buffer = None


def options(problem: Problem, forms: tuple[Form, ...], kind: str, **more: Any) -> dict[str, Any]:
    """The constants of a kernel's text, except its shape."""
    one = len(forms) == 1 and forms[0].one_band
    uses = problem.scores.uses
    masks = {"masks": () if one else forms, "one_band": one}
    scores = {name: name in uses for name in TERMS}
    scores["plain"] = uses <= {"sinks", "dropout"}
    return {"kind": kind, **masks, **scores, "fine": False, "paged": False, "codes": rows_of(problem), **more}


@lru_cache(maxsize=512)
def _text(template: str, items: tuple[tuple[str, Any], ...]) -> str:
    return render(template, **dict(items))


def text(template: str, constants: dict[str, Any]) -> str:
    """The kernel's text; equal constants are rendered once."""
    return _text(template, tuple(sorted(constants.items())))


class AttentionLaunch:
    """The steps of one call on one device, in order."""

    def __init__(self, gpu: Gpu, problem: Problem, plan: Plan, arrays: AttentionBuffers, extras: Extras):
        self.gpu, self.problem, self.plan, self.arrays, self.extras = gpu, problem, plan, arrays, extras
        self.steps: list[Step] = []
        self.owned: list[Buffer] = []
        self.encoded: dict[tuple[int, bool], tuple[Buffer, Encoded]] = {}
        self.memory = int(gpu.limits[MEMORY])
        size = 4 if arrays.kind == "f32" else 2
        p = problem
        self.widths = {"q": p.Hq * vectors(p.D) * 4 * size, "do": p.Hq * vectors(p.Dv) * 4 * size}
        self.widths |= {"k": p.Hk * vectors(p.D) * 4 * size, "v": p.Hk * vectors(p.Dv) * 4 * size}
        if codes := rows_of(p):
            self.widths |= {"k": p.Hk * codes.k.size * 4, "v": p.Hk * codes.v.size * 4}
        self.widths |= {"o": p.Hq * vectors(p.Dv) * 16, "dq": p.Hq * vectors(p.D) * 16}
        self.widths |= {"dk": p.Hk * vectors(p.D) * 16, "dv": p.Hk * vectors(p.Dv) * 16}
        self.paged = extras.block_table is not None

    def options(self, forms: tuple[Form, ...], **more: Any) -> dict[str, Any]:
        """`options` of this call."""
        return options(self.problem, forms, self.arrays.kind, paged=self.paged) | more

    def shape(self) -> Tile:
        """The tile of this call's kernels."""
        return shape(self.problem.D, self.problem.Dv, self.memory, self.gpu.software)

    def lists(self, part: Part, transposed: bool = False) -> tuple[Buffer, Encoded]:
        """The words of a part on the device."""
        key = id(part), transposed
        if key not in self.encoded:
            mine = plan_encoding.with_call(plan_encoding.of_part(part, ROWS, transposed), self.problem, self.extras)
            self.encoded[key] = self.gpu.upload(mine.words), mine
            self.owned.append(self.encoded[key][0])
        return self.encoded[key]

    def add(
        self, template: str, constants: dict[str, Any], bindings: Sequence[Any], grid: tuple[int, int, int]
    ) -> None:
        """Add one dispatch, unless its grid is empty."""
        if all(grid):
            kernel = self.gpu.kernel(text(template, constants), template)
            self.steps.append(Step(kernel, bindings, grid))

    def rows(self, T: int, span: Span, **buffers: Buffer) -> tuple[list[Any], int]:
        """Bindings of a span of the named arrays [B, T, ...], and the row of [B * T] at which all of them start."""
        first, last = span.b0 * T + span.t0, (span.b1 - 1) * T + span.t1
        unit = 256 // gcd(256, *(self.widths[name] for name in buffers))
        base = first // unit * unit
        widths = [self.widths[name] for name in buffers]
        if (base, last) == (0, self.problem.B * T):
            # a buffer may be longer than its array, and then longer than a binding
            limit = int(self.gpu.limits[BINDING])
            each = zip(buffers.values(), widths, strict=True)
            return [x if x.size <= limit else (x, 0, max(last * w, 16)) for x, w in each], 0
        return [(x, base * w, (last - base) * w) for x, w in zip(buffers.values(), widths, strict=True)], base

    def keys(self, span: Span, **gradients: Buffer) -> tuple[list[Any], int]:
        """`rows` for k, v and their gradients; pages are bound whole, because a span's keys may be in any of them."""
        of_keys = {"k": self.arrays.k, "v": self.arrays.v}
        if not self.paged:
            return self.rows(self.problem.Tk, span, **of_keys, **gradients)
        bound, base = self.rows(self.problem.Tk, span, **gradients) if gradients else ([], 0)
        return [*of_keys.values(), *bound], base

    def pieces(
        self, queries: Sequence[str], keys: Sequence[str], part: Part, multiple: int = ROWS
    ) -> Iterator[tuple[Span, Span]]:
        """Pairs (query rows, key rows) of spans that fit bindings; for each span of queries, keys are in order."""
        p, limit = self.problem, int(self.gpu.limits[BINDING])
        of_q = spans(limit, p.B, p.Tq, max(self.widths[n] for n in queries))
        of_k = [Span(0, p.B, 0, p.Tk)]
        if mine := [n for n in keys if not (self.paged and n in ("k", "v"))]:
            of_k = spans(limit, p.B, p.Tk, max(self.widths[n] for n in mine), multiple)
        if len(of_q) == len(of_k) == 1:
            yield of_q[0], of_k[0]
            return
        if part.step > 1:
            reason = f"strided masks need each array in one binding, which holds {limit} bytes here: split the batch"
            raise Unsupported("webgpu", [reason])
        for b in range(p.B):
            mine = [[s._replace(b0=b, b1=b + 1) for s in each if s.b0 <= b < s.b1] for each in (of_q, of_k)]
            for a in mine[0]:
                for c in mine[1]:
                    yield a, c

    def tiles(self, span: Span, T: int, n_tiles: int) -> dict[str, int]:
        """The tiles of a part that are in a span."""
        if (span.t0, span.t1) == (0, T):
            return {"first_tile": 0, "tile_count": n_tiles}
        return {"first_tile": span.t0 // ROWS, "tile_count": -(-(span.t1 - span.t0) // ROWS)}

    def uniform(self, numbers: dict[str, int], **more: int) -> Buffer:
        """The uniform block of one dispatch."""
        return self.gpu.uniform(plan_encoding.dims(self.problem, numbers, self.extras, **more).tobytes())


def forward(launch: AttentionLaunch, o: Buffer, lse: Buffer) -> None:
    """Add steps that compute o and lse."""
    p, arrays = launch.problem, launch.arrays
    launches = [(x, pair) for x in launch.plan.parts for pair in launch.pieces(("q", "o"), ("k", "v"), x)]
    last_of = {(pair[0].b0, pair[0].t0): n for n, (_, pair) in enumerate(launches)}
    seen: set[tuple[int, int]] = set()
    for n, (part, (a, c)) in enumerate(launches):
        words, lists = launch.lists(part)
        key = (a.b0, a.t0)
        sinks = p.scores.sinks and last_of[key] == n
        constants = launch.options(lists.forms, merge=key in seen, sinks=sinks) | launch.shape()._asdict()
        seen.add(key)
        (q, out), q_base = launch.rows(p.Tq, a, q=arrays.q, o=o)
        keys, k_base = launch.keys(c)
        tiles = launch.tiles(a, p.Tq, part.n_tiles)
        where = {"k_lo": c.t0, "k_hi": c.t1, "first_batch": a.b0, "q_base": q_base, "k_base": k_base}
        uniform = launch.uniform(lists.numbers, **tiles, **where)
        grid = (p.Hq, tiles["tile_count"] * lists.numbers["n_classes"], a.b1 - a.b0)
        launch.add("forward", constants, [q, *keys, out, lse, words, uniform, *bias_of(arrays)], grid)


def bias_of(arrays: AttentionBuffers) -> list[Buffer]:
    return [] if arrays.bias is None else [arrays.bias]


# the options of kernels that compute no scores
NO_SCORES = {"plain": True, **dict.fromkeys(TERMS, False)}


def decode(launch: AttentionLaunch, o: Buffer, lse: Buffer) -> None:
    """Add the steps of the split decode and its combine."""
    p, plan, arrays = launch.problem, launch.plan, launch.arrays
    words, lists = launch.lists(plan.parts[0])
    # loading words is faster than loading halves, and the bytes are the same
    kind = "f32" if arrays.kind == "f32" else "packed"
    of_keys = "codes" if p.quantised else kind
    tile = decode_shape(p.D, p.Dv, p.G * p.Tq, of_keys, launch.gpu.shuffle, launch.gpu.software)
    constants = launch.options(lists.forms, kind=kind) | tile
    rows, chunks = p.G * p.Tq, plan.num_splits
    partial = launch.gpu.buffer(p.B * p.Hk * rows * chunks * (tile["DV4"] + 1) * 16)
    launch.owned.append(partial)
    more = {"chunks": chunks, "chunk_keys": plan.split_keys}
    groups = -(-rows // tile["R"])
    for a, c in launch.pieces(("q", "o"), ("k", "v"), plan.parts[0], plan.split_keys):
        (q,), q_base = launch.rows(p.Tq, a, q=arrays.q)
        keys, k_base = launch.keys(c)
        # the ranges in this piece; no range ends inside another piece
        mine = {"first_tile": c.t0 // plan.split_keys, "tile_count": -(-(c.t1 - c.t0) // plan.split_keys)}
        where = {"k_lo": c.t0, "k_hi": c.t1, "first_batch": a.b0, "q_base": q_base, "k_base": k_base}
        uniform = launch.uniform(lists.numbers, **more, **where, **mine)
        bindings = [q, *keys, partial, words, uniform, *bias_of(arrays)]
        launch.add("decode", constants, bindings, (groups * p.Hk, mine["tile_count"], a.b1 - a.b0))
    ending = launch.options(lists.forms, sinks=p.scores.sinks) | combine_shape(p.Dv) | NO_SCORES
    columns = ending["LANES"]
    uniform = launch.uniform(lists.numbers, **more)
    launch.add("combine", ending, [partial, o, lse, words, uniform], (rows * -(-tile["DV4"] // columns), p.Hk, p.B))
