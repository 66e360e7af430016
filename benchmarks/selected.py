"""Selected keys compared with dense attention per allowed pair, on the CPU.

    python benchmarks/selected.py rows.csv

At T = 32768 each query, or each group of 64 queries, sees 2048 keys in 32 random blocks of 64. The ceiling of a case is
the rate of dense attention with the same heads over 4096 tokens, measured in turn with it, and the fraction is the
share of it that the selected pairs reach. Each pair is one query head, query and key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from arguments import chosen, parser
from torch import Tensor

import saccade
from saccade import mask
from saccade.cli.bench.clocks import in_turn
from saccade.cli.bench.machine import Environment, environment
from saccade.cli.bench.rows import Row, write

T, DENSE, BLOCK, ENTRIES, D = 32768, 4096, 64, 32, 128


class Case(NamedTuple):
    """Query heads, key heads, and queries that share a list."""

    name: str
    Hq: int
    Hk: int
    rows: int


CASES = (
    Case("groups of 64 queries", 2, 2, 64),
    Case("groups of 64 queries, 4 heads per key head", 4, 1, 64),
    Case("16 heads per key head", 16, 1, 1),
    Case("64 heads on 4 key heads", 64, 4, 1),
    Case("1 head per key head", 2, 2, 1),
)


def calls(q: Tensor, k: Tensor, v: Tensor, of: mask.Mask | None) -> dict[str, Callable[[], object]]:
    """The forward and the backward, each alone."""
    with torch.no_grad():
        o, lse = saccade.attention(q, k, v, of, return_lse=True)
    do = torch.randn_like(o)
    return {
        "forward": lambda: saccade.attention(q, k, v, of),
        "backward": lambda: saccade.attention_backward(do, q, k, v, o, lse, of),
    }


def measure(case: Case, dtype: torch.dtype, tokens: int, about: Environment) -> list[Row]:
    """The rows of a case."""
    Hq, Hk = case.Hq, case.Hk
    q, k, v = (torch.randn(1, tokens, heads, D).to(dtype) for heads in (Hq, Hk, Hk))
    lists = torch.rand(1, Hk, -(-tokens // case.rows), tokens // BLOCK).topk(ENTRIES).indices
    of = mask.select(lists, BLOCK, case.rows)
    dense = calls(q[:, :DENSE], k[:, :DENSE], v[:, :DENSE], None)
    rows: list[Row] = []
    for kind, call in calls(q, k, v, of).items():
        times = in_turn({"selected": call, "dense": dense[kind]}, rounds=(5, 20))
        pairs = {"selected": Hq * tokens * BLOCK * ENTRIES, "dense": Hq * DENSE * DENSE}
        flops = {"forward": 4 * D, "backward": 10 * D}[kind]
        rates = {name: pairs[name] * flops / times[name].median / 1e9 for name in pairs}
        shape = f"1x{tokens}x{tokens}x{Hq}x{Hk}x{D}"
        name = f"selected-{str(dtype)[6:]}-{case.name}"
        row = Row(*about, name, "saccade", kind, str(dtype)[6:], shape, f"select(lists, {BLOCK}, {case.rows})")
        share = rates["selected"] / rates["dense"]
        measured = {"rate": rates["selected"], "rate_unit": "GFLOP/s", "ceiling": rates["dense"], "fraction": share}
        rows.append(replace(row, pairs=pairs["selected"], **measured, **times["selected"]._asdict()))
    return rows


def main() -> None:
    """Measure every case in float32 and bfloat16."""
    words = parser(__doc__)
    words.add_argument("--tokens", type=int, default=T)
    args = words.parse_args()
    torch.manual_seed(0)
    about = environment(args.commit)
    picked = chosen((case for case in CASES if args.only in case.name), args.part)
    dtypes = torch.float32, torch.bfloat16
    write(args.out, (row for dtype in dtypes for case in picked for row in measure(case, dtype, args.tokens, about)))


if __name__ == "__main__":
    main()
