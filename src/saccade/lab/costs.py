"""Views of the cost model: the roofline of a shape on a device, and key-value caches of models."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any

from .. import cost
from ..counting import costs, count
from ..mask import parse
from ..plan import Limits, make_plan
from .query import Query, chosen, heads_of, mask_of, problem_of, whole

LONGEST = 1 << 17


def roofline(query: Query) -> dict[str, Any]:
    """The roof of a device, and the points of prefill, decode, the backward pass and unfused attention under it.

    roof: three points (flop per byte, flop/s). works: kind, flops, bytes, intensity, bound, seconds, rate.
    """
    machine = cost.device(chosen(query, "device", list(cost.DEVICES)))
    dtype = chosen(query, "dtype", ["bfloat16", "float16", "float32", "float64"])
    B, T = whole(query, "batch", 1, 1, 256), whole(query, "t", 4096, 1, LONGEST)
    (Hq, Hk), D = heads_of(query, 32, 8), whole(query, "d", 128, 1, 1024)
    mask = mask_of(query)
    prefill, decode = (cost.Shape(B, Tq, T, Hq, Hk, D, D, dtype) for Tq in (T, 1))
    works = [*_works(str(mask), prefill), *_works(str(mask), decode)[:1], cost.naive(prefill)]
    verdicts = [cost.roofline(work, machine) for work in works]
    ridge = machine.ridge(dtype)
    ends = [
        min(0.1, *(0.5 * v.work.intensity for v in verdicts)),
        ridge,
        max(64 * ridge, *(2 * w.intensity for w in works)),
    ]
    return {
        "device": machine.name,
        "source": machine.source,
        "peak": machine.peak(dtype),
        "bandwidth": machine.bandwidth,
        "ridge": ridge,
        "roof": [(x, min(machine.peak(dtype), x * machine.bandwidth)) for x in ends],
        "works": [
            asdict(v.work)
            | {"intensity": v.work.intensity, "bound": v.bound, "seconds": v.seconds, "rate": v.flops_per_second}
            | {"time": cost.duration(v.seconds), "moved": cost.size(v.work.bytes)}
            for v in verdicts
        ],
        "scores": cost.size(B * cost.score_matrix_bytes(T, dtype=dtype, heads=Hq)),
    }


@lru_cache(maxsize=256)
def _works(text: str, shape: cost.Shape) -> list[cost.Work]:
    # counted once for all devices
    problem = problem_of(parse(text), shape)
    return costs(problem, count(make_plan(problem, Limits("lab")), shape.B, shape.Tq, shape.Tk))


def caches(query: Query) -> dict[str, Any]:
    """Bytes of a model's key-value cache for one, several and all query heads per kv head; its own for every preset.

    A model with a latent cache has a fourth grouping, "MLA".
    """
    model = cost.MODELS[chosen(query, "model", list(cost.MODELS))]
    machine = cost.device(chosen(query, "device", list(cost.DEVICES)))
    tokens, batch = whole(query, "tokens", 4096, 1, 1 << 24), whole(query, "batch", 64, 1, 1 << 16)
    groupings: dict[str, int | None] = {"MHA": model.heads, "GQA": model.kv_heads, "MQA": 1}
    own = None if model.latent else model.kv_heads
    if model.kv_heads in (model.heads, 1):
        # a model without groups is shown with eight kv heads, as most models have now
        groupings["GQA"] = next(n for n in (8, 6, 4, 2, 1) if model.heads % n == 0)
    if model.latent:
        groupings["MLA"] = None
    return {
        "model": asdict(model),
        "device": machine.name,
        "memory": machine.memory,
        "memory_text": cost.size(machine.memory),
        "projections": model.projections(),
        "tokens": tokens,
        "batch": batch,
        "groupings": [
            _grouping(model, machine, name, n, tokens, batch) | {"own": n == own} for name, n in groupings.items()
        ],
        "models": [
            {"name": m.name, "heads": m.heads, "layers": m.layers}
            | _grouping(m, machine, "own", None if m.latent else m.kv_heads, tokens, batch)
            for m in cost.MODELS.values()
        ],
    }


def _grouping(
    model: cost.Model, machine: cost.Device, name: str, kv_heads: int | None, tokens: int, batch: int
) -> dict[str, Any]:
    token, one = model.cache_bytes(kv_heads=kv_heads), model.cache_bytes(tokens, kv_heads=kv_heads)
    everything = model.cache_bytes(tokens, batch, kv_heads=kv_heads)
    return {
        "grouping": name,
        "kv_heads": kv_heads,
        "smaller": model.numbers(model.heads) / model.numbers(kv_heads),
        "token": cost.size(token),
        "sequence": cost.size(one),
        "bytes": everything,
        "all": cost.size(everything),
        "read": cost.duration(one / machine.bandwidth),
        "fits": everything <= machine.memory,
        "most_tokens": model.most_tokens(machine.memory, batch, kv_heads=kv_heads),
    }
