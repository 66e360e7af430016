"""Where each device of the cost model computes, and the plan of a problem there. Needs no device."""

from __future__ import annotations

from dataclasses import replace

from ..errors import Unsupported
from ..plan import Limits, Plan, make_plan
from ..problem import Problem
from . import Backend, load, refusals

# for each device of the cost model, the backend that computes on it, and the backend's name for it
PLACES = {
    "cpu": ("cpu", "cpu"),
    "webgpu": ("webgpu", "webgpu"),
    "m3": ("metal", "mlx"),
    "m3-max": ("metal", "mlx"),
    "m4": ("metal", "mlx"),
    "a100": ("triton", "cuda:sm_80"),
    "h100": ("triton", "cuda:sm_90"),
    "h200": ("triton", "cuda:sm_90"),
    "b200": ("triton", "cuda:sm_100"),
    "rtx-4090": ("triton", "cuda:sm_89"),
    "rtx-5090": ("triton", "cuda:sm_120"),
    "zen5": ("cpu", "cpu"),
}
# tiles to plan with if the device's backend is not on this machine
TILE = 64


def planned(name: str, problem: Problem, place: str = "") -> tuple[Plan, dict[str, str]]:
    """The plan of a device's backend, and its kernels, or why there are none.

    place: the backend's name for another device of its kind, such as a recorder.
    """
    backend, device = PLACES[name]
    there = replace(problem, device=place or device)
    try:
        module: Backend = load(backend)
        # what this machine lacks does not change the plan
        refused = [reason for reason in refusals(module, there) if reason not in module.missing()]
        if not refused:
            return module.explain(there, module.plan(there))
        reasons = {"not computed": "; ".join(refused)}
    except Unsupported as error:
        reasons = {"not known here": "; ".join(error.reasons)}
    return make_plan(problem, Limits(f"{backend}, not planned by its own tiles", TILE, TILE)), reasons
