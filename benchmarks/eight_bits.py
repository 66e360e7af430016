"""8-bit floats over many keys, compared with float64: `python benchmarks/eight_bits.py rows.csv [--keys 131072]`.

Each case has queries that see all keys. In a needle, every query looks for one key, whose weight is about a quarter or
nearly 1; the rest of the weight is spread over all others. In a sum, all weights are equal, so an accumulator that
rounds drifts with every step. `error` is the root mean square over o. `allowed` is 1.5 times that of weights rounded to
e4m3 in an exact computation plus 2^-9 of o, the rule of tests/triton/on_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from arguments import gpu_parser, started
from torch import Tensor

import saccade
from saccade.cli.bench.machine import Environment
from saccade.cli.bench.rows import Row, write
from saccade.testing import forms

KEYS, ROWS, HEADS = 131072, 128, 2
SIZES = (64, 128, 256)
# how many times its own key a query is
NEEDLES = {"quarter": 1.0, "whole": 1.5}
SUMS = ("ones", "positive", "signed")


def needle(Tk: int, D: int, factor: float) -> list[Tensor]:
    """q, k, v in which row r looks for key r (Tk - 1) / (ROWS - 1): the first, the last and others between them."""
    k, v = (torch.randn(1, Tk, HEADS, D, device="cuda") for _ in range(2))
    at = torch.linspace(0, Tk - 1, ROWS, device="cuda").long()
    # so that every head size gives the needle the same score, factor times 11.3
    return [factor * (128 / D) ** 0.5 * k[:, at], k, v]


def sums(Tk: int, D: int, name: str) -> list[Tensor]:
    """q, k, v with equal scores; v is 1, or random."""
    q, k, v = torch.zeros(1, ROWS, HEADS, D, device="cuda"), *torch.randn(2, 1, Tk, HEADS, D, device="cuda")
    return [q, k, {"ones": torch.ones_like(v), "positive": v.abs(), "signed": v}[name]]


def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o [1, ROWS, HEADS, D] in float64, and o of weights rounded to e4m3 so that the largest of a row is 2^8."""
    both: list[list[Tensor]] = []
    for h in range(q.shape[2]):
        s = q[0, :, h].double() @ k[0, :, h].double().T * q.shape[-1] ** -0.5
        w = (s - s.amax(-1, keepdim=True)).exp()
        small = (256 * w).to(torch.float8_e4m3fn).double() / 256
        both.append([p @ v[0, :, h].double() / w.sum(-1, keepdim=True) for p in (w, small)])
    return torch.stack([o for o, _ in both], 1)[None], torch.stack([o for _, o in both], 1)[None]


def in_eight_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """o of Saccade's kernels for 8-bit floats."""
    return saccade.attention(q, k, v, descale=[torch.ones(HEADS, device="cuda")] * 3)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def rows(env: Environment, Tk: int) -> Iterator[Row]:
    """A row for each case and provider: Saccade in 8 bits, by its new forms, and in bfloat16 on the same values."""
    cases = [(D, f"needle-{name}", needle, factor) for D in SIZES for name, factor in NEEDLES.items()]
    cases += [(D, f"sum-{name}", sums, name) for D in SIZES for name in SUMS]
    for D, name, make, how in cases:
        small = [x.to(torch.float8_e4m3fn) for x in make(Tk, D, how)]
        right, rounded = exact(*small)
        allowed = 1.5 * (rms(rounded - right) + 2**-9 * rms(right))
        shape = f"1x{ROWS}x{Tk}x{HEADS}x{HEADS}x{D}"
        for form in ("", *forms.of_kind("eight bits"), "bfloat16"):
            kind, provider = "float8_e4m3fn", f"saccade, {form}" if form else "saccade"
            if form == "bfloat16":
                kind, o = form, saccade.attention(*(x.bfloat16() for x in small))
            else:
                with forms.using([form] if form else []):
                    o = in_eight_bits(*small)
            figures = {"error": rms(o.double() - right), "allowed": allowed}
            note = f"relative={figures['error'] / rms(right):.3g}"
            row = (*env, f"{name}-T{Tk}-D{D}", provider, "error", kind, shape)
            yield Row(*row, pairs=ROWS * Tk * HEADS, note=note, **figures)


def main() -> None:
    """Measure and write the rows."""
    words = gpu_parser(__doc__, resumes=False)
    words.add_argument("--keys", type=int, default=KEYS)
    args, env, _ = started(words)
    with forms.using(args.using):
        write(args.out, rows(env, args.keys))


if __name__ == "__main__":
    main()
