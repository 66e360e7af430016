"""The output of `saccade explain --device m3`: tiles, threadgroup memory, registers counted by hand, an estimate."""

from __future__ import annotations

from typing import NamedTuple

from ...plan import Plan, make_plan
from ...problem import Problem
from ...recurrent.problem import Matrix
from ..plan_encoding import splits
from . import recurrent as linear
from .gradients import SUMS
from .shapes import LARGEST_HEAD, MEMORY, RESIDENT, Tile, shape
from .single_head import ROWS
from .texts import TYPES
from .tiled import limits


class Estimate(NamedTuple):
    """One launch, estimated by counting the operations of products and the bytes that threadgroups load and store."""

    name: str
    flops: int
    bytes: int
    threadgroup_bytes: int
    registers: int


def unsupported(problem: Problem) -> list[str]:
    """Reasons that hold on every Apple GPU."""
    reasons: list[str] = []
    if problem.dtype not in TYPES:
        reasons.append(f"{problem.dtype} is not computed on Metal: cast to float32, float16 or bfloat16")
    if max(problem.D, problem.Dv) > LARGEST_HEAD:
        reasons.append(f"head sizes are D = {problem.D} and Dv = {problem.Dv}: at most {LARGEST_HEAD}")
    return reasons


def explain(problem: Problem, plan: Plan) -> tuple[Plan, dict[str, str]]:
    """The plan, and the kernels of a problem on an Apple GPU."""
    p, size = problem, _size(problem)
    forward, backward = shape(p.D, p.Dv, size), shape(p.D, p.Dv, size, backward=True)
    more = _both(p, backward)
    together = "together" if more else "one after the other, to save registers"
    kernels = {
        "kernels": "Metal through MLX; emulated, not yet run on a Mac",
        "forward": _tiles(forward),
        "backward": f"{_tiles(backward, more)}; dK and dV {together}",
    }
    if splits(p, plan):
        rows = shape(p.D, p.Dv, size, rows=p.G * p.Tq).BR
        ranges = f"{plan.num_splits} ranges of {plan.split_keys} keys in parallel, then merged"
        kernels["decode"] = f"{p.G * p.Tq} rows of a group in tiles of {rows}, {ranges}"
    for e in estimates(p):
        kernels[f"estimate, {e.name}"] = f"{e.flops:.3g} flop, {e.bytes:.3g} bytes loaded and stored"
    if p.mask is None or str(p.mask) in ("full()", "causal()"):
        kernels["alternative"] = "saccade.integrations.mlx hands plain and causal attention to MLX's own kernel"
    return plan, kernels


def _size(p: Problem | Matrix) -> int:
    return 4 if p.dtype == "float32" else 2


def _both(p: Problem, s: Tile) -> int:
    # registers for the sums of dV if one launch computes both dK and dV, otherwise 0
    return 2 * min(s.DP, s.DVP) // 8 if 2 * (p.D + p.Dv) // 8 <= SUMS else 0


def _tiles(s: Tile, more: int = 0) -> str:
    threads = f"{s.BR // 8} SIMD-group{'s' if s.BR > 8 else ''} of 8 rows"
    why = f"{s.resident} fit {MEMORY} at once" if s.resident >= RESIDENT else "one at a time"
    memory = f"{s.bytes} bytes of threadgroup memory ({why})"
    return f"tiles of {s.BR} × {s.BC}, {threads}, {memory}, {s.registers + more} registers of sums"


def estimates(problem: Problem) -> list[Estimate]:
    """Every launch of a forward pass or a split decode, and of a backward pass.

    Each product covers every visited pair; a tile of BR rows loads D and Dv numbers of each row of the other side.
    """
    p, size, plan = problem, _size(problem), make_plan(problem, limits())
    pairs, rows, keys = plan.visited_pairs, p.B * p.Tq * p.Hq, p.B * p.Tk * p.Hk
    width = p.D + p.Dv
    split = splits(p, plan)
    launches: list[Estimate] = []
    for name, back, products in (("forward", False, 2), ("dq", True, 3), ("dk and dv", True, 4)):
        packed = p.G * p.Tq if split and not back else 0
        s = shape(p.D, p.Dv, size, back, packed)
        # the queries of a group share a packed tile
        loaded = pairs // (min(s.BR, packed) or s.BR) * width * size * products // 2
        stored = {"forward": rows * p.Dv, "dq": rows * p.D}.get(name, keys * width) * size
        if packed:
            stored = plan.num_splits * rows * (p.Dv + 1) * 4
        more = _both(p, s) if name == "dk and dv" else 0
        moved = loaded + rows * p.D * size + stored
        launches.append(Estimate(name, pairs * products * width, moved, s.bytes, s.registers + more))
    if split:
        chunks = plan.num_splits * rows
        launches.insert(1, Estimate("combine", 2 * chunks * p.Dv, chunks * (p.Dv + 1) * 4 + rows * p.Dv * size, 0, 4))
    launches.insert(-2, Estimate("delta", 2 * rows * p.Dv, rows * (2 * p.Dv * size + 20), 0, 5))
    if p.few_pairs:
        launches.insert(-2, Estimate("restate", 24 * rows, 40 * rows, 0, 5))
    if p.scores.bias:
        # each thread loads its rows itself
        launches.append(Estimate("bias gradient", 2 * pairs * width, 2 * pairs * width * size, 0, 10))
    return launches


def estimates_of_linear(problem: Matrix) -> list[Estimate]:
    """`estimates` for linear attention: the states of chunks, the outputs, then the same for the gradients."""
    p, size = problem, _size(problem)
    tokens, slots = p.B * p.T * p.H, p.B * -(-p.T // linear.shape(p.T, p.K, p.V, False).C) if p.causal else p.N
    state = slots * p.H * p.K * p.columns * 4
    s = linear.shape(p.T, p.K, p.columns, True)
    blocks = -(-p.columns // s.VC) * p.K + -(-p.K // s.KB) * p.V
    states = Estimate("states", 2 * tokens * p.K * p.columns, tokens * blocks * size + state, s.bytes, s.registers)
    launches = [states]
    of_values, of_keys = (p.K, p.V, p.V), (p.columns, p.K, p.K)
    sizes = {"o": of_values, "dq": of_keys, "dk": of_keys, "dv": of_values}
    for name, (depth, columns, opposite) in sizes.items():
        s = linear.shape(p.T, depth, columns, False)
        passes = -(-columns // s.VC)
        # pairs within a chunk, then the state
        flops = 2 * tokens * (passes * s.C * depth + s.C * columns) * p.causal + 2 * tokens * depth * columns
        moved = tokens * (passes * 2 * depth + opposite + columns) * size + state
        launches.append(Estimate(name, flops, moved, s.bytes, s.registers))
    rows = [
        Estimate("o in float32", *launches[1][1:]),
        Estimate("row sums", 2 * tokens * p.V, tokens * (p.V * (size + 4) + 12), 0, 5),
    ]
    return [*launches[:2], *(rows if p.normalize else []), Estimate("states of gradients", *states[1:]), *launches[2:]]


def estimate_of_single_head(Tq: int, Tk: int, D: int, dtype: str) -> Estimate:
    """`single_head`: four queries share each row of k and v, which the threadgroup stores in float32."""
    size = 4 if dtype == "float32" else 2
    moved = (-(-Tq // ROWS) * Tk * 2 * D + 2 * Tq * D) * size
    return Estimate("single head", 4 * Tq * Tk * D, moved, 2 * 4 * D, 2 * -(-D // 32) + 4)
