"""`saccade explain`: the plan and the cost of a shape, a mask and a device."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade import cost

from . import show

if TYPE_CHECKING:
    from saccade.counting import Count
    from saccade.plan import Plan
    from saccade.problem import Problem

# the documented WGSL backward kernel for short sequences refuses longer ones
SHORT = 1024
# of the sequence over ranks, unless another is given
LAYOUT = "zigzag"


def explain(
    q: Annotated[str, typer.Option(help="Shape of q, BxTqxHqxD, e.g. 1x4096x32x128.")],
    kv_heads: Annotated[int, typer.Option(help="Key and value heads; 0 for as many as q has.")] = 0,
    keys: Annotated[int, typer.Option(help="Number of keys; 0 for as many as queries.")] = 0,
    v_dim: Annotated[int, typer.Option(help="Head size of values; 0 for that of q.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(cost.DTYPE_BYTES)}.")] = "bfloat16",
    mask: Annotated[str, typer.Option(help='A mask, e.g. "causal & window(1023, 0)"; empty for none.')] = "",
    device: Annotated[str, typer.Option(help=f"cpu for this machine, or one of {', '.join(cost.DEVICES)}.")] = "cpu",
    model: Annotated[str, typer.Option(help=f"Also print the size of the KV cache of {', '.join(cost.MODELS)}.")] = "",
    batch: Annotated[int, typer.Option(help="Number of sequences in that KV cache.")] = 1,
    ranks: Annotated[int, typer.Option(help="Also estimate the cost of dividing the work among this many ranks.")] = 0,
    layout: Annotated[
        str, typer.Option(help="Layout of the sequence over ranks: zigzag, contiguous or striped.")
    ] = LAYOUT,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the mask, the size of the score matrix and the roofline in this file.")
    ] = None,
    json: show.Json = False,
) -> None:
    """Print the plan (tiles, share skipped) and the cost (flops, bytes, bound) of a shape, a mask and a device."""
    from saccade.backends.places import planned
    from saccade.counting import costs, count

    show.at_least(0, kv_heads=kv_heads, keys=keys, v_dim=v_dim, ranks=ranks)
    show.at_least(1, batch=batch)
    show.picture(plot)
    if batch != 1 and not model:
        show.fail(f"--batch is {batch}, the sequences in the KV cache of --model, which is not given; give both")
    try:
        problem = describe(q, kv_heads, keys, v_dim, dtype, mask)
        machine = rates(device, problem)
        plan, kernels = planned(device, problem)
        preset = replace(cost.MODELS[model], dtype=problem.dtype) if model else None
        shared = strategies(problem, ranks, layout, device)
    except KeyError:
        show.fail(f"--model is {model!r}; expected one of {', '.join(cost.MODELS)}")
    except (ValueError, TypeError) as error:
        show.fail(error)
    counted = count(plan, problem.B, problem.Tq, problem.Tk)
    works = costs(problem, counted)
    verdicts = [cost.roofline(work, machine) for work in works]
    if plot:
        from saccade.plot.costs import costs as draw

        with show.plain_errors("explain"):
            draw(verdicts, machine, plot, mask=problem.mask, queries=problem.Tq, keys=problem.Tk, batch=problem.B)
        typer.echo(f"drawn in {plot}", err=True)
    data = report(problem, plan, counted, verdicts, machine)
    if machine.tile_memory:
        data["tile"] = tile(problem, plan, machine)
    if device == "webgpu":
        data["adapter"] = entry().get("adapter", {})
    data |= {"kernels": kernels} if kernels else {}
    if shared:
        data["ranks"] = {"number": ranks, **shared}
    if preset is not None:
        data["cache"] = {"model": preset.name, **caches(preset, problem.Tk, batch, machine)}
    if json:
        show.document(data)
    else:
        _print(problem, plan, counted, verdicts, data)


def describe(q: str, kv_heads: int, keys: int, v_dim: int, dtype: str, mask: str) -> Problem:
    """The problem that the options describe; raises ValueError for arguments that a call refuses."""
    from saccade.mask import parse
    from saccade.operands import Request, Spec
    from saccade.problem import describe as check

    sizes = [size.strip() for size in q.lower().split("x")]
    # longer numbers exceed every limit
    if len(sizes) != 4 or not all(size.isdecimal() and len(size) < 16 for size in sizes):
        raise ValueError(f"--q is {q[:80]!r}; expected four integers BxTqxHqxD, e.g. 1x4096x32x128")
    B, Tq, Hq, D = map(int, sizes)
    if dtype not in cost.DTYPE_BYTES:
        raise ValueError(f"--dtype is {dtype!r}; expected one of {', '.join(cost.DTYPE_BYTES)}")
    Tk, Hk = keys or Tq, kv_heads or Hq
    name = "cpu"
    spec_q, spec_k = Spec((B, Tq, Hq, D), dtype, name), Spec((B, Tk, Hk, D), dtype, name)
    spec_v = replace_last(spec_k, v_dim or D)
    problem = check(spec_q, spec_k, spec_v, Request(parse(mask) if mask.strip() else None))
    if problem.mask is not None:
        problem.mask.check(B, Tq, Tk, Hq)
    if problem.selection is not None:
        raise ValueError("--mask has select(...), whose lists are in no plan; give the rest of the mask, without it")
    return problem


def replace_last(spec: Any, size: int) -> Any:
    """The spec with another last dimension."""
    return spec._replace(shape=(*spec.shape[:-1], size))


def rates(name: str, problem: Problem) -> cost.Device:
    """The rates of a device; those of this machine's CPU are measured when this is called."""
    from saccade import backends

    if name != "cpu":
        return cost.device(name)
    core: Any = backends.load("cpu")
    flops = {dtype: core.probe_flops(dtype) for dtype in dict.fromkeys(("float32", problem.dtype))}
    return cost.Device("cpu", flops, core.probe_stream(), source=f"this machine, {core.isa()}, probed now")


def tile(problem: Problem, plan: Plan, machine: cost.Device) -> dict[str, int]:
    """The memory that a tile of the plan takes, the memory of a core, and how many tiles fit at once."""
    from saccade.backends.places import PLACES
    from saccade.tile_sizes import tile_bytes

    size = cost.item_bytes(problem.dtype)
    shared = PLACES[machine.name][0] == "metal"
    taken = tile_bytes(plan.tile_q, plan.tile_k, problem.D, problem.Dv, size, shared_kv=shared)
    return {"bytes": taken, "budget": machine.tile_memory, "resident": machine.tile_memory // taken}


@cache
def entry() -> dict[str, Any]:
    """The entry of `saccade devices` for WebGPU."""
    from .devices import backends

    return backends(("webgpu",))[0]


def strategies(problem: Problem, ranks: int, layout: str, device: str) -> dict[str, str]:
    """The cost of each way to divide the work among ranks; the choice of `strategy="auto"` comes first.

    Empty for 0 ranks. Raises ValueError for an unknown layout, for one without ranks, for too many ranks, and as
    `summary`.
    """
    from saccade.distributed.layout import NAMED
    from saccade.distributed.strategy import summary

    if layout not in NAMED:
        raise ValueError(f"--layout is {layout!r}; expected one of {', '.join(NAMED)}")
    if layout != LAYOUT and not ranks:
        raise ValueError(f"--layout is {layout!r}, that of --ranks, which is not given; give both")
    try:
        return summary(problem, ranks, layout, device) if ranks else {}
    except MemoryError:
        raise ValueError(f"there is too little memory to compare the layouts of --ranks {ranks}; give fewer") from None


def report(
    problem: Problem, plan: Plan, counted: Count, verdicts: list[cost.Verdict], machine: cost.Device
) -> dict[str, Any]:
    """The document that `--json` writes."""
    p = problem
    data: dict[str, Any] = {
        "problem": {**asdict(replace(p, mask=None)), "mask": None if p.mask is None else str(p.mask)},
        "plan": str(plan),
        "tile_q": plan.tile_q,
        "tile_k": plan.tile_k,
        "parts": len(plan.parts),
        "count": {**asdict(counted), "skipped": counted.skipped},
        "device": machine.name,
        "work": [
            {**asdict(v.work), "intensity": v.work.intensity, "ridge": v.ridge, "bound": v.bound, "seconds": v.seconds}
            for v in verdicts
        ],
        "tile_traffic_bytes": counted.keys_read * (p.D + p.Dv) * cost.item_bytes(p.dtype),
        "score_matrix_bytes": p.B * cost.score_matrix_bytes(p.Tq, p.Tk, dtype=p.dtype, heads=p.Hq),
        "naive_traffic_bytes": p.B * cost.naive_traffic(p.Tq, p.Tk, dtype=p.dtype, heads=p.Hq),
    }
    if machine.name == "webgpu":
        data["scratch_bytes"] = cost.scratch_bytes(p.Tq, p.Hq)
        data["scratch_max_heads"] = cost.scratch_max_heads(p.Tq)
        data["scratch_refused"] = p.Tq > SHORT
    return data


def caches(model: cost.Model, tokens: int, batch: int, machine: cost.Device) -> dict[str, Any]:
    """The model's KV cache: bytes per token, sequence and batch, seconds to read it once, and other groupings."""
    one = model.cache_bytes(tokens)
    return {
        "token_bytes": model.cache_bytes(),
        "sequence_bytes": one,
        "batch": batch,
        "batch_bytes": model.cache_bytes(tokens, batch),
        "read_seconds": one / machine.bandwidth,
        "fits": model.cache_bytes(tokens, batch) <= machine.memory if machine.memory else None,
        "dtype": model.dtype,
        "mha_bytes": model.cache_bytes(tokens, kv_heads=model.heads),
        "mqa_bytes": model.cache_bytes(tokens, kv_heads=1),
    }


def _print(problem: Problem, plan: Plan, counted: Count, verdicts: list[cost.Verdict], data: dict[str, Any]) -> None:
    p, total = problem, data["count"]["pairs"]
    shapes = f"q [{p.B}, {p.Tq}, {p.Hq}, {p.D}]  k [{p.B}, {p.Tk}, {p.Hk}, {p.D}]  v [{p.B}, {p.Tk}, {p.Hk}, {p.Dv}]"
    tiles = counted.full + counted.partial
    at_most = "" if counted.exact else "at most "
    show.pairs("problem", {"shapes": f"{shapes}  {p.dtype}", "mask": "none" if p.mask is None else p.mask})
    typer.secho("plan", bold=True)
    for line in str(plan).splitlines():
        typer.echo(f"  {line}")
    rows: dict[str, object] = {
        "tiles": f"{plan.tile_q} queries × {plan.tile_k} keys: {tiles:,} of {counted.tiles:,} visited, "
        f"{counted.full:,} full, {counted.partial:,} partial",
        **({} if p.mask is None else {"skipped": f"{counted.skipped:.1%} of the pairs are in no visited tile"}),
        "pairs": f"{at_most}{counted.allowed:,} allowed of {total:,}, {_share(counted.allowed, total)}; "
        f"visited / allowed {counted.visited / counted.allowed if counted.allowed else 0:.3f}",
    }
    if "tile" in data:
        t = data["tile"]
        rows["memory"] = f"{cost.size(t['bytes'])} per tile, of {cost.size(t['budget'])}: {t['resident']} fit at once"
    show.pairs("tiles", rows)
    for v in verdicts:
        show.pairs(f"{v.work.kind} on {v.device}", _verdict(v))
    matrix = (
        f"{cost.size(data['score_matrix_bytes'])}; unfused attention moves {cost.size(data['naive_traffic_bytes'])}"
    )
    rows = {"score matrix": f"{matrix} for it", "tile traffic": f"{cost.size(data['tile_traffic_bytes'])} of k and v"}
    if "scratch_bytes" in data:
        refused = f" (refused above T = {SHORT}: the streaming backward runs)" if data["scratch_refused"] else ""
        limit = f"; a 128 MiB binding holds {data['scratch_max_heads']} heads"
        rows["scratch"] = f"short backward: {cost.size(data['scratch_bytes'])}{limit}{refused}"
    show.pairs("memory", rows)
    if data.get("adapter"):
        from .devices import one_line

        show.pairs("webgpu here", {"adapter": one_line(data["adapter"])})
    if "kernels" in data:
        show.pairs(f"kernels on {data['device']}", data["kernels"])
    if "ranks" in data:
        number = data["ranks"].pop("number")
        show.pairs(f"forward and backward on {number} ranks, by a model", data["ranks"])
    if "cache" in data:
        _print_cache(data["cache"])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _verdict(v: cost.Verdict) -> dict[str, object]:
    return {
        "flops": f"{v.work.flops / 1e9:,.4g} GFLOP",
        "bytes": f"{cost.size(v.work.bytes)}, each array once, without unseen keys",
        "intensity": f"{v.work.intensity:.4g} flop per byte, ridge {v.ridge:.1f}",
        "bound": f"{v.bound}-bound: at least {cost.duration(v.seconds)}, {v.flops_per_second / 1e12:.4g} TFLOP/s",
    }


def _print_cache(c: dict[str, Any]) -> None:
    fits = {True: "fits", False: "does not fit", None: "memory unknown"}[c["fits"]]
    rows = {
        "per token": cost.size(c["token_bytes"]),
        "per sequence": f"{cost.size(c['sequence_bytes'])}, read once in {cost.duration(c['read_seconds'])}",
        f"batch {c['batch']}": f"{cost.size(c['batch_bytes'])}: {fits}",
        "a kv head per head": f"{cost.size(c['mha_bytes'])} per sequence",
        "one kv head": f"{cost.size(c['mqa_bytes'])} per sequence",
    }
    show.pairs(f"KV cache of {c['model']} in {c['dtype']}", rows)
