"""The CPU backend: checks what it can compute, lays out the arrays, and hands them to the compiled core.

Kernels read arrays in place with any strides, as long as the last dimension is contiguous; bfloat16 arrives as uint16.
problem.py checks the arguments; plan.py decides which keys a query tile visits.
"""

from __future__ import annotations

import weakref
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import narrow
from ...combinations import not_invariant, not_with_select
from ...plan import Limits, Plan, make_plan, positions
from ...problem import Problem
from ...quantised import Quantised
from ...statistics import sink_delta, sinks_gradient
from .. import Extras, Inputs, Outputs

try:
    from . import _core
except ImportError as error:
    from ...errors import Unsupported

    here = any(path.suffix in (".so", ".pyd") for path in Path(__file__).parent.glob("_core*"))
    reason = f"does not load ({error})" if here else f"is missing: {Path(__file__).parent} has no file _core*.so"
    raise Unsupported("cpu", [f"its compiled core {reason}; install the package with `pip install .`"]) from error

from . import threads
from .probes import isa, probe_flops, probe_stream
from .threads import get_num_threads, set_num_threads

__all__ = [
    "TAKES",
    "THREADS",
    "append",
    "backward",
    "decode",
    "describe",
    "direct",
    "ffi_handlers",
    "forward",
    "get_num_threads",
    "isa",
    "limits",
    "plan",
    "probe_flops",
    "probe_stream",
    "set_num_threads",
    "tangent",
    "unsupported",
]

Array = NDArray[Any]

SCORES = {"softcap", "sinks", "bias", "alibi", "relative", "gates", "dropout"}
STORED = {"source", "quantised"}
RESULTS = {"return_max", "return_entropy"}
TAKES = {
    "forward": {*SCORES, *STORED, *RESULTS, "select", "batch"},
    "decode": {*SCORES, *STORED, *RESULTS, "select", "batch"},
    "backward": {*SCORES, *RESULTS, "select", "batch"},
    "tangent": SCORES,
}
# options of calls that `direct` supports
DIRECT = {"softcap", "batch"}
THREADS = threads
CARRIER = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}
# the core's numbers for the kinds of codes
CODES = {"int8": 1, "int4": 2, "fp8": 3}
LARGEST_HEAD = 1024

_parts: weakref.WeakKeyDictionary[Plan, list[Any]] = weakref.WeakKeyDictionary()


def limits(problem: Problem) -> Limits:
    """Tiles of 64 queries, which are the lanes of the kernels, and of 64 keys. A stage has work for all owners."""
    return Limits(name="cpu", tile_q=64, tile_k=64, stage=128)


def plan(problem: Problem) -> Plan:
    """The plan of a problem."""
    return make_plan(problem, limits(problem))


def describe() -> dict[str, Any]:
    """The instruction set and the number of threads in use."""
    return {"isa": isa(), "threads": get_num_threads()}


def elsewhere(device: str, dtype: str) -> list[str]:
    """Reasons that attention and recurrences share: the device of the arrays, and their dtype."""
    reasons = [] if device == "cpu" else [f"its arrays live on {device}: move them to the CPU"]
    if dtype not in CARRIER:
        reasons.append(f"{dtype} is not computed on the CPU: cast to bfloat16 or float32")
    return reasons


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = elsewhere(problem.device, problem.dtype)
    if max(problem.D, problem.Dv) > LARGEST_HEAD:
        reasons.append(f"head sizes are D = {problem.D} and Dv = {problem.Dv}: at most {LARGEST_HEAD}")
    return reasons + not_with_select(problem) + not_invariant(problem)


def forward(problem: Problem, plan: Plan, inputs: Inputs, *, out_dtype: str | None = None) -> tuple[Array, ...]:
    """(o [B, Tq, Hq, Dv], lse [B, Tq, Hq], *more); o in out_dtype or the inputs' dtype."""
    return _forward(problem, plan, inputs, out_dtype or problem.dtype, 0)


def decode(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Array, ...]:
    """`forward` for calls without a backward: the keys of few queries are split into chunks."""
    # a list of selected keys is short: its keys are not split
    split_keys = 0 if problem.selection is not None else plan.split_keys
    return _forward(problem, plan, inputs, problem.dtype, split_keys)


def direct(problem: Problem, plan: Plan, kind: type, decode: bool) -> Any:
    """A call (threads, q, k, v, want_lse) -> (o, lse or None) for tensors of `kind`, or None.

    It exists where `kind` offers DLPack's C exchange API. The call returns None for tensors that must first be made
    contiguous. So does its attribute `backward` (threads, owners, do, q, k, v, o, lse, dlse or None) -> (dq, dk, dv).
    """
    exchange = getattr(kind, "__dlpack_c_exchange_api__", None)
    if exchange is None or len(plan.parts) > 1 or not problem.B * problem.Tq * problem.Hq * problem.Dv:
        return None
    if not problem.uses <= DIRECT:
        return None
    split_keys = plan.split_keys if decode else 0
    return _core.Direct(exchange, _core_parts(plan), _options(problem), split_keys)


def _forward(problem: Problem, plan: Plan, inputs: Inputs, out_dtype: str, split_keys: int) -> tuple[Array, ...]:
    q, k, v, extras = inputs
    shape = (problem.B, problem.Tq, problem.Hq)
    # the results of several parts are merged in the accumulator's precision
    dtype = problem.accumulator if len(plan.parts) > 1 else CARRIER[out_dtype]
    o, lse = np.empty((*shape, problem.Dv), dtype), np.empty(shape, problem.accumulator)
    top = np.empty_like(lse) if problem.return_max else None
    entropy = np.empty_like(lse) if problem.return_entropy else None
    if lse.size:
        parts, options, extra = _core_parts(plan), _options(problem), _extra(problem, extras)
        _core.forward(parts, options, threads.number, split_keys, q, k, v, o, lse, top, entropy, extra)
    o = narrow(o, out_dtype) if len(plan.parts) > 1 else o
    return (o, lse) if top is entropy is None else (o, lse, *[x for x in (top, entropy) if x is not None])


def backward(
    problem: Problem,
    plan: Plan,
    inputs: Inputs,
    outputs: Outputs,
    *,
    grads: Set[str] = frozenset(),
    out_dtype: str | None = None,
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """(dq, dk, dv, more); more has the fields of `Side` that grads names: in the accumulator's dtype, but float64 for
    log_f.
    """
    (q, k, v, extras), (o, lse, do, dlse, delta, entropy, dentropy) = inputs, outputs
    out_dtype = out_dtype or problem.dtype
    wide, carrier = np.dtype(problem.accumulator), CARRIER[out_dtype]
    rows = (problem.B, problem.Tq, problem.Hq)
    splits = plan.owners
    several = len(plan.parts) > 1
    dq = np.zeros((*rows, problem.D), wide) if several else np.empty((*rows, problem.D), carrier)
    dk = np.zeros((problem.B, problem.Tk, problem.Hk, problem.D), carrier)
    dv = np.zeros((problem.B, problem.Tk, problem.Hk, problem.Dv), carrier)
    more: dict[str, Array] = {}
    if "bias" in grads and problem.scores.bias:
        shared = problem.scores.bias != (problem.B, problem.Hq, problem.Tq, problem.Tk)
        more["bias"] = np.zeros(problem.scores.bias, np.float64 if shared else wide)
    slopes = np.zeros((problem.B, problem.Hk, splits, problem.G)) if "slopes" in grads else None
    distances = np.zeros(extras.distances.shape) if "table" in grads else None
    gates = np.zeros((problem.B, problem.Hk, splits, problem.G, problem.Tk)) if "log_f" in grads else None
    # (lse in log2 units, delta) of each row, as the kernels used them
    used = np.zeros((*rows, 2)) if "sinks" in grads else None
    if problem.B and problem.Hq:
        dlse, entropy, dentropy = (None if x is None else np.ascontiguousarray(x) for x in (dlse, entropy, dentropy))
        delta = None if delta is None else np.ascontiguousarray(delta, np.float64)
        call = _core_parts(plan), _options(problem), threads.number, splits
        rows_in, rows_out = (do, q, k, v, o, np.ascontiguousarray(lse), dlse, entropy, dentropy, delta), (dq, dk, dv)
        added = more.get("bias"), distances, slopes, gates
        _core.backward(*call, *rows_in, *rows_out, *added, used, _extra(problem, extras))
    if "bias" in more:
        more["bias"] = more["bias"].astype(wide, copy=False)
    if slopes is not None and problem.scores.alibi:
        per_head = slopes.sum(2).reshape(problem.B, problem.Hq)
        more["slopes"] = (per_head.sum(0, keepdims=True) if problem.scores.alibi[0] == 1 else per_head).astype(wide)
    if distances is not None:
        more["table"] = distances.astype(wide, copy=False)
    if gates is not None:
        more["log_f"] = gates.sum(2).reshape(problem.B, problem.Hq, problem.Tk).swapaxes(1, 2)
    if used is not None:
        sinks = np.asarray(extras.sinks, np.float64)
        delta = sink_delta(used[..., 1], sinks, lse, dentropy)
        more["sinks"] = sinks_gradient(sinks, used[..., 0], delta, log2=True).astype(wide)
    return (narrow(dq, out_dtype) if several else dq), dk, dv, more


def tangent(
    problem: Problem, plan: Plan, inputs: Inputs, o: Array, lse: Array, tangents: Inputs
) -> tuple[Array, Array]:
    """The tangents of o and lse, by one pass that recomputes the scores; o: all parts of the plan in its dtype."""
    several = len(plan.parts) > 1
    do = np.empty(o.shape, problem.accumulator if several else o.dtype)
    dlse = np.empty(lse.shape, problem.accumulator)
    if dlse.size:
        arrays = *inputs[:3], o, np.ascontiguousarray(lse), *tangents[:3], do, dlse
        extras = _extra(problem, inputs.extras), _extra(problem, tangents.extras)
        _core.tangent(_core_parts(plan), _options(problem), threads.number, *arrays, *extras)
    return (narrow(do, problem.dtype) if several else do), dlse


def append(
    x: Array,
    target: Array,
    scale: Array | None,
    first: Array,
    second: Array,
    cos: Array | None,
    sin: Array | None,
    interleaved: bool,
    how: Quantised | None,
) -> bool:
    """`caches.storage.Arrays.write`; always True, because it handles every case."""
    if not target.flags.writeable:
        raise ValueError("an array of the cache is read-only; expected one that append can write to")
    # a source inside of the target would change while it is read
    x = x.copy() if np.may_share_memory(x, target) else x
    x = _dense(x)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    cos, sin = (None if a is None else np.ascontiguousarray(a, wide) for a in (cos, sin))
    x, target = (a.view(np.uint16) if a.dtype.name == "bfloat16" else a for a in (x, target))
    code, group = (0, 0) if how is None else (CODES[how.kind], how.group)
    _core.append(x, target, scale, code, group, first, second, cos, sin, interleaved, threads.number)
    return True


def ffi_handlers() -> dict[str, Any]:
    """The handlers of XLA's foreign function interface by their names, as capsules (core/ffi.cpp)."""
    return _core.ffi_handlers()


def _dense(x: Array) -> Array:
    # kernels need a contiguous last dimension
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def _core_parts(plan: Plan) -> list[Any]:
    parts = _parts.get(plan)
    if parts is None:
        parts = _parts[plan] = [_core.Part(part) for part in plan.parts]
    return parts


def _options(p: Problem) -> Any:
    s, ranges = p.scores, limits(p).split_least if p.deterministic == "batch" else 0
    return _core.Options(p.B, p.Tq, p.Tk, p.Hq, p.Hk, p.D, p.Dv, s.scale, s.softcap, s.dropout, ranges)


_NO_EXTRA = _core.Extra(None, None, None, None, None, 0, 0)


def _extra(problem: Problem, extras: Extras) -> Any:
    if (
        extras.bias is extras.slopes is extras.sinks is extras.block_table is extras.k_scale is None
        and extras.distances is extras.gates is None
        and not problem.scores.dropout
        and problem.selection is None
    ):
        return _NO_EXTRA
    bias, slopes, offset, sinks, gates = extras.bias, None, None, None, None
    # of a field of records, for example; kernels read any strides in whole numbers
    if bias is not None and not bias.flags.aligned:
        bias = np.ascontiguousarray(bias)
    if not (extras.slopes is extras.distances is extras.gates is None):
        offset = positions(problem)
    if extras.slopes is not None:
        slopes = np.ascontiguousarray(extras.slopes, np.float64)
    if extras.gates is not None:
        # [B, Hq, Tk]: the sums of a head are contiguous
        gates = np.ascontiguousarray(extras.gates.swapaxes(1, 2))[..., None]
    if extras.sinks is not None:
        sinks = np.ascontiguousarray(extras.sinks, np.float64)
    how = problem.quantised
    codes = None, None, 0, 0
    if how is not None:
        codes = _dense(extras.k_scale), _dense(extras.v_scale), CODES[how.kind], how.group
    pages = extras.block_table, extras.page_size
    by_position = None if extras.distances is None else np.ascontiguousarray(extras.distances), gates
    of = problem.selection
    selected = (None, 1, 1) if of is None else (of.lists(), of.block, of.rows)
    return _core.Extra(bias, slopes, offset, sinks, *pages, extras.seed, *codes, *by_position, *selected)
