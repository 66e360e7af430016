"""What `saccade devices` and `saccade explain` print: the GPU; which kernels compute a problem there, and why."""

from __future__ import annotations

from typing import Any

import torch

import triton

from ... import combinations
from ...mask.sequences import sequences
from ...plan import Limits, Plan, make_plan
from ...problem import OPTIONS, Problem
from ..tested import chip_status, triton_status
from . import hopper
from .chip import chip_of, interpreted
from .tiles import of_plan


def missing() -> list[str]:
    """What prevents kernels from running on this machine; plans, `explain` and compilation need no GPU."""
    return [] if interpreted() or torch.cuda.is_available() else ["torch finds no NVIDIA GPU"]


def not_invariant(p: Problem) -> list[str]:
    """Reasons why the bits of a problem's rows would depend on the batch, if they must not."""
    reasons = combinations.not_invariant(p)
    if p.batch_invariant and not reasons and not sequences(p.mask, p.B, p.Tq, p.Tk).apart:
        reasons.append(f"{OPTIONS['batch']} with sequences that start at different keys in each batch entry: pack them")
    return reasons


def describe() -> dict[str, Any]:
    """The GPU that torch uses, or the interpreter; what is known about the chip and the version of Triton."""
    version = triton_status(triton.__version__)
    if interpreted():
        return {"GPU": "interpreted", "Triton": version}
    return {"GPU": torch.cuda.get_device_name(), "chip": chip_status(chip_of("cuda")), "Triton": version}


def explain(problem: Problem, plan: Plan) -> tuple[Plan, dict[str, str]]:
    """The plan with the forward's tiles; the kernels of each verb, why no others are used, and what has been tested."""
    chip = chip_of(problem.device)
    reasons = hopper.why_not(problem, plan, chip)
    facts = _portable(problem, plan, chip) if reasons else _hopper(problem, plan)
    if reasons:
        facts["Hopper kernels"] = "not these: " + "; ".join(reasons)
    if plan.split_keys:
        ranges = f"{plan.num_splits} ranges of {plan.split_keys} keys in parallel, then merged"
        facts["decode"] = f"{problem.G * problem.Tq} rows of a group packed, {ranges}"
    if hopper.decodes_rows_of(problem, chip):
        facts["decode of a latent cache"] = "64 heads × 128 keys, for Hopper, in Gluon; pages of a multiple of 64"
    facts |= {"chip": chip_status(chip), "Triton": triton_status(triton.__version__)}
    tiles = None if reasons else hopper.tiles_for(problem, plan)
    if tiles is not None:
        plan = make_plan(problem, Limits(f"triton {chip}", tiles.BM, tiles.BN, quantum=tiles.BN))
    return plan, facts


def _hopper(p: Problem, plan: Plan) -> dict[str, str]:
    tiles = hopper.tiles_for(p, plan)
    assert tiles
    groups = "1 warpgroup that computes" if tiles.NC == 1 else f"{tiles.NC} warpgroups that compute"
    order = "dQ added in a fixed order" if p.deterministic else "dQ added in any order"
    return {
        "kernels": "for Hopper, in Gluon; portable ones for arrays that are not on 16-byte boundaries",
        "forward": f"{tiles.BM} queries × {tiles.BN} keys, {groups} and a warp that loads",
        "backward": f"five products, {order}",
    }


def _portable(p: Problem, plan: Plan, chip: str) -> dict[str, str]:
    forward, dq = (of_plan(name, chip, p, plan) for name in ("forward", "dq"))
    dkdv = of_plan("dkdv", chip, p, plan, plan.parts[0])
    launches = "" if len(plan.parts) == 1 else f", {len(plan.parts)} disjoint parts one after the other"
    if plan.order is not None:
        launches += ", of keys and values copied into another order: the mask's columns fill tiles of their own"
    return {
        "kernels": f"portable Triton{launches}",
        "forward": f"{forward.BM} queries × {forward.BN} keys, {forward.num_warps} warps, {forward.num_stages} stages",
        "backward": f"dQ by owners of {plan.tile_q} queries × {dq.BN} keys, dK and dV by owners of {dkdv.BN} keys × "
        f"{dkdv.BM} queries",
    }
