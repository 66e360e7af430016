"""Calls with return_max and return_entropy, compared with the plain call in turn, on the CPU.

    python benchmarks/outputs.py rows.csv        # a minute or two

The bar is 5 % more than the plain call takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from arguments import chosen, parser

import saccade
from saccade import mask
from saccade.cli.bench.clocks import in_turn
from saccade.cli.bench.machine import environment
from saccade.cli.bench.rows import Row, write

T, BAR = 2048, 1.05
RESULTS = {
    "plain": {},
    "max": {"return_max": True},
    "entropy": {"return_entropy": True},
    "both": {"return_max": True, "return_entropy": True},
}
KINDS = ("forward", "both")


def calls(dtype: torch.dtype, D: int, kind: str) -> dict[str, Callable[[], object]]:
    """The plain call and those with more results; a backward has a gradient of the entropy if that is returned."""
    q, k, v = (torch.randn(1, T, heads, D, dtype=dtype).requires_grad_(kind == "both") for heads in (8, 2, 2))
    do = torch.randn_like(q)

    def call(**options: bool) -> object:
        o, _, *more = saccade.attention(q, k, v, mask.causal(), return_lse=True, **options)
        if kind == "forward":
            return o
        loss = (o * do).sum() + (more[-1].sum() if "return_entropy" in options else 0)
        return torch.autograd.grad(loss, (q, k, v))

    return {name: lambda options=options: call(**options) for name, options in RESULTS.items()}


def rows(about: Row, dtype: torch.dtype, D: int, kind: str) -> Iterator[Row]:
    """A row for each set of results; all but the plain one have the ratio of the medians and the bar in their note."""
    times = in_turn(calls(dtype, D, kind), seconds=6.0)
    row = replace(about, case=f"outputs-{kind}-D{D}-{str(dtype)[6:]}", kind=kind, dtype=str(dtype)[6:])
    for name, time in times.items():
        note = "" if name == "plain" else f"ratio={time.median / times['plain'].median:.3f}; bar={BAR}"
        shape = f"1x{T}x{T}x8x2x{D}"
        yield replace(row, provider=f"saccade, {name}", shape=shape, mask="causal()", note=note, **time._asdict())


def main() -> None:
    """Write the rows."""
    options = parser(__doc__).parse_args()
    about = Row(*environment(options.commit), "", "", "")
    every = [(dtype, D, kind) for dtype in (torch.float32, torch.bfloat16) for D in (64, 128) for kind in KINDS]
    picked = chosen((case for case in every if options.only in str(case)), options.part)
    write(options.out, (line for case in picked for line in rows(about, *case)))


if __name__ == "__main__":
    main()
