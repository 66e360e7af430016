"""Ring attention on more GPUs than there are, from measured speeds of kernels and links:

    torchrun --nproc_per_node 4 benchmarks/scaling.py measure speeds.csv
    python benchmarks/scaling.py simulate speeds.csv scaling.csv scaling.svg [--rings distributed.csv]

Measured: causal attention of n tokens on one GPU, forward and backward, and a message that every GPU sends to its
neighbour at once, by size. Assumed: in every step of a zigzag ring all ranks compute n² / 2 pairs, in the time of the
causal n tokens; keys and values of the next step travel meanwhile (forward 2 bytes a number; backward those and float32
gradients), so that a step takes the longer of the two; beyond the measured sizes times grow with pairs and with bytes;
GPUs of one machine have the measured link, and of more than 8 some hop of the ring crosses machines, at `--between`
bytes a second a GPU (50e9, a port of 400 Gb/s, not measured), on which all ranks wait. With --rings, rows of
distributed.py, every step takes as much longer than its kernel or message as those rings' did, by tokens of a GPU:
launches, and partial results that are added up. Left out: stragglers, congestion, everything of a model that is not
attention.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

FIELDS = ["device", "what", "tokens", "bytes", "heads", "key_heads", "head_dim", "forward_s", "backward_s", "link_s"]
OUT = ["gpus", "tokens", "tokens_a_gpu", "forward_s", "backward_s", "tflops_a_gpu", "efficiency", "bound"]
HEADS, KEY_HEADS, D = 16, 16, 128
LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
SIZES = [2**e for e in range(16, 29, 2)]
GPUS = [2**e for e in range(11)]
MACHINE = 8
LONGEST = 10_000_000


def measure(path: Path, lengths: Iterable[int], repeats: int) -> None:
    """Write speeds of kernels and links as rows; every rank takes part, rank 0 writes."""
    import torch
    import torch.distributed as dist

    import saccade
    from saccade import mask
    from saccade.testing.ranks import start

    device = start()
    gpus = device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if gpus else lambda: None
    name = torch.cuda.get_device_name() if gpus else "cpu"
    base = {"device": name, "heads": HEADS, "key_heads": KEY_HEADS, "head_dim": D}
    rows: list[dict[str, Any]] = []

    def seconds(call: Callable[[], Any]) -> float:
        # median of the slowest rank
        found: list[float] = []
        for n in range(repeats + 3):
            wait()
            dist.barrier()
            begin = time.perf_counter()
            call()
            wait()
            taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            found += [float(taken)] if n >= 3 else []
        return statistics.median(found)

    for n in lengths:
        shapes = [(1, n, h, D) for h in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
        q, k, v, do = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        attend = partial(saccade.attention, q, k, v, mask.causal(), return_lse=True)
        forward = seconds(attend)
        backward = seconds(partial(saccade.attention_backward, do, q, k, v, *attend(), mask.causal()))
        rows.append({**base, "what": "kernel", "tokens": n, "forward_s": forward, "backward_s": backward})
    me, world = dist.get_rank(), dist.get_world_size()
    for size in SIZES:
        out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

        def exchange(out: Any = out, into: Any = into) -> None:
            ops = [dist.P2POp(dist.isend, out, (me + 1) % world), dist.P2POp(dist.irecv, into, (me - 1) % world)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        rows.append({**base, "what": "link", "bytes": size, "link_s": seconds(exchange)})
    if me == 0:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


# seconds of a ring by tokens of a GPU and GPUs
Step = Callable[[int, int], float]


class Curve:
    """Seconds by size, between measured points along their logarithms, beyond the last in proportion to size**power."""

    def __init__(self, points: Iterable[tuple[float, float]], power: float) -> None:
        self.sizes, self.seconds = (np.array(x) for x in zip(*sorted(points), strict=True))
        self.power = power

    def __call__(self, size: float) -> float:
        if size > self.sizes[-1]:
            return float(self.seconds[-1] * (size / self.sizes[-1]) ** self.power)
        return float(np.exp(np.interp(np.log(size), np.log(self.sizes), np.log(self.seconds))))


def beyond(rings: list[dict[str, str]], steps: tuple[Step, Step]) -> tuple[Curve, Curve]:
    """Seconds of a step of a measured zigzag ring beyond what `steps` say it takes, forward and backward, by tokens."""
    found: tuple[list[tuple[float, float]], ...] = ([], [])
    taken: dict[tuple[int, int], dict[str, float]] = {}
    for row in rings:
        if row["provider"] == "saccade, zigzag":
            at = taken.setdefault((int(row["world"]), int(row["tokens"])), {})
            at[row["pass"]] = float(row["median_ms"]) / 1e3
    for (world, n), at in taken.items():
        for index, seconds in enumerate((at["forward"], at["both"] - at["forward"])):
            found[index].append((n, max(1e-9, seconds - steps[index](n, world)) / world))
    return Curve(found[0], 1), Curve(found[1], 1)


def simulate(
    rows: list[dict[str, str]], between: float, rings: list[dict[str, str]] | None = None
) -> list[dict[str, Any]]:  # fmt: skip
    """Simulated figures: 8k and 32k tokens a GPU, and 10 M tokens in all, on up to 1024 GPUs."""
    kernels = [row for row in rows if row["what"] == "kernel"]
    heads, key_heads, dim = (int(kernels[0][name]) for name in ("heads", "key_heads", "head_dim"))
    compute = [Curve([(int(r["tokens"]), float(r[name])) for r in kernels], 2) for name in ("forward_s", "backward_s")]
    link = Curve([(int(r["bytes"]), float(r["link_s"])) for r in rows if r["what"] == "link"], 1)

    def hop(index: int, n: int, gpus: int) -> float:
        # keys and values of 16 bits, in a backward also their gradients of 32
        size = n * key_heads * 2 * dim * (2, 6)[index]
        return link(size) if gpus <= MACHINE else max(link(size), size / between)

    def seconds(index: int, n: int, gpus: int) -> float:
        step, hops = compute[index](n), gpus - 1 if index == 0 else gpus
        return step * gpus + max(0.0, hop(index, n, gpus) - step) * (hops if gpus > 1 else 0)

    more = beyond(rings, (partial(seconds, 0), partial(seconds, 1))) if rings else None
    found: list[dict[str, Any]] = []
    for gpus in GPUS:
        for n in (8192, 32768, -(-LONGEST // gpus)):
            total = [seconds(index, n, gpus) for index in range(2)]
            if more and gpus > 1:
                total = [x + curve(n) * gpus for x, curve in zip(total, more, strict=True)]
            ideal = sum(curve(n) for curve in compute) * gpus
            slower = " ".join(
                "link" if gpus > 1 and hop(index, n, gpus) > compute[index](n) else "kernel" for index in range(2)
            )
            flops = 14 * dim * heads * (n * gpus) * (n * gpus + 1) / 2 / gpus
            found.append(
                {
                    "gpus": gpus,
                    "tokens": n * gpus,
                    "tokens_a_gpu": n,
                    "forward_s": total[0],
                    "backward_s": total[1],
                    "tflops_a_gpu": flops / sum(total) / 1e12,
                    "efficiency": ideal / sum(total),
                    "bound": slower,
                }
            )
    return found


def draw(found: list[dict[str, Any]], device: str, path: Path) -> None:
    """Efficiency by GPUs, one line for each number of tokens a GPU, and one for 10 M in all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, chosen in (
        ("8k tokens a GPU", lambda row: row["tokens_a_gpu"] == 8192),
        ("32k tokens a GPU", lambda row: row["tokens_a_gpu"] == 32768),
        ("10 M tokens in all", lambda row: row["tokens_a_gpu"] not in (8192, 32768) and row["gpus"] >= 8),
    ):
        rows = [row for row in found if chosen(row)]
        axes.plot([row["gpus"] for row in rows], [row["efficiency"] for row in rows], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("GPUs (more than 8: simulated across machines)")
    axes.set_ylabel("efficiency")
    axes.set_title(f"zigzag ring, causal, forward and backward, by speeds of {device}")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["measure", "simulate"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rings", type=Path, help="rows of distributed.py")
    parser.add_argument("--between", type=float, default=50e9, help="bytes a second between machines, a GPU")
    given = parser.parse_args()
    if given.verb == "measure":
        measure(given.paths[0], given.lengths, given.repeats)
        return
    source, table, picture = given.paths
    with source.open() as file:
        rows = list(csv.DictReader(file))
    rings = list(csv.DictReader(given.rings.open())) if given.rings else None
    found = simulate(rows, given.between, rings)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, OUT, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    draw(found, rows[0]["device"], picture)


if __name__ == "__main__":
    main()
