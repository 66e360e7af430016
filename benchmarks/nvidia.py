"""Attention on this machine's NVIDIA GPU beside torch's own: `python benchmarks/nvidia.py rows.csv [--only WORD]`.

Times are medians of CUDA events after a warm-up, of graph replays for decode, of the wall clock for a step (a mask made
anew, forward and backward) and for the host's share of a call. FLOPs are 4 D a pair allowed, 2.5 times that for a
backward. Every result is compared with float32 attention of a few rows in the same run.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia_cases import HOST, SUITES, Case, allowed_of, ids_of, mask_of
from nvidia_peers import PEERS

import saccade
import triton
from saccade import mask as masks
from saccade.backends import load
from saccade.mask.lowering import lower
from saccade.plan import make_plan
from saccade.problem import Problem, Scores
from saccade.quantised import quantised

FIELDS = [
    "commit", "device", "driver", "case", "provider", "dtype", "shape", "mask", "pairs", "visited", "median", "p10",
    "p90", "rate", "rate_unit", "error", "note",
]  # fmt: skip
# tokens of a page, 0 for keys one after the other, and how numbers are coded
CACHES: dict[str, tuple[int, str | None]] = {"saccade, cache": (0, None)}
CACHES |= {f"saccade, pages of {n}": (n, None) for n in (64, 16, 1)}
CACHES |= {f"saccade, {kind}": (0, kind) for kind in ("int8", "fp8", "int4")}
CACHES["saccade, int8 in pages of 64"] = 64, "int8"
# ours on the arrays of a pattern, without it
DENSE = "saccade, dense"


def inputs(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    kind = {"device": "cuda", "dtype": dtype if dtype.itemsize > 1 else torch.bfloat16}
    q, do = (torch.randn(case.B, case.Tq, case.Hq, case.D, **kind) for _ in range(2))
    k, v = (torch.randn(case.B, case.Tk, case.Hk, case.D, **kind) for _ in range(2))
    return [x.to(dtype) for x in (q, k, v, do)]


def problem_of(case: Case) -> Problem:
    return Problem(
        case.B, case.Tq, case.Tk, case.Hq, case.Hk, case.D, case.D, case.dtype,
        mask_of(case, ids_of(case) if case.documents else None), scores=Scores(scale=case.D**-0.5), device="cuda:0",
    )  # fmt: skip


def ours(case: Case, x: list[torch.Tensor]) -> Callable[[], Any]:
    q, k, v, do = x
    ids = ids_of(case).cuda() if case.documents else None
    mask = mask_of(case, ids)
    if case.verb in ("step", "recorded", "host"):
        given = [a.clone().requires_grad_() for a in (q, k, v)]

        if case.verb == "recorded":
            return lambda: saccade.attention(*given, mask)

        def step() -> Any:
            # ids of the next batch are another array
            made = mask if ids is None else mask_of(case, ids + 1)
            return torch.autograd.grad(saccade.attention(*given, made), given, do)

        return step
    if q.dtype.itemsize == 1:
        ones = [torch.ones(x.shape[2], device="cuda") for x in (q, k, v)]
        return lambda: saccade.attention(q, k, v, mask, descale=ones)
    if case.verb != "backward":
        with torch.no_grad():
            return lambda: saccade.attention(q, k, v, mask)
    o, lse = saccade.attention(q, k, v, mask, return_lse=True)
    return lambda: saccade.attention_backward(do, q, k, v, o, lse, mask)[:3]


def cached(case: Case, x: list[torch.Tensor], page: int, kind: str | None) -> Callable[[], Any] | None:
    """`decode` over a cache whose lengths are on the device, its keys one after the other or in scattered pages."""
    if case.verb != "decode":
        return None
    q, k, v, _ = x
    if not page:
        held: Any = saccade.KVCache(case.B, case.Tk, case.Hk, case.D, dtype=k.dtype, device="cuda", quantised=kind)
        held.append(k, v)
    else:
        n = -(-case.Tk // page)
        pool = saccade.PagedKVCache(case.B * n, page, case.Hk, case.D, dtype=k.dtype, device="cuda", quantised=kind)
        table = torch.randperm(case.B * n, device="cuda").reshape(case.B, n).int()
        at = table.long()[:, torch.arange(case.Tk, device="cuda") // page], torch.arange(case.Tk, device="cuda") % page
        for array, a in zip(pool.arrays, pool.stored(k, v), strict=True):
            array[at] = a
        lengths = torch.full((case.B,), case.Tk, dtype=torch.int32, device="cuda")
        held = pool.view([])._replace(block_table=table, lengths=lengths)
    return lambda: saccade.decode(q, held)


def bytes_read(case: Case, kind: str | None, size: int) -> int:
    """Of the keys and values of a decode step, which are numbers of `size` bytes or codes."""
    if kind is None:
        return 2 * case.B * case.Tk * case.Hk * case.D * size
    how = quantised(kind, None, case.D)
    return 2 * case.B * case.Tk * case.Hk * (how.width(case.D) + 2 * how.scales(case.D))


def error(case: Case, x: list[torch.Tensor], got: Any) -> float:
    """Largest difference of eight rows of o from attention in float32."""
    q, k, v, _ = (a.float() for a in x)
    o = got[0] if isinstance(got, tuple) else got
    rows = torch.linspace(0, case.Tq - 1, min(8, case.Tq), device="cuda").long()
    k, v = (a.repeat_interleave(case.Hq // case.Hk, 2) for a in (k, v))
    s = torch.einsum("bthd,bjhd->bhtj", q[:, rows], k) * case.D**-0.5
    mask = mask_of(case, ids_of(case) if case.documents else None)
    if mask is not None:
        # the rows alone, as positions of their own
        seen = torch.stack([seen_by(mask, int(t), case) for t in rows]).cuda()
        s.masked_fill_(~seen, float("-inf"))
    ref = torch.einsum("bhtj,bjhd->bthd", s.softmax(-1), v)
    return float((o[:, rows].float() - ref).abs().max())


def seen_by(mask: masks.Mask, t: int, case: Case) -> torch.Tensor:
    """The keys of row t, bool [Tk]."""
    low = lower(mask, 1, 1, case.Tq, case.Tk).masks[0]
    return torch.from_numpy(low.test(t, np.arange(case.Tk)))


FIRST = """
import time
import torch
q, k, v = (torch.randn({0}, {1}, {3}, {5}, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
begin = time.perf_counter()
import saccade
saccade.attention(q, k, v, saccade.mask.parse("{mask}"))
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def first_calls(case: Case) -> list[float]:
    """Seconds of `import saccade` and one call in a new process, when the kernels lie in Triton's cache on disk."""
    code = FIRST.format(*case[1:7], mask=case.mask)
    words = [sys.executable, "-c", code]
    found = [float(subprocess.run(words, capture_output=True, text=True, check=True).stdout) for _ in range(6)]
    return np.quantile(found[1:], [0.5, 0.1, 0.9]).tolist()


def by_clock(call: Callable[[], Any], wait: bool) -> list[float]:
    """Seconds of the wall clock a call; without `wait` of the host alone, which runs ahead of the device."""
    found = []
    for n in range(12):
        inside = 4 if wait else 100
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(inside):
            call()
        if wait:
            torch.cuda.synchronize()
        if n >= 2:
            found.append((time.perf_counter() - begin) / inside)
    return np.quantile(found, [0.5, 0.1, 0.9]).tolist()


def timed(case: Case, call: Callable[[], Any]) -> list[float]:
    if case.verb == "decode":
        return graphed(call)
    if case.verb == "first":
        return first_calls(case)
    if case.verb in ("step", *HOST):
        return by_clock(call, case.verb == "step")
    return [ms * 1e-3 for ms in triton.testing.do_bench(call, warmup=60, rep=250, quantiles=[0.5, 0.1, 0.9])]


def graphed(call: Callable[[], Any], inside: int = 20) -> list[float]:
    """Seconds a call inside a captured graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inside):
            call()
    found = triton.testing.do_bench(graph.replay, warmup=30, rep=150, quantiles=[0.5, 0.1, 0.9])
    return [ms * 1e-3 / inside for ms in found]


def run(case: Case, peers: list[str]) -> Iterator[dict[str, Any]]:
    x = inputs(case)
    problem = problem_of(case)
    plan = make_plan(problem, load("triton").limits(problem))
    masked = (
        plan.allowed_upper if not case.pattern else case.B * case.Hq * allowed_of(case.mask, case.Tk),
        plan.visited_pairs,
    )
    every = case.B * case.Hq * case.Tq * case.Tk
    calls: dict[str, Any] = {"saccade": lambda: ours(case, x)}
    if case.pattern:
        # the same arrays without the mask, whose rate is what an allowed pair's stands beside
        calls[DENSE] = lambda: ours(case._replace(mask=""), x)
    for name, held in CACHES.items():
        calls[name] = lambda held=held: cached(case, x, *held)
    calls |= {name: lambda peer=peer: peer(case, x) for name, peer in PEERS.items() if name in peers}
    for provider, make in calls.items():
        size = bytes_read(case, CACHES.get(provider, (0, None))[1], x[0].element_size())
        pairs, visited = (every, every) if provider == DENSE else masked
        flops = 4 * pairs * case.D * {"backward": 2.5, "step": 3.5, "host": 3.5}.get(case.verb, 1)
        work, unit = (size * 1e-9, "GB/s") if case.verb == "decode" else (flops * 1e-12, "TFLOP/s")
        row: dict[str, Any] = {"case": case.name, "provider": provider, "dtype": case.dtype, "mask": case.mask}
        row |= {
            "pairs": pairs,
            "visited": visited,
            "shape": "x".join(map(str, case[1:7])),
            "rate_unit": unit,
        }
        try:
            call = make()
            if call is None:
                continue
            if provider.startswith("saccade") and provider != DENSE and case.verb in ("forward", "decode"):
                row["error"] = f"{error(case, x, call()):.3g}"
            row["median"], row["p10"], row["p90"] = timed(case, call)
            row["rate"] = work / row["median"]
        except Exception as failure:
            row["note"] = f"{type(failure).__name__}: {failure}"[:200]
        yield row
        call = None
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--suite", nargs="*", default=list(SUITES))
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--commit", default="", help="what to write as the commit")
    args = parser.parse_args()
    words = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = args.commit or subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    driver = f"torch {torch.__version__}, triton {triton.__version__}"
    where = {"commit": commit, "device": torch.cuda.get_device_name(), "driver": driver}
    with args.out.open("w", newline="") as file:
        rows = csv.DictWriter(file, FIELDS)
        rows.writeheader()
        for suite in args.suite:
            for case in SUITES[suite]():
                if args.only not in case.name:
                    continue
                for row in run(case, args.peers):
                    rows.writerow(where | row)
                    file.flush()
                    told = row.get("note")
                    if "rate" in row:
                        told = f"{row['rate']:9.1f} {row['rate_unit']} {row['median'] * 1e6:10.1f} us"
                    print(f"{row['case']:64} {row['provider']:12} {told} {row.get('error', '')}", flush=True)


if __name__ == "__main__":
    main()
