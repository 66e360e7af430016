"""WebGPU kernels on this machine's adapter, timed on the device: `python benchmarks/webgpu.py rows.csv`.

The tiled kernels and the documented ones run forward, backward and decode. Tiled kernels are first checked against the
float64 oracle at small sizes. Times are medians of the adapter's own clocks, after half a second of the same work.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from arguments import chosen, parser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from saccade.backends import Extras, webgpu
from saccade.backends.webgpu import diagonal, documented, gradients, recurrent, shapes, tiled
from saccade.backends.webgpu.arrays import GpuArray
from saccade.backends.webgpu.codes import encoded
from saccade.backends.webgpu.step import Step
from saccade.backends.webgpu.work import Work
from saccade.cli.bench.clocks import timing
from saccade.cli.bench.machine import Environment, commit_name
from saccade.cli.bench.rows import Row, write
from saccade.mask import Mask, causal, window
from saccade.operands import Spec
from saccade.plan import make_plan
from saccade.problem import Problem
from saccade.quantised import quantised
from saccade.recurrent.diagonal import SELECTIVE_SCAN, ScanOptions
from saccade.recurrent.problem import MATRIX, MatrixOptions
from saccade.testing import cases, run
from saccade.testing import diagonal as scans
from saccade.testing import recurrent as recurrences
from saccade.testing.inputs import make

GPU = webgpu.open_gpu()
HALVES = "f16" if "shader-f16" in GPU.features else "packed"
QUICK = GPU.software or "--quick" in sys.argv
ENV = Environment(commit_name(), GPU.name, f"{GPU.driver}; {GPU.backend}; wgpu")


def timed(steps: Sequence[Step], samples: int = 15) -> tuple[list[float], list[float]]:
    """Seconds of all steps together, per sample; and the median seconds of each step alone."""
    # a device that waits for the host between short kernels lowers its clocks
    many = [*steps] * (1 if QUICK else 64)
    begin = time.time()
    while time.time() - begin < (0.0 if QUICK else 0.5):
        GPU.run(many)
        GPU.wait()
    rounds = [GPU.run(steps, timed=True) or [] for _ in range(2 if QUICK else samples)]
    return list(map(sum, rounds)), [statistics.median(column) for column in zip(*rounds, strict=True)]


def upload(rng: np.random.Generator, kind: str, *shape: int) -> Any:
    """Normally distributed numbers, as the kernels store them."""
    dtype = np.float32 if kind == "f32" else np.float16
    return GPU.upload((rng.standard_normal(shape, np.float32) / 2).astype(dtype, copy=False))


def arrays(p: Problem, kind: str) -> tiled.AttentionBuffers:
    """Random q, k, v and do of a problem whose head sizes are multiples of four."""
    rng = np.random.default_rng(0)
    q, do = (upload(rng, kind, p.B, p.Tq, p.Hq, n) for n in (p.D, p.Dv))
    k, v = (upload(rng, kind, p.B, p.Tk, p.Hk, n) for n in (p.D, p.Dv))
    return tiled.AttentionBuffers(kind, q, k, v, None, do)


def pairs(p: Problem) -> int:
    """Allowed (query, key) pairs over batch and heads."""
    return make_plan(p, webgpu.limits(p)).allowed_upper if p.mask is not None else p.B * p.Hq * p.Tq * p.Tk


class Figure(NamedTuple):
    """A timed call: its samples, and its work; `unit` is that of the work per second."""

    case: str
    provider: str
    times: list[float]
    amount: float
    unit: str
    note: str = ""

    def of(self, p: Problem) -> Row:
        """The row of an attention problem."""
        shape, mask = f"{p.B}x{p.Tq}x{p.Tk}x{p.Hq}x{p.Hk}x{p.D}", "" if p.mask is None else str(p.mask)
        dtype = "float16 packed" if p.dtype == "float16" and HALVES == "packed" else p.dtype
        return replace(self.at(dtype, shape), mask=mask, pairs=pairs(p))

    def at(self, dtype: str, shape: str) -> Row:
        """The row of a call without pairs."""
        time, kind = timing(self.times), self.case.partition("-")[0]
        row = Row(*ENV, self.case, self.provider, kind, dtype, shape, note=self.note, **time._asdict())
        return replace(row, rate=self.amount / time.median, rate_unit=self.unit)


def attention(T: int, D: int, kind: str, mask: Mask | None, name: str) -> Iterator[Row]:
    """Forward and backward of the tiled kernels, 12 query and 4 key heads."""
    p = Problem(1, T, T, 12, 4, D, D, mask=mask, needs_grad=True, dtype="float32" if kind == "f32" else "float16")
    plan, a, n = make_plan(p, webgpu.limits(p)), arrays(p, kind), p.B * p.Tq * p.Hq
    o, lse = GPU.buffer(16 * n * shapes.vectors(D)), GPU.buffer(4 * n)
    launch = tiled.AttentionLaunch(GPU, p, plan, a, Extras())
    tiled.forward(launch, o, lse)
    flops = 4 * D * pairs(p)
    times, _ = timed(launch.steps)
    yield Figure(f"forward-{name}", "saccade tiled", times, flops / 1e12, "TFLOP/s").of(p)
    stats = GPU.buffer(16 * n)
    size = 16 * p.Tk * p.Hk * shapes.vectors(D)
    grads = gradients.GradientBuffers(GPU.buffer(16 * n * shapes.vectors(D)), GPU.buffer(size), GPU.buffer(size))
    launch = tiled.AttentionLaunch(GPU, p, plan, a, Extras())
    gradients.statistics(launch, o, lse, None, stats)
    gradients.backward(launch, stats, grads)
    times, each = timed(launch.steps, 7)
    note = "delta, dq, dkdv, sums of dk, of dv: " + ", ".join(f"{1e3 * t:.2f} ms" for t in each)
    yield Figure(f"backward-{name}", "saccade tiled", times, 2.5 * flops / 1e12, "TFLOP/s", note).of(p)


def decode(Tk: int, kind: str, codes: str = "") -> Iterator[Row]:
    """One token over Tk keys, with 32 query and 8 key heads of 128; codes: the kind of codes in the cache."""
    how = quantised(codes, None, 128) if codes else None
    p = Problem(1, 1, Tk, 32, 8, 128, 128, dtype="float32" if kind == "f32" else "float16", quantised=how)
    plan = make_plan(p, webgpu.limits(p))
    o, lse = GPU.buffer(4 * 32 * 128), GPU.buffer(4 * 32)
    a = arrays(p, kind)
    size = 2 * Tk * 8 * 128 * (4 if kind == "f32" else 2)
    if how:
        numbers = GpuArray(GPU, a.k, (Tk, 8, 128), np.float32 if kind == "f32" else np.float16)
        rows = encoded(numbers, how)
        a, size = a._replace(k=rows.buffer, v=rows.buffer), 2 * rows.nbytes
    launch = tiled.AttentionLaunch(GPU, p, plan, a, Extras())
    tiled.decode(launch, o, lse)
    times, each = timed(launch.steps)
    note = f"{plan.num_splits} splits; decode, combine: " + ", ".join(f"{1e6 * t:.0f} us" for t in each)
    name = f"decode-{Tk}" + (f"-{codes}" if codes else "")
    yield Figure(name, "saccade tiled", times, size / 1e9, "GB/s", note).of(p)


def documented_set(T: int, backward: bool) -> Iterator[Row]:
    """The documented kernels at 12:4 heads of 64, causal: forward, and both backward paths."""
    rng = np.random.default_rng(0)
    p = Problem(1, T, T, 12, 4, 64, 64, mask=causal(), needs_grad=True)
    Q, dO = (webgpu.array((rng.standard_normal((T, 12, 64)) / 2).astype(np.float32)) for _ in range(2))
    K, V = (webgpu.array((rng.standard_normal((T, 4, 64)) / 2).astype(np.float32)) for _ in range(2))
    call = documented.prepare("attention_forward", Q=Q, K=K, V=V)
    flops = 4 * 64 * pairs(p) / 1e12
    yield Figure(f"forward-f32-causal-{T}-D64", "documented", timed([call.step])[0], flops, "TFLOP/s").of(p)
    if not backward:
        return
    LSE = call.arrays["LSE"]
    short = documented.prepare("attention_backward_short", Q=Q, K=K, V=V, dO=dO, LSE=LSE)
    scratch = {name: short.arrays[name] for name in ("P_scratch", "dS_scratch")}
    keys = documented.prepare("attention_backward_short_dKdV", Q=Q, dO=dO, **scratch, n_kv_heads=4)
    stream = documented.prepare("attention_backward", Q=Q, K=K, V=V, dO=dO, LSE=LSE)
    case = f"backward-f32-causal-{T}-D64"
    for name, steps in (
        ("documented, short", [short.step, keys.step]),
        ("documented, streaming", [stream.step]),
    ):
        yield Figure(case, name, timed(steps, 9)[0], 2.5 * flops, "TFLOP/s").of(p)


def linear(T: int, D: int, decay: bool) -> Iterator[Row]:
    """Causal linear attention, or one decay per head: 16 heads of D, forward and backward.

    The work is that of the recurrence: per token and head 4 K V forward and 10 K V backward.
    """
    rng, H = np.random.default_rng(0), 16
    x: dict[str, Any] = {n: rng.standard_normal((1, T, H, D), np.float32) for n in ("q", "k", "v")}
    x |= {"g": -rng.random((1, T, H), np.float32)} if decay else {}
    options = MatrixOptions() if decay else MatrixOptions(feature_map="elu+1", normalize=True)
    flops, name = T * H * D * D / 1e12, f"{'scalar-decay' if decay else 'linear'}-{T}-D{D}"
    for what, amount in (("forward", 4 * flops), ("backward", 10 * flops)):
        with Work(GPU) as work:
            launch = recurrent.MatrixLaunch(work, *described(MATRIX, x, options))
            launch.forward() if what == "forward" else launch.backward(x["v"], None)
            times, each = timed(work.steps)
            figure = Figure(f"{what}-{name}", "saccade chunks", times, amount, "TFLOP/s", steps(work, each))
        yield figure.at("float32", f"1x{T}x{H}x{D}")


def scan(T: int, D: int, N: int = 16) -> Iterator[Row]:
    """Mamba's selective scan with every option, forward and backward. The bytes are those of u, delta, z and y,
    in a backward also of dy and three gradients.
    """
    rng = np.random.default_rng(0)
    x: dict[str, Any] = {n: rng.standard_normal((1, T, D), np.float32) for n in ("u", "delta", "z")}
    x |= {n: rng.standard_normal((1, T, N), np.float32) for n in ("B", "C")}
    x |= {"A": -np.exp(rng.standard_normal((D, N), np.float32)), "D": np.ones(D, np.float32)}
    for what, arrays in (("forward", 4), ("backward", 7)):
        with Work(GPU) as work:
            launch = diagonal.ScanLaunch(work, *described(SELECTIVE_SCAN, x, ScanOptions(True)))
            launch.forward() if what == "forward" else launch.backward(x["u"], None)
            times, each = timed(work.steps)
            amount = 4 * arrays * T * D / 1e9
            figure = Figure(f"{what}-scan-{T}-D{D}", "saccade", times, amount, "GB/s", steps(work, each))
        yield figure.at("float32", f"1x{T}x{D}x{N}")


def described(family: Any, x: dict[str, Any], options: Any) -> tuple[Any, dict[str, Any]]:
    """The problem of these arrays, and the arrays by name, None for those that are missing."""
    specs = {n: Spec(x[n].shape, "float32", "cpu") if n in x else None for n in family.names}
    return family.describe(specs, options), {n: x.get(n) for n in family.names}


def steps(work: Work, each: Sequence[float]) -> str:
    """The kernels of a call and their times."""
    return ", ".join(f"{s.kernel.label} {1e6 * t:.0f} us" for s, t in zip(work.steps, each, strict=True))


CHECKED = ("heads-12to4", "mask-documents-causal", "mask-strided-window", "softcap", "D192-Dv128", "sinks", "alibi")


def check() -> None:
    """Print whether results and gradients of a few cases are within the tolerance rule on this adapter."""
    for name in CHECKED:
        mets = run.verify(make(cases.by_name(name)), "webgpu")
        wrong = [str(met) for met in mets if not met.ok]
        print(name, "; ".join(wrong) or "within the rule", flush=True)
    sizes = recurrences.Sizes(1, 200, 4, 2, 64, 64)
    for op in [recurrences.by_name(n) for n in ("linear-elu+1", "linear-all", "ssd")] + scans.OPS[:1]:
        wrong = [str(met) for met in recurrences.verify(op, sizes, "float32", "webgpu") if not met.ok]
        print(op, "; ".join(wrong) or "within the rule", flush=True)


def jobs() -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    """The measurements: a name, and a call that yields rows."""
    long = 256 if QUICK else 4096
    for kind in ("f32", HALVES):
        sizes: list[tuple[str, int, int, Mask | None]] = [("causal", long, D, causal()) for D in (64, 128, 256)]
        sizes += [("causal", 2 * long, 64, causal()), ("full", long, 64, None)]
        sizes += [("window256", long, 64, causal() & window(255, 0))]
        sizes += [("causal", long // 8, 64, causal())] if kind == "f32" else []
        for word, T, D, mask in sizes:
            name = f"{kind}-{word}-{T}-D{D}"
            yield name, partial(attention, T, D, kind, mask, name)
        for codes in ("", "int8", "fp8", "int4"):
            for Tk in (512,) if QUICK else (8192, 32768, 131072):
                yield f"{kind}-decode-{Tk}-{codes}", partial(decode, Tk, kind, codes)
    for T in (long, 4 * long):
        for D, decay in ((64, False), (128, False), (64, True)):
            yield f"linear-{T}-D{D}", partial(linear, T, D, decay)
    for T, D in ((long, 5120), (2 * long, 1536)):
        yield f"scan-{T}-D{D}", partial(scan, T, D)
    for T, backward in ((long, False), (long // 8, True)):
        yield f"documented-{T}", partial(documented_set, T, backward)


def main() -> None:
    """Check, measure, write the rows."""
    words = parser(__doc__)
    words.add_argument("--quick", action="store_true", help="tiny shapes, to check that everything runs")
    args = words.parse_args()
    check()
    picked = chosen((job for name, job in jobs() if args.only in name), args.part)
    write(args.out, (row for job in picked for row in job()))


if __name__ == "__main__":
    main()
