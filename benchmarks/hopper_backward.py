"""The Hopper backward kernels against float64 on small shapes, and their speed beside torch's, on the GPU at hand.

`python benchmarks/hopper_backward.py check | bench [D ...]`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from saccade import mask
from saccade.backends import Inputs
from saccade.backends.triton import hopper
from saccade.backends.triton.hopper.backward import backward
from saccade.backends.triton.launch import AttentionLaunch
from saccade.plan import Limits, make_plan
from saccade.problem import Problem, Scores


def prepare(q: Any, k: Any, v: Any, m: Any, **more: Any) -> tuple[Any, Any, Any]:
    """What `backward` takes of a mask and of q, k, v on the GPU, call and schedules; and the lowered mask."""
    (B, Tq, Hq, D), (_, Tk, Hk, _) = q.shape, k.shape
    scores, kind = Scores(scale=D**-0.5, softcap=more.pop("softcap", 0.0)), str(q.dtype)[6:]
    p = Problem(B, Tq, Tk, Hq, Hk, D, D, dtype=kind, mask=m, scores=scores, device=str(q.device), **more)
    plan = make_plan(p, Limits("triton", tile_q=128, tile_k=128, quantum=128))
    schedules = tuple(of(p, plan, q.device) for of in (hopper.forward_schedule, hopper.backward_schedule))
    return AttentionLaunch(p, plan, Inputs(q, k, v)), schedules, plan.parts[0].masks[0]


def reference(q: Any, k: Any, v: Any, do: Any, allowed: Any, softcap: float, dtype: torch.dtype) -> Any:
    """(lse, delta, dq, dk, dv) of plain attention in `dtype`."""
    q, k, v, do = (x.detach().to(dtype).transpose(1, 2) for x in (q, k, v, do))
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
    """Frobenius, relative."""
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
    """Prints the errors of one case; whether they are within twice plain attention's and a rounding."""
    c = {"B": 1, "Tq": 512, "Tk": 512, "Hq": 4, "Hk": 4, "softcap": 0.0, "dtype": torch.bfloat16, "size": 1.0}
    c |= CASES[name]
    shape = {"q": (c["Tq"], c["Hq"]), "k": (c["Tk"], c["Hk"]), "v": (c["Tk"], c["Hk"]), "do": (c["Tq"], c["Hq"])}
    t: dict[str, torch.Tensor] = {}
    for n, (T, H) in shape.items():
        x = torch.randn(c["B"], *((H, T) if c.get("heads_first") else (T, H)), D, device="cuda") * c["size"]
        t[n] = x.to(c["dtype"]).transpose(1, 2) if c.get("heads_first") else x.to(c["dtype"])
    more = {"softcap": c["softcap"], "deterministic": deterministic}
    call, schedules, low = prepare(t["q"], t["k"], t["v"], c["m"], **more)
    grid = np.ogrid[: low.batch, : c["Tq"], : c["Tk"]]
    allowed = torch.from_numpy(np.ascontiguousarray(low.test(grid[1], grid[2], grid[0]))).cuda().expand(c["B"], -1, -1)
    lse, delta, *exact = reference(t["q"], t["k"], t["v"], t["do"], allowed, c["softcap"], torch.float64)
    plain = reference(t["q"], t["k"], t["v"], t["do"], allowed, c["softcap"], c["dtype"])[2:]
    outs = tuple(torch.full_like(t[n], torch.nan) for n in ("q", "k", "v"))
    backward(call, schedules, (t["do"], lse, delta), outs)
    rounding = torch.finfo(c["dtype"]).eps
    errors = [(error(a, b), error(p, b)) for a, b, p in zip(outs, exact, plain, strict=True)]
    good = all(a <= 2 * b + rounding / 2 for a, b in errors)
    print(f"{'ok ' if good else 'BAD'} D={D} {name:14}", *(f"{a:.2e}/{b:.2e}" for a, b in errors), flush=True)
    return good


def check(dims: list[int]) -> None:
    """All cases, and the same bits five times."""
    bad = 0
    for D in dims or [64, 128, 256]:
        for name in CASES:
            bad += not check_case(name, D, True)
        bad += not check_case("causal", D, False)
        call = setup(1, 4096, 8, D, mask.causal())[0]
        first = call()
        same = all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, call(), strict=True))
        print(f"{'ok ' if same else 'BAD'} D={D} same bits five times", flush=True)
        bad += not same
    print("bad cases:", bad)
    sys.exit(bad > 0)


def setup(B: int, T: int, H: int, D: int, m: Any, **more: Any) -> tuple[Any, Any, float]:
    """(our backward, the flash backward of torch, flops) on random data."""
    q, k, v, do = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    call, schedules, low = prepare(q, k, v, m, **more)
    causal = low.bands[0, 0, 0] == 0
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    o, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, bool(causal))
    delta = (o.float() * do.transpose(1, 2).float()).sum(-1).transpose(1, 2).contiguous()
    lse_rows = lse.transpose(1, 2).contiguous()

    def ours() -> Any:
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        backward(call, schedules, (do, lse_rows, delta), gradients)
        return gradients

    def flash() -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do.transpose(1, 2), *heads, o, lse, rest[0], rest[1], T, T, 0.0, bool(causal), rest[4], rest[5]
        )

    pairs = B * H * T * T / (2 if causal else 1)
    return ours, flash, 2.5 * 4 * pairs * D


def cudnn(B: int, T: int, H: int, D: int, causal: bool) -> Any:
    """The backward of torch's cuDNN attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, do = (torch.randn(B, H, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def time(call: Any, budget: float = 0.25) -> float:
    """Median seconds of a call by events."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 30 and (len(times) < 5 or sum(times) < budget):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        call()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return float(np.median(times))


def bench(dims: list[int]) -> None:
    """TFLOP/s, ordered and not, beside torch's flash and cuDNN."""
    for D in dims or [128, 64, 256]:
        for causal, B, T, H in ((True, 1, 16384, 16), (False, 1, 16384, 16), (True, 4, 4096, 16), (True, 1, 2048, 16)):
            m = mask.causal() if causal else mask.full()
            ours, flash, flops = setup(B, T, H, D, m)
            free = setup(B, T, H, D, m, deterministic=False)[0]
            errors = [error(a.transpose(1, 2), b) for a, b in zip(ours(), flash()[:3], strict=True)]
            row = {"ordered": ours, "free": free, "flash": flash, "cudnn": cudnn(B, T, H, D, causal)}
            speed = {n: flops / time(c) / 1e12 for n, c in row.items()}
            print(f"D={D} B={B} T={T} {'causal' if causal else 'full':6}", *(f"{n} {s:.0f}" for n, s in speed.items()))
            print("    against flash", *(f"{e:.1e}" for e in errors), flush=True)


if __name__ == "__main__":
    torch.manual_seed(int(torch.empty((), dtype=torch.int64).random_()) if "--seed" in sys.argv else 0)
    {"check": check, "bench": bench}[sys.argv[1]]([int(x) for x in sys.argv[2:] if x.isdigit()])
