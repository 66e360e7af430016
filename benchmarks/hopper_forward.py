"""Checks and times the Hopper forward kernel: `python benchmarks/hopper_forward.py check [D ...] | time rows.csv`.

Checks compare with float64 on the same inputs; rates are TFLOP/s of the allowed pairs.
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
from saccade.backends.plan_encoding import longest_first
from saccade.backends.triton.hopper import fits
from saccade.backends.triton.hopper.forward import forward
from saccade.backends.triton.hopper.tiles import TILES, Tiles
from saccade.backends.triton.hopper.walks import long_ones
from saccade.cli.bench.clocks import by_events, timing
from saccade.cli.bench.machine import gpu_environment
from saccade.cli.bench.rows import Row, note, write
from saccade.plan import Limits, make_plan
from saccade.problem import Problem

# sizes, and the name of a mask
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


def prepare(case: Case, m: Any, tiles: Tiles) -> dict[str, Any]:
    """What `forward` takes of a plan, on the GPU, and the plan's part under "part"."""
    p = Problem(*case[1:7], case.D, dtype="bfloat16", mask=m)
    part = make_plan(p, Limits("hopper", tile_q=tiles.BM, tile_k=tiles.BN, quantum=tiles.BN)).parts[0]
    lowered, r = part.masks[0], part.ranges
    keys = r.keys().reshape(part.Bm, part.n_tiles)
    long = int(long_ones(keys).sum(1).max(initial=0))
    order, bands = longest_first(keys).reshape(-1), lowered.bands.astype(np.int32)
    device = {"ptr": r.ptr, "seg": r.seg, "order": order, "bands": bands}
    if lowered.rows:
        device["row_lo"], device["row_hi"] = lowered.rows[0].lo, lowered.rows[0].hi
    arrays: dict[str, Any] = {k: torch.from_numpy(np.ascontiguousarray(v)).cuda() for k, v in device.items()}
    return arrays | {"n_tiles": part.n_tiles, "long": long, "Bm": part.Bm, "tiles": tiles, "part": part}


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
    """Random and adversarial inputs on small shapes; prints and counts the wrong results."""
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
    # k and v as slices of one array: strides that are not contiguous
    k, v = torch.randn(B, Tk, Hk, 2 * D, device="cuda").to(dtype).split(D, -1)
    if option.get("ramp"):
        # scores that grow along the keys: every tile raises the maximum
        k = (torch.linspace(0, 4, Tk, device="cuda")[None, :, None, None] * torch.ones_like(q[:, :1, :Hk])).to(dtype)
    q = q.to(dtype)
    plan = prepare(case, m, TILES[D])
    lowered = plan.pop("part").masks[0]
    t, j = np.arange(Tq)[:, None], np.arange(Tk)[None, :]
    allowed = torch.from_numpy(np.stack([lowered.test(t, j, b) for b in range(B)])).cuda()
    sinks = torch.randn(Hq, device="cuda") if option.get("sinks") else None
    out = torch.full((B, Tq, Hq, D), float("nan"), device="cuda", dtype=dtype)
    lse = torch.full((B, Tq, Hq), float("nan"), device="cuda")
    scale, softcap = D**-0.5, option.get("softcap", 0.0)
    assert fits(q, k, v)
    forward(q, k, v, scale=scale, softcap=softcap, sinks=sinks, out=out, lse=lse, **plan)
    first = out.clone()
    forward(q, k, v, scale=scale, softcap=softcap, sinks=sinks, out=out, lse=lse, **plan)
    ref, ref_lse = reference(q, k, v, allowed, scale, softcap, sinks)
    error = float((out.double() - ref).norm() / ref.norm())
    empty = ref_lse == float("-inf")
    error_lse = float((lse.double() - ref_lse)[~empty].abs().max())
    same = torch.equal(out, first) and torch.equal(lse == float("-inf"), empty)
    good = error < 6e-3 and error_lse < 2e-4 * max(1.0, float(ref_lse[~empty].abs().max())) and same
    if not good:
        print(f"WRONG {name} {option} D={D}: o {error:.1e}, lse {error_lse:.1e}, same bits and empty rows: {same}")
    return not good


def flops(plan: dict[str, Any], case: Case) -> float:
    """4 · D for every allowed pair."""
    lowered, t = plan["part"].masks[0], np.arange(case.Tq)
    band = lowered.bands[0, 0].astype(np.int64)
    lo, hi = np.maximum(t - band[1], band[2]), np.minimum(t - band[0] + 1, band[3])
    if lowered.rows:
        lo, hi = np.maximum(lo, lowered.rows[0].lo[0]), np.minimum(hi, lowered.rows[0].hi[0])
    return 4.0 * case.D * case.Hq * case.B * float(np.maximum(hi - lo, 0).sum())


def time_one(name: str, row: Row, peers: bool, how: dict[str, Any]) -> Iterator[Row]:
    """Rows of one case twice, and of torch's flash and cuDNN where they are wanted and the mask allows.

    The error of a peer is its difference from ours, relative in norm.
    """
    case, kind = CASES[name]
    options = {key: value for key, value in how.items() if key != "tiles"}
    plan = prepare(case, _mask(kind, case.Tq), how.get("tiles", TILES[case.D]))
    work = flops(plan, case)
    plan.pop("part")
    q, k, v = (torch.randn(case.B, case.Tq, H, case.D, device="cuda").bfloat16() for H in (case.Hq, case.Hk, case.Hk))
    out, lse = torch.empty_like(q), torch.empty(case.B, case.Tq, case.Hq, device="cuda")
    row = replace(row, case=name, dtype="bfloat16", shape=case.shape, mask=kind, rate_unit="TFLOP/s")

    def run() -> None:
        forward(q, k, v, scale=case.D**-0.5, out=out, lse=lse, **plan, **options)

    def timed(provider: str, call: Any) -> Row:
        time = timing(by_events(call, warm=0.1, seconds=0.3))
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
