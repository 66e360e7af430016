"""Which kernels a chip computes a problem with, and why: what `saccade explain` prints. Needs no GPU."""

from __future__ import annotations

from ...plan import Plan, make_plan
from ...problem import Problem
from . import hopper, limits
from .tiles import of_plan

# devices of the cost model, and what their kernels are compiled for
CHIPS = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90"}


def explain(problem: Problem, chip: str) -> dict[str, str]:
    """The kernels of forward, backward and decode, their tiles, and why not others."""
    plan = make_plan(problem, limits(problem))
    reasons = hopper.why_not(problem, plan, chip)
    found = _portable(problem, plan, chip) if reasons else _hopper(problem, plan)
    if reasons:
        found["Hopper kernels"] = "not these: " + "; ".join(reasons)
    if plan.split_keys:
        ranges = f"{plan.num_splits} ranges of {plan.split_keys} keys side by side, then folded"
        found["decode"] = f"{problem.G * problem.Tq} rows of a group packed, {ranges}"
    return found


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
