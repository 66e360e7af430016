"""The launches of one call: constants, lists and arrays of the tiled kernels.

plan.py decides which keys a tile visits, and device.py which runtime launches a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...plan import Limits, Part, Plan, positions
from ...problem import Problem
from ...rope import angles
from .. import Extras, plan_encoding
from ..plan_encoding import TERMS, Form, Int32, Words
from .interface import LEAST, Output, Runtime
from .shapes import MEMORY, Tile, shape
from .texts import kernel

# rows that share a list of segments
LIST = 32
# work items that fill a large GPU, and the least number of keys per item
LANES, SPLIT_LEAST = 256, 128
# kinds of codes of keys and values, in the order of their numbers in the texts
CODES = ("", "int8", "fp8", "int4")


def limits() -> Limits:
    """Segment lists for 32 queries and 32 keys, and the threadgroup memory that every Apple GPU has."""
    return Limits("metal", LIST, LIST, MEMORY, lanes=LANES, split_least=SPLIT_LEAST)


class AttentionArrays(NamedTuple):
    """A call's q, k, v, do, bias and scales of codes as the runtime's arrays; None for those that it lacks."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    do: Any = None
    k_scales: Any = None
    v_scales: Any = None


class Rotation(NamedTuple):
    """Rotary positions by which the forward pass rotates q and k on load, in pairs (i, i + D/2) or (2i, 2i + 1)."""

    base: float = 10000.0
    interleaved: bool = False

    def table(self, problem: Problem) -> tuple[NDArray[np.float32], int]:
        """(cosine and sine [positions, D / 2, 2], computed in float64; the row of position 0)."""
        p, offset = problem, positions(problem)
        first, last = min(0, int(offset.min())), max(p.Tk, p.Tq + int(offset.max()))
        turn = angles(np.zeros(0, np.float32), np.arange(first, last), p.D, base=self.base)
        return np.stack([x[:, 0] for x in turn], -1), -first


def programs(forms: tuple[Form, ...]) -> Int32:
    """The element tests of a part's masks as words that kernels interpret.

    The first words say where each mask's program starts. A program has the start of the mask's record, the number of
    bands, and for each band its number of factors and then a code per factor: 8 times the factor's place in the record,
    plus 1 for a grid, 2 for inside, and 4 for an interval of rows for each key.
    """
    starts: list[int] = []
    words: list[int] = []
    for form in forms:
        starts.append(len(forms) + len(words))
        words += [form.record, len(form.bands)]
        for band in form.bands:
            codes = [f.place << 3 | f.of_keys << 2 | f.inside << 1 | f.grid for f in band.factors]
            words += [len(codes), *codes]
    return np.array([*starts, *words], np.int32)


def put_all_keys(words: Words, numbers: dict[str, int], part: Part, Tk: int) -> dict[str, int]:
    """Append classes and lists for launches that own keys. Every key is in a class, even if no query may see it,
    because the kernel must fill all of its gradient, which is a new array.

    numbers: those of the lists of key tiles in `words`.
    """
    seen = set((part.k_start[part.nk > 0] % part.step).tolist())
    left = [r for r in range(min(part.step, Tk)) if r not in seen]
    classes = np.stack([part.q_start, part.k_start, part.nq, part.nk], 1)
    more = np.array([[0, r, 0, -(-(Tk - r) // part.step)] for r in left], np.int32).reshape(-1, 4)
    cells, tiles = len(part.nq) * len(part.masks) * part.Bm, numbers["t_tiles"]
    lists = words.pieces[0][numbers["o_tptr"] :][: cells * tiles + 1]
    wanted = max(tiles, -(-int(max([0, *more[:, 3]])) // LIST))
    # the largest class may now have more tiles; each added tile is empty and starts where the next class starts
    empty = np.repeat(lists[tiles::tiles, None], wanted - tiles, 1)
    rest = np.full(len(left) * len(part.masks) * part.Bm * wanted + 1, lists[-1])
    lists = np.concatenate([lists[:-1].reshape(cells, tiles), empty], 1).reshape(-1)
    sizes = {"key_classes": len(classes) + len(left), "t_tiles": wanted}
    return sizes | {
        "o_key_classes": words.put(np.concatenate([classes, more])),
        "o_tptr": words.put(np.concatenate([lists, rest])),
    }


class AttentionLaunch:
    """One call on one runtime. heads_first: arrays are [B, H, T, n], else [B, T, H, n]."""

    def __init__(
        self,
        runtime: Runtime,
        problem: Problem,
        plan: Plan,
        arrays: AttentionArrays,
        extras: Extras,
        heads_first: bool = False,
        rotation: Rotation | None = None,
    ):
        self.turns, self.zero = None, 0
        self.rotation = rotation
        if rotation is not None:
            table, self.zero = rotation.table(problem)
            self.turns = runtime.array(table, "float32")
        self.runtime, self.problem, self.plan, self.arrays, self.extras = runtime, problem, plan, arrays, extras
        self.heads_first = heads_first
        self.size = 4 if problem.dtype == "float32" else 2
        self.nothing = {n: runtime.array(np.zeros(LEAST, n), n) for n in ("float32", "uint16")}
        self.encoded: dict[tuple[int, bool], tuple[Any, dict[str, int]]] = {}

    def shape(self, backward: bool = False, rows: int = 0) -> Tile:
        """The tiles of this call's kernels."""
        return shape(self.problem.D, self.problem.Dv, self.size, backward, rows)

    def constants(self, **more: object) -> dict[str, object]:
        """The constants that every kernel needs."""
        p = self.problem
        options = {name.upper(): name in p.uses for name in TERMS}
        rope = 0 if self.rotation is None else 2 if self.rotation.interleaved else 1
        how = p.quantised
        codes = {"CODES": CODES.index(how.kind if how else ""), "GROUP": how.group if how else 1}
        options |= {
            **codes,
            "S": "uint8" if how else p.dtype,
            "HEADS_FIRST": self.heads_first,
            "PACKED": False,
            "ROPE": rope,
        }
        return {"T": p.dtype, "D": p.D, "DV": p.Dv, "LIST": LIST, **options, **more}

    def lists(self, part: Part, transposed: bool = False) -> tuple[Any, dict[str, int]]:
        """The words of a part as an array, and where its tables start."""
        key = id(part), transposed
        if key not in self.encoded:
            mine = plan_encoding.with_call(plan_encoding.of_part(part, LIST, transposed), self.problem, self.extras)
            words = Words()
            words.put(mine.words)
            numbers = mine.numbers | {"o_programs": words.put(programs(mine.forms))}
            if self.rotation is not None:
                offset = positions(self.problem)
                numbers |= {"o_offset": words.put(offset), "offset_stride": int(len(offset) > 1), "q_base": self.zero}
            if transposed:
                numbers |= put_all_keys(words, numbers, part, self.problem.Tk)
            self.encoded[key] = self.runtime.array(words.joined(), "int32"), numbers
        return self.encoded[key]

    def numbers(self, at: dict[str, int], **more: int) -> Any:
        """The numbers of one launch in the layout of `struct Dims`."""
        return self.runtime.array(plan_encoding.dims(self.problem, at, self.extras, **more), "int32")

    def run(
        self,
        name: str,
        constants: dict[str, object],
        inputs: dict[str, Any],
        outputs: dict[str, Output],
        grid: tuple[int, int, int],
        threads: int,
    ) -> dict[str, Any]:
        """One launch on `grid` threads; omitted inputs are bound to an unused array, omitted outputs are dropped."""
        program = kernel(name, constants)
        bound = {n: inputs.get(n) for n in program.inputs}
        # an unused input must still have its type
        nothing = {n: self.nothing["uint16" if f"ushort* {n} " in program.text else "float32"] for n in program.inputs}
        bound = {n: nothing[n] if x is None else x for n, x in bound.items()}
        # an unused output must still have its type
        kinds = {n: str(constants["U"]) if f"device U* {n} " in program.text else "float32" for n in program.outputs}
        wanted = {n: outputs.get(n, Output((8,), kind)) for n, kind in kinds.items()}
        return self.runtime.run(program, bound, wanted, grid, (min(threads, grid[0]), 1, 1))


def rows_shape(p: Problem, heads_first: bool, T: int, H: int, *n: int) -> tuple[int, ...]:
    """The shape of an array of T rows and H heads."""
    return (p.B, H, T, *n) if heads_first else (p.B, T, H, *n)


def forward(launch: AttentionLaunch, out_dtype: str) -> tuple[Any, Any]:
    """(o, lse) of the runtime's kind; the parts of a plan are merged in order."""
    p, tile = launch.problem, launch.shape()
    o = lse = None
    for n, part in enumerate(launch.plan.parts):
        words, at = launch.lists(part)
        last = n == len(launch.plan.parts) - 1
        dtype = out_dtype if last else "float32"
        constants = launch.constants(U=dtype, MERGE=n > 0, SINKS=p.scores.sinks and last, **tile.constants)
        inputs = launch.arrays._asdict() | {
            "before_o": o,
            "before_lse": lse,
            "turns": launch.turns,
            "numbers": launch.numbers(at),
            "side": words,
        }
        outputs = {
            "o": Output(rows_shape(p, launch.heads_first, p.Tq, p.Hq, p.Dv), dtype),
            "lse": Output(rows_shape(p, launch.heads_first, p.Tq, p.Hq), "float32"),
        }
        tiles = at["n_tiles"] * (LIST // tile.BR) * at["n_classes"]
        threads = 4 * tile.BR
        results = launch.run("forward", constants, inputs, outputs, (p.Hq * threads, tiles, p.B), threads)
        o, lse = results["o"], results["lse"]
    return o, lse


def decode(launch: AttentionLaunch, out_dtype: str) -> tuple[Any, Any]:
    """`forward` for few queries: the heads of a group share a tile; chunks of keys run in parallel and are merged."""
    p, plan = launch.problem, launch.plan
    rows = p.G * p.Tq
    tile = launch.shape(rows=rows)
    words, at = launch.lists(plan.parts[0])
    constants = launch.constants(U="float32", MERGE=False, SINKS=False, **tile.constants) | {"PACKED": True}
    chunks = plan.num_splits
    numbers = launch.numbers(at, chunks=chunks, chunk_keys=plan.split_keys)
    of_rows = rows_shape(p, launch.heads_first, p.Tq, p.Hq)[1:]
    outputs = {
        "o": Output((p.B * chunks, *of_rows, p.Dv), "float32"),
        "lse": Output((p.B * chunks, *of_rows), "float32"),
    }
    inputs = launch.arrays._asdict() | {"turns": launch.turns, "numbers": numbers, "side": words}
    threads = 4 * tile.BR
    grid = (-(-rows // tile.BR) * p.Hk * threads, chunks, p.B)
    results = launch.run("forward", constants, inputs, outputs, grid, threads)
    inputs = {"partial_o": results["o"], "partial_lse": results["lse"], "numbers": numbers, "side": words}
    outputs = {
        "o": Output(rows_shape(p, launch.heads_first, p.Tq, p.Hq, p.Dv), out_dtype),
        "lse": Output(rows_shape(p, launch.heads_first, p.Tq, p.Hq), "float32"),
    }
    constants = launch.constants(U=out_dtype, SINKS=p.scores.sinks)
    results = launch.run("combine", constants, inputs, outputs, (p.Dv, p.Tq * p.Hq, p.B), 256)
    return results["o"], results["lse"]
