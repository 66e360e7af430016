"""Generated kernels by name, for a second compiler: the tiled ones for two tiles and the main options.

Kernels of recurrences do not depend on shapes; they are included with the options that change them most.
"""

from __future__ import annotations

from typing import Any

from ...mask import causal, documents, strided, tiles
from ...plan import Limits, make_plan
from ...problem import Problem, Scores
from ...quantised import Quantised
from .. import plan_encoding
from . import diagonal, documented, tiled
from .codes import encoder, rows_of
from .shapes import PORTABLE_MEMORY, ROWS, combine_shape, decode_shape, shape, vectors


def catalogue() -> dict[str, str]:
    """The complete WGSL of every generated kernel for a browser, by name."""
    return documented.catalogue() | tiled_kernels() | recurrent_kernels()


def tiled_kernels() -> dict[str, str]:
    """The texts, by name, of every tiled kernel for two tiles and the options that change it most."""
    problems = {
        "causal": Problem(1, 100, 100, 4, 2, 64, 64, mask=causal()),
        "wide": Problem(1, 100, 100, 4, 2, 512, 512),
        "scores": Problem(2, 20, 20, 4, 2, 40, 24, mask=causal() | documents(cu_seqlens=[0, 7, 20]),
                          scores=Scores(softcap=2.0, sinks=True, bias=(2, 4, 20, 20), dropout=0.5)),
        "slopes": Problem(2, 20, 20, 4, 2, 64, 128, mask=strided(3) | tiles([[True]], 32), scores=Scores(alibi=(1, 4))),
        "positions": Problem(2, 20, 20, 4, 2, 64, 64, mask=causal(), scores=Scores(relative=(1, 4), gates=True)),
        "int8": Problem(1, 4, 100, 4, 2, 64, 128, mask=causal(), quantised=Quantised("int8", 32)),
        "int4": Problem(2, 4, 20, 4, 2, 40, 28, quantised=Quantised("int4", 40),
                        scores=Scores(softcap=2.0, sinks=True, bias=(2, 4, 4, 20))),
        "fp8": Problem(1, 4, 100, 4, 2, 256, 250, source="paged", quantised=Quantised("fp8", 6)),
    }  # fmt: skip
    texts: dict[str, str] = {}
    for name, problem in problems.items():
        plan = make_plan(problem, Limits("webgpu", ROWS, ROWS))
        forms = plan_encoding.of_part(plan.parts[0], ROWS, False).forms
        for memory in (PORTABLE_MEMORY, 2 * PORTABLE_MEMORY):
            kind = "packed" if name in ("wide", "fp8") else "f32"
            if coded := rows_of(problem):
                texts[f"encode, {name}"] = encoder(coded.v, problem.Dv, kind == "packed")
            options = tiled.options(problem, forms, kind, paged=problem.source == "paged")
            for template, more in _texts(problem, memory, options["kind"]).items():
                head = "enable subgroups;\n" if more.get("shuffle") else ""
                whole = head + tiled.text(template.partition(" ")[0], options | more)
                texts[f"{template}, {name}, {memory} bytes"] = whole
    return texts


def _texts(p: Problem, memory: int, kind: str) -> dict[str, dict[str, Any]]:
    one = shape(p.D, p.Dv, memory, False)._asdict()
    of_keys = "codes" if p.quantised else kind
    constants: dict[str, dict[str, Any]] = {
        "forward": one | {"merge": True, "sinks": p.scores.sinks},
        "decode": decode_shape(p.D, p.Dv, p.G * p.Tq, of_keys, 1, False),
        "decode by shuffles": decode_shape(p.D, p.Dv, p.G * p.Tq, of_keys, 16, False),
        "combine": combine_shape(p.Dv) | {"sinks": p.scores.sinks} | tiled.NO_SCORES,
    }
    if p.quantised:
        return constants
    of_rows = {"slopes_grad": p.scores.alibi is not None, "gates_grad": p.scores.gates, "first": True}
    constants |= {
        "dq": one | of_rows | {"fine": True},
        "dkdv": one | {"fine": True, "spread": True},
        "delta": {"DV4": vectors(p.Dv), "dlse": True}, "gather": {},
        "refine": one | {"fine": True, "last": True, "sinks": p.scores.sinks, "far": False},
        "refine of a part": one | {"fine": True, "last": False, "sinks": p.scores.sinks, "far": True},
    }  # fmt: skip
    owners = {"rows_own": True, "each_b": True, "each_h": True, "fine": True}
    constants |= {"dbias": one | owners} if p.scores.bias or p.scores.gates else {}
    return constants | ({"distances": one | {"each_b": False, "fine": True}} if p.scores.relative else {})


def recurrent_kernels() -> dict[str, str]:
    """The texts, by name, of the kernels of recurrences."""
    linear = {"BY": 2, "feature_map": "elu+1", "normalize": True, "causal": True, "decay": False, "beta": False}
    decays = {"BY": 2, "feature_map": "", "normalize": False, "causal": True, "decay": True, "beta": True}
    matrix = {"linear": linear, "all": linear | {"causal": False, "feature_map": "exp"}, "decays": decays}
    gated = {"BY": 2, "gate": True, "skip": True, "bias": True, "softplus": True, "fixed_B": False, "fixed_C": False}
    bare = {"BY": 2, "gate": False, "skip": False, "bias": False, "softplus": False, "fixed_B": True, "fixed_C": True}
    texts = {"fold": tiled.text("fold", {})}
    for name, constants in matrix.items():
        for template, more in _of_chunks(constants):
            texts[f"{template} {' '.join(map(str, more.values()))}, {name}"] = tiled.text(template, constants | more)
    for name, constants in {"gated": gated, "bare": bare}.items():
        options = constants | {"KEEP": diagonal.KEEP, "backward": False, "begins": name == "gated"}
        for template, keep in (("forward", False), ("forward", True), ("reverse", True), ("gradients", True)):
            texts[f"scan_{template} {keep}, {name}"] = tiled.text(f"scan_{template}", options | {"keep": keep})
    return texts


def _of_chunks(constants: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    rows: list[tuple[str, dict[str, Any]]] = [("chunk_rows", {"of": x, "totals": False}) for x in "oqkv"]
    if not constants["causal"]:
        return rows
    states: list[tuple[str, dict[str, Any]]] = [("chunk_states", {"of": x}) for x in "kq"]
    carry = [("chunk_carry", {"reverse": x, "begins": x}) for x in (False, True)]
    decays = [("chunk_ramps", {}), ("chunk_decays", {})]
    sums = [("chunk_divisors", {}), ("chunk_rows", {"of": "o", "totals": True})]
    return rows + states + carry + (decays if constants["decay"] else sums)
