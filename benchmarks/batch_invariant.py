"""The cost of `deterministic="batch"`, compared with the default in turn, on the CPU.

    python benchmarks/batch_invariant.py rows.csv        # a few minutes

The bars are 15 % for forward and backward, and 30 % for decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from arguments import chosen, parser

import saccade
from saccade import mask
from saccade.cli.bench.clocks import in_turn
from saccade.cli.bench.machine import environment
from saccade.cli.bench.rows import Row, write

# B, T, Hq, Hk
FORWARD = [(1, 1024, 8, 8), (4, 256, 8, 2), (1, 4096, 8, 2)]
DECODE = [(1, 512, 8, 8), (1, 4096, 8, 8), (1, 16384, 8, 2), (8, 2048, 8, 8), (1, 4096, 32, 8)]
DOCUMENTS = 16
BARS = {"forward": 1.15, "backward": 1.15, "decode": 1.30}


# (name, kind, shape, a function from `deterministic` to the call)
Case = tuple[str, str, tuple[int, ...], Callable[[Any], Callable[[], Any]]]


def prompts(dtype: torch.dtype, D: int) -> Iterator[Case]:
    """Forward and backward, of one sequence per entry and of packed documents."""
    for B, T, Hq, Hk in FORWARD:
        q, do = (torch.randn(B, T, Hq, D, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(B, T, Hk, D, dtype=dtype) for _ in range(2))
        packed = mask.documents(cu_seqlens=list(range(0, T + 1, T // DOCUMENTS)))
        for name, seen in (("causal", mask.causal()), ("documents", mask.causal() & packed)):
            o, lse = saccade.attention(q, k, v, seen, return_lse=True)
            forward = partial(saccade.attention, q, k, v, seen)
            backward = partial(saccade.attention_backward, do, q, k, v, o, lse, seen)
            for kind, call in (("forward", forward), ("backward", backward)):
                yield name, kind, (B, T, T, Hq, Hk, D), lambda how, call=call: partial(call, deterministic=how)


def tokens(dtype: torch.dtype, D: int) -> Iterator[Case]:
    """Decode of one token per entry."""
    for B, T, Hq, Hk in DECODE:
        cache = saccade.KVCache(B, T, Hk, D, dtype=dtype)
        cache.append(*(torch.randn(B, T, Hk, D, dtype=dtype) for _ in range(2)))
        call = partial(saccade.decode, torch.randn(B, 1, Hq, D, dtype=dtype), cache)
        yield "decode", "decode", (B, 1, T, Hq, Hk, D), lambda how, call=call: partial(call, deterministic=how)


def rows(row: Row, dtype: torch.dtype, D: int, only: str) -> Iterator[Row]:
    """Two rows for each case; the second has the ratio of the medians and the bar in its note."""
    for name, kind, shape, call in chain(prompts(dtype, D), tokens(dtype, D)):
        title = f"{name}-{kind}-{'x'.join(map(str, shape))}"
        if only not in title:
            continue
        times = in_turn({"default": call(True), "batch": call("batch")}, seconds=3.0)
        ratio = times["batch"].median / times["default"].median
        for provider, time in times.items():
            note = f"ratio={ratio:.3f}; bar={BARS[kind]}" if provider == "batch" else ""
            line = replace(row, case=title, provider=f"saccade, {provider}", kind=kind, dtype=str(dtype)[6:], note=note)
            yield replace(line, shape="x".join(map(str, shape)), **time._asdict())


def main() -> None:
    """Write the rows."""
    options = parser(__doc__).parse_args()
    row = Row(*environment(options.commit), "", "", "")
    every = [(dtype, D) for dtype in (torch.float32, torch.bfloat16) for D in (64, 128)]
    chosen_of = chosen(every, options.part)
    write(options.out, (line for dtype, D in chosen_of for line in rows(row, dtype, D, options.only)))


if __name__ == "__main__":
    main()
