"""The NVIDIA backend: Triton kernels on torch CUDA tensors, or on CPU tensors by the interpreter (TRITON_INTERPRET=1).

problem.py checks arguments; plan.py decides which keys a query tile visits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from ...combinations import not_with_select
from ...errors import Unsupported, how_to_install
from ...plan import Limits, Plan, make_plan
from ...problem import Problem
from ...statistics import sink_delta, sinks_gradient
from .. import Inputs, Outputs

try:
    import torch
    from torch import Tensor

    import triton  # noqa: F401 # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise Unsupported("triton", [f"it needs the package {error.name}: {how_to_install('triton')}"]) from error
from . import hopper, launch, launch_backward, launch_decode, on_device, support, tokens, versions
from .chip import chip_of, elsewhere, interpreted, multiprocessors, on
from .replay import AttentionRecorder, Recorder, Replay
from .support import describe as describe
from .support import explain as explain
from .support import missing as missing
from .tangent import tangent as tangent
from .tiles import LEAST, SPLIT_LEAST, tile_of

if interpreted():
    from . import interpret

    interpret.prepare()

SCORES = {"softcap", "sinks", "bias", "alibi", "relative", "gates", "dropout"}
RESULTS = {"return_max", "return_entropy"}
EVERY_VERB = {*SCORES, *RESULTS, "select", "batch"}
STORED = {"source", "quantised"}
TAKES = dict.fromkeys(("forward", "decode"), EVERY_VERB | STORED) | {"backward": EVERY_VERB, "tangent": SCORES}
# options of calls whose keys may be reordered: none of them depends on the order of the keys
GATHERED = {"softcap", "sinks", *RESULTS}
# options of calls that may be replayed
REPLAYED = {"softcap"}
# the largest head sizes: of gradients and of v, and of q and k without gradients
LARGEST_HEAD, LARGEST_LATENT = 512, 576
# frameworks pass torch tensors without converting them, also tensors on the CPU
TAKES_TENSORS = True
append, append_rows = tokens.append, tokens.append_rows
DTYPES = ("float32", "bfloat16", "float16")


def limits(problem: Problem) -> Limits:
    """Tiles of the forward kernel, and enough splits of few queries to fill the chip."""
    forward = tile_of("forward", chip := chip_of(problem.device), problem)
    name, tiles = f"triton {chip}", (forward.BM, forward.BN)
    if problem.batch_invariant:
        return Limits(name, *tiles, quantum=forward.BN, tests_all=True, few_queries=0)
    splits: Any = {"few_queries": 16, "lanes": 2 * multiprocessors(problem.device), "split_least": SPLIT_LEAST}
    return Limits(name, *tiles, quantum=forward.BN, least_q=LEAST, gathers=gathers(problem), **splits)


def gathers(p: Problem) -> bool:
    """Whether a problem may have its keys reordered, and has enough rows to pay for the copy."""
    return p.Tq >= LEAST and p.uses <= GATHERED


def plan(problem: Problem) -> Plan:
    """The plan of a problem; the arrays of a mask on the device stay there."""
    wanted = limits(problem)
    part: Any = None if problem.batch_invariant else on_device.part_of(problem, wanted.tile_q)
    return make_plan(problem, wanted, None if part is None else (part,))


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = elsewhere(problem.device)
    if problem.dtype == hopper.EIGHT_BITS:
        reasons += _eight_bits(problem)
    elif problem.dtype not in DTYPES:
        reasons.append(f"{problem.dtype} is not computed by Triton: cast to {', '.join(DTYPES)} or {hopper.EIGHT_BITS}")
    most = LARGEST_HEAD if problem.needs_grad else LARGEST_LATENT
    if most < problem.D or problem.Dv > LARGEST_HEAD:
        limits = f"at most {LARGEST_HEAD}, or D of {LARGEST_LATENT} without gradients"
        reasons.append(f"head sizes are D = {problem.D} and Dv = {problem.Dv}: {limits}")
    reasons += not_with_select(problem) + support.not_invariant(problem)
    chip = chip_of(problem.device)
    if problem.quantised and problem.quantised.kind == "fp8" and (chip[:3] != "sm_" or int(chip[3:]) < 89):
        reasons.append("only NVIDIA chips from sm_89 on read 8-bit floats: store int8")
    if problem.dtype == hopper.EIGHT_BITS and problem.uses & {"source", "quantised"}:
        reasons.append("keys in pages or as codes are not read as 8-bit floats: gather them first")
    return reasons


def _eight_bits(problem: Problem) -> list[str]:
    if problem.needs_grad:
        return [f"{problem.dtype} has no gradient: detach it, or cast to bfloat16"]
    wanted = hopper.why_not(problem, plan(problem), chip_of(problem.device))
    return [f"{problem.dtype} is computed by the kernels for Hopper alone: {reason}" for reason in wanted]


def forward(problem: Problem, plan: Plan, inputs: Inputs, *, out_dtype: str | None = None) -> tuple[Tensor, ...]:
    """(o [B, Tq, Hq, Dv] in out_dtype or the inputs' dtype, lse [B, Tq, Hq] float32, *more)."""
    q, extras = inputs.q, inputs.extras
    dtype = getattr(torch, out_dtype or ("bfloat16" if extras.descale else problem.dtype))
    if q.numel() and replayable(problem, plan):
        first = partial(_recorded, _launch_forward, problem, plan, inputs, dtype)
        arrays = inputs[:3] if extras.lengths is None else (*inputs[:3], extras.lengths)
        if results := _again(f"forward {dtype}", problem, plan, arrays, first):
            return results[0], results[1]
    # the results of several parts are merged in float32
    o, lse = _empty(problem, q, dtype if len(plan.parts) == 1 else torch.float32)
    more = launch.more_results(problem, lse)
    if lse.numel():
        with on(q):
            _launch_forward(launch.AttentionLaunch(problem, plan, inputs, more), o, lse)
    return o.to(dtype), lse, *(x for x in more if x is not None)


def _recorded(
    compute: Callable[..., None], problem: Problem, plan: Plan, inputs: Inputs, dtype: torch.dtype
) -> tuple[Recorder, list[Tensor]]:
    # the call that `compute` makes, recorded, with its results: o in this dtype, and lse
    call, results = AttentionRecorder(problem, plan, inputs), _empty(problem, inputs.q, dtype)
    compute(call, *results)
    return call, results


def _empty(p: Problem, q: Tensor, dtype: torch.dtype) -> list[Tensor]:
    # room for o [B, Tq, Hq, Dv] and lse [B, Tq, Hq]
    rows = p.B, p.Tq, p.Hq
    return [q.new_empty((*rows, p.Dv), dtype=dtype), q.new_empty(rows, dtype=torch.float32)]


def _launch_forward(call: launch.AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    problem, plan, (q, k, v) = call.problem, call.plan, (x.p for x in call.qkv)
    if call.descale:
        if not hopper.fits(q, k, v):
            raise ValueError("the rows of 8-bit q, k, v are not on 16-byte boundaries: call contiguous()")
        hopper.run_forward(call, o, lse)
    elif problem.selection is not None:
        launch_decode.selected(call, o, lse)
    elif _for_hopper(problem, plan, q, k, v):
        hopper.run_forward(call, o, lse)
    else:
        launch.forward(call, o, lse)


def _for_hopper(problem: Problem, plan: Plan, *tensors: Tensor) -> bool:
    if interpreted() or not problem.Tk or hopper.why_not(problem, plan, chip_of(problem.device)):
        return False
    return hopper.fits(*tensors)


def decode(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Tensor, ...]:
    """`forward` for calls without a backward: the keys of few queries are split into ranges."""
    q, k, v, extras = inputs
    if not plan.split_keys or extras.descale or problem.selection is not None:
        return forward(problem, plan, inputs)
    if extras.lengths is not None and q.numel() and replayable(problem, plan):
        first = partial(_recorded, _launch_decode, problem, plan, inputs, q.dtype)
        if results := _again("decode", problem, plan, (q, k, v, extras.lengths), first):
            return results[0], results[1]
    o, lse = _empty(problem, q, q.dtype)
    more = launch.more_results(problem, lse)
    if lse.numel():
        with on(q):
            _launch_decode(launch.AttentionLaunch(problem, plan, inputs, more), o, lse)
    return o, lse, *(x for x in more if x is not None)


def _launch_decode(call: launch.AttentionLaunch, o: Tensor, lse: Tensor) -> None:
    (hopper.run_decode if hopper.decodes(call) else launch_decode.decode)(call, o, lse)


def follows_lengths(problem: Problem, plan: Plan) -> bool:
    """Whether `decode` of this problem can read the lengths of its sequences on the device."""
    return plan.split_keys > 0 and launch_decode.reach_of(problem.mask) is not None


def direct(problem: Problem, plan: Plan, kind: type, decode: bool) -> Any:
    """A call (threads, q, k, v, want_lse) -> (o, lse) for CUDA tensors, or None if there is none.

    The call returns None for tensors of another layout. So does its attribute `backward` (threads, owners, do, q, k, v,
    o, lse, dlse or None) -> (dq, dk, dv).
    """
    if not replayable(problem, plan) or not problem.B * problem.Tq * problem.Hq * problem.Dv:
        return None
    compute = _launch_decode if decode and plan.split_keys > 0 else _launch_forward
    replay = Replay(problem.device)

    def call(threads: int, q: Tensor, k: Tensor, v: Tensor, want_lse: bool) -> Any:
        return replay((q, k, v), partial(_recorded, compute, problem, plan, Inputs(q, k, v), q.dtype))

    def back(_: int, owners: Any, *arrays: Any) -> Any:
        do, q, k, v, o, lse, dlse = arrays
        if dlse is not None or not lse.is_contiguous():
            return None
        results = _backward_again(problem, plan, Inputs(q, k, v), Outputs(o, lse, do))
        return None if results is None else tuple(results)

    verbs: Any = call
    verbs.backward = back
    return verbs


def replayable(p: Problem, plan: Plan) -> bool:
    """Whether launches depend only on the layout of the arrays, and the version of Triton's launcher is known."""
    if plan.parts[0].step > 1 or len(plan.parts) > 1 or plan.order is not None:
        return False
    return p.uses <= REPLAYED and p.dtype != hopper.EIGHT_BITS and not versions.why_not() and not interpreted()


# replays by plan, which devices share, and by all else that launches depend on; the last array may be int64 lengths
_replays: weakref.WeakKeyDictionary[Plan, dict[Any, Replay]] = weakref.WeakKeyDictionary()


def _again(
    verb: str, p: Problem, plan: Plan, arrays: Sequence[Tensor], first: Callable[[], tuple[Recorder, list[Tensor]]]
) -> list[Tensor] | None:
    replays = _replays.setdefault(plan, {})
    key = verb, p.device, p.dtype, p.scores.scale, p.scores.softcap, p.deterministic, arrays[-1].dtype
    if key not in replays:
        replays[key] = Replay(p.device)
    return replays[key](arrays, first)


def _backward_again(
    p: Problem, plan: Plan, inputs: Inputs, outputs: Outputs, out_dtype: str | None = None
) -> list[Tensor] | None:
    if not outputs.lse.numel() or not p.Tk:
        return None

    def first() -> tuple[Recorder, list[Tensor]]:
        call = AttentionRecorder(p, plan, inputs)
        return call, list(_launch_backward(call, outputs, frozenset(), {}, out_dtype)[:3])

    delta = () if outputs.delta is None else (outputs.delta,)
    arrays = (outputs.do, *inputs[:3], *outputs[:2], *delta)
    return _again(f"backward {out_dtype} {len(delta)}", p, plan, arrays, first)


def backward(
    problem: Problem,
    plan: Plan,
    inputs: Inputs,
    outputs: Outputs,
    *,
    grads: Set[str] = frozenset(),
    out_dtype: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(dq, dk, dv, more); more has the fields of `Side` that grads names: float32, but float64 for log_f."""
    _, lse, _, dlse, delta, _, dentropy = outputs
    if problem.uses & RESULTS:
        # kernels of a plain backward also serve a call with these results
        problem = replace(problem, return_max=False, return_entropy=dentropy is not None)
    dense = lse.is_contiguous() and (delta is None or delta.is_contiguous())
    if dlse is None and dense and not grads and replayable(problem, plan):
        again = _backward_again(problem, plan, inputs, outputs, out_dtype)
        if again is not None:
            return again[0], again[1], again[2], {}
    call = launch.AttentionLaunch(problem, plan, inputs)
    more: dict[str, Tensor] = {}
    lse = lse.contiguous()
    with on(inputs.q):
        dq, dk, dv, delta = _launch_backward(call, outputs._replace(lse=lse), grads, more, out_dtype)
    if "sinks" in grads and inputs.extras.sinks is not None:
        sinks = inputs.extras.sinks.double()
        more["sinks"] = sinks_gradient(sinks, lse, sink_delta(delta, sinks, lse, dentropy)).float()
    return dq, dk, dv, more


def _launch_backward(
    call: launch.AttentionLaunch,
    outputs: Outputs,
    grads: Set[str],
    more: dict[str, Tensor],
    out_dtype: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # (dq, dk, dv, delta)
    problem, plan, (q, k, v) = call.problem, call.plan, (x.p for x in call.qkv)
    _, lse, do, _, delta, _, dentropy = outputs
    dtype = getattr(torch, out_dtype) if out_dtype else q.dtype
    fast, share = _for_hopper(problem, plan, do, q, k, v), None
    if delta is None:
        delta = launch.delta(call, outputs)
        share = None if fast else launch.refine(call, outputs, delta)
    if fast and lse.numel():
        dq, dk, dv = hopper.run_backward(call, do, lse, delta, dtype)
    else:
        dentropy = None if dentropy is None else dentropy.contiguous()
        arrays = call.arrays._replace(do=launch.array(do), lse=lse, share=share, delta=delta, dentropy=dentropy)
        dq, dk, dv = launch_backward.backward(call, arrays, grads, more, dtype)
    return dq, call.caller_order(dk), call.caller_order(dv), delta
