"""The launches of a backward pass: the statistics of rows, dQ, dK and dV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..plan_encoding import far_from_zero
from .interface import Output
from .tiled import LIST, AttentionLaunch, rows_shape

# numbers per lane for the sums of one launch; if dK and dV need more, two launches compute them
SUMS = 64


class Gradients(NamedTuple):
    """Arrays of the runtime; `slopes` has the partial sums [B * Hq, n] of each part."""

    dq: Any
    dk: Any
    dv: Any
    slopes: list[Any]


def statistics(launch: AttentionLaunch, o: Any, o_dtype: str, lse: Any, dlse: Any) -> Any:
    """[rows, 4]: lse in log2 units in two parts, Δ = rowsum(do * o) - dlse, and rowsum(do * o)."""
    p = launch.problem
    n = p.B * p.Tq * p.Hq
    constants = launch.constants(U=o_dtype, DLSE=dlse is not None)
    inputs = {"dout": launch.arrays.do, "o": o, "lse": lse, "dlse": dlse}
    stats = launch.run("delta", constants, inputs, {"stats": Output((n, 4), "float32")}, (n, 1, 1), 256)["stats"]
    if not p.few_pairs and not far_from_zero(p):
        return stats
    sums = None
    for part in launch.plan.parts:
        results = _gradients(launch, part, stats, {}, keys=False, sums=("SUMS", (n, 2)), before={"before_sums": sums})
        sums = results["sums"]
    words, at = launch.lists(launch.plan.parts[0], transposed=True)
    inputs = {"stats": stats, "sums": sums, "numbers": launch.numbers(at), "side": words}
    outputs = {"better": Output((n, 4), "float32")}
    constants = launch.constants(SINKS=p.scores.sinks, FAR=not p.few_pairs)
    return launch.run("restate", constants, inputs, outputs, (n, 1, 1), 256)["better"]


def backward(launch: AttentionLaunch, stats: Any, slopes_wanted: bool, out_dtype: str) -> Gradients:
    """dq, dk and dv in out_dtype; the parts of a plan are added in order, in float32."""
    p = launch.problem
    dq = dk = dv = None
    slopes: list[Any] = []
    both = 2 * (p.D + p.Dv) // 8 <= SUMS
    for part in launch.plan.parts:
        dtype = out_dtype if part is launch.plan.parts[-1] else "float32"
        sums = ("SLOPES", _slope_sums(launch, part)) if slopes_wanted else None
        results = _gradients(launch, part, stats, {"first": dtype}, keys=False, sums=sums, before={"before_first": dq})
        dq = results["first"]
        if sums:
            slopes.append(results["sums"])
        if both:
            before = {"before_first": dk, "before_second": dv}
            results = _gradients(launch, part, stats, {"first": dtype, "second": dtype}, keys=True, before=before)
            dk, dv = results["first"], results["second"]
        else:
            dk = _gradients(launch, part, stats, {"first": dtype}, keys=True, before={"before_first": dk})["first"]
            dv = _gradients(launch, part, stats, {"second": dtype}, keys=True, before={"before_second": dv})["second"]
    return Gradients(dq, dk, dv, slopes)


def _slope_sums(launch: AttentionLaunch, part: Any) -> tuple[int, ...]:
    p, tile = launch.problem, launch.shape(backward=True)
    tiles = part.n_tiles * (LIST // tile.BR) * len(part.nq)
    return (p.B * p.Hq, tiles * tile.BR // 8)


def _gradients(
    launch: AttentionLaunch,
    part: Any,
    stats: Any,
    dtypes: dict[str, str],
    *,
    keys: bool,
    sums: tuple[str, tuple[int, ...]] | None = None,
    before: dict[str, Any],
) -> dict[str, Any]:
    # One launch, which owns rows of queries or of keys. dtypes: those of the gradients to compute, "first" and
    # "second". sums: the flag and the shape of other sums. before: results of earlier parts, which the kernel adds.
    p, tile = launch.problem, launch.shape(backward=True)
    words, at = launch.lists(part, transposed=True)
    merge = any(x is not None for x in before.values())
    flags = {"KEYS": keys, "FIRST": "first" in dtypes, "SECOND": "second" in dtypes, "MERGE": merge}
    flags |= {"SUMS": False, "SLOPES": False}
    T, H = (p.Tk, p.Hk) if keys else (p.Tq, p.Hq)
    sizes = {"first": p.D, "second": p.Dv}
    outputs = {n: Output(rows_shape(p, launch.heads_first, T, H, sizes[n]), dtype) for n, dtype in dtypes.items()}
    if sums:
        flags[sums[0]] = True
        outputs["sums"] = Output(sums[1], "float32")
    # only with sums, because each value of a flag is another kernel to compile
    flags["FAR"] = flags["SUMS"] and not p.few_pairs
    constants = launch.constants(U=next(iter(dtypes.values()), "float32"), **flags, **tile.constants)
    arrays = launch.arrays._asdict()
    if keys:
        at = at | {"o_classes": at["o_key_classes"], "n_classes": at["key_classes"]}
    inputs = arrays | {"dout": arrays["do"], "stats": stats, "numbers": launch.numbers(at), "side": words, **before}
    threads = 4 * tile.BR
    lists = at["t_tiles"] if keys else at["n_tiles"]
    grid = (H * threads, lists * (LIST // tile.BR) * at["n_classes"], p.B)
    return launch.run("gradients", constants, inputs, outputs, grid, threads)


def bias_gradient(launch: AttentionLaunch, stats: Any, shape: Sequence[int], by_distance: bool = False) -> Any:
    """The gradient of a bias [1 | B, 1 | Hq, 1 | Tq, Tk], or of a bias by distance [1 | B, Hq, 1, n]."""
    entries, heads, rows, columns = shape
    sums = None
    flags = {"EACH_B": entries > 1, "EACH_H": heads > 1, "BY_DISTANCE": by_distance}
    for part in launch.plan.parts:
        words, at = launch.lists(part, transposed=True)
        arrays = launch.arrays._asdict()
        inputs = arrays | {"dout": arrays["do"], "stats": stats, "numbers": launch.numbers(at), "side": words}
        constants = launch.constants(MERGE=sums is not None, **flags)
        outputs = {"gradient": Output(tuple(shape), "float32")}
        grid = (columns, rows, entries * heads)
        sums = launch.run("bias_gradient", constants, {**inputs, "before": sums}, outputs, grid, 64)["gradient"]
    return sums
