"""The output of `saccade explain` for NVIDIA: which kernels a chip computes a problem with, and why. Needs no GPU."""

from __future__ import annotations

from ...plan import Limits, Plan, make_plan
from ...problem import Problem
from . import hopper
from .chip import chip_of
from .tiles import of_plan


def explain(problem: Problem, plan: Plan) -> tuple[Plan, dict[str, str]]:
    """The plan with the forward's tiles; the kernels of forward, backward and decode, and why no others."""
    chip = chip_of(problem.device)
    reasons = hopper.why_not(problem, plan, chip)
    facts = _portable(problem, plan, chip) if reasons else _hopper(problem, plan)
    if reasons:
        facts["Hopper kernels"] = "not these: " + "; ".join(reasons)
    if plan.split_keys:
        ranges = f"{plan.num_splits} ranges of {plan.split_keys} keys in parallel, then merged"
        facts["decode"] = f"{problem.G * problem.Tq} rows of a group packed, {ranges}"
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
