"""Decode over a latent cache compared with the machine's roofline, on the CPU.

    python benchmarks/latent_decode.py rows.csv

One sequence of 32768 tokens. The least time of a step is the longer of two: reading every row once, and computing every
product, at the speeds that the machine reached in the same run. The fraction is the least time divided by the measured.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from arguments import chosen, parser

import saccade
from saccade.cli.bench.clocks import in_turn
from saccade.cli.bench.machine import Environment, environment
from saccade.cli.bench.measure import Ceiling
from saccade.cli.bench.rows import Row, write

T, LATENT, ROPE = 32768, 512, 64
CASES = [(heads, Tq, dtype) for dtype in ("float32", "bfloat16") for heads in (4, 16, 128) for Tq in (1, 4)]


def measure(heads: int, Tq: int, dtype: str, ceiling: Ceiling, about: Environment) -> Row:
    """The row of a case."""
    of = getattr(torch, dtype)
    q, rows = torch.randn(1, Tq, heads, LATENT + ROPE).to(of), saccade.LatentKVCache(1, T, dtype=of)
    rows.append(torch.randn(1, T, LATENT).to(of), torch.randn(1, T, ROPE).to(of))
    time = in_turn({"decode": lambda: saccade.decode(q, rows, scale=192**-0.5)}, rounds=(10, 40))["decode"]
    size, flops = T * (LATENT + ROPE) * of.itemsize, 2 * Tq * heads * T * (2 * LATENT + ROPE)
    reads, products = size / ceiling.stream(), flops / ceiling.flops(dtype)
    amount, unit = (size, "GB/s") if reads > products else (flops, "GFLOP/s")
    rate, top = amount / time.median / 1e9, amount / max(reads, products) / 1e9
    name, shape = f"latent-{dtype}-{heads} heads, {Tq} queries", f"1x{Tq}x{T}x{heads}x1x{LATENT + ROPE}"
    row = Row(*about, name, "saccade", "decode", dtype, shape, rate=rate, rate_unit=unit, ceiling=top)
    return replace(row, fraction=rate / top, pairs=heads * Tq * T, **time._asdict())


def main() -> None:
    """Measure every case."""
    args = parser(__doc__).parse_args()
    torch.manual_seed(0)
    about, ceiling = environment(args.commit), Ceiling()
    picked = chosen((case for case in CASES if args.only in f"{case}"), args.part)
    write(args.out, (measure(*case, ceiling, about) for case in picked))


if __name__ == "__main__":
    main()
