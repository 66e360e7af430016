"""The forms of the Hopper forward kernel, and their checks against float64 on the same inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from nvidia_cases import Case

from saccade import mask
from saccade.backends import Extras, Inputs
from saccade.backends.triton.hopper import fits, schedule_for
from saccade.backends.triton.hopper.forward import forward
from saccade.backends.triton.hopper.tiles import DEFAULT, TILES, TILES_8, Form, Tiles
from saccade.backends.triton.launch import AttentionLaunch
from saccade.mask.forms import Lowered
from saccade.plan import Limits, make_plan
from saccade.problem import Problem, Scores


class Variant(NamedTuple):
    """A form of the kernel for one head size and one width of floats, and its tiles.

    aligned: tiles of rows start where documents start.
    """

    D: int
    tiles: Tiles
    form: Form = DEFAULT
    small: bool = False
    aligned: bool = False


# per head size first the form that problems get
VARIANTS: dict[str, Variant] = {
    "64": Variant(64, TILES[64]),
    "64-turns": Variant(64, TILES[64], Form(turns=True)),
    "64-turns-slack": Variant(64, TILES[64], Form(turns=True, slack=8)),
    "64-turns-4": Variant(64, Tiles(128, 3, 4, 2), Form(turns=True)),
    "64-two": Variant(64, Tiles(128, 2, 4, 2)),
    "64-two-turns": Variant(64, Tiles(128, 2, 4, 2), Form(turns=True)),
    "64-two-turns-slack": Variant(64, Tiles(128, 2, 4, 2), Form(turns=True, slack=8)),
    "128": Variant(128, TILES[128]),
    "128-slack": Variant(128, TILES[128], Form(slack=8)),
    "128-turns-slack": Variant(128, TILES[128], Form(turns=True, slack=8)),
    "128-aligned": Variant(128, TILES[128], aligned=True),
    "256": Variant(256, TILES[256]),
    "256-slack": Variant(256, TILES[256], Form(slack=8)),
    "256-turns-slack": Variant(256, TILES[256], Form(turns=True, slack=8)),
    "64-fp8": Variant(64, TILES_8[64], small=True),
    "64-fp8-every-1": Variant(64, TILES_8[64], Form(every=1), True),
    "64-fp8-every-1-turns": Variant(64, TILES_8[64], Form(every=1, turns=True), True),
    "128-fp8": Variant(128, TILES_8[128], small=True),
    "128-fp8-aligned": Variant(128, TILES_8[128], small=True, aligned=True),
    "128-fp8-slack": Variant(128, TILES_8[128], Form(slack=4), True),
    "128-fp8-every-1": Variant(128, TILES_8[128], Form(every=1, columns=64), True),
    "128-fp8-every-1-keys-64": Variant(128, Tiles(64, 2, 4, 2), Form(every=1), True),
    "128-fp8-every-4": Variant(128, TILES_8[128], Form(every=4), True),
    "256-fp8": Variant(256, TILES_8[256], small=True),
    "256-fp8-slack": Variant(256, TILES_8[256], Form(slack=4), True),
    "256-fp8-every-1": Variant(256, TILES_8[256], Form(every=1, columns=64), True),
}


def prepare(q: Any, k: Any, v: Any, m: Any, tiles: Tiles | None = None, **scores: Any) -> tuple[Any, Any, Lowered]:
    """The call and the schedule that `forward` takes, for q, k, v on the GPU and a mask; and the lowered mask."""
    (B, Tq, Hq, D), (_, Tk, Hk, _) = q.shape, k.shape
    sinks, descale = scores.pop("sinks", None), scores.pop("descale", None)
    aligned = scores.pop("aligned", False)
    tiles = tiles or (TILES if descale is None else TILES_8)[D]
    options = Scores(scale=D**-0.5, sinks=sinks is not None, **scores)
    p = Problem(B, Tq, Tk, Hq, Hk, D, D, dtype=str(q.dtype)[6:], mask=m, scores=options, device=str(q.device))
    plan = make_plan(p, Limits("hopper", tile_q=tiles.BM, tile_k=tiles.BN, quantum=tiles.BN))
    call = AttentionLaunch(p, plan, Inputs(q, k, v, Extras(sinks=sinks, descale=descale)))
    return call, schedule_for(plan, tiles, q.device, aligned), plan.parts[0].masks[0]


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


def check(name: str) -> int:
    """Checks random and adversarial inputs on small shapes. Prints and counts the wrong results."""
    variant, rng = VARIANTS[name], np.random.default_rng()
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
    bad = 0
    options = [
        {},
        {"softcap": 15.0},
        {"sinks": True},
        {"large": 6.0},
        {"ends": (0, 4)},
        {"ends": (0, 40)},
        {"ends": (4, 0)},
    ]
    options += [] if variant.small else [{"dtype": torch.float16}]
    for shape, B, Tq, Tk, m in shapes:
        for option in options if shape in ("causal", "late") else options[:1]:
            bad += _check_one(shape, variant, option, Case("forward", B, Tq, Tk, 4, 2, variant.D), m)
    bad += _check_nan(variant)
    print(f"{name}: {'all right' if not bad else f'{bad} WRONG'}", flush=True)
    return bad


def _inputs(case: Case, small: bool, option: dict[str, Any]) -> tuple[Any, ...]:
    # q, k, v and the factors of 8-bit floats; k and v are slices of one array, so their strides are not contiguous
    B, Tq, Tk, Hq, Hk, D = case[1:7]
    dtype = torch.float8_e4m3fn if small else option.get("dtype", torch.bfloat16)
    q = torch.randn(B, Tq, Hq, D, device="cuda") * option.get("large", 1.0)
    kv = torch.randn(B, Tk, Hk, 2 * D, device="cuda")
    if "nan" in option:
        kv[0, option["nan"], 0, 5] = float("nan")
    k, v = kv.to(dtype).split(D, -1)
    if ends := option.get("ends"):
        # scores that grow along the keys, so that every tile raises the maximum, or that fall
        k = torch.linspace(ends[0], ends[1], Tk, device="cuda")[None, :, None, None] * torch.ones_like(q[:, :1, :Hk])
        k = k.to(dtype)
    shapes = (B, Hq), (Hk,), (B, Hk)
    return q.to(dtype), k, v, tuple(torch.rand(x, device="cuda") + 0.5 for x in shapes) if small else None


def _wide(q: Any, k: Any, v: Any, descale: Any) -> tuple[Any, Any, Any]:
    # q, k and v in float64, times their factors
    if descale is None:
        return q, k, v
    one, two, three = (
        x.double() * f.expand(len(x), x.shape[2])[:, None, :, None] for x, f in zip((q, k, v), descale, strict=True)
    )
    return one, two, three


def _check_one(name: str, variant: Variant, option: dict[str, Any], case: Case, m: Any) -> bool:
    B, Tq, Tk, Hq, _, D = case[1:7]
    q, k, v, descale = _inputs(case, variant.small, option)
    scale, softcap = D**-0.5, option.get("softcap", 0.0)
    sinks = torch.randn(Hq, device="cuda") if option.get("sinks") else None
    call, schedule, lowered = prepare(
        q, k, v, m, variant.tiles, softcap=softcap, sinks=sinks, descale=descale, aligned=variant.aligned
    )
    t, j = np.arange(Tq)[:, None], np.arange(Tk)[None, :]
    allowed = torch.from_numpy(np.stack([lowered.test(t, j, b) for b in range(B)])).cuda()
    out = torch.full(q.shape, float("nan"), device="cuda", dtype=torch.bfloat16 if variant.small else q.dtype)
    lse = torch.full((B, Tq, Hq), float("nan"), device="cuda")
    assert fits(q, k, v)
    forward(call, schedule, out, lse, form=variant.form)
    first = out.clone()
    forward(call, schedule, out, lse, form=variant.form)
    ref, ref_lse = reference(*_wide(q, k, v, descale), allowed, scale, softcap, sinks)
    error = float((out.double() - ref).norm() / ref.norm())
    empty = ref_lse == float("-inf")
    error_lse = float((lse.double() - ref_lse)[~empty].abs().max())
    same = torch.equal(out, first) and torch.equal(lse == float("-inf"), empty)
    # weights in e4m3 have 4 bits, and their sum is of weights before rounding
    allowed_o, allowed_lse = (4e-2, 2e-3) if variant.small else (6e-3, 2e-4)
    good = error < allowed_o and error_lse < allowed_lse * max(1.0, float(ref_lse[~empty].abs().max())) and same
    if not good:
        print(f"WRONG {name} {option} {variant}: o {error:.1e}, lse {error_lse:.1e}, same bits and empty rows: {same}")
    return not good


def _check_nan(variant: Variant) -> bool:
    # a NaN in one key makes NaN of exactly the rows that see it, also where no maximum rises
    q, k, v, descale = _inputs(Case("forward", 1, 640, 640, 4, 2, variant.D), variant.small, {"nan": 300})
    call, schedule, _ = prepare(q, k, v, mask.causal(), variant.tiles, descale=descale)
    out, lse = torch.empty(q.shape, device="cuda", dtype=torch.bfloat16), torch.empty(1, 640, 4, device="cuda")
    forward(call, schedule, out, lse, form=variant.form)
    expected = torch.zeros_like(lse, dtype=torch.bool)
    expected[:, 300:, :2] = True
    good = torch.equal(out.isnan().any(-1), expected) and torch.equal(lse.isnan(), expected)
    if not good:
        print(f"WRONG NaN {variant}: {int(out.isnan().any(-1).sum())} rows for {int(expected.sum())}")
    return not good


def long_sums(name: str, T: int = 131072, rows: int = 64) -> None:
    """Prints the errors of `rows` rows that see all of T keys: with random keys, and with one that a row looks for."""
    variant = VARIANTS[name]
    for needle in (False, True):
        torch.manual_seed(0)
        q, k, v, descale = _inputs(Case("forward", 1, rows, T, 2, 1, variant.D), variant.small, {})
        v = (v.float() + 1).to(v.dtype)
        if needle:
            # key 1000 (t + 1) is along row t, so its score is 0.7 √D, where others have a deviation of 1
            q[0, :, 1] = q[0, :, 0]
            k[0, 1000 : 1000 * (rows + 1) : 1000, 0] = (0.7 * q[0, :, 0].float()).to(k.dtype)
        call, schedule, _ = prepare(q, k, v, None, variant.tiles, descale=descale)
        out, lse = torch.empty(q.shape, device="cuda", dtype=torch.bfloat16), torch.empty(1, rows, 2, device="cuda")
        forward(call, schedule, out, lse, form=variant.form)
        wide = _wide(q, k, v, descale)
        allowed = torch.ones(1, rows, T, dtype=torch.bool, device="cuda")
        ref, _ = reference(*wide, allowed, variant.D**-0.5, 0.0, None)
        off = out.double() - ref
        print(f"{name}, {T} keys{', one looked for' if needle else ''}: error {float(off.norm() / ref.norm()):.2e}, "
              f"mean {float(off.mean() / ref.abs().mean()):+.2e}", flush=True)  # fmt: skip
