"""Ring attention on more GPUs than there are, from measured speeds of kernels and links:

    torchrun --nproc_per_node 4 benchmarks/scaling.py measure speeds.csv
    python benchmarks/scaling.py simulate speeds.csv scaling.csv [--rings distributed.csv]

Measured are causal attention of n tokens on one GPU, forward and backward, and a message that every GPU sends to its
neighbour at once, by size. The simulation assumes:

- In every step of a zigzag ring all ranks compute n² / 2 pairs, in the time of n causal tokens.
- Keys and values of the next step travel meanwhile (2 bytes per number; in a backward also float32 gradients), so a
  step takes the longer of the two.
- Beyond the measured sizes times grow with pairs and with bytes.
- GPUs of one machine have the measured link. With more than 8 GPUs some hop of the ring crosses machines, at
  `--between` bytes per second and GPU (50e9, a port of 400 Gb/s, not measured), and all ranks wait for this hop.
- With --rings (rows of distributed.py) a step takes as much longer than its kernel or message as the steps of those
  rings did, by tokens per GPU. This time goes to launches and to partial results that are added up.

Stragglers, congestion and everything in a model besides attention are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.cli.bench.clocks import over_ranks, timing
from saccade.cli.bench.machine import Environment, environment, gpu_environment
from saccade.cli.bench.rows import Row, note, read, write

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
    env = gpu_environment() if device.type == "cuda" else environment()
    rows: list[Row] = []

    def times(call: Callable[[], Any]) -> dict[str, Any]:
        return timing(over_ranks(call, device, rounds=repeats, warm=3))._asdict()

    for n in lengths:
        shapes = [(1, n, h, D) for h in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
        q, k, v, do = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        forward = partial(saccade.attention, q, k, v, mask.causal(), return_lse=True)
        backward = partial(saccade.attention_backward, do, q, k, v, *forward(), mask.causal())
        shape = f"1x{n}x{n}x{HEADS}x{KEY_HEADS}x{D}"
        for kind, call in (("forward", forward), ("backward", backward)):
            row = Row(*env, f"{kind}-{n}", "saccade", kind, "bfloat16", shape, "causal()", **times(call))
            rows.append(row)
    me, world = dist.get_rank(), dist.get_world_size()
    for size in SIZES:
        out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

        def exchange(out: Any = out, into: Any = into) -> None:
            ops = [dist.P2POp(dist.isend, out, (me + 1) % world), dist.P2POp(dist.irecv, into, (me - 1) % world)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        rows.append(Row(*env, f"link-{size}", "neighbour", "link", "uint8", str(size), **times(exchange)))
    if me == 0:
        write(path, rows)
    dist.destroy_process_group()


# seconds of a ring by tokens per GPU and number of GPUs
Step = Callable[[int, int], float]


class Curve:
    """Seconds by size: interpolated along logarithms, beyond the last point in proportion to size**power."""

    def __init__(self, points: Iterable[tuple[float, float]], power: float) -> None:
        self.sizes, self.seconds = (np.array(x) for x in zip(*sorted(points), strict=True))
        self.power = power

    def __call__(self, size: float) -> float:
        if size > self.sizes[-1]:
            return float(self.seconds[-1] * (size / self.sizes[-1]) ** self.power)
        return float(np.exp(np.interp(np.log(size), np.log(self.sizes), np.log(self.seconds))))


class Ring(NamedTuple):
    """A simulated ring: seconds of a forward and a backward, TFLOP/s per GPU, efficiency, what each pass waits for."""

    gpus: int
    tokens: int
    forward: float
    backward: float
    rate: float
    efficiency: float
    bound: str

    def row(self, env: Environment) -> Row:
        """The row of this ring."""
        text = note({"forward": self.forward, "backward": self.backward, "bound": self.bound})
        case, share = f"ring-{self.gpus}x{self.tokens}", self.efficiency
        return Row(*env, case, "simulated", "both", rate=self.rate, rate_unit="TFLOP/s", fraction=share, note=text)


def sizes_of(row: Row) -> tuple[int, int]:
    """Number of GPUs and tokens per GPU of a ring's row."""
    gpus, tokens = row.case.removeprefix("ring-").split("x")
    return int(gpus), int(tokens)


def beyond(rings: Iterable[Row], steps: tuple[Step, Step]) -> tuple[Curve, Curve]:
    """Seconds by which a step of a measured zigzag ring exceeds `steps`, forward and backward, by tokens."""
    points: tuple[list[tuple[float, float]], ...] = ([], [])
    seconds: dict[tuple[int, int], dict[str, float]] = {}
    for row in rings:
        if row.provider == "saccade, zigzag":
            seconds.setdefault(sizes_of(row), {})[row.kind] = row.median
    for (world, n), at in seconds.items():
        for index, taken in enumerate((at["forward"], at["both"] - at["forward"])):
            points[index].append((n, max(1e-9, taken - steps[index](n, world)) / world))
    return Curve(points[0], 1), Curve(points[1], 1)


def simulate(rows: Iterable[Row], between: float, rings: Iterable[Row] | None = None) -> list[Ring]:
    """Rings of 8k and 32k tokens per GPU, and of 10 M tokens in all, on up to 1024 GPUs."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    kernels = [by_kind["forward"], by_kind["backward"]]
    heads, key_heads, dim = (int(size) for size in kernels[0][0].shape.split("x")[3:])
    compute = [Curve([(int(row.shape.split("x")[1]), row.median) for row in kernel], 2) for kernel in kernels]
    link = Curve([(int(row.shape), row.median) for row in by_kind["link"]], 1)

    def hop(index: int, n: int, gpus: int) -> float:
        # keys and values in 16 bits, in a backward also their gradients in 32
        size = n * key_heads * 2 * dim * (2, 6)[index]
        return link(size) if gpus <= MACHINE else max(link(size), size / between)

    def seconds(index: int, n: int, gpus: int) -> float:
        step, hops = compute[index](n), gpus - 1 if index == 0 else gpus
        return step * gpus + max(0.0, hop(index, n, gpus) - step) * (hops if gpus > 1 else 0)

    more = beyond(rings, (partial(seconds, 0), partial(seconds, 1))) if rings else None
    results: list[Ring] = []
    for gpus in GPUS:
        for n in (8192, 32768, -(-LONGEST // gpus)):
            total = [seconds(index, n, gpus) for index in range(2)]
            if more and gpus > 1:
                total = [x + curve(n) * gpus for x, curve in zip(total, more, strict=True)]
            ideal = sum(curve(n) for curve in compute) * gpus
            late = [gpus > 1 and hop(index, n, gpus) > compute[index](n) for index in range(2)]
            flops = 14 * dim * heads * (n * gpus) * (n * gpus + 1) / 2 / gpus
            bound = " ".join("link" if slow else "kernel" for slow in late)
            results.append(Ring(gpus, n, *total, flops / sum(total) / 1e12, ideal / sum(total), bound))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["measure", "simulate"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rings", type=Path, help="rows of distributed.py")
    parser.add_argument("--between", type=float, default=50e9, help="bytes per second and GPU between machines")
    args = parser.parse_args()
    if args.verb == "measure":
        measure(args.paths[0], args.lengths, args.repeats)
        return
    source, table = args.paths
    speeds = read(source)
    rings = simulate(speeds, args.between, read(args.rings) if args.rings else None)
    env = Environment(speeds[0].commit, speeds[0].device, speeds[0].driver)
    write(table, (ring.row(env) for ring in rings))


if __name__ == "__main__":
    main()
