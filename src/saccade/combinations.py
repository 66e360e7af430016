"""Options that no backend computes together: with selected keys, and with `deterministic="batch"`."""

from __future__ import annotations

from .mask.algebra import contains
from .mask.sequences import hidden
from .problem import OPTIONS, Problem

# options whose numbers depend on the batch, or are not computed from fixed ranges of keys, and why
_OPTIONS = {
    "dropout": "its pattern depends on the place in the batch",
    "gates": "they are sums over the whole array",
    "return_max": "results of ranges of keys are merged without it",
    "return_entropy": "results of ranges of keys are merged without it",
}


def not_with_select(problem: Problem) -> list[str]:
    """Reasons why kernels of selected keys do not compute a problem: options whose rows they do not know."""
    if problem.selection is None:
        return []
    known = {"softcap", "sinks", "source", "quantised", "select", "return_max", "return_entropy"}
    names = sorted(OPTIONS[name] for name in problem.uses - known)
    return [f"selected keys with {name} are not computed: leave one of the two out" for name in names]


def not_invariant(problem: Problem) -> list[str]:
    """Reasons why the bits of a problem's rows would depend on the batch, if they must not; else none."""
    if not problem.batch_invariant:
        return []
    name = OPTIONS["batch"]
    reasons = [f"{name} with {OPTIONS[x]}: {why}" for x, why in _OPTIONS.items() if x in problem.uses]
    mask = problem.mask
    for kind in ("strided", "dilated"):
        if mask is not None and contains(mask, kind):
            reasons.append(f"{name} with {kind}: the plan of a stride reorders keys, so leave one of the two out")
    inside = hidden(mask)
    if inside is not None:
        inside = "documents" if inside == "packed" else inside
        reasons.append(f"{name} with {inside} inside |, ~ or per_head: join it to the whole mask with &")
    return reasons
