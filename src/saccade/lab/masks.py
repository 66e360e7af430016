"""Views of a mask: its picture, and the tiles that each backend's plan visits."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any

import numpy as np

from ..backends.places import PLACES, planned
from ..cost import DTYPE_BYTES
from ..counting import count
from ..errors import Unsupported
from ..mask import Mask
from ..mask.drawing import cell_states
from ..mask.heads import head_count
from ..plan import Part, Plan
from ..problem import Problem
from .kernels import recorder
from .query import LONGEST, FieldError, Query, chosen, mask_of, problem_of, shape_of, whole

# cells per side of the picture, and the most segments that a page draws at once
CELLS, SEGMENTS = 128, 40000
# the most characters of a mask that is copied as Python
LONGEST_TEXT = 20000
DTYPES = ("bfloat16", *(name for name in DTYPE_BYTES if name != "bfloat16"))
EXAMPLES = {
    "causal": "causal()",
    "sliding window": "causal() & window(255, 0)",
    "window and first tokens": "causal() & (window(127, 0) | prefix(16))",
    "prefix": "prefix(256) | causal()",
    "packed documents": "causal() & documents(cu_seqlens=[0, 300, 420, 800, 1024])",
    "global tokens": "window(64, 64) | global_tokens([0, 511, 1023])",
    "dilated window": "dilated(24, 8)",
    "strided": "causal() & (window(127, 0) | strided(64))",
    "chunks": "causal() & chunked(128)",
    "a mask per head": "per_head([causal(), window(63, 63), strided(16), full()])",
    "everything": "full()",
}


def picture(query: Query) -> dict[str, Any]:
    """The mask as cells, uint8 in base64: 0 nothing, 1 part, 2 all; if there are few pairs, a cell is one pair."""
    mask, Tq, Tk, head = _mask(query)
    # the same checks as in a call
    problem_of(mask, shape_of(Tq, Tk, head_count(mask)))
    states = cell_states(mask, Tq, Tk, head=head, size=CELLS)
    text = str(mask)
    return {
        "mask": text if len(text) < 2000 else repr(mask),
        "python": python_of(text),
        "heads": head_count(mask),
        "cell": max(1, -(-max(Tq, Tk) // CELLS)),
        "rows": states.shape[0],
        "columns": states.shape[1],
        "states": b64encode(states.tobytes()).decode(),
    }


def python_of(text: str) -> str:
    """Lines of Python that make the mask of a text; empty for a text that is too long to copy."""
    if len(text) > LONGEST_TEXT:
        return ""
    if "empty(" in text:
        return f"from saccade.mask import parse\n\nmask = parse({text!r})\n"
    names = sorted(set(re.findall(r"[a-z_]+(?=\()", text)))
    return f"from saccade.mask import {', '.join(names)}\n\nmask = {text}\n"


def visits(query: Query) -> dict[str, Any]:
    """What the plan of a device visits: counts of all heads, and the segments of each query tile of one head.

    The plan is that of `saccade explain`, with WebGPU's default limits for the device "webgpu".
    parts: one for each stride, with classes {rows, keys, tiles [[begin, end, kind], ..]}; tiles count a class's own
    rows and keys, and kind is 1 for PARTIAL or 2 for FULL.
    """
    mask, Tq, Tk, head = _mask(query)
    device, dtype = chosen(query, "device", list(PLACES)), chosen(query, "dtype", DTYPES)
    D = whole(query, "d", 128, 1, 1024)
    problem = problem_of(mask, shape_of(Tq, Tk, head_count(mask), D, dtype))
    plan, kernels = _planned(device, problem)
    where = {"backend": PLACES[device][0], "device": device}
    if lacks := [kernels[key] for key in ("not computed", "not known here") if key in kernels]:
        return where | {"lacks": lacks}
    counted = count(plan, 1, Tq, Tk)
    return where | {
        "kernels": kernels,
        # a task of the CPU is one query tile, and later ones come first (cpu/core/items.hpp)
        "at_once": where["backend"] != "cpu",
        "tile_q": plan.tile_q,
        "tile_k": plan.tile_k,
        "tiles": counted.tiles,
        "full": counted.full,
        "partial": counted.partial,
        "pairs": counted.pairs,
        "visited": counted.visited,
        "allowed": counted.allowed,
        "exact": counted.exact,
        "skipped": counted.skipped,
        "plan": str(plan),
        "parts": _parts(plan, head),
    }


def _mask(query: Query) -> tuple[Mask, int, int, int]:
    mask = mask_of(query)
    Tq = whole(query, "tq", 1024, 1, LONGEST)
    Tk = whole(query, "tk", Tq, 1, LONGEST)
    return mask, Tq, Tk, min(whole(query, "head", 0, 0, 255), head_count(mask) - 1)


def _planned(device: str, problem: Problem) -> tuple[Plan, dict[str, str]]:
    if PLACES[device][0] != "webgpu":
        return planned(device, problem)
    try:
        gpu = recorder()
    except Unsupported as error:
        return planned(device, problem, "cpu")[0], {"not known here": "; ".join(error.reasons)}
    return planned(device, problem, gpu.place)


def _parts(plan: Plan, head: int) -> list[dict[str, Any]]:
    total = sum(len(part.ranges.seg) for part in plan.parts)
    if total > SEGMENTS:
        raise FieldError(
            "mask", f"the plan has {total} segments, more than the {SEGMENTS} that are drawn; make the mask smaller"
        )
    return [{"step": part.step, "classes": _classes(part, int(part.head[head]))} for part in plan.parts]


def _classes(part: Part, m: int) -> list[dict[str, Any]]:
    ptr, seg = part.ranges.ptr, part.ranges.seg
    classes: list[dict[str, Any]] = []
    for c in range(len(part.nq)):
        first = (c * len(part.masks) + m) * part.Bm * part.n_tiles
        tiles = [seg[ptr[first + n] : ptr[first + n + 1]].tolist() for n in range(part.n_tiles)]
        start = np.array([part.q_start[c], part.k_start[c]])
        classes.append({"rows": int(part.nq[c]), "keys": int(part.nk[c]), "start": start.tolist(), "tiles": tiles})
    return classes
