"""Checks and times the Hopper forward kernel and its forms.

    python benchmarks/hopper_forward.py check [D ...]          # compared with float64 on the same inputs
    python benchmarks/hopper_forward.py long [D ...]           # errors of 8-bit floats over 131072 keys
    python benchmarks/hopper_forward.py time rows.csv [--peers] [case ...] [name=value ...]

`time` runs the default twice and the forms of 8-bit floats (`Tiles.every`), all in turn; name=value sets tiles
(BN,NC,stages,q_stages,every) of the default, grid or section. Rates are TFLOP/s of the allowed pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from nvidia_cases import Case, values_of

from saccade import mask
from saccade.backends import Extras, Inputs
from saccade.backends.triton import hopper
from saccade.backends.triton.hopper import fits, schedule_for
from saccade.backends.triton.hopper.forward import forward
from saccade.backends.triton.hopper.tiles import TILES_8, Tiles, known_tiles
from saccade.backends.triton.launch import AttentionLaunch
from saccade.cli.bench.clocks import by_events, timing
from saccade.cli.bench.machine import gpu_environment
from saccade.cli.bench.rows import Row, note, write
from saccade.mask.forms import Lowered
from saccade.plan import Limits, make_plan
from saccade.problem import Problem, Scores

SMALL = torch.float8_e4m3fn
SIZES = (64, 80, 96, 128, 192, 256)
# the forms of 8-bit floats that only benchmarks select, by head size
EVERY = {128: (TILES_8[128]._replace(every=2),)}

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
for _D, _heads in ((64, 32), (128, 16), (256, 8)):
    CASES[f"full-16k-{_D}-fp8"] = Case("forward", 1, 16384, 16384, _heads, _heads, _D, dtype="float8_e4m3fn"), "full"


def _mask(name: str, T: int) -> mask.Mask | None:
    if name == "documents":
        rng = np.random.default_rng(0)
        cuts = np.sort(rng.choice(T, T // 4096 - 1, replace=False))
        return mask.documents(cu_seqlens=np.concatenate([[0], cuts, [T]])) & mask.causal()
    return {"causal": mask.causal(), "full": None, "window": mask.window(1024, 0)}[name]


def forms_of(dtype: torch.dtype, D: int) -> list[Tiles]:
    """The forms of the kernel for one dtype and head size, first the one that dense masks get."""
    return [*known_tiles(dtype, hopper.sizes.SIZES[D, values_of(D)]), *(EVERY.get(D, ()) if dtype == SMALL else ())]


def prepare(
    q: Any, k: Any, v: Any, m: Any, tiles: Tiles, descale: Any = None, sinks: Any = None, softcap: float = 0.0
) -> tuple[Any, Any, Lowered]:
    """The call and the schedule that `forward` takes, for q, k, v on the GPU and a mask; and the lowered mask."""
    (B, Tq, Hq, D), (_, Tk, Hk, _) = q.shape, k.shape
    options = Scores(scale=D**-0.5, sinks=sinks is not None, softcap=softcap)
    p = Problem(B, Tq, Tk, Hq, Hk, D, v.shape[3], dtype=str(q.dtype)[6:], mask=m, scores=options, device=str(q.device))
    plan = make_plan(p, Limits("hopper", tile_q=tiles.BM, tile_k=tiles.BN, quantum=tiles.BN))
    call = AttentionLaunch(p, plan, Inputs(q, k, v, Extras(sinks=sinks, descale=descale)))
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


def check(tiles: Tiles, dtype: torch.dtype, D: int) -> int:
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
        ("many", 1, 4000, 4000, mask.causal()),
    ]  # fmt: skip
    # ends: scores that grow along the keys, so that every tile raises the maximum, or that fall
    options: list[dict[str, Any]] = [{}, {"softcap": 15.0}, {"sinks": True}, {"large": 6.0}]
    options += [{"ends": ends} for ends in ((0, 4), (0, 40), (4, 0))]
    bad = 0
    for name, B, Tq, Tk, m in shapes:
        for option in options if name in ("causal", "late") else options[:1]:
            bad += not _check_one(name, option, Case("forward", B, Tq, Tk, 4, 2, D), m, tiles, dtype)
    bad += not _check_nan(tiles, dtype, D)
    print(f"D={D} {dtype} {tiles}: {'all right' if not bad else f'{bad} WRONG'}", flush=True)
    return bad


def _inputs(case: Case, dtype: torch.dtype, large: float = 1.0, nan: int | None = None) -> tuple[Any, ...]:
    # q, k, v and the factors of 8-bit floats; k and v are slices of one array, so their strides are not contiguous
    B, Tq, Tk, Hq, Hk, D = case[1:7]
    q = torch.randn(B, Tq, Hq, D, device="cuda") * large
    sizes = D, values_of(D)
    kv = torch.randn(B, Tk, Hk, sum(sizes), device="cuda")
    if nan is not None:
        kv[0, nan, 0, 5] = float("nan")
    factors = tuple(torch.rand(x, device="cuda") + 0.5 for x in ((B, Hq), (Hk,), (B, Hk)))
    return q.to(dtype), *kv.to(dtype).split(sizes, -1), factors if dtype == SMALL else None


def _wide(x: Any, factor: Any) -> Any:
    # x in float64, times the factor of its heads
    return x.double() * factor.expand(len(x), x.shape[2])[:, None, :, None]


def _results(q: Any) -> tuple[Any, Any]:
    shape, dtype = (*q.shape[:3], values_of(q.shape[3])), torch.bfloat16 if q.dtype == SMALL else q.dtype
    o = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    return o, torch.full(q.shape[:3], float("nan"), device="cuda")


def _check_one(name: str, option: dict[str, Any], case: Case, m: Any, tiles: Tiles, dtype: torch.dtype) -> bool:
    B, Tq, Tk, Hq, Hk, D = case[1:7]
    q, k, v, descale = _inputs(case, dtype, option.get("large", 1.0))
    if ends := option.get("ends"):
        k = torch.linspace(*ends, Tk, device="cuda")[None, :, None, None] * torch.ones(B, 1, Hk, D, device="cuda")
        k = k.to(dtype)
    scale, softcap = D**-0.5, option.get("softcap", 0.0)
    sinks = torch.randn(Hq, device="cuda") if option.get("sinks") else None
    call, schedule, lowered = prepare(q, k, v, m, tiles, descale, softcap=softcap, sinks=sinks)
    t, j = np.arange(Tq)[:, None], np.arange(Tk)[None, :]
    allowed = torch.from_numpy(np.stack([lowered.test(t, j, b) for b in range(B)])).cuda()
    out, lse = _results(q)
    assert fits(q, k, v)
    forward(call, schedule, out, lse)
    first = out.clone()
    forward(call, schedule, out, lse)
    if descale:
        q, k, v = map(_wide, (q, k, v), descale)
    ref, ref_lse = reference(q, k, v, allowed, scale, softcap, sinks)
    error = float((out.double() - ref).norm() / ref.norm())
    empty = ref_lse == float("-inf")
    error_lse = float((lse.double() - ref_lse)[~empty].abs().max())
    same = torch.equal(out, first) and torch.equal(lse == float("-inf"), empty)
    # weights in e4m3 have 4 bits, and their sum is of weights before rounding
    bound, bound_lse = (4e-2, 2e-3) if descale else (6e-3, 2e-4)
    good = error < bound and error_lse < bound_lse * max(1.0, float(ref_lse[~empty].abs().max())) and same
    if not good:
        print(f"WRONG {name} {option}: o {error:.1e}, lse {error_lse:.1e}, same bits and empty rows: {same}")
    return good


def _check_nan(tiles: Tiles, dtype: torch.dtype, D: int) -> bool:
    # a NaN in one key makes NaN of exactly the rows that see it
    q, k, v, descale = _inputs(Case("forward", 1, 640, 640, 4, 2, D), dtype, nan=300)
    call, schedule, _ = prepare(q, k, v, mask.causal(), tiles, descale)
    out, lse = _results(q)
    forward(call, schedule, out, lse)
    expected = torch.zeros_like(lse, dtype=torch.bool)
    expected[:, 300:, :2] = True
    good = torch.equal(out.isnan().any(-1), expected) and torch.equal(lse.isnan(), expected)
    if not good:
        print(f"WRONG NaN: {int(out.isnan().any(-1).sum())} rows for {int(expected.sum())}")
    return good


def long_sums(tiles: Tiles, D: int, T: int = 131072, rows: int = 64) -> None:
    """Prints the errors of 8-bit floats in rows that see T keys: random ones, and with one that each row looks for."""
    for needle in (False, True):
        torch.manual_seed(0)
        q, k, v, descale = _inputs(Case("forward", 1, rows, T, 2, 1, D), SMALL)
        v = (v.float() + 1).to(SMALL)
        if needle:
            # key 1000 (t + 1) is along row t, so its score is 0.7 √D, where others have a deviation of 1
            q[0, :, 1] = q[0, :, 0]
            k[0, 1000 : 1000 * (rows + 1) : 1000, 0] = (0.7 * q[0, :, 0].float()).to(SMALL)
        call, schedule, _ = prepare(q, k, v, None, tiles, descale)
        out, lse = _results(q)
        forward(call, schedule, out, lse)
        allowed = torch.ones(1, rows, T, dtype=torch.bool, device="cuda")
        ref, _ = reference(*map(_wide, (q, k, v), descale), allowed, D**-0.5, 0.0, None)
        off, name = out.double() - ref, f"D={D} {tiles}{', one key looked for' if needle else ''}"
        print(f"{name}: error {float(off.norm() / ref.norm()):.2e}, mean {float(off.mean() / ref.abs().mean()):+.2e}")


def flops(lowered: Lowered, case: Case) -> float:
    """2 (D + Dv) for every allowed pair."""
    t, band = np.arange(case.Tq), lowered.bands[0, 0].astype(np.int64)
    lo, hi = np.maximum(t - band[1], band[2]), np.minimum(t - band[0] + 1, band[3])
    if lowered.rows:
        lo, hi = np.maximum(lo, lowered.rows[0].lo[0]), np.minimum(hi, lowered.rows[0].hi[0])
    return 2.0 * (case.D + values_of(case.D)) * case.Hq * case.B * float(np.maximum(hi - lo, 0).sum())


def _peers(q: Any, k: Any, v: Any, causal: bool) -> dict[str, tuple[Any, Any]]:
    # calls of torch's kernels and their results
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, calls = [x.transpose(1, 2) for x in (q, k, v)], {}
    how = {"is_causal": causal, "enable_gqa": q.shape[2] != k.shape[2]}
    for label, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        run = sdpa_kernel(backend)(partial(torch.nn.functional.scaled_dot_product_attention, *heads, **how))
        calls[f"torch {label}"] = run, run().transpose(1, 2)
    return calls


def time_one(name: str, row: Row, peers: bool, how: dict[str, Any]) -> Iterator[Row]:
    """Rows of one case; with `peers` and a causal or full mask of 16-bit floats also of torch flash and cuDNN.

    The error of a row is its difference from the first row's result, relative in norm.
    """
    case, kind = CASES[name]
    dtype = getattr(torch, case.dtype)
    sizes = (case.Hq, case.D), (case.Hk, case.D), (case.Hk, values_of(case.D))
    q, k, v = (torch.randn(case.B, case.Tq, H, n, device="cuda").bfloat16() for H, n in sizes)
    descale = tuple(torch.ones(H, device="cuda") for H in (case.Hq, case.Hk, case.Hk)) if dtype == SMALL else None
    first, *others = forms_of(dtype, case.D)
    first = how.get("tiles", first)
    forms = {"saccade": first, "saccade, again": first} | {f"saccade, every {x.every}": x for x in others if x.every}
    overrides = {key: value for key, value in how.items() if key != "tiles"}
    calls: dict[str, tuple[Any, Any]] = {}
    for provider, tiles in forms.items():
        inputs = [x.to(dtype) for x in (q, k, v)]
        call, schedule, lowered = prepare(*inputs, _mask(kind, case.Tq), tiles, descale)
        out, lse = _results(inputs[0])
        calls[provider] = partial(forward, call, schedule, out, lse, **overrides), out
    if peers and descale is None and kind in ("causal", "full"):
        calls |= _peers(q, k, v, kind == "causal")
    seconds: dict[str, list[float]] = {provider: [] for provider in calls}
    for _ in range(3):
        for provider, (run, _) in calls.items():
            seconds[provider] += by_events(run, warm=0.05, seconds=0.1)
    ours, work = calls["saccade"][1].float(), flops(lowered, case)
    row = replace(row, case=name, dtype=case.dtype, shape=case.shape, mask=kind, rate_unit="TFLOP/s")
    for provider, (_, out) in calls.items():
        time, error = timing(seconds[provider]), float((out.float() - ours).norm() / ours.norm())
        text = note(overrides | {"tiles": ",".join(map(str, forms[provider]))}) if provider in forms else ""
        timed = replace(row, provider=provider, rate=work / time.median / 1e12, error=error, **time._asdict())
        yield timed.with_text(text)


def main() -> None:
    """The three verbs of the module."""
    verb, *rest = sys.argv[1:]
    sizes = [int(D) for D in rest if D.isdigit()] or SIZES
    if verb == "check":
        kinds = torch.bfloat16, torch.float16, SMALL
        sys.exit(sum(check(form, dtype, D) for D in sizes for dtype in kinds for form in forms_of(dtype, D)) > 0)
    if verb == "long":
        for D in sizes:
            for form in forms_of(SMALL, D):
                long_sums(form, D)
        return
    out, *rest = rest
    how: dict[str, Any] = {}
    for key, value in (a.split("=") for a in rest if "=" in a):
        how[key] = Tiles(*map(int, value.split(","))) if key == "tiles" else int(value)
    names = [a for a in rest if "=" not in a and a != "--peers"] or list(CASES)
    row = Row(*gpu_environment(), "", "saccade", "forward")
    write(out, (timed for name in names for timed in time_one(name, row, "--peers" in rest, how)))


if __name__ == "__main__":
    main()
