"""The CPU backend: checks what it can compute, lays out the arrays, and hands them to the compiled core.

Kernels read the arrays where they lie, in any strides but for a contiguous last dimension; bfloat16 arrives as uint16.
Not responsible for checking arguments (problem.py) nor for which keys a query tile visits (plan.py).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import narrow
from ...plan import Limits, Plan
from ...problem import Problem
from ...quantised import Quantised
from .. import Extras

try:
    from . import _core
except ImportError as error:
    from ...errors import Unsupported

    raise Unsupported(
        "cpu", [f"its compiled core is missing ({error}): install the package with `pip install .`"]
    ) from error

Array = NDArray[Any]

CARRIER = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}
# as the core numbers them
CODES = {"int8": 1, "int4": 2, "fp8": 3}
LARGEST_HEAD = 1024

_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_parts: weakref.WeakKeyDictionary[Plan, list[Any]] = weakref.WeakKeyDictionary()


def set_num_threads(n: int) -> None:
    """Use at most n threads, the calling one among them."""
    global _threads
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the number of threads is {n!r}; expected an integer of at least 1")
    _threads = n


def get_num_threads() -> int:
    """How many threads a call may use."""
    return _threads


def join_team(library: str | None) -> None:
    """Run the calling thread's calls by the OpenMP runtime at this path, which others keep awake; None: our threads."""
    runtime = ctypes.CDLL(library) if library else None
    run, pause = (
        ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value if hasattr(runtime, name) else None
        for name in ("GOMP_parallel", "omp_pause_resource_all")
    )
    _core.join_team(run or 0, pause or 0)


def isa() -> str:
    """The instruction set in use: "avx512bf16", "avx512", "v3", "base" or "neon"."""
    return _core.isa()


def probe_flops(dtype: str = "float32", threads: int | None = None) -> float:
    """Flop/s of the kernels' inner product on tiles in the first cache: the ceiling of every prefill figure."""
    code = {"float32": 0, "bfloat16": 1, "float16": 0, "float64": 3}[dtype]
    return _core.probe_flops(code, threads or _threads)


def probe_stream(threads: int | None = None, megabytes: int = 512) -> float:
    """Bytes/s of one read of a large array, the ceiling of every decode figure."""
    return _core.probe_stream(np.ones(megabytes << 17), threads or _threads)


def limits(problem: Problem) -> Limits:
    """Tiles of 64 queries, the lanes of the kernels, and 64 keys."""
    return Limits(name="cpu", tile_q=64, tile_k=64)


def elsewhere(device: str, dtype: str) -> list[str]:
    """Reasons that attention and recurrences have alike: where the arrays live, and their dtype."""
    reasons = [] if device == "cpu" else [f"its arrays live on {device}: move them to the CPU"]
    if dtype not in CARRIER:
        reasons.append(f"{dtype} is not computed on the CPU: cast to bfloat16 or float32")
    return reasons


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this problem cannot run here."""
    reasons = elsewhere(problem.device, problem.dtype)
    if max(problem.D, problem.Dv) > LARGEST_HEAD:
        reasons.append(f"head sizes are D = {problem.D} and Dv = {problem.Dv}: at most {LARGEST_HEAD}")
    return reasons


def forward(
    problem: Problem, plan: Plan, q: Array, k: Array, v: Array, extras: Extras, *, out_dtype: str | None = None
) -> tuple[Array, Array]:
    """(o [B, Tq, Hq, Dv], lse [B, Tq, Hq]); o in out_dtype or the inputs'. `backward` recomputes its scores."""
    return _forward(problem, plan, q, k, v, extras, out_dtype or problem.dtype, 0)


def decode(problem: Problem, plan: Plan, q: Array, k: Array, v: Array, extras: Extras) -> tuple[Array, Array]:
    """forward where no backward follows: few queries are split over the keys."""
    return _forward(problem, plan, q, k, v, extras, problem.dtype, plan.split_keys)


def direct(problem: Problem, plan: Plan, kind: type, decode: bool) -> Any:
    """A call (threads, q, k, v, lse wanted) -> (o, lse or None) for tensors of `kind` alone, or None.

    Only where the kind offers DLPack's C exchange. The call returns None for tensors to be made contiguous first. Its
    attribute `backward` (threads, owners, do, q, k, v, o, lse, dlse or None) -> (dq, dk, dv) does so too.
    """
    exchange = getattr(kind, "__dlpack_c_exchange_api__", None)
    if exchange is None or len(plan.parts) > 1 or not problem.B * problem.Tq * problem.Hq * problem.Dv:
        return None
    if problem.dropout or problem.sinks or problem.bias or problem.alibi:
        return None
    if problem.source != "strided" or problem.quantised:
        return None
    split_keys = plan.split_keys if decode else 0
    return _core.Direct(exchange, _core_parts(plan), _options(problem), split_keys)


def _forward(
    problem: Problem, plan: Plan, q: Array, k: Array, v: Array, extras: Extras, out_dtype: str, split_keys: int
) -> tuple[Array, Array]:
    shape = (problem.B, problem.Tq, problem.Hq)
    # several parts fold into one another in the accumulator's precision
    kept = problem.accumulator if len(plan.parts) > 1 else CARRIER[out_dtype]
    o, lse = np.empty((*shape, problem.Dv), kept), np.empty(shape, problem.accumulator)
    if lse.size:
        parts, options, extra = _core_parts(plan), _options(problem), _extra(problem, extras)
        _core.forward(parts, options, _threads, split_keys, q, k, v, o, lse, extra)
    return (narrow(o, out_dtype) if len(plan.parts) > 1 else o), lse


def backward(
    problem: Problem, plan: Plan, do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, extras: Extras, *,
    dlse: Array | None = None, delta: Array | None = None, grads: Set[str] = frozenset(), out_dtype: str | None = None,
) -> tuple[Array, Array, Array, dict[str, Array]]:  # fmt: skip
    """(dq, dk, dv, more); more holds what grads names of "bias", "slopes", "sinks", in the accumulator's dtype."""
    out_dtype = out_dtype or problem.dtype
    wide, carrier = np.dtype(problem.accumulator), CARRIER[out_dtype]
    rows = (problem.B, problem.Tq, problem.Hq)
    splits = plan.owners
    several = len(plan.parts) > 1
    dq = np.zeros((*rows, problem.D), wide) if several else np.empty((*rows, problem.D), carrier)
    dk = np.zeros((problem.B, problem.Tk, problem.Hk, problem.D), carrier)
    dv = np.zeros((problem.B, problem.Tk, problem.Hk, problem.Dv), carrier)
    more: dict[str, Array] = {}
    if "bias" in grads and problem.bias:
        shared = problem.bias != (problem.B, problem.Hq, problem.Tq, problem.Tk)
        more["bias"] = np.zeros(problem.bias, np.float64 if shared else wide)
    slopes = np.zeros((problem.B, problem.Hk, splits, problem.G)) if "slopes" in grads else None
    # (lse in log2 units, delta) of each row, as the kernels used them
    used = np.zeros((*rows, 2)) if "sinks" in grads else None
    if problem.B and problem.Hq:
        _core.backward(
            _core_parts(plan), _options(problem), _threads, splits, do, q, k, v, o, np.ascontiguousarray(lse),
            None if dlse is None else np.ascontiguousarray(dlse),
            None if delta is None else np.ascontiguousarray(delta, np.float64),
            dq, dk, dv, more.get("bias"), slopes, used, _extra(problem, extras),
        )  # fmt: skip
    if "bias" in more:
        more["bias"] = more["bias"].astype(wide, copy=False)
    if slopes is not None and problem.alibi:
        per_head = slopes.sum(2).reshape(problem.B, problem.Hq)
        more["slopes"] = (per_head if problem.alibi[0] > 1 else per_head.sum(0, keepdims=True)).astype(wide)
    if used is not None:
        share = np.exp2(np.asarray(extras.sinks, np.float64) * np.log2(np.e) - used[..., 0])
        more["sinks"] = -(share * used[..., 1]).sum((0, 1)).astype(wide)
    return (narrow(dq, out_dtype) if several else dq), dk, dv, more


def append(
    x: Array, held: Array, scale: Array | None, first: Array, second: Array, cos: Array | None, sin: Array | None,
    interleaved: bool, how: Quantised | None,
) -> bool:  # fmt: skip
    """`caches.storage.Arrays.write`; True, for there is nothing that it leaves undone."""
    code, group = (0, 0) if how is None else (CODES[how.kind], how.group)
    x = x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)
    cos, sin = (None if a is None else np.ascontiguousarray(a) for a in (cos, sin))
    x, held = (a.view(np.uint16) if a.dtype.name == "bfloat16" else a for a in (x, held))
    _core.append(x, held, scale, code, group, first, second, cos, sin, interleaved, _threads)
    return True


def _core_parts(plan: Plan) -> list[Any]:
    parts = _parts.get(plan)
    if parts is None:
        parts = _parts[plan] = [_core.Part(part) for part in plan.parts]
    return parts


def _options(p: Problem) -> Any:
    return _core.Options(p.B, p.Tq, p.Tk, p.Hq, p.Hk, p.D, p.Dv, p.scale, p.softcap, p.dropout)


_NO_EXTRA = _core.Extra(None, None, None, None, None, 0, 0)


def _extra(problem: Problem, extras: Extras) -> Any:
    if (
        extras.bias is extras.slopes is extras.sinks is extras.block_table is extras.k_scale is None
        and not problem.dropout
    ):
        return _NO_EXTRA
    slopes = offset = sinks = None
    if extras.slopes is not None:
        slopes = np.ascontiguousarray(extras.slopes, np.float64)
        offset = _position_offset(problem)
    if extras.sinks is not None:
        sinks = np.ascontiguousarray(extras.sinks, np.float64)
    how = problem.quantised
    codes = () if how is None else (extras.k_scale, extras.v_scale, CODES[how.kind], how.group)
    return _core.Extra(extras.bias, slopes, offset, sinks, extras.block_table, extras.page_size, extras.seed, *codes)


def _position_offset(problem: Problem) -> Array:
    if problem.mask is None:
        return np.array([problem.Tk - problem.Tq], np.int32)
    return np.ascontiguousarray(problem.mask.offset(problem.B, problem.Tq, problem.Tk), np.int32).reshape(-1)
