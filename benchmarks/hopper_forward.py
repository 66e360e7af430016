"""Checks and times the Hopper forward kernel and its forms.

    python benchmarks/hopper_forward.py check [D | form ...]          # against float64 on the same inputs
    python benchmarks/hopper_forward.py long [form ...]               # errors of 8-bit floats at 128k keys
    python benchmarks/hopper_forward.py time rows.csv [--peers] [--forms] [case ...]

With --forms, all forms of a case run in turn. Rates are TFLOP/s of the allowed pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from hopper_forms import VARIANTS, Variant, check, long_sums, prepare
from nvidia_cases import Case

from saccade import mask
from saccade.backends.triton.hopper.forward import forward
from saccade.backends.triton.hopper.tiles import DEFAULT, Form, Tiles
from saccade.cli.bench.clocks import by_events, timing
from saccade.cli.bench.machine import gpu_environment
from saccade.cli.bench.rows import Row, note, write
from saccade.mask.forms import Lowered

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
SMALL = "float8_e4m3fn"
for _D, _heads in ((64, 32), (128, 16), (256, 8)):
    CASES[f"full-16k-{_D}-fp8"] = Case("forward", 1, 16384, 16384, _heads, _heads, _D, dtype=SMALL), "full"


def _mask(name: str, T: int) -> mask.Mask | None:
    if name == "documents":
        rng = np.random.default_rng(0)
        cuts = np.sort(rng.choice(T, T // 4096 - 1, replace=False))
        return mask.documents(cu_seqlens=np.concatenate([[0], cuts, [T]])) & mask.causal()
    return {"causal": mask.causal(), "full": None, "window": mask.window(1024, 0)}[name]


def flops(lowered: Lowered, case: Case) -> float:
    """4 · D for every allowed pair."""
    t, band = np.arange(case.Tq), lowered.bands[0, 0].astype(np.int64)
    lo, hi = np.maximum(t - band[1], band[2]), np.minimum(t - band[0] + 1, band[3])
    if lowered.rows:
        lo, hi = np.maximum(lo, lowered.rows[0].lo[0]), np.minimum(hi, lowered.rows[0].hi[0])
    return 4.0 * case.D * case.Hq * case.B * float(np.maximum(hi - lo, 0).sum())


class Timed(NamedTuple):
    """One variant with inputs on the GPU: its call, its result, and its work."""

    run: Any
    out: Any
    work: float


def ready(case: Case, kind: str, variant: Variant, inputs: Any, overrides: dict[str, int]) -> Timed:
    """The call of a variant."""
    q, k, v = (x.to(torch.float8_e4m3fn) if variant.small else x for x in inputs)
    scores: dict[str, Any] = {"aligned": variant.aligned}
    if variant.small:
        scores["descale"] = tuple(torch.ones(1, H, device="cuda") for H in (case.Hq, case.Hk, case.Hk))
    call, schedule, lowered = prepare(q, k, v, _mask(kind, case.Tq), variant.tiles, **scores)
    out, lse = torch.empty_like(inputs[0]), torch.empty(case.B, case.Tq, case.Hq, device="cuda")
    run = partial(forward, call, schedule, out, lse, form=variant.form, **overrides)
    return Timed(run, out, flops(lowered, case))


def time_one(name: str, row: Row, options: Options) -> Iterator[Row]:
    """Rows of one case: of all its forms in turn, or two of one form; with peers also of torch flash and cuDNN.

    The error of a peer or of a form is its difference from the first form, relative in norm.
    """
    case, kind = CASES[name]
    small = case.dtype == SMALL
    inputs = [torch.randn(case.B, case.Tq, H, case.D, device="cuda").bfloat16() for H in (case.Hq, case.Hk, case.Hk)]
    fitting = {key: x for key, x in VARIANTS.items() if (x.D, x.small) == (case.D, small)}
    if kind != "documents":
        fitting = {key: x for key, x in fitting.items() if not x.aligned}
    if not options.forms:
        first = next(iter(fitting.values()))
        first = first._replace(tiles=options.tiles or first.tiles, form=options.form)
        fitting = {"saccade": first, "saccade, again": first}
    calls = {key: ready(case, kind, x, inputs, options.overrides) for key, x in fitting.items()}
    seconds: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(3):
        for key, call in calls.items():
            seconds[key] += by_events(call.run, warm=0.05, seconds=0.1)
    out, work = next(iter(calls.values()))[1:]
    row = replace(row, case=name, dtype=case.dtype, shape=case.shape, mask=kind, rate_unit="TFLOP/s")

    def timed(provider: str, samples: list[float], result: Any) -> Row:
        time, error = timing(samples), float((result.float() - out.float()).norm() / out.float().norm())
        return replace(row, provider=provider, rate=work / time.median / 1e12, error=error, **time._asdict())

    for key, call in calls.items():
        yield timed(key, seconds[key], call.out).with_text(note(options.overrides | _described(fitting[key])))
    if options.peers and kind in ("causal", "full") and not small:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        heads = [x.transpose(1, 2) for x in inputs]
        how = {"is_causal": kind == "causal", "enable_gqa": case.Hq != case.Hk}
        for label, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                peer = partial(torch.nn.functional.scaled_dot_product_attention, *heads, **how)
                yield timed(f"torch {label}", by_events(peer, warm=0.1, seconds=0.3), peer().transpose(1, 2))


def _described(variant: Variant) -> dict[str, Any]:
    return (
        {"tiles": ",".join(map(str, variant.tiles[:4]))}
        | {k: int(x) for k, x in variant.form._asdict().items()}
        | {"aligned": int(variant.aligned)}
    )


class Options(NamedTuple):
    """What `time` is asked for: peers, all forms; else tiles and a form; arguments of `forward`."""

    peers: bool
    forms: bool
    tiles: Tiles | None
    form: Form
    overrides: dict[str, int]


def _options(words: list[str]) -> Options:
    named = dict(word.split("=") for word in words if "=" in word)
    tiles = named.pop("tiles", None)
    form = DEFAULT._replace(**{key: int(named.pop(key)) for key in Form._fields if key in named})
    chosen = Tiles(*map(int, tiles.split(","))) if tiles else None
    return Options("--peers" in words, "--forms" in words, chosen, form, {k: int(x) for k, x in named.items()})


def main() -> None:
    """The verbs; for `time` name=value sets tiles (BN,NC,stages,q_stages), a field of the form, grid or section."""
    verb, rest = sys.argv[1], sys.argv[2:]
    if verb == "check":
        names = [n for n, x in VARIANTS.items() if not rest or n in rest or (str(x.D) in rest and n != str(x.D))]
        sys.exit(sum(map(check, names)) > 0)
    if verb == "long":
        for name in rest or [n for n, x in VARIANTS.items() if x.small]:
            long_sums(name)
        return
    out, *rest = rest
    names = [a for a in rest if "=" not in a and not a.startswith("--")] or list(CASES)
    row = Row(*gpu_environment(), "", "saccade", "forward")
    write(out, (timed for name in names for timed in time_one(name, row, _options(rest))))


if __name__ == "__main__":
    main()
