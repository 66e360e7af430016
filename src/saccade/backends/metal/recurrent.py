"""Linear attention on Apple GPUs: lays out the arrays of a recurrence over matrix states and launches its kernels.

Inputs are NumPy arrays (bfloat16 as uint16), MLX arrays or torch tensors on MPS; results are the same kind.
`chunk` is ignored: a chunk has as many tokens as a tile has rows, 8 to 32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...recurrent.family import check_borders
from ...recurrent.problem import MAPS, Matrix
from .device import like, misplaced, on_host, runtime, zeros
from .interface import Output
from .texts import TYPES, kernel

TAKES = {"initial_state", "cu_seqlens", "feature_map", "normalize", "causal"}
LARGEST = 1024
# the most rows, depth and columns of a float32 tile
TILE = 32
# for each output, the role of the rows that take the place of q
PLACES = {"o": 0, "k": 2, "v": 1, "q": 3}
Int32 = NDArray[np.int32]


def unsupported(problem: Matrix) -> list[str]:
    """Reasons why this problem cannot run here."""
    p, reasons = problem, misplaced(problem.device)
    if p.dtype not in TYPES:
        reasons.append(f"{p.dtype} is not computed on Metal: cast to float32, float16 or bfloat16")
    if p.feature_map == "taylor":
        reasons.append("the Taylor map is computed only on the CPU: move the arrays there, or use another map")
    if max(p.K, p.V) > LARGEST:
        reasons.append(f"a state has {p.K} rows and {p.V} columns: at most {LARGEST} of each")
    return reasons


class ChunkTile(NamedTuple):
    """C: tokens per chunk; KB, DC, VC: a tile's rows, depth and columns; bytes per threadgroup; sums per lane."""

    C: int
    KB: int
    DC: int
    VC: int
    bytes: int
    registers: int


def shape(T: int, rows: int, columns: int, states: bool) -> ChunkTile:
    """The tiles of a launch: its owners have states of `rows` by `columns`, or `columns` sums over `rows` numbers."""
    C, R, VC = (min(TILE, -(-max(n, 1) // 8) * 8) for n in (T, rows, columns))
    if states:
        floats = C * R + C * VC + 8 * R
    else:
        floats = C * R + C * max(R, VC) + max(R * VC, C * C) + C + C // 8
    # each array is aligned to 16 bytes
    return ChunkTile(C, R, R, VC, 4 * floats + 64, 2 * (2 * VC // 8 if states else VC // 8 + C // 8))


@lru_cache(maxsize=64)
def chunks(B: int, T: int, C: int, borders: tuple[int, ...] | None) -> tuple[Int32, int]:
    """(words, offset of the sequences' table). The words are the batch entry, first token, length and sequence of each
    chunk, then the first chunk and the number of chunks of each sequence.
    """
    first = np.zeros(B, np.int64) if borders is None else np.array(borders[:-1])
    stop = np.full(B, T) if borders is None else np.array(borders[1:])
    counts = -(-(stop - first) // C)
    starts = np.cumsum(counts) - counts
    n = np.repeat(np.arange(len(counts)), counts)
    at = first[n] + C * (np.arange(len(n)) - starts[n])
    entry = n if borders is None else np.zeros_like(n)
    table = np.stack([entry, at, np.minimum(C, stop[n] - at), n], 1)
    words = np.concatenate([table.reshape(-1), np.stack([starts, counts], 1).reshape(-1)])
    return words.astype(np.int32), table.size


class LinearLaunch:
    """One call: its arrays, and its launches."""

    def __init__(self, p: Matrix, arrays: Mapping[str, Any]) -> None:
        self.p, self.here = p, runtime(arrays["q"])
        self.arrays = {name: self.here.array(arrays[name], p.dtype) for name in ("q", "k", "v")}
        initial, cu = arrays["initial_state"], on_host(arrays["cu_seqlens"])
        self.initial = None if initial is None else self.here.array(initial, "float32")
        borders = None if cu is None else tuple(check_borders(cu, p.T).tolist())
        self.C = shape(p.T, p.K, p.V, False).C
        words, o_sequences = chunks(p.B, p.T, self.C, borders)
        self.slots = o_sequences // 4
        numbers = np.array([p.T, p.H, p.Hk, o_sequences, 0, 0, 0, 0], np.int32)
        numbers.view(np.float32)[4] = p.scale
        # "dout" is replaced if there is a dO; until then q is bound, because every input needs an array of its type
        self.common = {
            "dout": self.arrays["q"],
            "numbers": self.here.array(numbers, "int32"),
            "side": self.here.array(words, "int32"),
        }
        self.nothing = self.here.array(np.zeros(8, np.float32), "float32")

    def run(
        self,
        name: str,
        constants: dict[str, object],
        inputs: dict[str, Any],
        outputs: dict[str, Output],
        grid: tuple[int, int, int],
        threads: int,
    ) -> dict[str, Any]:
        """One launch; inputs left out are bound to an unused array."""
        program = kernel(name, {"T": self.p.dtype, **constants})
        arrays = {**self.arrays, **self.common, **inputs}
        bound = {n: self.nothing if arrays.get(n) is None else arrays[n] for n in program.inputs}
        wanted = {n: outputs.get(n, Output((8,), "float32")) for n in program.outputs}
        return self.here.run(program, bound, wanted, grid, (threads, 1, 1))

    def constants(self, tile: ChunkTile, threads: int) -> dict[str, object]:
        """The constants that both kernels need."""
        p = self.p
        options: dict[str, object] = {"K": p.K, "V": p.V, "NORMALIZE": p.normalize, "CAUSAL": p.causal}
        options |= {"MAP": (*("",), *MAPS).index(p.feature_map), "C": tile.C, "BC": tile.C, "VC": tile.VC}
        return options | {"THREADS": threads, "SIMDGROUPS": threads // 32}

    def states(self, more: dict[str, Any], initial: Any, backward: bool, keep: bool) -> tuple[Any, Any]:
        """(states before each chunk, last state) [.., H, K, columns]; backward: gradients after each, and the first."""
        p, tile = self.p, shape(self.p.T, self.p.K, self.p.columns, True)
        constants = self.constants(tile, 4 * tile.KB) | {"U": "float32", "KB": tile.KB}
        constants |= {"BACKWARD": backward, "INITIAL": initial is not None, "KEEP": keep}
        outputs = {"last": Output((p.N, p.H, p.K, p.columns), "float32")}
        if keep:
            outputs["kept"] = Output((self.slots, p.H, p.K, p.columns), "float32")
        blocks = -(-p.K // tile.KB) * -(-p.columns // tile.VC)
        inputs, grid = {**more, "initial": initial}, (p.H * 4 * tile.KB, blocks, p.N)
        results = self.run("linear_states", constants, inputs, outputs, grid, 4 * tile.KB)
        return results["kept"] if keep else results["last"], results["last"]

    def outputs(
        self, name: str, states: Any, dtype: str, more: dict[str, Any], totals: bool = False
    ) -> tuple[Any, Any]:
        """(o or the gradient with respect to `name`, φ(q) · z if `totals`)."""
        p, of_keys = self.p, name in ("q", "k")
        tile = shape(p.T, p.columns if of_keys else p.K, p.K if of_keys else p.V, False)
        heads, columns = (p.Hk, p.K) if of_keys else (p.H, p.V)
        constants = self.constants(tile, 4 * tile.C) | {"U": dtype, "DC": tile.DC, "LEFT": PLACES[name]}
        outputs = {"y": Output((p.B, p.T, heads, columns), dtype)}
        if totals:
            outputs["totals"] = Output((p.B, p.T, p.H), "float32")
        grid = heads * 4 * tile.C, self.slots, -(-columns // tile.VC)
        results = self.run(
            "linear_outputs", {**constants, "TOTALS": totals}, {**more, "states": states}, outputs, grid, 4 * tile.C
        )
        return results["y"], results["totals"]


def forward(problem: Matrix, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """(o [B, T, H, V], final state [N, H, K, columns])."""
    p = problem
    if not p.B * p.T * p.N:
        return _without_tokens(p, arrays)
    call = LinearLaunch(p, arrays)
    states, last = call.states({}, call.initial, False, p.causal)
    o, _ = call.outputs("o", states, p.out_dtype, {})
    return like(arrays["q"], call.here, o, last)


def backward(problem: Matrix, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]) -> dict[str, Any]:
    """Gradients of q, k, v and the initial state, in their dtypes."""
    p, (do, dlast), q = problem, cotangents, arrays["q"]
    if not p.B * p.T * p.N:
        gradients = {n: zeros(q, tuple(arrays[n].shape), p.dtype) for n in ("q", "k", "v")}
        dinitial = zeros(q, (p.N, p.H, p.K, p.columns), "float32") if dlast is None else dlast
        return {**gradients, "initial_state": dinitial}
    call = LinearLaunch(p, arrays)
    do = call.here.array(zeros(q, (p.B, p.T, p.H, p.V), p.dtype) if do is None else do, p.dtype)
    more: dict[str, Any] = {"dout": do}
    states, _ = call.states({}, call.initial, False, p.causal)
    if p.normalize:
        o, totals = call.outputs("o", states, "float32", {}, totals=True)
        stats = {"stats": Output((p.B, p.T, p.H, 2), "float32")}
        inputs = {"dout": do, "o": o, "totals": totals}
        more |= call.run("linear_delta", {"V": p.V}, inputs, stats, (p.B * p.T * p.H, 1, 1), 256)
    dlast = None if dlast is None else call.here.array(dlast, "float32")
    dstates, dinitial = call.states(more, dlast, True, p.causal)
    names = ("q", "k", "v")
    rows = [call.outputs(n, states if n == "q" else dstates, p.dtype, more)[0] for n in names]
    return dict(zip((*names, "initial_state"), like(q, call.here, *rows, dinitial), strict=True))


def _without_tokens(p: Matrix, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    initial, q = arrays["initial_state"], arrays["q"]
    final = zeros(q, (p.N, p.H, p.K, p.columns), "float32") if initial is None else initial
    return zeros(q, (p.B, p.T, p.H, p.V), p.out_dtype), final
