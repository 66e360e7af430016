"""What this backend reports: its adapter, the kernels that it chooses for a problem, and why."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...plan import Plan
from ...problem import Problem
from .. import plan_encoding
from . import tiled
from .device import Gpu, at, open_gpu
from .shapes import ROWS, shape
from .texts import BINDING, MEMORY, STORAGE, THREADS

LARGEST_HEAD = 512
# WGSL has no bfloat16: such arrays are widened when they are uploaded
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float32}


def kind(dtype: str, gpu: Gpu) -> str:
    """How kernels read arrays of a dtype on a device: "f32", "f16", or "packed", two halves per word."""
    if dtype != "float16":
        return "f32"
    return "f16" if "shader-f16" in gpu.features else "packed"


def unsupported(problem: Problem) -> list[str]:
    """Reasons that hold on every adapter."""
    reasons = elsewhere(problem.device, problem.dtype)
    if max(problem.D, problem.Dv) > LARGEST_HEAD:
        reasons.append(f"head sizes are D = {problem.D} and Dv = {problem.Dv}: at most {LARGEST_HEAD}")
    return reasons


def elsewhere(device: str, dtype: str) -> list[str]:
    """Reasons that all calls share: the device of the arrays, and their dtype."""
    reasons: list[str] = []
    if device.partition(":")[0] not in ("cpu", "webgpu"):
        reasons.append(f"its arrays live on {device}: move them to the CPU")
    if dtype not in STORED:
        reasons.append(f"{dtype} is not computed on WebGPU: cast to float32, float16 or bfloat16")
    return reasons


def describe() -> dict[str, Any]:
    """The adapter in use: name, driver, api, software, features, limits. Raises Unsupported if there is none."""
    gpu = open_gpu()
    limits = {name: int(gpu.limits[name]) for name in (STORAGE, MEMORY, THREADS, BINDING)}
    return {
        "name": gpu.name,
        "driver": gpu.driver,
        "api": gpu.backend,
        "software": gpu.software,
        "features": sorted(gpu.features),
        "limits": limits,
    }


def explain(problem: Problem, plan: Plan) -> tuple[Plan, dict[str, str]]:
    """The plan, and its kernels' tile and variants with reasons. Raises Unsupported as `describe` does."""
    gpu = at(problem.device)
    stored, memory = kind(problem.dtype, gpu), int(gpu.limits[MEMORY])
    tile = shape(problem.D, problem.Dv, memory, gpu.software)
    options = tiled.options(problem, plan_encoding.of_part(plan.parts[0], ROWS, False).forms, stored)
    text = tiled.text("forward", options | tile._asdict() | {"merge": False, "sinks": problem.scores.sinks})
    kernel = gpu.kernel(text, "forward")
    where = f"{memory} bytes of workgroup memory" + (" on a software adapter" if gpu.software else "")
    return plan, {
        "tile": f"{tile.ROWS} queries × {4 * tile.CG} keys, {tile.WG} threads of {tile.RT} × 4, for heads of "
        f"{problem.D} and {problem.Dv} and {where}",
        "arrays": _arrays(problem, stored),
        "mask": "one band, tested without lists" if options["one_band"] else f"{len(options['masks'])} lists of bands",
        "scores": "scale alone" if options["plain"] else "with softcap, bias or slopes",
        "forward binds": f"{kernel.storage} storage buffers and {kernel.workgroup_bytes} bytes of workgroup memory",
        "decode": _decode(problem, plan, gpu),
    }


def _decode(problem: Problem, plan: Plan, gpu: Gpu) -> str:
    if not plan_encoding.splits(problem, plan):
        return "the forward kernel: too many queries, too few keys to split, or dropout"
    summed = _SUMMED[gpu.shuffle > 1]
    return f"{plan.num_splits} ranges of {plan.split_keys} keys, scores summed {summed}, then a combine"


def _arrays(problem: Problem, stored: str) -> str:
    text = _ARRAYS[stored] + (", widened on the way up" if problem.dtype == "bfloat16" else "")
    return text + (f"; keys and values as {problem.quantised.kind}" if problem.quantised else "")


_SUMMED = {True: "by shuffles", False: "through workgroup memory"}
_ARRAYS = {
    "f32": "float32",
    "f16": "float16 by shader-f16, sums in float32",
    "packed": "float16 in pairs, unpacked to float32: no shader-f16 here",
}
