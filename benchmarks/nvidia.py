"""Attention on an NVIDIA GPU, compared with its peers: `python benchmarks/nvidia.py rows.csv [--only WORD]`.

Times are medians of CUDA events after a warm-up. Decode uses replays of a graph. A step (a new mask, forward and
backward) and the host's share of a call use the wall clock. FLOPs are 4 D per allowed pair, 2.5 times that for a
backward. Every result is compared with float32 attention of a few rows in the same run.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from arguments import chosen, gpu_parser, started, version_of
from nvidia_cases import BUCKETS, HOST, SUITES, Case, allowed_of, ids_of, mask_of, term_of
from nvidia_peers import PEERS

import saccade
from saccade import mask as masks
from saccade.backends import load
from saccade.cli.bench.clocks import by_clock, by_events, by_replays, timing
from saccade.cli.bench.machine import Environment
from saccade.cli.bench.rows import Row, note, write
from saccade.mask.lowering import lower
from saccade.plan import make_plan
from saccade.problem import Problem, Scores
from saccade.quantised import quantised
from saccade.testing import forms

# tokens per page, 0 for contiguous keys, and the kind of codes
CACHES: dict[str, tuple[int, str | None]] = {"saccade, cache": (0, None)}
CACHES |= {f"saccade, pages of {n}": (n, None) for n in (64, 16, 1)}
CACHES |= {f"saccade, {kind}": (0, kind) for kind in ("int8", "fp8", "int4")}
CACHES["saccade, int8 in pages of 64"] = 64, "int8"
# Saccade on the arrays of a pattern, without its mask
DENSE = "saccade, dense"


def inputs(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    kind = {"device": "cuda", "dtype": dtype if dtype.itemsize > 1 else torch.bfloat16}
    q, do = (torch.randn(case.B, case.Tq, case.Hq, case.D, **kind) for _ in range(2))
    k, v = (torch.randn(case.B, case.Tk, case.Hk, case.D, **kind) for _ in range(2))
    return [x.to(dtype) for x in (q, k, v, do)]


def problem_of(case: Case) -> Problem:
    mask = mask_of(case, ids_of(case) if case.documents else None)
    slopes, table = ((1, case.Hq) if case.scores == name else None for name in ("slopes", "table"))
    scores = Scores(scale=case.D**-0.5, alibi=slopes, relative=table, gates=case.scores == "gates")
    return Problem(*case[1:7], case.D, case.dtype, mask, scores=scores, device="cuda:0")


def bias_of(case: Case) -> Any:
    """The term added to the scores, as `bias=` takes it; None if there is none."""
    x = term_of(case)
    if x is None:
        return None
    make = {"slopes": saccade.alibi, "table": partial(saccade.relative, origin=BUCKETS), "gates": saccade.gates}
    return make[case.scores](x)


def ours(case: Case, x: list[torch.Tensor], ordered: bool = True) -> Callable[[], Any]:
    q, k, v, do = x
    ids = ids_of(case).cuda() if case.documents else None
    mask = mask_of(case, ids)
    if case.verb in ("step", "recorded", "host"):
        leaves = [a.clone().requires_grad_() for a in (q, k, v)]

        if case.verb == "recorded":
            return lambda: saccade.attention(*leaves, mask)

        def step() -> Any:
            # the next batch has another array of ids
            fresh = mask if ids is None else mask_of(case, ids + 1)
            return torch.autograd.grad(saccade.attention(*leaves, fresh), leaves, do)

        return step
    if q.dtype.itemsize == 1:
        ones = [torch.ones(x.shape[2], device="cuda") for x in (q, k, v)]
        return lambda: saccade.attention(q, k, v, mask, descale=ones)
    bias = bias_of(case)
    if case.verb != "backward":
        with torch.no_grad():
            return lambda: saccade.attention(q, k, v, mask, bias=bias)
    o, lse = saccade.attention(q, k, v, mask, bias=bias, return_lse=True)
    return lambda: saccade.attention_backward(do, q, k, v, o, lse, mask, bias=bias, deterministic=ordered)[:3]


def cached(case: Case, x: list[torch.Tensor], page: int, kind: str | None) -> Callable[[], Any] | None:
    """`decode` over a cache whose lengths are on the device, its keys contiguous or in scattered pages."""
    if case.verb != "decode":
        return None
    q, k, v, _ = x
    if not page:
        cache: Any = saccade.KVCache(case.B, case.Tk, case.Hk, case.D, dtype=k.dtype, device="cuda", quantised=kind)
        cache.append(k, v)
    else:
        n = -(-case.Tk // page)
        pool = saccade.PagedKVCache(case.B * n, page, case.Hk, case.D, dtype=k.dtype, device="cuda", quantised=kind)
        table = torch.randperm(case.B * n, device="cuda").reshape(case.B, n).int()
        at = table.long()[:, torch.arange(case.Tk, device="cuda") // page], torch.arange(case.Tk, device="cuda") % page
        for array, a in zip(pool.arrays, pool.stored(k, v), strict=True):
            array[at] = a
        lengths = torch.full((case.B,), case.Tk, dtype=torch.int32, device="cuda")
        cache = pool.view([])._replace(block_table=table, lengths=lengths)
    return lambda: saccade.decode(q, cache)


def bytes_read(case: Case, kind: str | None, size: int) -> int:
    """Bytes of the keys and values that a decode step reads: numbers of `size` bytes, or codes."""
    if kind is None:
        return 2 * case.B * case.Tk * case.Hk * case.D * size
    how = quantised(kind, None, case.D)
    return 2 * case.B * case.Tk * case.Hk * (how.width(case.D) + 2 * how.scales(case.D))


def error(case: Case, x: list[torch.Tensor], got: Any) -> float:
    """The largest difference of eight rows of o from attention in float32."""
    q, k, v, _ = (a.float() for a in x)
    o = got[0] if isinstance(got, tuple) else got
    rows = torch.linspace(0, case.Tq - 1, min(8, case.Tq), device="cuda").long()
    k, v = (a.repeat_interleave(case.Hq // case.Hk, 2) for a in (k, v))
    s = torch.einsum("bthd,bjhd->bhtj", q[:, rows], k) * case.D**-0.5
    s += added(case, rows)
    mask = mask_of(case, ids_of(case) if case.documents else None)
    if mask is not None:
        # the selected rows only
        seen = torch.stack([seen_by(mask, int(t), case) for t in rows]).cuda()
        s.masked_fill_(~seen, float("-inf"))
    ref = torch.einsum("bhtj,bjhd->bthd", s.softmax(-1), v)
    return float((o[:, rows].float() - ref).abs().max())


def added(case: Case, rows: torch.Tensor) -> Any:
    """The term added to the scores of some rows, float32, broadcast to [B, Hq, rows, Tk]; 0 if there is none."""
    x, distance = term_of(case), rows[:, None] - torch.arange(case.Tk, device="cuda")
    if x is None:
        return 0.0
    if case.scores == "slopes":
        return -x[:, None, None] * distance.abs()
    if case.scores == "table":
        return x[:, (distance + BUCKETS).clamp(0, 2 * BUCKETS)]
    c = x.double().cumsum(1).transpose(1, 2)
    return (c[:, :, rows, None] - c[:, :, None]).float()


def seen_by(mask: masks.Mask, t: int, case: Case) -> torch.Tensor:
    """Whether row t sees each key, bool [Tk]."""
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
    """Seconds of `import saccade` and one call in a new process, with the kernels in Triton's cache on disk."""
    code = FIRST.format(*case[1:7], mask=case.mask)
    words = [sys.executable, "-c", code]
    samples = [float(subprocess.run(words, capture_output=True, text=True, check=True).stdout) for _ in range(6)]
    return samples[1:]


def samples_of(case: Case, call: Callable[[], Any]) -> list[float]:
    """Seconds per call, by the clock of the verb. The host's share is timed while the host runs ahead of the GPU."""
    wait = torch.cuda.synchronize
    if case.verb == "decode":
        return by_replays(call)
    if case.verb == "first":
        return first_calls(case)
    if case.verb == "step":
        return by_clock(call, warm=8, inside=4, before=wait, after=wait)
    if case.verb in HOST:
        return by_clock(call, warm=200, inside=100, before=wait)
    return by_events(call)


def calls_of(case: Case, x: list[torch.Tensor], args: Namespace) -> dict[str, Callable[[], Any]]:
    """Calls by provider, each prepared when its turn comes.

    Saccade, its new forms between two turns of the default, without a pattern's mask, over caches; peers.
    """
    calls: dict[str, Callable[[], Any]] = {"saccade": lambda: ours(case, x)}
    if case.verb == "backward":
        calls["saccade, any order"] = lambda: ours(case, x, False)
    news = forms.of_kind(case.verb) if args.forms else []
    # the default twice, around the new forms
    for name, call in list(calls.items()) if news else ():
        calls |= {f"{name}, {form}": call for form in news} | {f"{name}, again": call}
    if case.pattern:
        # the reference for the rate of allowed pairs
        calls[DENSE] = lambda: ours(case._replace(mask=""), x)
    for name, cache in CACHES.items():
        calls[name] = lambda cache=cache: cached(case, x, *cache)
        for form in news if cache[1] is None else ():
            calls[f"{name}, {form}"] = calls[name]
    return calls | {name: lambda peer=peer: peer(case, x) for name, peer in PEERS.items() if name in args.peers}


def measured(case: Case, row: Row, prepare: Callable[[], Any], x: list[torch.Tensor]) -> Row | None:
    """The row with the times and the error of a provider, or with the reason for their absence.

    None if the provider does not compute the case.
    """
    try:
        call = prepare()
        if call is None:
            return None
        if row.provider.startswith("saccade") and row.provider != DENSE and case.verb in ("forward", "decode"):
            row = replace(row, error=error(case, x, call()))
        time = timing(samples_of(case, call))
    except ImportError as failure:
        return row.with_text(f"not installed: {failure}")
    except Exception as failure:
        return row.with_text(" ".join(f"{type(failure).__name__}: {failure}".split())[:200])
    kind = next((kind for name, (_, kind) in CACHES.items() if row.provider.startswith(name)), None)
    flops = 4 * row.pairs * case.D * {"backward": 2.5, "step": 3.5, "host": 3.5}.get(case.verb, 1)
    size = bytes_read(case, kind, x[0].element_size())
    work, unit = (size * 1e-9, "GB/s") if case.verb == "decode" else (flops * 1e-12, "TFLOP/s")
    return replace(row, rate=work / time.median, rate_unit=unit, **time._asdict())


def run(case: Case, env: Environment, args: Namespace) -> Iterator[Row]:
    """A row for each provider that computes the case."""
    x = inputs(case)
    problem = problem_of(case)
    plan = make_plan(problem, load("triton").limits(problem))
    every = case.B * case.Hq * case.Tq * case.Tk
    pairs = case.B * case.Hq * allowed_of(case.mask, case.Tk) if case.pattern else plan.allowed_upper
    for provider, prepare in calls_of(case, x, args).items():
        computed, visited = (every, every) if provider == DENSE else (pairs, plan.visited_pairs)
        row = Row(*env, case.name, provider, case.verb, case.dtype, case.shape, case.mask, computed)
        row = row.with_text(note({"visited": visited, "version": version_of(provider)}))
        form = provider.rpartition(", ")[2]
        with forms.using([form] if form in forms.FORMS else []):
            row = measured(case, row, prepare, x)
        if row is not None:
            yield row
        torch.cuda.empty_cache()


def main() -> None:
    """Measure and write the rows."""
    words = gpu_parser(__doc__)
    words.add_argument("--suite", nargs="*", default=list(SUITES))
    words.add_argument("--peers", nargs="*", default=list(PEERS))
    words.add_argument("--forms", action="store_true", help="also measure new forms of the kernels")
    args, env, earlier = started(words)
    done = {row.case for row in earlier}
    cases = [case for suite in args.suite for case in SUITES[suite]() if args.only in case.name]
    cases = [case for case in chosen(cases, args.part) if case.name not in done]
    with forms.using(args.using):
        write(args.out, (row for case in cases for row in run(case, env, args)), earlier)


if __name__ == "__main__":
    main()
