"""Attention of today's models on an NVIDIA GPU: `python benchmarks/nvidia_models.py rows.csv [--only WORD]`.

Latent decode: 128 sequences of 8192 tokens with rows of 512 + 64 numbers. The ceiling of a case is the shorter of two
limits: reading every row once at the speed of a copy, and the products at the speed of a matrix product, both measured
in the same run. Selected keys: each query, or each group of 64 queries, sees 2048 of 32768 keys in blocks of 64. Their
ceiling is the rate of dense attention with the same heads, per allowed pair. `error` is the largest difference from
float32 attention of a few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from arguments import chosen, gpu_parser, started
from nvidia_recurrent import reached
from selected import calls as attention_calls
from torch import Tensor

import saccade
from saccade import mask
from saccade.cli.bench.clocks import by_events, by_replays, timing
from saccade.cli.bench.rows import Row, note, write
from saccade.testing import forms

LATENT, ROPE, D = 512, 64, 128
# the scale of DeepSeek-V3, whose heads have 192 numbers
SCALE = 192**-0.5
# tokens and key blocks of selected keys, and tokens of the dense attention that they are compared with
TOKENS, BLOCK, ENTRIES, DENSE = 32768, 64, 32, 8192


class Latent(NamedTuple):
    """Sequences, their tokens, query heads, queries per sequence."""

    B: int
    T: int
    heads: int
    Tq: int = 1

    @property
    def name(self) -> str:
        return f"latent-B{self.B}-T{self.Tq}x{self.T}-H{self.heads}"


class Selected(NamedTuple):
    """Query heads, key heads, and queries that share a list."""

    Hq: int
    Hk: int
    rows: int

    @property
    def name(self) -> str:
        return f"selected-H{self.Hq}:{self.Hk}-rows{self.rows}"


LATENTS = (Latent(128, 8192, 16), Latent(128, 8192, 128), Latent(128, 8192, 128, 2), Latent(1, 32768, 128))
SELECTED = (Selected(16, 16, 64), Selected(16, 4, 64), Selected(64, 4, 1))
PAGE = 64


def latent_calls(case: Latent) -> tuple[dict[str, Callable[[], Any]], Callable[[Tensor], float]]:
    """Calls by provider, and the error of a result."""
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    B, T, heads, Tq = case
    q = torch.randn(B, Tq, heads, LATENT + ROPE, **kind)
    rows = torch.randn(B, T, LATENT, **kind), torch.randn(B, T, ROPE, **kind)
    cache = saccade.LatentKVCache(B, T, dtype=kind["dtype"], device="cuda")
    cache.append(*rows)
    n = -(-T // PAGE)
    pool = saccade.PagedLatentKVCache(B * n, PAGE, dtype=kind["dtype"], device="cuda")
    table, at = torch.randperm(B * n, device="cuda").reshape(B, n).int(), torch.arange(T, device="cuda")
    where = table.long()[:, at // PAGE], at % PAGE
    pool.k[where] = torch.cat(rows, -1)[:, :, None]
    lengths = torch.full((B,), T, dtype=torch.int32, device="cuda")
    pages = pool.view([])._replace(block_table=table, lengths=lengths)

    def error(o: Tensor) -> float:
        # of one sequence and its last query
        key = torch.cat([x[-1].float() for x in rows], -1)
        weights = (q[-1, -1].float() @ key.T * SCALE).softmax(-1)
        return float((o[-1, -1].float() - weights @ key[:, :LATENT]).abs().max())

    return {
        "saccade": lambda: saccade.decode(q, cache, scale=SCALE),
        f"saccade, pages of {PAGE}": lambda: saccade.decode(q, pages, scale=SCALE),
    }, error


def latent_rows(case: Latent, base: Row, ceilings: dict[str, float]) -> Iterator[Row]:
    """A row for each provider of a case."""
    size, pairs = case.B * case.T * (LATENT + ROPE) * 2, case.B * case.heads * case.Tq * case.T
    flops = 2 * pairs * (2 * LATENT + ROPE)
    # a copy reads and writes
    reads, products = size / ceilings["GB/s"] / 1e9, flops / ceilings["TFLOP/s"] / 1e12
    amount, unit = (size / 1e9, "GB/s") if reads > products else (flops / 1e12, "TFLOP/s")
    top, shape = amount / max(reads, products), f"{case.B}x{case.Tq}x{case.T}x{case.heads}x1x{LATENT + ROPE}"
    base = replace(base, case=case.name, kind="decode", shape=shape, pairs=pairs, rate_unit=unit, ceiling=top)
    calls, error = latent_calls(case)
    for provider, call in calls.items():
        row, time = replace(base, provider=provider, error=error(call())), timing(by_replays(call))
        rate = amount / time.median
        yield replace(row, rate=rate, fraction=rate / top, **time._asdict())


def selected_rows(case: Selected, base: Row) -> Iterator[Row]:
    """The rows of the forward and the backward."""
    Hq, Hk, rows = case
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(1, TOKENS, heads, D, **kind) for heads in (Hq, Hk, Hk))
    lists = torch.rand(1, Hk, -(-TOKENS // rows), TOKENS // BLOCK, device="cuda").topk(ENTRIES).indices
    of = mask.select(lists, BLOCK, rows)
    dense = attention_calls(*(x[:, :DENSE] for x in (q, k, v)), None)
    text = f"select(lists, {BLOCK}, {rows})"
    base = replace(base, case=case.name, provider="saccade", shape=f"1x{TOKENS}x{TOKENS}x{Hq}x{Hk}x{D}", mask=text)
    for verb, call in attention_calls(q, k, v, of).items():
        flops = {"forward": 4 * D, "backward": 10 * D}[verb] * 1e-12
        time, whole = (timing(by_events(x)) for x in (call, dense[verb]))
        pairs = Hq * TOKENS * BLOCK * ENTRIES
        rate, top = pairs * flops / time.median, Hq * DENSE**2 * flops / whole.median
        measured = {"rate": rate, "rate_unit": "TFLOP/s", "ceiling": top, "fraction": rate / top}
        yield replace(base, kind=verb, pairs=pairs, **measured, **time._asdict())


def main() -> None:
    """Measure and write the rows."""
    args, env, earlier = started(gpu_parser(__doc__))
    done = {row.case for row in earlier}
    base, ceilings = Row(*env, "", "", "", "bfloat16"), reached()
    base = base.with_text(note({f"{unit} of torch": rate for unit, rate in ceilings.items()}))
    cases = [case for case in (*LATENTS, *SELECTED) if args.only in case.name and case.name not in done]

    def rows() -> Iterator[Row]:
        for case in chosen(cases, args.part):
            yield from latent_rows(case, base, ceilings) if isinstance(case, Latent) else selected_rows(case, base)
            torch.cuda.empty_cache()

    with forms.using(args.using):
        write(args.out, rows(), earlier)


if __name__ == "__main__":
    main()
