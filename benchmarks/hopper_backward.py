"""Checks the Hopper backward kernels against float64 on small shapes, and compares their speed with torch's.

`python benchmarks/hopper_backward.py check [D ...]`, or `bench rows.csv [D ...]`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia_cases import Case, values_of

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from saccade import mask
from saccade.backends import Inputs
from saccade.backends.triton import hopper
from saccade.backends.triton.hopper.backward import backward
from saccade.backends.triton.hopper.forward import forward
from saccade.backends.triton.launch import AttentionLaunch
from saccade.cli.bench.clocks import by_events, timing
from saccade.cli.bench.machine import gpu_environment
from saccade.cli.bench.rows import Row, write
from saccade.plan import Limits, make_plan
from saccade.problem import Problem, Scores


def prepare(q: Any, k: Any, v: Any, m: Any, **more: Any) -> tuple[Any, Any, Any]:
    """The call and the schedules that `backward` takes, for q, k, v on the GPU and a mask; and the lowered mask."""
    (B, Tq, Hq, D), (_, Tk, Hk, _) = q.shape, k.shape
    scores, kind = Scores(scale=D**-0.5, softcap=more.pop("softcap", 0.0)), str(q.dtype)[6:]
    p = Problem(B, Tq, Tk, Hq, Hk, D, v.shape[3], dtype=kind, mask=m, scores=scores, device=str(q.device), **more)
    plan = make_plan(p, Limits("triton", tile_q=128, tile_k=128, quantum=128))
    schedules = tuple(of(p, plan, q.device) for of in (hopper.forward_schedule, hopper.backward_schedule))
    return AttentionLaunch(p, plan, Inputs(q, k, v)), schedules, plan.parts[0].masks[0]


def reference(arrays: list[torch.Tensor], allowed: Any, softcap: float, dtype: torch.dtype) -> Any:
    """(lse, delta, dq, dk, dv) of plain attention in `dtype`; arrays are q, k, v, do."""
    q, k, v, do = (x.detach().to(dtype).transpose(1, 2) for x in arrays)
    G = q.shape[1] // k.shape[1]
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    s = q.shape[-1] ** -0.5 * (q @ k.repeat_interleave(G, 1).transpose(2, 3))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~allowed[:, None], -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    o = p @ v.repeat_interleave(G, 1)
    grads = torch.autograd.grad(o, (q, k, v), do)
    delta = (o * do).sum(-1)
    return *(x.detach().transpose(1, 2).float().contiguous() for x in (lse, delta)), *(g.transpose(1, 2) for g in grads)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative error in the Frobenius norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


CASES: dict[str, dict[str, Any]] = {
    "causal": {"m": mask.causal()},
    "full": {"m": mask.full()},
    "ragged": {"m": mask.full(), "Tq": 333, "Tk": 459},
    "ragged causal": {"m": mask.causal(), "Tq": 517, "Tk": 517},
    "empty rows": {"m": mask.causal() & mask.window(64, 0), "Tq": 512, "Tk": 256},
    "window": {"m": mask.window(100, 0), "Tq": 700, "Tk": 700},
    "union": {"m": mask.global_tokens(4) | (mask.window(100, 0) & mask.causal()), "Tq": 1000, "Tk": 1000},
    "documents": {"m": mask.documents(cu_seqlens=[0, 300, 301, 700, 1000]) & mask.causal(), "Tq": 1000, "Tk": 1000},
    "grouped": {"m": mask.causal(), "Hq": 8, "Hk": 2},
    "batch": {"m": mask.causal(), "B": 3, "Hq": 2, "Hk": 2},
    "softcap": {"m": mask.causal(), "softcap": 5.0},
    "float16": {"m": mask.causal(), "dtype": torch.float16},
    "large scores": {"m": mask.causal(), "size": 4.0},
    "heads first": {"m": mask.causal(), "heads_first": True},
    "one head": {"m": mask.causal(), "Hq": 1, "Hk": 1, "Tq": 2048, "Tk": 2048},
}


def check_case(name: str, D: int, deterministic: bool) -> bool:
    """Prints the errors of one case. True if each is at most twice that of plain attention plus eps / 2."""
    c = {"B": 1, "Tq": 512, "Tk": 512, "Hq": 4, "Hk": 4, "softcap": 0.0, "dtype": torch.bfloat16, "size": 1.0}
    c |= CASES[name]
    (queries, keys), Dv = ((c["Tq"], c["Hq"]), (c["Tk"], c["Hk"])), values_of(D)
    shape = {"q": (*queries, D), "k": (*keys, D), "v": (*keys, Dv), "do": (*queries, Dv)}
    t: dict[str, torch.Tensor] = {}
    for n, (T, H, width) in shape.items():
        x = torch.randn(c["B"], *((H, T) if c.get("heads_first") else (T, H)), width, device="cuda") * c["size"]
        t[n] = x.to(c["dtype"]).transpose(1, 2) if c.get("heads_first") else x.to(c["dtype"])
    more = {"softcap": c["softcap"], "deterministic": deterministic}
    call, schedules, low = prepare(t["q"], t["k"], t["v"], c["m"], **more)
    grid = np.ogrid[: low.batch, : c["Tq"], : c["Tk"]]
    allowed = torch.from_numpy(np.ascontiguousarray(low.test(grid[1], grid[2], grid[0]))).cuda().expand(c["B"], -1, -1)
    lse, delta, *exact = reference(list(t.values()), allowed, c["softcap"], torch.float64)
    plain = reference(list(t.values()), allowed, c["softcap"], c["dtype"])[2:]
    outs = tuple(torch.full_like(t[n], torch.nan) for n in ("q", "k", "v"))
    # torch gives this memory to the sums
    torch.full((1 << 25,), torch.nan, device="cuda")
    backward(call, schedules, (t["do"], lse, delta), outs)
    rounding = torch.finfo(c["dtype"]).eps
    errors = [(error(a, b), error(p, b)) for a, b, p in zip(outs, exact, plain, strict=True)]
    good = all(a <= 2 * b + rounding / 2 for a, b in errors)
    print(f"{'ok ' if good else 'BAD'} D={D} {name:14}", *(f"{a:.2e}/{b:.2e}" for a, b in errors), flush=True)
    return good


def check(dims: list[int]) -> None:
    """Checks all cases, and that five more calls give the same bits."""
    bad = 0
    for D in dims or [64, 80, 96, 128, 192, 256]:
        for name in CASES:
            bad += not check_case(name, D, True)
        bad += not check_case("causal", D, False)
        call = setup(Case("backward", 1, 4096, 4096, 8, 8, D))[0]
        first = call()
        same = all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, call(), strict=True))
        print(f"{'ok ' if same else 'BAD'} D={D} same bits five times", flush=True)
        bad += not same
    print("bad cases:", bad)
    sys.exit(bad > 0)


def setup(case: Case, **more: Any) -> tuple[Any, Any, float]:
    """(backward of Saccade, flash backward of torch or None, FLOPs) on random data, causal or full."""
    B, Tq, Tk, Hq, Hk, D = case[1:7]
    causal = bool(case.mask)
    q, do = (torch.randn(B, Tq, Hq, n, device="cuda", dtype=torch.bfloat16) for n in (D, values_of(D)))
    k, v = (torch.randn(B, Tk, Hk, n, device="cuda", dtype=torch.bfloat16) for n in (D, values_of(D)))
    call, schedules, _ = prepare(q, k, v, mask.causal() if causal else mask.full(), **more)
    if values_of(D) != D:
        o, lse_rows = torch.empty_like(do), torch.empty(B, Tq, Hq, device="cuda")
        forward(call, schedules[0], o, lse_rows)
        delta = (o.float() * do.float()).sum(-1)
        return partial(_gradients, call, schedules, (do, lse_rows, delta)), None, _flops(case)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    G = Hq // Hk
    heads[1:] = [x.repeat_interleave(G, 1) for x in heads[1:]] if G > 1 else heads[1:]
    o, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, causal)
    delta = (o.float() * do.transpose(1, 2).float()).sum(-1).transpose(1, 2).contiguous()
    lse_rows = lse.transpose(1, 2).contiguous()

    def flash() -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do.transpose(1, 2), *heads, o, lse, rest[0], rest[1], Tq, Tk, 0.0, causal, rest[4], rest[5]
        )

    return partial(_gradients, call, schedules, (do, lse_rows, delta)), flash, _flops(case)


def _gradients(call: AttentionLaunch, schedules: Any, rows: Any) -> Any:
    gradients = tuple(torch.empty_like(x.p) for x in call.qkv)
    backward(call, schedules, rows, gradients)
    return gradients


def _flops(case: Case) -> float:
    # three products of D numbers and two of Dv
    pairs = case.B * case.Hq * case.Tq * case.Tk / (2 if case.mask else 1)
    return 2.0 * pairs * (3 * case.D + 2 * values_of(case.D))


def cudnn(B: int, T: int, H: int, D: int, causal: bool) -> Any:
    """The backward of torch's cuDNN attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, do = (torch.randn(B, H, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def rows(D: int, row: Row) -> Iterator[Row]:
    """Rows of one head size: Saccade in fixed order and in any order, torch flash, torch cuDNN.

    The error of the first is its largest difference from torch flash, relative in norm.
    """
    for causal, B, T, H in ((True, 1, 16384, 16), (False, 1, 16384, 16), (True, 4, 4096, 16), (True, 1, 2048, 16)):
        case = Case("backward", B, T, T, H, H, D, "causal()" if causal else "")
        ours, flash, flops = setup(case)
        free = setup(case, deterministic=False)[0]
        calls = {"saccade hopper": ours, "saccade hopper, deterministic=False": free, "torch flash": flash}
        calls["torch cuDNN"] = cudnn(B, T, H, D, causal)
        far = max(error(a.transpose(1, 2), b) for a, b in zip(ours(), flash()[:3], strict=True))
        for provider, call in calls.items():
            time = timing(by_events(call))
            line = replace(row, case=case.name, provider=provider, dtype=case.dtype, shape=case.shape, mask=case.mask)
            line = replace(line, rate=flops / time.median / 1e12, rate_unit="TFLOP/s", **time._asdict())
            yield replace(line, error=far) if call is ours else line


def main() -> None:
    """`check [D ...]` or `bench rows.csv [D ...]`; --seed draws other inputs."""
    torch.manual_seed(int(torch.empty((), dtype=torch.int64).random_()) if "--seed" in sys.argv else 0)
    verb, words = sys.argv[1], [a for a in sys.argv[2:] if not a.startswith("--")]
    if verb == "check":
        check([int(D) for D in words])
    out, *dims = words
    row = Row(*gpu_environment(), "", "", "backward")
    write(out, (line for D in dims or (128, 64, 256) for line in rows(int(D), row)))


if __name__ == "__main__":
    main()
