"""WebGPU kernels on this machine's adapter, timed on the device: `python benchmarks/webgpu.py rows.csv`.

The library's tiled kernels beside the documented ones, forward, backward and decode, each checked against the float64
oracle at a small size first. Times are medians of the adapter's own clocks, after half a second of the same work.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from saccade.backends import Extras, webgpu
from saccade.backends.webgpu import diagonal, documented, gradients, recurrent, shapes, tiled
from saccade.backends.webgpu.arrays import GpuArray
from saccade.backends.webgpu.codes import encoded
from saccade.backends.webgpu.step import Step
from saccade.backends.webgpu.work import Work
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

FIELDS = [
    "commit", "device", "driver", "case", "provider", "dtype", "shape", "mask", "pairs", "median", "p10", "p90",
    "samples", "rate", "rate_unit", "note",
]  # fmt: skip
GPU = webgpu.open_gpu()
HALVES = "f16" if "shader-f16" in GPU.features else "packed"
QUICK = GPU.software or "--quick" in sys.argv


def timed(steps: Sequence[Step], samples: int = 15) -> tuple[list[float], list[float]]:
    """Seconds of all steps together, one a sample, ascending; and of each step alone, medians."""
    # a device that waits for the host between short kernels lowers its clocks
    many = [*steps] * (1 if QUICK else 64)
    begin = time.time()
    while time.time() - begin < (0.0 if QUICK else 0.5):
        GPU.run(many)
        GPU.wait()
    found = [GPU.run(steps, timed=True) or [] for _ in range(2 if QUICK else samples)]
    return sorted(map(sum, found)), [statistics.median(column) for column in zip(*found, strict=True)]


def upload(rng: np.random.Generator, kind: str, *shape: int) -> Any:
    """Normal numbers as the kernels store them."""
    dtype = np.float32 if kind == "f32" else np.float16
    return GPU.upload((rng.standard_normal(shape, np.float32) / 2).astype(dtype, copy=False))


def arrays(p: Problem, kind: str) -> tiled.AttentionBuffers:
    """Random q, k, v and do of a problem whose head sizes divide by four."""
    rng = np.random.default_rng(0)
    q, do = (upload(rng, kind, p.B, p.Tq, p.Hq, n) for n in (p.D, p.Dv))
    k, v = (upload(rng, kind, p.B, p.Tk, p.Hk, n) for n in (p.D, p.Dv))
    return tiled.AttentionBuffers(kind, q, k, v, None, do)


def pairs(p: Problem) -> int:
    """Allowed (query, key) pairs over batch and heads."""
    return make_plan(p, webgpu.limits(p)).allowed_upper if p.mask is not None else p.B * p.Hq * p.Tq * p.Tk


def row(
    case: str, provider: str, p: Problem, kind: str, times: list[float], amount: float, unit: str, note: str = ""
) -> dict[str, Any]:
    """One line of the table."""
    dtype = {"f32": "float32", "f16": "float16", "packed": "float16 packed"}[kind]
    shape, mask = f"{p.B}x{p.Tq}x{p.Tk}x{p.Hq}x{p.Hk}x{p.D}", "" if p.mask is None else str(p.mask)
    return line(case, provider, dtype, shape, times, amount, unit, note) | {"mask": mask, "pairs": pairs(p)}


def line(
    case: str, provider: str, dtype: str, shape: str, times: list[float], amount: float, unit: str, note: str = ""
) -> dict[str, Any]:
    """The same of what has no pairs."""
    n = len(times)
    return {
        "commit": COMMIT, "device": GPU.name, "driver": f"{GPU.driver}; {GPU.backend}; wgpu", "case": case,
        "provider": provider, "dtype": dtype, "shape": shape, "mask": "", "pairs": 0, "median": times[n // 2],
        "p10": times[n // 10], "p90": times[-1 - n // 10], "samples": n, "rate": amount / times[n // 2],
        "rate_unit": unit, "note": note,
    }  # fmt: skip


def attention(T: int, D: int, kind: str, mask: Mask | None, name: str) -> list[dict[str, Any]]:
    """Forward and backward of the tiled kernels, 12 query and 4 key heads."""
    p = Problem(1, T, T, 12, 4, D, D, mask=mask, needs_grad=True, dtype="float32" if kind == "f32" else "float16")
    plan, a, n = make_plan(p, webgpu.limits(p)), arrays(p, kind), p.B * p.Tq * p.Hq
    o, lse = GPU.buffer(16 * n * shapes.vectors(D)), GPU.buffer(4 * n)
    launch = tiled.AttentionLaunch(GPU, p, plan, a, Extras())
    tiled.forward(launch, o, lse)
    flops = 4 * D * pairs(p)
    found = [row(f"forward-{name}", "saccade tiled", p, kind, timed(launch.steps)[0], flops / 1e12, "TFLOP/s")]
    stats = GPU.buffer(16 * n)
    size = 16 * p.Tk * p.Hk * shapes.vectors(D)
    grads = gradients.GradientBuffers(GPU.buffer(16 * n * shapes.vectors(D)), GPU.buffer(size), GPU.buffer(size))
    launch = tiled.AttentionLaunch(GPU, p, plan, a, Extras())
    gradients.statistics(launch, o, lse, None, stats)
    gradients.backward(launch, stats, grads)
    times, each = timed(launch.steps, 7)
    note = "delta, dq, dkdv, sums of dk, of dv: " + ", ".join(f"{1e3 * t:.2f} ms" for t in each)
    return [*found, row(f"backward-{name}", "saccade tiled", p, kind, times, 2.5 * flops / 1e12, "TFLOP/s", note)]


def decode(Tk: int, kind: str, codes: str = "") -> dict[str, Any]:
    """One token over Tk keys, 32 query and 8 key heads of 128; codes: what a cache holds of keys and values."""
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
    return row(name, "saccade tiled", p, kind, times, size / 1e9, "GB/s", note)


def documented_set(T: int, backward: bool) -> list[dict[str, Any]]:
    """The documented kernels at 12:4 heads of 64, causal: forward, and both backward paths."""
    rng = np.random.default_rng(0)
    p = Problem(1, T, T, 12, 4, 64, 64, mask=causal(), needs_grad=True)
    Q, dO = (webgpu.array((rng.standard_normal((T, 12, 64)) / 2).astype(np.float32)) for _ in range(2))
    K, V = (webgpu.array((rng.standard_normal((T, 4, 64)) / 2).astype(np.float32)) for _ in range(2))
    call = documented.prepare("attention_forward", Q=Q, K=K, V=V)
    flops = 4 * 64 * pairs(p) / 1e12
    found = [row(f"forward-f32-causal-{T}-D64", "documented", p, "f32", timed([call.step])[0], flops, "TFLOP/s")]
    if not backward:
        return found
    LSE = call.arrays["LSE"]
    short = documented.prepare("attention_backward_short", Q=Q, K=K, V=V, dO=dO, LSE=LSE)
    scratch = {name: short.arrays[name] for name in ("P_scratch", "dS_scratch")}
    keys = documented.prepare("attention_backward_short_dKdV", Q=Q, dO=dO, **scratch, n_kv_heads=4)
    stream = documented.prepare("attention_backward", Q=Q, K=K, V=V, dO=dO, LSE=LSE)
    case = f"backward-f32-causal-{T}-D64"
    for name, steps in (
        ("documented, short (S10 + S11)", [short.step, keys.step]),
        ("documented, streaming", [stream.step]),
    ):
        found.append(row(case, name, p, "f32", timed(steps, 9)[0], 2.5 * flops, "TFLOP/s"))
    return found


def linear(T: int, D: int, decay: bool) -> list[dict[str, Any]]:
    """Causal linear attention, or a decay a head: 16 heads of D, forward and backward.

    The work counted is that of the recurrence, 4 K V of a token and head forward and 10 K V backward.
    """
    rng, H = np.random.default_rng(0), 16
    given: dict[str, Any] = {n: rng.standard_normal((1, T, H, D), np.float32) for n in ("q", "k", "v")}
    given |= {"g": -rng.random((1, T, H), np.float32)} if decay else {}
    options = MatrixOptions() if decay else MatrixOptions(feature_map="elu+1", normalize=True)
    flops, name = T * H * D * D / 1e12, f"{'scalar-decay' if decay else 'linear'}-{T}-D{D}"
    found: list[dict[str, Any]] = []
    for what, amount in (("forward", 4 * flops), ("backward", 10 * flops)):
        with Work(GPU) as work:
            launch = recurrent.MatrixLaunch(work, *described(MATRIX, given, options))
            launch.forward() if what == "forward" else launch.backward(given["v"], None)
            times, each = timed(work.steps)
            found.append(
                line(
                    f"{what}-{name}",
                    "saccade chunks",
                    "float32",
                    f"1x{T}x{H}x{D}",
                    times,
                    amount,
                    "TFLOP/s",
                    steps(work, each),
                )
            )
    return found


def scan(T: int, D: int, N: int = 16) -> list[dict[str, Any]]:
    """Mamba's selective scan with every option, forward and backward. The bytes counted are those of u, delta, z, y
    and, backward, of dy and three gradients.
    """
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {n: rng.standard_normal((1, T, D), np.float32) for n in ("u", "delta", "z")}
    given |= {n: rng.standard_normal((1, T, N), np.float32) for n in ("B", "C")}
    given |= {"A": -np.exp(rng.standard_normal((D, N), np.float32)), "D": np.ones(D, np.float32)}
    found: list[dict[str, Any]] = []
    for what, arrays in (("forward", 4), ("backward", 7)):
        with Work(GPU) as work:
            launch = diagonal.ScanLaunch(work, *described(SELECTIVE_SCAN, given, ScanOptions(True)))
            launch.forward() if what == "forward" else launch.backward(given["u"], None)
            times, each = timed(work.steps)
            amount, shape = 4 * arrays * T * D / 1e9, f"1x{T}x{D}x{N}"
            found.append(
                line(f"{what}-scan-{T}-D{D}", "saccade", "float32", shape, times, amount, "GB/s", steps(work, each))
            )
    return found


def described(family: Any, given: dict[str, Any], options: Any) -> tuple[Any, dict[str, Any]]:
    """The problem of these arrays, and they with None for what is left out."""
    specs = {n: Spec(given[n].shape, "float32", "cpu") if n in given else None for n in family.names}
    return family.describe(specs, options), {n: given.get(n) for n in family.names}


def steps(work: Work, each: Sequence[float]) -> str:
    """The kernels of a call and their times."""
    return ", ".join(f"{s.kernel.label} {1e6 * t:.0f} us" for s, t in zip(work.steps, each, strict=True))


def check() -> None:
    """Every gradient of a few cases within the tolerance rule on this adapter."""
    for name in (
        "heads-12to4",
        "mask-documents-causal",
        "mask-strided-window",
        "softcap",
        "D192-Dv128",
        "sinks",
        "alibi",
    ):
        mets = run.verify(make(cases.by_name(name)), "webgpu")
        wrong = [str(met) for met in mets if not met.ok]
        print(name, "; ".join(wrong) or "within the rule", flush=True)
    sizes = recurrences.Sizes(1, 200, 4, 2, 64, 64)
    for op in [recurrences.by_name(n) for n in ("linear-elu+1", "linear-all", "ssd")] + scans.OPS[:1]:
        wrong = [str(met) for met in recurrences.verify(op, sizes, "float32", "webgpu") if not met.ok]
        print(op, "; ".join(wrong) or "within the rule", flush=True)


def main(out: str) -> None:
    """Check, measure, write the table."""
    check()
    long = 256 if QUICK else 4096
    found: list[dict[str, Any]] = []
    for kind in ("f32", HALVES):
        for D in (64, 128, 256):
            found += attention(long, D, kind, causal(), f"{kind}-causal-{long}-D{D}")
        found += attention(2 * long, 64, kind, causal(), f"{kind}-causal-{2 * long}-D64")
        found += attention(long, 64, kind, None, f"{kind}-full-{long}-D64")
        found += attention(long, 64, kind, causal() & window(255, 0), f"{kind}-window256-{long}-D64")
        lengths = (512,) if QUICK else (8192, 32768, 131072)
        found += [decode(Tk, kind, codes) for codes in ("", "int8", "fp8", "int4") for Tk in lengths]
    found += attention(long // 8, 64, "f32", causal(), f"f32-causal-{long // 8}-D64")
    for T in (long, 4 * long):
        found += linear(T, 64, False) + linear(T, 128, False) + linear(T, 64, True)
    found += scan(long, 5120) + scan(2 * long, 1536)
    found += documented_set(long, False) + documented_set(long // 8, True)
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    for r in found:
        print(f"{r['case']:36} {r['provider']:30} {r['rate']:9.2f} {r['rate_unit']}  {r['note']}", flush=True)


COMMIT = subprocess.run(
    ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
).stdout.strip()
if __name__ == "__main__":
    main(sys.argv[1])
