"""o and its tangent by torch.func.jvp, compared with the forward alone, on the CPU.

    python benchmarks/forward_mode.py rows.csv

The rate of a case is how many forwards the two take together, at most 4.5. With tangents of q, k and v a forward has
two products per pair and the pass of the tangent five to six. The peer is the same calls of torch's math attention,
which stores all scores and the tangents of all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from arguments import chosen, parser
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from saccade import mask
from saccade.cli.bench.clocks import in_turn
from saccade.cli.bench.machine import Environment, environment
from saccade.cli.bench.rows import Row, write

BAR, HEADS = 4.5, 4


class Case(NamedTuple):
    """Tokens, head size, dtype, mask, and which of q, k and v have a tangent."""

    T: int
    D: int
    dtype: torch.dtype
    causal: bool
    moved: str = "qkv"

    @property
    def name(self) -> str:
        """What a row calls it."""
        tangents = ", ".join(self.moved)
        return f"jvp-{str(self.dtype)[6:]}-{self.T}x{self.D}-{'causal' if self.causal else 'full'} of {tangents}"


CASES = (
    *(
        Case(4096, D, dtype, causal)
        for dtype in (torch.float32, torch.bfloat16)
        for D in (64, 128)
        for causal in (True, False)
    ),
    Case(4096, 128, torch.float32, True, "q"),
    Case(4096, 128, torch.float32, True, "v"),
    Case(32768, 64, torch.bfloat16, True),
)


def by_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's math attention, on tensors [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def calls(attend: Callable[..., Tensor], case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward and the forward with its tangent."""
    x = {name: torch.randn(1, case.T, HEADS, case.D).to(case.dtype) for name in "qkv"}
    primals = {name: x[name] for name in case.moved}
    tangents = {name: torch.randn_like(x[name]) for name in case.moved}
    return lambda: attend(**x), lambda: torch.func.jvp(lambda moved: attend(**x | moved), (primals,), (tangents,))


def measure(case: Case, about: Environment) -> list[Row]:
    """The rows of a case, of Saccade and, where its scores fit the memory, of torch."""
    of = mask.causal() if case.causal else None
    providers = {"saccade": lambda q, k, v: saccade.attention(q, k, v, of)}
    if case.T <= 4096:
        providers["torch, math"] = lambda q, k, v: by_torch(q, k, v, case.causal)
    timed: dict[str, Callable[[], object]] = {}
    for name, attend in providers.items():
        timed[f"{name} forward"], timed[f"{name} jvp"] = calls(attend, case)
    times = in_turn(timed, seconds=20.0, rounds=(3, 30))
    rows: list[Row] = []
    for name in providers:
        jvp, ratio = times[f"{name} jvp"], times[f"{name} jvp"].median / times[f"{name} forward"].median
        shape = f"1x{case.T}x{case.T}x{HEADS}x{HEADS}x{case.D}"
        row = Row(*about, case.name, name, "jvp", str(case.dtype)[6:], shape, "causal()" if case.causal else "")
        bar = f"bar={BAR}" if name == "saccade" else ""
        rows.append(replace(row, rate=ratio, rate_unit="forwards", note=bar, **jvp._asdict()))
    return rows


def main() -> None:
    """Measure every case."""
    args = parser(__doc__).parse_args()
    torch.manual_seed(0)
    about = environment(args.commit)
    picked = chosen((case for case in CASES if args.only in case.name), args.part)
    write(args.out, (row for case in picked for row in measure(case, about)))


if __name__ == "__main__":
    main()
