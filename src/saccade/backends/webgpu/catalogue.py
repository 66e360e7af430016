"""Generated kernels by name, for a second compiler: the tiled ones for two tiles and the options that matter most."""

from __future__ import annotations

from typing import Any

from ...mask import causal, documents, strided, tiles
from ...plan import Limits, make_plan
from ...problem import Problem
from . import documented, side, tiled
from .shapes import PORTABLE_MEMORY, ROWS, combine_shape, decode_shape, shape, vectors


def catalogue() -> dict[str, str]:
    """Every generated kernel, complete WGSL for a browser, by name."""
    return documented.catalogue() | tiled_kernels()


def tiled_kernels() -> dict[str, str]:
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
            made = tiled.options(problem, forms, "packed" if name == "wide" else "f32")
            for template, more in _texts(problem, memory, made["kind"]).items():
                head = "enable subgroups;\n" if more.get("shuffle") else ""
                found[f"{template}, {name}, {memory} bytes"] = head + tiled.text(
                    template.partition(" ")[0], made | more
                )
    return found


def _texts(p: Problem, memory: int, kind: str) -> dict[str, dict[str, Any]]:
    one = shape(p.D, p.Dv, memory, False)._asdict()
    slopes = {"slopes_grad": p.alibi is not None, "fine": True}
    found: dict[str, dict[str, Any]] = {
        "forward": one | {"merge": True, "sinks": p.sinks}, "dq": one | slopes, "gather": {},
        "dkdv": one | {"fine": True, "spread": True},
        "delta": {"DV4": vectors(p.Dv), "dlse": True}, "decode": decode_shape(p.D, p.Dv, p.G * p.Tq, kind, 1, False),
        "decode by shuffles": decode_shape(p.D, p.Dv, p.G * p.Tq, kind, 16, False),
        "combine": combine_shape(p.Dv) | {"sinks": p.sinks} | tiled.NO_SCORES,
    }  # fmt: skip
    return found | ({"dbias": one | {"rows_own": True, "fine": True}} if p.bias else {})
