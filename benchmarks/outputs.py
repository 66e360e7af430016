"""The time of calls with return_max and return_entropy, divided by that of the plain call, on the CPU.

    python benchmarks/outputs.py        # a minute or two; --rounds for more

Calls alternate, and the printed ratio is the median over rounds. The bar is 1.05.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

import saccade
from saccade import mask

RESULTS = {
    "max": {"return_max": True},
    "entropy": {"return_entropy": True},
    "both": {"return_max": True, "return_entropy": True},
}


def calls(dtype: torch.dtype, backward: bool, T: int, D: int) -> dict[str, Callable[[], object]]:
    """The plain call and those with more results; a backward has a gradient of the entropy if that is returned."""
    q, k, v = (torch.randn(1, T, heads, D, dtype=dtype).requires_grad_(backward) for heads in (8, 2, 2))
    do = torch.randn_like(q)

    def call(**options: bool) -> object:
        o, _, *more = saccade.attention(q, k, v, mask.causal(), return_lse=True, **options)
        if not backward:
            return o
        loss = (o * do).sum() + (more[-1].sum() if "return_entropy" in options else 0)
        return torch.autograd.grad(loss, (q, k, v))

    return {"plain": call} | {name: lambda options=options: call(**options) for name, options in RESULTS.items()}


def seconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Print a line per dtype, head size and kind of call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        for D in (64, 128):
            for backward in (False, True):
                of = calls(dtype, backward, args.tokens, D)
                rounds = [{name: seconds(call) for name, call in of.items()} for _ in range(args.rounds + 1)][1:]
                ratios = {name: median(r[name] / r["plain"] for r in rounds) for name in RESULTS}
                kind = "forward and backward" if backward else "forward"
                figures = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
                print(f"{str(dtype)[6:]}, D = {D}, {kind}: {figures}", flush=True)


if __name__ == "__main__":
    main()
