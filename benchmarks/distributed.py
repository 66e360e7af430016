"""Attention of a sequence cut over GPUs, forward and backward, beside one GPU and torch's context_parallel:

    torchrun --nproc_per_node 4 benchmarks/distributed.py rows.csv [--tokens 8192 32768] [--only WORD]

Causal, bf16, 16 heads of 128. A rank's FLOPs are 14 D a pair allowed (4 forward, 10 backward), its share of all pairs.
A time is the median of the slowest rank's; efficiency is TFLOP/s a GPU over one GPU's own at as many tokens, measured
in the same run on every GPU at once. Rows are written as found.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from saccade.distributed import attention, ring_attention
from saccade.testing.ranks import start

FIELDS = [
    "commit", "device", "torch", "world", "tokens", "heads", "D", "dtype", "provider", "pass", "median_ms", "p10_ms",
    "p90_ms", "tflops", "efficiency", "sent_mb", "peak_mb", "note",
]  # fmt: skip
Call = Callable[[], Any]


class Bench:
    """One number of tokens a rank; figures of one GPU once they are measured."""

    def __init__(self, given: argparse.Namespace, tokens: int, device: torch.device) -> None:
        self.given, self.n, self.device = given, tokens, device
        self.world, self.dtype = dist.get_world_size(), getattr(torch, given.dtype)
        self.alone: dict[str, float] = {}
        # what a provider holds open while it is measured
        self.opened: Any = None

    def tensors(self, T: int) -> list[torch.Tensor]:
        torch.manual_seed(T + dist.get_rank())
        H, Hk, D = self.given.heads, self.given.key_heads, self.given.head_dim
        shapes = ((1, T, H, D), (1, T, Hk, D), (1, T, Hk, D), (1, T, H, D))
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for shape in shapes]

    def passes(self, attend: Callable[..., Any], x: list[torch.Tensor]) -> dict[str, Call]:
        """Forward alone, and forward with backward, of a call of q, k and v."""
        leaves, do = [a.requires_grad_() for a in x[:3]], x[3]

        def forward() -> Any:
            with torch.no_grad():
                return attend(*leaves)

        return {"forward": forward, "both": lambda: torch.autograd.grad(attend(*leaves), leaves, do)}

    def pairs(self, alone: bool) -> float:
        """Pairs of query and key that a rank has to compute, over its heads."""
        T = self.n if alone else self.n * self.world
        return T * (T + 1) / 2 * self.given.heads / (1 if alone else self.world)

    def measure(self, call: Call) -> tuple[list[float], float]:
        """Milliseconds of every repeat on the slowest rank, and the largest peak of memory in MB."""
        for _ in range(self.given.warm):
            call()
        self.wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found: list[float] = []
        for _ in range(self.given.repeats):
            self.wait()
            begin = time.perf_counter()
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            found.append(1e3 * (time.perf_counter() - begin))
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.device.type == "cuda" else 0.0
        slowest = torch.tensor([*found, peak], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        *times, peak = slowest.tolist()
        return times, peak

    def wait(self) -> None:
        """Until every rank is here and idle."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def row(self, provider: str, kind: str, call: Call, alone: bool = False) -> dict[str, Any]:
        from saccade.distributed import peers_of

        peers = peers_of()
        before = peers.bytes
        times, peak = self.measure(call)
        sent = (peers.bytes - before) / (self.given.warm + self.given.repeats) / 2**20
        median = statistics.median(times)
        flops = {"forward": 4, "both": 14}[kind] * self.given.head_dim * self.pairs(alone)
        rate = flops / median / 1e9
        if alone and provider == "saccade, one GPU":
            self.alone[kind] = rate
        share = rate / self.alone[kind] if kind in self.alone else float("nan")
        low, high = (sorted(times)[int(q * (len(times) - 1))] for q in (0.1, 0.9))
        return {
            "provider": provider, "pass": kind, "median_ms": f"{median:.4f}", "p10_ms": f"{low:.4f}",
            "p90_ms": f"{high:.4f}", "tflops": f"{rate:.1f}", "efficiency": f"{share:.3f}", "sent_mb": f"{sent:.2f}",
            "peak_mb": f"{peak:.0f}",
        }  # fmt: skip


def providers(bench: Bench) -> dict[str, Callable[[], dict[str, Call]]]:
    """What is measured, each made when its turn comes."""
    causal, n = saccade.mask.causal(), bench.n

    def ring(layout: str, overlap: bool = True) -> dict[str, Call]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return ring_attention(q, k, v, causal, layout=layout, overlap=overlap)

        return bench.passes(attend, bench.tensors(n))

    def other(strategy: str) -> dict[str, Call]:
        return bench.passes(lambda q, k, v: attention(q, k, v, causal, strategy=strategy), bench.tensors(n))

    return {
        "saccade, one GPU": lambda: bench.passes(lambda q, k, v: saccade.attention(q, k, v, causal), bench.tensors(n)),
        "saccade, zigzag": lambda: ring("zigzag"),
        "saccade, zigzag, no overlap": lambda: ring("zigzag", overlap=False),
        "saccade, striped": lambda: ring("striped"),
        "saccade, contiguous": lambda: ring("contiguous"),
        "saccade, heads for positions": lambda: other("ulysses"),
        "saccade, gathered keys": lambda: other("gather"),
        "torch, one GPU, cudnn": lambda: sdpa(bench, SDPBackend.CUDNN_ATTENTION),
        "torch, one GPU, flash": lambda: sdpa(bench, SDPBackend.FLASH_ATTENTION),
        "torch context_parallel, cudnn": lambda: context_parallel(bench, SDPBackend.CUDNN_ATTENTION),
        "torch context_parallel, flash": lambda: context_parallel(bench, SDPBackend.FLASH_ATTENTION),
    }


def sdpa(bench: Bench, backend: SDPBackend) -> dict[str, Call]:
    """torch's attention of as many tokens on one GPU."""
    gqa = bench.given.heads != bench.given.key_heads

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

    return bench.passes(attend, [x.transpose(1, 2).contiguous() for x in bench.tensors(bench.n)])


def context_parallel(bench: Bench, backend: SDPBackend) -> dict[str, Call]:
    """torch's ring: tensors of the whole sequence become slices inside its context, and stay so while it is open."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as cut

    mesh = init_device_mesh(bench.device.type, (bench.world,))
    torch.manual_seed(0)
    T, H, D = bench.n * bench.world, bench.given.heads, bench.given.head_dim
    x = [torch.randn(1, H, T, D, device=bench.device, dtype=bench.dtype) for _ in range(4)]

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    bench.opened = cut(mesh, buffers=x, buffer_seq_dims=[2] * 4, no_restore_buffers=set(x))
    bench.opened.__enter__()
    return bench.passes(attend, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of a rank")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--only", default="", help="providers whose name holds this, beside one GPU's")
    given = parser.parse_args()
    device = start()
    for tokens in given.tokens:
        bench = Bench(given, tokens, device)
        for name, make in providers(bench).items():
            if given.only in name or name == "saccade, one GPU":
                for row in rows_of(bench, name, make):
                    write(given, bench, row)
    dist.destroy_process_group()


def rows_of(bench: Bench, name: str, make: Callable[[], dict[str, Call]]) -> list[dict[str, Any]]:
    """The rows of a provider, or one that says why there are none."""
    try:
        return [bench.row(name, kind, call, "one GPU" in name) for kind, call in make().items()]
    except Exception as error:
        return [{"provider": name, "note": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}]
    finally:
        if bench.opened is not None:
            bench.opened.__exit__(None, None, None)
            bench.opened = None
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def write(given: argparse.Namespace, bench: Bench, row: dict[str, Any]) -> None:
    """Append a row to the file and print it, on rank 0."""
    if dist.get_rank():
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    whole = {
        "commit": commit.stdout.strip(), "device": device, "torch": torch.__version__, "world": bench.world,
        "tokens": bench.n, "heads": f"{given.heads}/{given.key_heads}", "D": given.head_dim, "dtype": given.dtype,
    } | row  # fmt: skip
    fresh = not given.rows.exists()
    with given.rows.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if fresh:
            writer.writeheader()
        writer.writerow(whole)
    print(" | ".join(str(value) for value in row.values()), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
