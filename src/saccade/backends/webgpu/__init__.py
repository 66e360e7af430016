"""The WebGPU backend: tiled kernels in WGSL, run through wgpu on any adapter it finds.

Inputs are NumPy arrays, with bfloat16 as uint16, or arrays that `array` put on the device; results are the same kind.
problem.py checks arguments; plan.py decides which keys a query tile visits.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arrays import narrow, widened
from ...errors import Unsupported, how_to_install
from ...plan import Limits, Plan, make_plan, positions
from ...problem import Problem
from ...quantised import Quantised
from ...statistics import gates_gradient, sinks_gradient_of, slopes_gradient, statistics_of
from .. import Extras, Inputs, Outputs
from ..plan_encoding import splits

try:
    from .arrays import GpuArray, array, empty
    from .device import Gpu, at, open_gpu
except ImportError as error:
    raise Unsupported("webgpu", [f"it needs the package {error.name}: {how_to_install('webgpu')}"]) from error
from . import codes, gradients, shapes, support, texts, tiled
from .documented import run
from .support import STORED, describe, explain
from .texts import kernel_source

__all__ = [
    "TAKES",
    "GpuArray",
    "array",
    "backward",
    "decode",
    "describe",
    "empty",
    "explain",
    "forward",
    "kernel_source",
    "limits",
    "open_gpu",
    "plan",
    "run",
    "unsupported",
]

Array = NDArray[Any]
# work items that fill a large device, and the least number of keys per item
LANES, SPLIT_LEAST = 1024, 64
SCORES = {"softcap", "sinks", "bias", "alibi", "relative", "gates", "dropout"}
# sums of a backward pass that each have their own buffer
OF_SCORES = ("bias", "distances", "keys")
READS = {*SCORES, "source"}
TAKES = {"forward": {*READS, "quantised"}, "decode": {*READS, "quantised"}, "backward": READS}


def limits(problem: Problem) -> Limits:
    """Tiles of 64 queries and 64 keys, and the workgroup memory of the arrays' adapter."""
    memory = int(at(problem.device).limits[texts.MEMORY])
    return Limits("webgpu", shapes.ROWS, shapes.ROWS, memory, lanes=LANES, split_least=SPLIT_LEAST)


def plan(problem: Problem) -> Plan:
    """The plan of a problem."""
    return make_plan(problem, limits(problem))


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this problem cannot run here."""
    return support.unsupported(problem) or _too_small(problem, at(problem.device))


def _too_small(problem: Problem, gpu: Gpu) -> list[str]:
    # a bias takes one binding, and its gradient another
    wanted = 10 if problem.scores.bias and problem.needs_grad else 8
    here = int(gpu.limits[texts.STORAGE])
    return [f"a bias with gradients binds {wanted} storage buffers: {gpu.name} has {here}"] if here < wanted else []


class _CallBuffers:
    """The buffers of one call; they return to the device's pool when it is done."""

    def __init__(self, problem: Problem, first: Any):
        self.problem = problem
        self.resident = isinstance(first, GpuArray)
        self.gpu: Gpu = first.gpu if isinstance(first, GpuArray) else open_gpu()
        self.owned: list[Any] = []
        self.kind = support.kind(problem.dtype, self.gpu)

    def rows(self, x: Any, dtype: Any = None) -> Any:
        """The buffer of an array [B, T, H, n], its rows padded to vectors of four."""
        dtype = STORED[self.problem.dtype] if dtype is None else dtype
        if isinstance(x, GpuArray):
            if x.dtype != dtype or x.shape[-1] % 4:
                wanted = f"{np.dtype(dtype).name} with a last dimension that divides by 4"
                raise ValueError(f"an array on the device is {x.dtype.name} {list(x.shape)}; expected {wanted}")
            return x.buffer
        n = x.shape[-1]
        padded = np.zeros((*x.shape[:-1], 4 * shapes.vectors(n)), dtype) if n % 4 or not n else None
        wide = widened(x) if x.dtype == np.uint16 else x
        if padded is not None:
            padded[..., :n] = wide
            wide = padded
        return self.keep(self.gpu.upload(np.ascontiguousarray(wide, dtype)))

    def codes(self, x: Any, scales: Any, how: Quantised, n: int) -> Any:
        """The buffer of rows [B, T, H], n numbers as codes and scales per row; a device array already has such rows."""
        if not isinstance(x, GpuArray):
            return self.keep(self.gpu.upload(codes.joined(x, scales, how)))
        size = codes.row_of(how, n).size
        if x.dtype != np.uint32 or x.shape[-1] != size:
            raise ValueError(f"codes on the device are {x.dtype.name} {list(x.shape)}; expected uint32 [..., {size}]")
        return x.buffer

    def numbers(self, x: Any) -> Any:
        """The buffer of a float32 array, unpadded."""
        if isinstance(x, GpuArray):
            return x.buffer
        return self.keep(self.gpu.upload(np.ascontiguousarray(x, np.float32)))

    def zeros(self, count: int) -> Any:
        """A buffer of float32 zeros."""
        return self.keep(self.gpu.buffer(4 * max(count, 1)))

    def keep(self, buffer: Any) -> Any:
        self.owned.append(buffer)
        return buffer

    def arrays(self, inputs: Inputs, do: Any = None) -> tiled.AttentionBuffers:
        """The buffers of a call's inputs, and of do."""
        (q, k, v, extras), bias = inputs, None
        if self.problem.scores.bias:
            bias = self.numbers(np.asarray(extras.bias, np.float32).reshape(self.problem.scores.bias))
        if how := self.problem.quantised:
            k = self.codes(k, extras.k_scale, how, self.problem.D)
            v = self.codes(v, extras.v_scale, how, self.problem.Dv)
        else:
            k, v = self.rows(k), self.rows(v)
        return tiled.AttentionBuffers(self.kind, self.rows(q), k, v, bias, None if do is None else self.rows(do))

    def finish(
        self, launch: tiled.AttentionLaunch, results: Sequence[tuple[Any, tuple[int, ...], str]], host: int = 0
    ) -> list[Any]:
        """Submit the steps; return the results as the caller's kind of array, the last `host` as NumPy arrays."""
        device = len(results) - host if self.resident else 0
        reads = [(b, np.float32, (*s[:-1], -(-s[-1] // 4) * 4) if len(s) == 4 else s) for b, s, _ in results[device:]]
        self.owned += launch.owned
        read = self.gpu.call(launch.steps, reads)[0]
        answers: list[Any] = []
        for buffer, shape, _ in results[:device]:
            self.owned.remove(buffer)
            answers.append(GpuArray(self.gpu, buffer, shape, np.float32))
        for a, (_, shape, dtype) in zip(read, results[device:], strict=True):
            answers.append(narrow(np.ascontiguousarray(a[..., : shape[-1]]), dtype))
        return answers

    def __enter__(self) -> _CallBuffers:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self.owned:
            self.gpu.release(buffer)


def forward(problem: Problem, plan: Plan, inputs: Inputs, *, out_dtype: str | None = None) -> tuple[Any, Any]:
    """(o [B, Tq, Hq, Dv], lse [B, Tq, Hq]); o has out_dtype or the inputs' dtype, on the device always float32."""
    return _forward(problem, plan, inputs, out_dtype or problem.dtype, False)


def decode(problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Any, Any]:
    """`forward` for calls without a backward pass; if there are few queries, the keys are split into ranges."""
    return _forward(problem, plan, inputs, problem.dtype, splits(problem, plan))


def _forward(problem: Problem, plan: Plan, inputs: Inputs, out_dtype: str, split: bool) -> tuple[Any, Any]:
    rows = (problem.B, problem.Tq, problem.Hq)
    with _CallBuffers(problem, inputs.q) as call:
        launch = tiled.AttentionLaunch(call.gpu, problem, plan, call.arrays(inputs), inputs.extras)
        n = int(np.prod(rows))
        o, lse = call.zeros(n * 4 * shapes.vectors(problem.Dv)), call.zeros(n)
        if n:
            (tiled.decode if split else tiled.forward)(launch, o, lse)
        results = call.finish(launch, [(o, (*rows, problem.Dv), out_dtype), (lse, rows, "float32")])
        return results[0], results[1]


def backward(
    problem: Problem,
    plan: Plan,
    inputs: Inputs,
    outputs: Outputs,
    *,
    grads: Set[str] = frozenset(),
    out_dtype: str | None = None,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(dq, dk, dv, more); more has the fields of `Side` that grads names, as NumPy arrays."""
    p, rows = problem, (problem.B, problem.Tq, problem.Hq)
    extras, (o, lse, do, dlse, delta) = inputs.extras, outputs[:5]
    with _CallBuffers(p, inputs.q) as call:
        launch = tiled.AttentionLaunch(call.gpu, p, plan, call.arrays(inputs, do), extras)
        n = int(np.prod(rows))
        stats = call.zeros(4 * n)
        if delta is not None:
            stats = call.numbers(statistics_of(lse, delta))
        elif n:
            wide = call.numbers if isinstance(o, GpuArray) else lambda x: call.rows(x, np.float32)
            down = None if dlse is None else call.numbers(dlse)
            gradients.statistics(launch, wide(o), call.numbers(lse), down, stats)
        keys, shapes_of = p.B * p.Tk * p.Hk, _sums_of_scores(p, plan, grads, extras)
        buffers = gradients.GradientBuffers(
            dq=call.zeros(n * 4 * shapes.vectors(p.D)),
            dk=call.zeros(keys * 4 * shapes.vectors(p.D)),
            dv=call.zeros(keys * 4 * shapes.vectors(p.Dv)),
            **{f"d{name}": call.zeros(int(np.prod(shape))) for name, shape in shapes_of.items() if name in OF_SCORES},
            dslopes=[call.zeros(int(np.prod(shape))) for name, shape in shapes_of.items() if name not in OF_SCORES],
        )
        if n:
            gradients.backward(launch, stats, buffers)
        dtype, of_keys = out_dtype or p.dtype, (p.B, p.Tk, p.Hk)
        results: list[tuple[Any, tuple[int, ...], str]] = [
            (buffers.dq, (*rows, p.D), dtype),
            (buffers.dk, (*of_keys, p.D), dtype),
            (buffers.dv, (*of_keys, p.Dv), dtype),
        ]
        of_scores = [getattr(buffers, f"d{name}") for name in shapes_of if name in OF_SCORES] + list(buffers.dslopes)
        extra = [(b, (int(np.prod(shape)),), "float32") for b, shape in zip(of_scores, shapes_of.values(), strict=True)]
        if grads & {"sinks", "log_f"}:
            extra.append((stats, (4 * n,), "float32"))
        arrays = call.finish(launch, results + extra, len(extra))
        names = [*shapes_of, "stats"]
        more = _more(p, grads, dict(zip(names, arrays[3:], strict=False)), inputs.extras)
        return arrays[0], arrays[1], arrays[2], more


def _sums_of_scores(p: Problem, plan: Plan, grads: Set[str], extras: Extras) -> dict[str, tuple[int, ...]]:
    # shapes of a backward pass's other sums, by name; the slopes come last, with one buffer per part
    sizes: dict[str, tuple[int, ...]] = {}
    if "bias" in grads and p.scores.bias:
        sizes["bias"] = p.scores.bias
    if "table" in grads:
        sizes["distances"] = extras.distances.shape
    if "log_f" in grads:
        sizes["keys"] = p.B, p.Hq, p.Tk
    if "slopes" in grads:
        sizes |= {f"slopes {n}": (p.B * p.Hq, len(x.nq) * x.n_tiles) for n, x in enumerate(plan.parts)}
    return sizes


def _more(p: Problem, grads: Set[str], sums: dict[str, Array], extras: Extras) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if "bias" in sums:
        more["bias"] = sums["bias"].reshape(p.scores.bias)
    if "distances" in sums:
        more["table"] = sums["distances"].reshape(extras.distances.shape)
    if "sinks" in grads:
        more["sinks"] = sinks_gradient_of(sums["stats"].reshape(-1, p.Hq, 4), extras.sinks)
    if "keys" in sums:
        of_rows = sums["stats"].reshape(p.B, p.Tq, p.Hq, 4)[..., 3].swapaxes(1, 2)
        more["log_f"] = gates_gradient(of_rows, sums["keys"].reshape(p.B, p.Hq, p.Tk), positions(p).tolist())
    if "slopes" in grads and p.scores.alibi:
        more["slopes"] = slopes_gradient([x for name, x in sums.items() if name[:6] == "slopes"], p.scores.alibi, p.B)
    return more
