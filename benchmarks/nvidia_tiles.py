"""Searches tiles of the portable kernels on this GPU: `python benchmarks/nvidia_tiles.py rows.csv tiles.json`.

The search starts from the library's own table. One number at a time is doubled, halved or moved by one, as long as this
is 2 % faster. The table thus stays near shapes whose registers are known. Candidates are first compiled by many
processes, then timed one by one. The provider of a row is the tile: BM, BN, num_warps, num_stages. The winners are
written to the second file, to be reviewed and checked in by hand.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from arguments import parser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from saccade.backends import Inputs, load
from saccade.backends.triton import launch, launch_decode, tiles
from saccade.cli.bench.clocks import by_events, timing
from saccade.cli.bench.machine import Environment, gpu_environment
from saccade.cli.bench.rows import Row, write
from saccade.mask import causal
from saccade.plan import make_plan
from saccade.problem import Problem, Scores

CHIP = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"
FASTER = 0.98
# (sequences, keys) of decode steps, whose times have equal weight
STEPS = ((32, 8192), (1, 131072), (1, 8192))


class Entry(NamedTuple):
    """An entry of the table: a kernel, the bytes of a number, and the head size."""

    kernel: str
    bytes: int
    D: int

    @property
    def key(self) -> str:
        return f"{self.bytes} bytes, {self.D}"

    @property
    def dtype(self) -> str:
        return {2: "bfloat16", 4: "float32"}[self.bytes]

    def row(self, env: Environment, tile: list[int], us: float) -> Row:
        """The row of a tile: its time, or that it does not run."""
        case, provider = f"{self.kernel}-{self.bytes}bytes-D{self.D}", "x".join(map(str, tile))
        row = Row(*env, case, provider, "search", self.dtype)
        return row.with_text("does not run") if math.isinf(us) else replace(row, median=1e-6 * us)


KERNELS = ("forward", "dq", "dkdv", "decode")
ENTRIES = [Entry(kernel, size, D) for kernel in KERNELS for size in (2, 4) for D in (64, 128, 256)]


def place(entry: Entry, tile: list[int]) -> None:
    """Put a tile into the table of this process. dq has the row tile of the forward."""
    table = tiles._table()
    table[CHIP] = {**copy.deepcopy(table["sm_80"]), **table.get(CHIP, {})}
    table[CHIP][entry.kernel][entry.key] = tile
    if entry.kernel == "dq":
        table[CHIP]["forward"][entry.key][0] = tile[0]
    tiles.tile.cache_clear()


def calls(entry: Entry) -> list[Callable[[], Any]]:
    """The calls to time: a portable kernel at 4096 tokens and 2048 numbers in all heads, or decode steps."""
    kind = {"device": "cuda", "dtype": getattr(torch, entry.dtype)}
    timed: list[Callable[[], Any]] = []
    shapes = STEPS if entry.kernel == "decode" else ((1, 4096),)
    for B, T in shapes:
        H, Hk, Tq = (32, 8, 1) if entry.kernel == "decode" else (2048 // entry.D, 2048 // entry.D, T)
        mask = None if entry.kernel == "decode" else causal()
        sizes, scores = (B, Tq, T, H, Hk, entry.D, entry.D), Scores(scale=0.1)
        p = Problem(*sizes, dtype=entry.dtype, mask=mask, scores=scores, device="cuda:0")
        plan = make_plan(p, load("triton").limits(p))
        q, do, o = (torch.randn(B, Tq, H, entry.D, **kind) for _ in range(3))
        k, v = (torch.randn(B, T, Hk, entry.D, **kind) for _ in range(2))
        lse, delta = (torch.zeros(B, Tq, H, device="cuda") for _ in range(2))
        call = launch.AttentionLaunch(p, plan, Inputs(q, k, v))
        if entry.kernel == "forward":
            timed.append(lambda call=call, o=o, lse=lse: launch.forward(call, o, lse))
        elif entry.kernel == "decode":
            timed.append(lambda call=call, o=o, lse=lse: launch_decode.decode(call, o, lse))
        else:
            arrays = call.arrays._replace(do=launch.array(do), lse=lse, delta=delta)
            grads = launch.Gradients(*(torch.empty_like(x) for x in (q, k, v)), None)
            timed.append(lambda call=call, a=(arrays, grads): launch.backward(call, *a, False))
    return timed


def attempt(entry: Entry, tile: list[int], timed: bool) -> float:
    """The geometric mean of the times, in µs; infinite if the tile cannot run."""
    place(entry, tile)
    try:
        times = []
        for call in calls(entry):
            call()
            torch.cuda.synchronize()
            if timed:
                times.append(timing(by_events(call, warm=0.02, seconds=0.08)).median)
        return 1e6 * math.prod(times) ** (1 / len(times)) if timed else 0.0
    except Exception as failure:  # the tile needs more than the chip has, or does not compile
        print(f"{entry} {tile}: {type(failure).__name__}", flush=True)
        return math.inf


def near(entry: Entry, tile: list[int]) -> Iterator[list[int]]:
    """Tiles that differ in one number. The row tiles of dq (the forward's) and of decode (16) are fixed."""
    for n in range(4):
        if n == 0 and entry.kernel in ("dq", "decode"):
            continue
        steps = (tile[n] - 1, tile[n] + 1) if n == 3 else (tile[n] // 2, 2 * tile[n])
        for new in steps:
            least, most = ((16, 256), (16, 256), (4, 8), (1, 5))[n]
            if least <= new <= most:
                yield [*tile[:n], new, *tile[n + 1 :]]


def search(entries: list[Entry], env: Environment, table: Path, pool: ProcessPoolExecutor) -> Iterator[Row]:
    """A row for every tile that was tried. The best tiles are in the table after each round."""
    best = {e: list(tiles.tile(e.kernel, CHIP, e.dtype, e.D)) for e in ENTRIES}
    times: dict[tuple[Entry, tuple[int, ...]], float] = {}
    moving = entries
    while moving:
        wanted = [(e, t) for e in moving for t in [best[e], *near(e, best[e])] if (e, tuple(t)) not in times]
        fine = list(pool.map(attempt, *zip(*wanted, strict=True), [False] * len(wanted)))
        for (e, t), broken in zip(wanted, fine, strict=True):
            times[e, tuple(t)] = us = math.inf if broken else attempt(e, t, True)
            place(e, best[e])
            yield e.row(env, t, us)
        before = {e: list(t) for e, t in best.items()}
        for e in moving:
            next_best = min(near(e, best[e]), key=lambda t, e=e: times.get((e, tuple(t)), math.inf))
            if times.get((e, tuple(next_best)), math.inf) < FASTER * times[e, tuple(best[e])]:
                best[e] = next_best
        for e in entries:
            if e.kernel == "dq":
                best[e][0] = best[Entry("forward", e.bytes, e.D)][0]
            place(e, best[e])
        moving = [e for e in entries if best[e] != before[e]]
        table.write_text(json.dumps({f"{e.kernel}; {e.key}": best[e] for e in entries}, indent=1))


def main() -> None:
    """Search the entries whose kernel and key contain the word of --only, or all."""
    words = parser(__doc__)
    words.add_argument("table", type=Path, help="the JSON file of the best tiles")
    args = words.parse_args()
    entries = [e for e in ENTRIES if args.only in f"{e.kernel} {e.key}"]
    env = gpu_environment(args.commit)
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), get_context("spawn")) as pool:
        write(args.out, search(entries, env._replace(device=f"{env.device}, {CHIP}"), args.table, pool))


if __name__ == "__main__":
    main()
