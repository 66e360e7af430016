"""What `saccade explain --device m3` prints: tiles, threadgroup memory, registers by hand count, and an estimate."""

from __future__ import annotations

from typing import NamedTuple

from ...plan import make_plan
from ...problem import Problem
from .gradients import SUMS
from .shapes import LARGEST_HEAD, MEMORY, RESIDENT, Shape, shape
from .texts import TYPES
from .tiled import limits, splits

# devices of the cost model that these kernels are for
CHIPS = ("m3", "m3-max")


class Estimate(NamedTuple):
    """One launch by count, not measured: operations of products, bytes that threadgroups load and store."""

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
    if problem.quantised:
        reasons.append("keys and values are codes, which the Metal kernels do not read: keep them as numbers")
    return reasons


def explain(problem: Problem) -> dict[str, str]:
    """The kernels of a problem on an Apple GPU, or why none computes it."""
    if lacks := unsupported(problem):
        return {"not computed": "; ".join(lacks)}
    p, plan = problem, make_plan(problem, limits())
    size = _size(p)
    forward, backward = shape(p.D, p.Dv, size), shape(p.D, p.Dv, size, backward=True)
    more = _both(p, backward)
    together = "together" if more else "one after the other, for registers"
    found = {
        "kernels": "Metal through MLX; emulated, not yet run on a Mac",
        "forward": _told(forward),
        "backward": f"{_told(backward, more)}; dK and dV {together}",
    }
    if splits(p, plan):
        rows = shape(p.D, p.Dv, size, rows=p.G * p.Tq).BR
        ranges = f"{plan.num_splits} ranges of {plan.split_keys} keys side by side, then folded"
        found["decode"] = f"{p.G * p.Tq} rows of a group in tiles of {rows}, {ranges}"
    for e in estimates(p):
        found[f"estimate, {e.name}"] = f"{e.flops:.3g} flop, {e.bytes:.3g} bytes loaded and stored"
    if p.mask is None or str(p.mask) in ("full()", "causal()"):
        found["beside it"] = "saccade.integrations.mlx hands plain and causal attention to MLX's own kernel"
    return found


def _size(p: Problem) -> int:
    return 4 if p.dtype == "float32" else 2


def _both(p: Problem, s: Shape) -> int:
    # registers that dV takes beside dK, where one launch makes both
    return 2 * min(s.DP, s.DVP) // 8 if 2 * (p.D + p.Dv) // 8 <= SUMS else 0


def _told(s: Shape, more: int = 0) -> str:
    threads = f"{s.BR // 8} SIMD-group{'s' if s.BR > 8 else ''} of 8 rows"
    why = f"{s.resident} fit {MEMORY} at once" if s.resident >= RESIDENT else "one at a time"
    memory = f"{s.bytes} bytes of threadgroup memory ({why})"
    return f"tiles of {s.BR} × {s.BC}, {threads}, {memory}, {s.registers + more} registers of sums"


def estimates(problem: Problem) -> list[Estimate]:
    """Forward, dQ, and dK with dV: every visited pair is multiplied once a product, every tile loads its other side."""
    p, size = problem, _size(problem)
    plan = make_plan(p, limits())
    pairs = plan.visited_pairs
    found: list[Estimate] = []
    rows, keys = p.B * p.Tq * p.Hq, p.B * p.Tk * p.Hk
    for name, back, products in (("forward", False, 2), ("dq", True, 3), ("dk and dv", True, 4)):
        s = shape(p.D, p.Dv, size, back)
        flops = pairs * products * (p.D + p.Dv)
        # a tile of BR rows reads D and Dv numbers of each row opposite once a product
        loaded = pairs // s.BR * (p.D + p.Dv) * size * products // 2
        stored = {"forward": rows * p.Dv, "dq": rows * p.D}.get(name, keys * (p.D + p.Dv)) * size
        more = _both(p, s) if name == "dk and dv" else 0
        found.append(Estimate(name, flops, loaded + rows * p.D * size + stored, s.bytes, s.registers + more))
    return found
