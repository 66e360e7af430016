"""The Metal backend: tiled kernels in Metal's language, launched through MLX on Apple GPUs.

It takes and returns NumPy arrays, with bfloat16 as uint16. problem.py checks arguments, plan.py decides which keys a
query tile visits, and frameworks/mlx.py converts MLX's arrays.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...plan import Limits, Plan, make_plan, positions
from ...problem import Problem
from ...statistics import gates_gradient, sinks_gradient_of, slopes_gradient, statistics_of
from .. import Inputs, Outputs
from ..plan_encoding import splits
from . import gradients, support, tiled
from .device import bits, install, like, misplaced, missing, on_host, runtime, zeros
from .interface import Output, Runtime
from .shapes import shape
from .support import explain
from .texts import kernel
from .tiled import Rotation

__all__ = [
    "TAKES",
    "Output",
    "Rotation",
    "Runtime",
    "backward",
    "decode",
    "explain",
    "forward",
    "install",
    "kernel",
    "limits",
    "missing",
    "plan",
    "shape",
    "unsupported",
]

Array = NDArray[Any]
SCORES = {"softcap", "sinks", "bias", "alibi", "relative", "gates", "dropout"}
READS = {*SCORES, "source"}
TAKES = {"forward": {*READS, "quantised"}, "decode": {*READS, "quantised"}, "backward": READS}


def limits(problem: Problem) -> Limits:
    """Segment lists for 32 queries and 32 keys, and the threadgroup memory that every Apple GPU has."""
    return tiled.limits()


def plan(problem: Problem) -> Plan:
    """The plan of a problem."""
    return make_plan(problem, limits(problem))


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this problem cannot run here."""
    return support.unsupported(problem) + misplaced(problem.device)


def _launch(
    problem: Problem,
    plan: Plan,
    inputs: Inputs,
    do: Any = None,
    heads_first: bool = False,
    rotation: Rotation | None = None,
) -> tiled.AttentionLaunch:
    q, k, v, extras = inputs
    here = runtime(q)
    small = {name: _host(getattr(extras, name)) for name in ("bias", "slopes", "sinks", "distances")}
    extras = extras._replace(**small, gates=None if extras.gates is None else on_host(extras.gates))
    bias = None if extras.bias is None else here.array(extras.bias.reshape(problem.scores.bias), "float32")
    q, do = (None if x is None else here.array(x, problem.dtype) for x in (q, do))
    kinds = ("uint8", "uint16") if problem.quantised else (problem.dtype, "")
    k, v = (here.array(bits(x) if problem.quantised else x, kinds[0]) for x in (k, v))
    scales = [here.array(bits(x), kinds[1]) for x in (extras.k_scale, extras.v_scale) if x is not None]
    arrays = tiled.AttentionArrays(q, k, v, bias, do, *scales)
    return tiled.AttentionLaunch(here, problem, plan, arrays, extras, heads_first, rotation)


def _host(x: Any) -> Any:
    # small arrays go into the side buffer, which the host fills
    return None if x is None else on_host(x).astype(np.float32, copy=False)


def forward(
    problem: Problem,
    plan: Plan,
    inputs: Inputs,
    *,
    out_dtype: str | None = None,
    heads_first: bool = False,
    rotation: Rotation | None = None,
) -> tuple[Any, Any]:
    """(o [B, Tq, Hq, Dv], lse [B, Tq, Hq]); o has out_dtype, by default the inputs' dtype.

    heads_first: all arrays have heads before rows, as in MLX's own attention. rotation: the kernel rotates q and k as
    it loads them, key j by position j and the last query by the position at which the mask aligns it; D must be even.
    `backward` takes no rotation: rotate q and k with `saccade.rope` before a call that needs gradients.
    """
    if rotation is not None and problem.D % 2:
        raise ValueError(f"rotation is given for heads of {problem.D}; expected an even size")
    if empty := _no_queries(problem, inputs.q, out_dtype or problem.dtype, heads_first):
        return empty
    launch = _launch(problem, plan, inputs, None, heads_first, rotation)
    o, lse = like(inputs.q, launch.runtime, *tiled.forward(launch, out_dtype or problem.dtype))
    return o, lse


def decode(
    problem: Problem, plan: Plan, inputs: Inputs, *, heads_first: bool = False, rotation: Rotation | None = None
) -> tuple[Any, Any]:
    """`forward` for calls without a backward pass; if there are few queries, the keys are split into chunks."""
    if not splits(problem, plan):
        return forward(problem, plan, inputs, heads_first=heads_first, rotation=rotation)
    if empty := _no_queries(problem, inputs.q, problem.dtype, heads_first):
        return empty
    launch = _launch(problem, plan, inputs, None, heads_first, rotation)
    o, lse = like(inputs.q, launch.runtime, *tiled.decode(launch, problem.dtype))
    return o, lse


def _no_queries(p: Problem, q: Any, dtype: str, heads_first: bool) -> tuple[Any, Any] | None:
    rows = tiled.rows_shape(p, heads_first, p.Tq, p.Hq)
    return None if p.B * p.Tq else (zeros(q, (*rows, p.Dv), dtype), zeros(q, rows, "float32"))


def backward(
    problem: Problem,
    plan: Plan,
    inputs: Inputs,
    outputs: Outputs,
    *,
    grads: Set[str] = frozenset(),
    out_dtype: str | None = None,
    heads_first: bool = False,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(dq, dk, dv, more); more has the fields of `Side` that grads names, as NumPy arrays."""
    if not problem.B * problem.Tq * problem.Tk:
        return _no_pairs(problem, inputs, outputs, grads, out_dtype or problem.dtype)
    p, extras, (o, lse, do, dlse, delta) = problem, inputs.extras, outputs[:5]
    launch = _launch(p, plan, inputs, do, heads_first)
    here = launch.runtime
    if delta is not None:
        stats = here.array(statistics_of(_host(lse), _host(delta)), "float32")
    else:
        kind = p.dtype
        if isinstance(o, np.ndarray):
            kind = "bfloat16" if o.dtype == np.uint16 else o.dtype.name
        down = None if dlse is None else here.array(dlse, "float32")
        stats = gradients.statistics(launch, here.array(o, kind), kind, here.array(lse, "float32"), down)
    results = gradients.backward(launch, stats, "slopes" in grads, out_dtype or p.dtype)
    more: dict[str, Any] = {}
    if "bias" in grads and p.scores.bias:
        more["bias"] = here.numpy(gradients.bias_gradient(launch, stats, p.scores.bias))
    if "table" in grads:
        entries, heads, n = extras.distances.shape
        more["table"] = here.numpy(gradients.bias_gradient(launch, stats, (entries, heads, 1, n), True))[:, :, 0]
    if "sinks" in grads:
        rows = here.numpy(stats).reshape(-1)[: 4 * p.B * p.Tq * p.Hq].reshape(-1, p.Hq, 4)
        more["sinks"] = sinks_gradient_of(rows, _host(extras.sinks))
    if "log_f" in grads:
        shapes = (p.B, p.Hq, p.Tq, 1), (p.B, p.Hq, 1, p.Tk)
        rows, keys = (here.numpy(gradients.bias_gradient(launch, stats, shape)) for shape in shapes)
        more["log_f"] = gates_gradient(rows[..., 0], keys[:, :, 0], positions(p).tolist())
    if "slopes" in grads and p.scores.alibi:
        more["slopes"] = slopes_gradient([here.numpy(x) for x in results.slopes], p.scores.alibi, p.B)
    return *like(inputs.q, launch.runtime, results.dq, results.dk, results.dv), more


def _no_pairs(
    p: Problem, inputs: Inputs, outputs: Outputs, grads: Set[str], out_dtype: str
) -> tuple[Any, Any, Any, dict[str, Any]]:
    shapes = ((p.Tq, p.Hq, p.D), (p.Tk, p.Hk, p.D), (p.Tk, p.Hk, p.Dv))
    dq, dk, dv = (zeros(inputs.q, (p.B, *n), out_dtype) for n in shapes)
    table = None if inputs.extras.distances is None else inputs.extras.distances.shape
    empty = {"bias": p.scores.bias, "slopes": p.scores.alibi, "table": table, "log_f": (p.B, p.Tk, p.Hq)}
    more: dict[str, Any] = {name: np.zeros(empty[name] or 0, np.float32) for name in grads - {"sinks"}}
    if "sinks" in grads:
        # without keys, the sink has all the weight: lse is the sink, and o is 0
        lse = _host(outputs.lse)
        down = np.zeros(lse.shape, np.float32) if outputs.dlse is None else -_host(outputs.dlse)
        more["sinks"] = sinks_gradient_of(statistics_of(lse, down).reshape(-1, p.Hq, 4), _host(inputs.extras.sinks))
    return dq, dk, dv, more
