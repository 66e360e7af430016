"""Attention of a sequence cut over GPUs, forward and backward, compared with one GPU and torch's context_parallel:

    torchrun --nproc_per_node 4 benchmarks/distributed.py rows.csv [--tokens 8192 32768] [--only WORD]

The calls are causal, in bf16, with 16 heads of 128. "latent" has the head sizes of latent attention in training, 192 of
keys and 128 of values; "selected keys" has 16 blocks of 64 keys in every row, and 16 query heads per key head. A rank
computes its share of the allowed pairs, 14 D FLOPs per pair (4 forward, 10 backward), or 8 D + 6 Dv. Times are those of
the slowest rank. The ceiling, in TFLOP/s per GPU, is the rate of one GPU with as many tokens, measured in the same run
on all GPUs at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from arguments import chosen, parser
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from saccade.cli.bench.clocks import over_ranks, timing
from saccade.cli.bench.machine import environment, gpu_environment
from saccade.cli.bench.rows import NAN, Row, note, write
from saccade.distributed import attention, ring_attention
from saccade.testing.ranks import start

Call = Callable[[], Any]
# head sizes of keys and values of latent attention
LATENT = 192, 128
# keys of a block, blocks of a list of selected keys, and query and key heads
BLOCK, CHOSEN, CHOSEN_HEADS = 64, 16, (32, 2)


class Bench:
    """The benchmark of one number of tokens per rank; `alone` has the rates of one GPU once they are measured."""

    def __init__(self, args: argparse.Namespace, tokens: int, device: torch.device) -> None:
        self.args, self.n, self.device = args, tokens, device
        self.world, self.dtype = dist.get_world_size(), getattr(torch, args.dtype)
        self.alone: dict[str, float] = {}
        self.reset()
        # a context that stays open while its provider is measured
        self.opened: Any = None
        env = gpu_environment(args.commit) if device.type == "cuda" else environment(args.commit)
        case = f"ring-{self.world}x{tokens}"
        self.base = Row(*env, case, "", "forward", args.dtype, "", "causal()", rate_unit="TFLOP/s")

    def reset(self) -> None:
        """Before a provider: query and key heads, sizes of heads of keys and values, pairs of a head of all ranks."""
        T = self.n * self.world
        self.heads = self.args.heads, self.args.key_heads
        self.sizes = self.args.head_dim, self.args.head_dim
        self.whole = T * (T + 1) / 2

    @property
    def shape(self) -> str:
        """The sizes of a rank's slices, as in a row."""
        return "x".join(map(str, (1, self.n, self.n, *self.heads, self.sizes[0])))

    def tensors(self, T: int) -> list[torch.Tensor]:
        torch.manual_seed(T + dist.get_rank())
        (H, Hk), (D, Dv) = self.heads, self.sizes
        shapes = ((1, T, H, D), (1, T, Hk, D), (1, T, Hk, Dv), (1, T, H, Dv))
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for shape in shapes]

    def passes(self, attend: Callable[..., Any], x: list[torch.Tensor]) -> dict[str, Call]:
        """Calls by kind: the forward alone, and forward with backward; `attend` takes q, k and v."""
        leaves, do = [a.requires_grad_() for a in x[:3]], x[3]

        def forward() -> Any:
            with torch.no_grad():
                return attend(*leaves)

        return {"forward": forward, "both": lambda: torch.autograd.grad(attend(*leaves), leaves, do)}

    def pairs(self, alone: bool) -> float:
        """Pairs of query and key that a rank computes, over its heads."""
        return self.heads[0] * (self.n * (self.n + 1) / 2 if alone else self.whole / self.world)

    def row(self, provider: str, kind: str, call: Call, alone: bool = False) -> Row:
        """Times of the slowest rank; the note has the MB that a rank sends and the largest peak of memory in MB."""
        from saccade.distributed import peers_of

        peers, cuda = peers_of(), self.device.type == "cuda"
        before = peers.bytes
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        time = timing(over_ranks(call, self.device, rounds=self.args.repeats, warm=self.args.warm))
        sent = (peers.bytes - before) / (self.args.warm + self.args.repeats) / 2**20
        peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0, device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        D, Dv = self.sizes
        flops = {"forward": 2 * D + 2 * Dv, "both": 8 * D + 6 * Dv}[kind] * self.pairs(alone)
        rate = flops / time.median / 1e12
        if alone and provider == "saccade, one GPU":
            self.alone[kind] = rate
        ceiling = self.alone.get(kind, NAN)
        row = replace(self.base, provider=provider, kind=kind, shape=self.shape, rate=rate, **time._asdict())
        text = note({"sent_mb": sent, "peak_mb": float(peak)})
        return replace(row, ceiling=ceiling, fraction=rate / ceiling, note=text)


def providers(bench: Bench) -> dict[str, Callable[[], dict[str, Call]]]:
    """The providers by name, each prepared when its turn comes; the first is one GPU."""
    causal, n = saccade.mask.causal(), bench.n

    def ring(layout: str, overlap: bool = True) -> dict[str, Call]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return ring_attention(q, k, v, causal, layout=layout, overlap=overlap)

        return bench.passes(attend, bench.tensors(n))

    def other(strategy: str, bias: Any = None) -> dict[str, Call]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, causal, strategy=strategy, bias=bias)

        return bench.passes(attend, bench.tensors(n))

    def with_bias(name: str) -> dict[str, Call]:
        H, kind = bench.args.heads, {"device": bench.device, "requires_grad": True}
        if name == "gates":
            return other("ulysses", saccade.gates(torch.full((1, n, H), -0.01, **kind)))
        return other("ulysses", saccade.relative(torch.zeros(H, 129, **kind), 128))

    def latent(strategy: str) -> dict[str, Call]:
        bench.sizes = LATENT
        return other(strategy) if strategy == "ulysses" else ring(strategy)

    def selected() -> dict[str, Call]:
        bench.heads = CHOSEN_HEADS
        mask, bench.whole = chosen_keys(n * bench.world, bench.heads[1], bench.device)
        return bench.passes(lambda q, k, v: attention(q, k, v, mask, strategy="ulysses"), bench.tensors(n))

    return {
        "saccade, one GPU": lambda: bench.passes(lambda q, k, v: saccade.attention(q, k, v, causal), bench.tensors(n)),
        "saccade, zigzag": lambda: ring("zigzag"),
        "saccade, zigzag, no overlap": lambda: ring("zigzag", overlap=False),
        "saccade, striped": lambda: ring("striped"),
        "saccade, contiguous": lambda: ring("contiguous"),
        "saccade, heads for positions": lambda: other("ulysses"),
        "saccade, heads for positions, gates": lambda: with_bias("gates"),
        "saccade, heads for positions, relative": lambda: with_bias("relative"),
        "saccade, heads for positions, selected keys": selected,
        "saccade, zigzag, latent": lambda: latent("zigzag"),
        "saccade, heads for positions, latent": lambda: latent("ulysses"),
        "saccade, gathered keys": lambda: other("gather"),
        "torch, one GPU, cudnn": lambda: sdpa(bench, SDPBackend.CUDNN_ATTENTION),
        "torch, one GPU, flash": lambda: sdpa(bench, SDPBackend.FLASH_ATTENTION),
        "torch context_parallel, cudnn": lambda: context_parallel(bench, SDPBackend.CUDNN_ATTENTION),
        "torch context_parallel, flash": lambda: context_parallel(bench, SDPBackend.FLASH_ATTENTION),
    }


def chosen_keys(T: int, heads: int, device: torch.device) -> tuple[saccade.mask.Mask, float]:
    """A mask of CHOSEN blocks of every row, from the first to its own, or all earlier ones; and its number of pairs."""
    own = torch.arange(T, device=device) // BLOCK
    lists = own[:, None] * torch.arange(CHOSEN, device=device) // (CHOSEN - 1)
    pairs = (own.clamp(max=CHOSEN - 1) * BLOCK + torch.arange(T, device=device) % BLOCK + 1).sum()
    return saccade.mask.causal() & saccade.mask.select(lists.int().expand(1, heads, T, CHOSEN), BLOCK), float(pairs)


def sdpa(bench: Bench, backend: SDPBackend) -> dict[str, Call]:
    """torch's attention on one GPU, with as many tokens as a rank has."""
    gqa = bench.args.heads != bench.args.key_heads

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

    return bench.passes(attend, [x.transpose(1, 2).contiguous() for x in bench.tensors(bench.n)])


def context_parallel(bench: Bench, backend: SDPBackend) -> dict[str, Call]:
    """torch's ring. Its context replaces tensors of the whole sequence by slices for as long as it is open."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as cut

    mesh = init_device_mesh(bench.device.type, (bench.world,))
    torch.manual_seed(0)
    T, H, D = bench.n * bench.world, bench.args.heads, bench.args.head_dim
    x = [torch.randn(1, H, T, D, device=bench.device, dtype=bench.dtype) for _ in range(4)]

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    bench.opened = cut(mesh, buffers=x, buffer_seq_dims=[2] * 4, no_restore_buffers=set(x))
    bench.opened.__enter__()
    return bench.passes(attend, x)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens per rank")
    words.add_argument("--heads", type=int, default=16)
    words.add_argument("--key-heads", type=int, default=16)
    words.add_argument("--head-dim", type=int, default=128)
    words.add_argument("--dtype", default="bfloat16")
    words.add_argument("--repeats", type=int, default=20)
    words.add_argument("--warm", type=int, default=5)
    args = words.parse_args()
    device = start()
    rows = every(args, device)
    if dist.get_rank():
        list(rows)
    else:
        write(args.out, rows)
    dist.destroy_process_group()


def every(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows of one GPU, and of the providers that --only and --part select."""
    for tokens in args.tokens:
        bench = Bench(args, tokens, device)
        known = providers(bench)
        first, *others = known
        for name in (first, *chosen((name for name in others if args.only in name), args.part)):
            bench.reset()
            yield from rows_of(bench, name, known[name])


def rows_of(bench: Bench, name: str, make: Callable[[], dict[str, Call]]) -> list[Row]:
    """The rows of a provider, or a row with the reason why it failed."""
    try:
        return [bench.row(name, kind, call, "one GPU" in name) for kind, call in make().items()]
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return [replace(bench.base, provider=name, shape=bench.shape, note=reason)]
    finally:
        if bench.opened is not None:
            bench.opened.__exit__(None, None, None)
            bench.opened = None
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
