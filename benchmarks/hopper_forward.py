"""Checks and times the Hopper forward kernel: `python benchmarks/hopper_forward.py check [D ...] | time rows.csv`.

Checks compare with float64 on the same inputs. Rates are TFLOP/s of the allowed pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from nvidia_cases import Case

from saccade import mask
from saccade.backends import Extras, Inputs
from saccade.backends.triton.hopper import fits, schedule_for
from saccade.backends.triton.hopper.forward import forward
from saccade.backends.triton.hopper.tiles import TILES, Tiles
from saccade.backends.triton.launch import AttentionLaunch
from saccade.cli.bench.clocks import by_events, timing
from saccade.cli.bench.machine import gpu_environment
from saccade.cli.bench.rows import Row, note, write
from saccade.mask.forms import Lowered
from saccade.plan import Limits, make_plan
from saccade.problem import Problem, Scores

# by name: sizes, and the name of a mask
CASES: dict[str, tuple[Case, str]] = {
    "causal-16k-128": (Case("forward", 1, 16384, 16384, 16, 16, 128), "causal"),
    "full-16k-128": (Case("forward", 1, 16384, 16384, 16, 16, 128), "full"),
    "causal-16k-64": (Case("forward", 1, 16384, 16384, 32, 32, 64), "causal"),
    "full-16k-64": (Case("forward", 1, 16384, 16384, 32, 32, 64), "full"),
    "causal-16k-256": (Case("forward", 1, 16384, 16384, 8, 8, 256), "causal"),
    "full-16k-256": (Case("forward", 1, 16384, 16384, 8, 8, 256), "full"),
    "causal-4x4k-128-gqa": (Case("forward", 4, 4096, 4096, 32, 8, 128), "causal"),
    "causal-8x2k-128": (Case("forward", 8, 2048, 2048, 16, 16, 128), "causal"),
    "window1k-16k-128": (Case("forward", 1, 16384, 16384, 16, 16, 128), "window"),
    "documents4k-16k-128": (Case("forward", 1, 16384, 16384, 16, 16, 128), "documents"),
}


def _mask(name: str, T: int) -> mask.Mask | None:
    if name == "documents":
        rng = np.random.default_rng(0)
        cuts = np.sort(rng.choice(T, T // 4096 - 1, replace=False))
        return mask.documents(cu_seqlens=np.concatenate([[0], cuts, [T]])) & mask.causal()
    return {"causal": mask.causal(), "full": None, "window": mask.window(1024, 0)}[name]


def prepare(q: Any, k: Any, v: Any, m: Any, tiles: Tiles | None = None, **scores: Any) -> tuple[Any, Any, Lowered]:
    """The call and the schedule that `forward` takes, for q, k, v on the GPU and a mask; and the lowered mask."""
    (B, Tq, Hq, D), (_, Tk, Hk, _) = q.shape, k.shape
    tiles, sinks = tiles or TILES[D], scores.pop("sinks", None)
    options = Scores(scale=D**-0.5, sinks=sinks is not None, **scores)
    p = Problem(B, Tq, Tk, Hq, Hk, D, D, dtype=str(q.dtype)[6:], mask=m, scores=options, device=str(q.device))
    plan = make_plan(p, Limits("hopper", tile_q=tiles.BM, tile_k=tiles.BN, quantum=tiles.BN))
    call = AttentionLaunch(p, plan, Inputs(q, k, v, Extras(sinks=sinks)))
    return call, schedule_for(plan, tiles, q.device), plan.parts[0].masks[0]


def reference(q: Any, k: Any, v: Any, allowed: Any, scale: float, softcap: float, sinks: Any) -> tuple[Any, Any]:
    """(o, lse) in float64; allowed [B, Tq, Tk]."""
    G = q.shape[2] // k.shape[2]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2)
    s = torch.einsum("bthd,bjhd->bhtj", q, k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~allowed[:, None], float("-inf"))
    lse = torch.logsumexp(s, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[None, :, None])
    p = torch.exp(s - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return torch.einsum("bhtj,bjhd->bthd", p, v), lse.transpose(1, 2)


def check(D: int) -> int:
    """Checks random and adversarial inputs on small shapes. Prints and counts the wrong results."""
    rng = np.random.default_rng()
    torch.manual_seed(int(rng.integers(1 << 30)))
    ids = np.sort(rng.integers(0, 9, 700))
    shapes: list[tuple[str, int, int, int, Any]] = [
        ("causal", 2, 640, 640, mask.causal()), ("full", 1, 300, 700, None), ("tail", 2, 333, 333, mask.causal()),
        ("late", 1, 700, 300, mask.causal()), ("window", 1, 900, 900, mask.window(200, 7)),
        ("documents", 1, 700, 700, mask.documents(ids) & mask.causal()),
        ("prefix", 1, 600, 600, mask.causal() | mask.keys(0, 100)), ("short", 1, 1, 37, None),
        ("documents", 2, 500, 500, mask.documents(np.sort(rng.integers(0, 5, (2, 500)), axis=1)) & mask.causal()),
        ("batch", 3, 400, 400, mask.causal() & mask.keys(0, np.array([400, 33, 190]))),
    ]  # fmt: skip
    bad = 0
    options = [{}, {"softcap": 15.0}, {"sinks": True}, {"dtype": torch.float16}, {"large": 6.0}, {"ramp": True}]
    for name, B, Tq, Tk, m in shapes:
        for option in options if name in ("causal", "late") else options[:1]:
            bad += _check_one(name, option, Case("forward", B, Tq, Tk, 4, 2, D), m)
    print(f"D={D}: {'all right' if not bad else f'{bad} WRONG'}")
    return bad


def _check_one(name: str, option: dict[str, Any], case: Case, m: Any) -> bool:
    B, Tq, Tk, Hq, Hk, D = case[1:7]
    dtype = option.get("dtype", torch.bfloat16)
    q = torch.randn(B, Tq, Hq, D, device="cuda") * option.get("large", 1.0)
    # k and v are slices of one array, so their strides are not contiguous
    k, v = torch.randn(B, Tk, Hk, 2 * D, device="cuda").to(dtype).split(D, -1)
    if option.get("ramp"):
        # scores that grow along the keys: every tile raises the maximum
        k = (torch.linspace(0, 4, Tk, device="cuda")[None, :, None, None] * torch.ones_like(q[:, :1, :Hk])).to(dtype)
    q = q.to(dtype)
    scale, softcap = D**-0.5, option.get("softcap", 0.0)
    sinks = torch.randn(Hq, device="cuda") if option.get("sinks") else None
    call, schedule, lowered = prepare(q, k, v, m, softcap=softcap, sinks=sinks)
    t, j = np.arange(Tq)[:, None], np.arange(Tk)[None, :]
    allowed = torch.from_numpy(np.stack([lowered.test(t, j, b) for b in range(B)])).cuda()
    out = torch.full((B, Tq, Hq, D), float("nan"), device="cuda", dtype=dtype)
    lse = torch.full((B, Tq, Hq), float("nan"), device="cuda")
    assert fits(q, k, v)
    forward(call, schedule, out, lse)
    first = out.clone()
    forward(call, schedule, out, lse)
    ref, ref_lse = reference(q, k, v, allowed, scale, softcap, sinks)
    error = float((out.double() - ref).norm() / ref.norm())
    empty = ref_lse == float("-inf")
    error_lse = float((lse.double() - ref_lse)[~empty].abs().max())
    same = torch.equal(out, first) and torch.equal(lse == float("-inf"), empty)
    good = error < 6e-3 and error_lse < 2e-4 * max(1.0, float(ref_lse[~empty].abs().max())) and same
    if not good:
        print(f"WRONG {name} {option} D={D}: o {error:.1e}, lse {error_lse:.1e}, same bits and empty rows: {same}")
    return not good


def flops(lowered: Lowered, case: Case) -> float:
    """4 · D for every allowed pair."""
    t, band = np.arange(case.Tq), lowered.bands[0, 0].astype(np.int64)
    lo, hi = np.maximum(t - band[1], band[2]), np.minimum(t - band[0] + 1, band[3])
    if lowered.rows:
        lo, hi = np.maximum(lo, lowered.rows[0].lo[0]), np.minimum(hi, lowered.rows[0].hi[0])
    return 4.0 * case.D * case.Hq * case.B * float(np.maximum(hi - lo, 0).sum())


def time_one(name: str, row: Row, peers: bool, how: dict[str, Any]) -> Iterator[Row]:
    """Two rows of one case; with `peers` and a causal or full mask also rows of torch flash and cuDNN.

    The error of a peer is its difference from Saccade, relative in norm.
    """
    case, kind = CASES[name]
    overrides = {key: value for key, value in how.items() if key != "tiles"}
    q, k, v = (torch.randn(case.B, case.Tq, H, case.D, device="cuda").bfloat16() for H in (case.Hq, case.Hk, case.Hk))
    call, schedule, lowered = prepare(q, k, v, _mask(kind, case.Tq), how.get("tiles"))
    work = flops(lowered, case)
    out, lse = torch.empty_like(q), torch.empty(case.B, case.Tq, case.Hq, device="cuda")
    row = replace(row, case=name, dtype="bfloat16", shape=case.shape, mask=kind, rate_unit="TFLOP/s")

    def run() -> None:
        forward(call, schedule, out, lse, **overrides)

    def timed(provider: str, function: Any) -> Row:
        time = timing(by_events(function, warm=0.1, seconds=0.3))
        return replace(row, provider=provider, rate=work / time.median / 1e12, **time._asdict())

    yield timed("saccade", run).with_text(note(how))
    yield timed("saccade, again", run).with_text(note(how))
    if peers and kind in ("causal", "full"):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        heads = [x.transpose(1, 2) for x in (q, k, v)]
        options = {"is_causal": kind == "causal", "enable_gqa": case.Hq != case.Hk}
        for label, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                peer = partial(torch.nn.functional.scaled_dot_product_attention, *heads, **options)
                error = (peer().transpose(1, 2).float() - out.float()).norm() / out.float().norm()
                theirs = replace(timed(f"torch {label}", peer), error=float(error))
            yield theirs


def main() -> None:
    """`check [D ...]` or `time rows.csv [--peers] [case ...]`; name=value sets tiles (BN,NC,stages), grid, section."""
    verb, rest = sys.argv[1], sys.argv[2:]
    if verb == "check":
        sys.exit(sum(check(int(D)) for D in rest or sorted(TILES)))
    out, *rest = rest
    how: dict[str, Any] = {}
    for key, value in (a.split("=") for a in rest if "=" in a):
        how[key] = Tiles(*map(int, value.split(","))) if key == "tiles" else int(value)
    names = [a for a in rest if "=" not in a and a != "--peers"] or list(CASES)
    row = Row(*gpu_environment(), "", "saccade", "forward")
    write(out, (timed for name in names for timed in time_one(name, row, "--peers" in rest, how)))


if __name__ == "__main__":
    main()
