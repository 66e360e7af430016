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
from saccade.backends.webgpu import documented, gradients, shapes, tiled
from saccade.backends.webgpu.arrays import GpuArray
from saccade.backends.webgpu.codes import encoded
from saccade.backends.webgpu.device import Step
from saccade.mask import Mask, causal, window
from saccade.plan import make_plan
from saccade.problem import Problem
from saccade.quantised import quantised
from saccade.testing import cases, run
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


def arrays(p: Problem, kind: str) -> tiled.Arrays:
    """Random q, k, v and do of a problem whose head sizes divide by four."""
    rng = np.random.default_rng(0)
    q, do = (upload(rng, kind, p.B, p.Tq, p.Hq, n) for n in (p.D, p.Dv))
    k, v = (upload(rng, kind, p.B, p.Tk, p.Hk, n) for n in (p.D, p.Dv))
    return tiled.Arrays(kind, q, k, v, None, do)


def pairs(p: Problem) -> int:
    """Allowed (query, key) pairs over batch and heads."""
    return make_plan(p, webgpu.limits(p)).allowed_upper if p.mask is not None else p.B * p.Hq * p.Tq * p.Tk


def row(
    case: str, provider: str, p: Problem, kind: str, times: list[float], amount: float, unit: str, note: str = ""
) -> dict[str, Any]:
    """One line of the table."""
    n = len(times)
    dtype = {"f32": "float32", "f16": "float16", "packed": "float16 packed"}[kind]
    shape, mask = f"{p.B}x{p.Tq}x{p.Tk}x{p.Hq}x{p.Hk}x{p.D}", "" if p.mask is None else str(p.mask)
    return {
        "commit": COMMIT, "device": GPU.name, "driver": f"{GPU.driver}; {GPU.backend}; wgpu", "case": case,
        "provider": provider, "dtype": dtype, "shape": shape, "mask": mask,
        "pairs": pairs(p), "median": times[n // 2], "p10": times[n // 10], "p90": times[-1 - n // 10], "samples": n,
        "rate": amount / times[n // 2], "rate_unit": unit, "note": note,
    }  # fmt: skip


def attention(T: int, D: int, kind: str, mask: Mask | None, name: str) -> list[dict[str, Any]]:
    """Forward and backward of the tiled kernels, 12 query and 4 key heads."""
    p = Problem(1, T, T, 12, 4, D, D, mask=mask, needs_grad=True, dtype="float32" if kind == "f32" else "float16")
    plan, a, n = make_plan(p, webgpu.limits(p)), arrays(p, kind), p.B * p.Tq * p.Hq
    o, lse = GPU.buffer(16 * n * shapes.vectors(D)), GPU.buffer(4 * n)
    launch = tiled.Launch(GPU, p, plan, a, Extras())
    tiled.forward(launch, o, lse)
    flops = 4 * D * pairs(p)
    found = [row(f"forward-{name}", "saccade tiled", p, kind, timed(launch.steps)[0], flops / 1e12, "TFLOP/s")]
    stats = GPU.buffer(16 * n)
    size = 16 * p.Tk * p.Hk * shapes.vectors(D)
    grads = gradients.Gradients(GPU.buffer(16 * n * shapes.vectors(D)), GPU.buffer(size), GPU.buffer(size))
    launch = tiled.Launch(GPU, p, plan, a, Extras())
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
    launch = tiled.Launch(GPU, p, plan, a, Extras())
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
        ("documented, streaming (S12)", [stream.step]),
    ):
        found.append(row(case, name, p, "f32", timed(steps, 9)[0], 2.5 * flops, "TFLOP/s"))
    return found


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
