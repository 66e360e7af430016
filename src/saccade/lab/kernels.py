"""Jobs for the browser's GPU: what a call of this library submits, with its inputs and its tolerance."""

from __future__ import annotations

from base64 import b64encode
from functools import lru_cache
from typing import Any

import numpy as np

from .. import cost
from ..mask import full
from ..mask.text import brief
from ..testing.cases import Case
from ..testing.compare import band
from ..testing.inputs import CaseInputs, make
from ..testing.run import expected, plain
from .query import FieldError, Query, chosen, heads_of, mask_of, whole

# WebGPU's default limits, and the highest limits that a page may report instead
LIMITS = {
    "max-storage-buffers-per-shader-stage": (8, 64),
    "max-compute-workgroup-storage-size": (16384, 1 << 20),
    "max-compute-invocations-per-workgroup": (256, 4096),
    "max-storage-buffer-binding-size": (1 << 27, 1 << 40),
    "max-compute-workgroups-per-dimension": (65535, 1 << 20),
}
# the most numbers in an array that is sent, and the most scores that the page's reference computes
MOST_NUMBERS, MOST_SCORES = 1 << 21, 1 << 23
SETS, DIRECTIONS = ("documented", "tiled"), ("forward", "backward", "decode")


def recorder(query: Query | None = None) -> Any:
    """A device that records what is submitted to it, with the limits that the page reports."""
    from ..backends import load

    load("webgpu")
    from ..backends.webgpu.recorded import Recorder

    limits = {name: whole(query or {}, name, least, 1, most) for name, (least, most) in LIMITS.items()}
    return Recorder(limits, software=(query or {}).get("software") == "1")


def job(query: Query) -> dict[str, Any]:
    """One call as `Recorder.job` describes it, with what the page needs to check it.

    allowed: bits [T, Tk] in base64, the keys that each query sees. tolerance: the error that each output may have by
    the rule of `saccade.testing.compare`, a number or float32 numbers in base64. flops: those of the call.
    Raises ValueError, and Unsupported if the kernels or the page's device lack a feature.
    """
    which, direction = chosen(query, "set", SETS), chosen(query, "direction", DIRECTIONS)
    x = _inputs(query, direction)
    if which == "documented" and direction != "decode" and str(x.mask) != "causal()":
        text = "None" if x.mask is None else brief(x.mask)
        raise FieldError(
            "mask", f"the documented kernels compute causal attention; the mask is {text}: choose causal()"
        )
    gpu = recorder(query)
    arrays = (_documented if which == "documented" else _tiled)(gpu, x, direction)
    case = x.case
    mask = full() if x.mask is None else x.mask
    allowed = np.ascontiguousarray(mask.evaluate(1, 1, case.Tq, case.Tk)[0, 0])
    flops = cost.backward_flops if direction == "backward" else cost.forward_flops
    return {
        **gpu.job(arrays),
        "scale": case.D**-0.5,
        "heads": case.Hq,
        "kv": case.Hk,
        "head_dim": case.D,
        "queries": case.Tq,
        "keys": case.Tk,
        "allowed": b64encode(np.packbits(allowed).tobytes()).decode(),
        "flops": flops(int(allowed.sum()) * case.Hq, case.D),
        "tolerance": _tolerance(x, direction),
    }


def _inputs(query: Query, direction: str) -> CaseInputs:
    (Hq, Hk), D = heads_of(query, 4, 2, most=32), whole(query, "d", 64, 4, 256)
    if D % 4:
        raise FieldError("d", f"Head size is {D}; expected a multiple of 4, as arrays on a WebGPU device have")
    seed = whole(query, "seed", 0, 0, 2**31)
    if direction == "decode":
        Tq, Tk, mask = 1, whole(query, "t", 256, 1, 8192), full()
    else:
        Tq = Tk = whole(query, "t", 256, 1, 512 if direction == "backward" else 1024)
        mask = mask_of(query)
    numbers, scores = Tk * Hq * D, Tq * Tk * Hq
    for what, n, most in (("Keys × heads × head size", numbers, MOST_NUMBERS), ("The scores", scores, MOST_SCORES)):
        if n > most:
            raise FieldError("t", f"{what} are {n}; a page compares at most {most}: use fewer tokens or heads")
    return _drawn(Tq, Tk, Hq, Hk, D, str(mask), seed)


@lru_cache(maxsize=4)
def _drawn(Tq: int, Tk: int, Hq: int, Hk: int, D: int, mask: str, seed: int) -> CaseInputs:
    # both sets get the same numbers, even in rows that see nothing, because the page's reference reads them
    return make(Case("lab", Tq, Tk, 1, Hq, Hk, D, D, mask), "float32", seed=seed, poison=False)


def _tiled(gpu: Any, x: CaseInputs, direction: str) -> dict[str, Any]:
    import saccade

    from ..backends.webgpu import array

    q, k, v, do = (array(a, gpu) for a in (x.q, x.k, x.v, x.do))
    arrays = {"q": q, "k": k, "v": v}
    if direction == "decode":
        return arrays | {"o": saccade.attention(q, k, v, x.mask)}
    o, lse = saccade.attention(q, k, v, x.mask, return_lse=True)
    arrays |= {"o": o, "lse": lse}
    if direction == "backward":
        gradients = saccade.attention_backward(do, q, k, v, o, lse, x.mask)[:3]
        arrays |= {"do": do, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return arrays


def _documented(gpu: Any, x: CaseInputs, direction: str) -> dict[str, Any]:
    from ..backends.webgpu import array, documented

    q, k, v, do = (array(a[0], gpu) for a in (x.q, x.k, x.v, x.do))
    arrays = {"q": q, "k": k, "v": v}
    if direction == "decode":
        one = documented.run("attention_decode", Q_one=q.reshape(*q.shape[1:]), K_cache=k, V_cache=v)
        return arrays | {"o": one}
    seg = array(np.zeros(len(q), np.uint32), gpu)
    o, lse = documented.run("attention_forward", Q=q, K=k, V=v, seg=seg)
    arrays |= {"o": o, "lse": lse}
    if direction == "backward":
        gradients = documented.run("attention_backward", Q=q, K=k, V=v, dO=do, LSE=lse, seg=seg)
        arrays |= {"do": do, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return arrays


def _tolerance(x: CaseInputs, direction: str) -> dict[str, Any]:
    names = {"forward": ("o", "lse"), "backward": ("o", "lse", "dq", "dk", "dv"), "decode": ("o",)}[direction]
    exact, alike = _references(x, direction == "backward")
    tolerances: dict[str, Any] = {}
    for name in names:
        ref, finite = exact[name], np.isfinite(exact[name])
        error = np.where(finite, np.abs(np.where(finite, alike[name], 0) - np.where(finite, ref, 0)), 0).max()
        allowed = 2 * error + band(name, np.where(finite, ref, 0), x.q.dtype)
        tolerances[name] = (
            b64encode(allowed.astype("<f4").tobytes()).decode() if name == "lse" else float(allowed.flat[0])
        )
    return tolerances


def _references(x: CaseInputs, backward: bool) -> tuple[Any, Any]:
    return expected(x, backward=backward), plain(x, backward=backward)
