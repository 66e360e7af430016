"""Recurrences on an NVIDIA GPU and their peers: `python benchmarks/nvidia_recurrent.py rows.csv [--only CASE]`.

Times are medians of CUDA events after a warm-up. FLOPs of a matrix state are 4 K V per token and head (the state takes
up a key, a query reads the state), 3 times that with the backward. The products within a chunk count as overhead. Bytes
of a scan are its inputs and outputs, read or written once. The ceiling is what a product or a copy of torch reaches in
the same run. `error` is the norm of the difference from Saccade's result, relative to that result.

The smallest size shows the host's share of a call, by the wall clock while the host runs ahead of the GPU: `eager` is a
call without gradients, `host` one with gradients and its backward.

Peers are flash-linear-attention (`fla-core`, `einops`) and the Triton kernels of mamba-ssm, if they can be imported,
the same chunks in torch operations under torch.compile, softmax attention, and for the scan a compiled loop over 64
tokens at a time. The two compiled peers run the forward alone, because torch compiles their gradients for minutes. A
provider that refuses, is missing or fails has a row with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from arguments import chosen, gpu_parser, started, version_of
from nvidia_cases import HOST
from torch import Tensor
from torch.nn import functional as F

from saccade import recurrent
from saccade.cli.bench.clocks import by_clock, by_events, timing
from saccade.cli.bench.rows import Row, note, write
from saccade.errors import Unsupported
from saccade.testing import forms

CHUNK = 64
# B, T, H, K, V, at last the smallest, and B, T, D, N; the sizes of the product and of the copy that give the ceilings
MATRICES = ((1, 8192, 96, 128, 128), (8, 1024, 8, 64, 64), (1, 128, 2, 64, 64))
SCANS = ((8, 2048, 2048, 16), (1, 8192, 4096, 16))
SQUARE, COPIED = 8192, 1 << 29
# providers that search for tiles, or are compiled, for minutes come after all others
STAGES = ("saccade", "fla", "mamba", "compiled")
Call = Callable[..., Tensor]


class Case(NamedTuple):
    """Inputs, Saccade and its peers as functions of them, and the FLOPs or bytes of a forward."""

    name: str
    shape: str
    inputs: list[Tensor]
    calls: dict[str, Call]
    work: float
    unit: str = "TFLOP/s"

    def kinds(self, provider: str) -> tuple[str, ...]:
        """What is timed of a provider; torch compiles the gradients of loops for minutes."""
        if self.inputs[0].shape[1] == MATRICES[-1][1]:
            return () if "compiled" in provider else ("eager", "host")
        return ("forward",) if "compiled" in provider else ("forward", "both")


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Scalar decay in torch operations, chunk by chunk, with heads of q and k repeated."""
    B, T, H, V = v.shape
    q, k = (x.repeat_interleave(H // x.shape[2], 2) for x in (q, k))
    q, k, v = (x.reshape(B, T // CHUNK, CHUNK, H, -1).transpose(2, 3) for x in (q, k, v))
    b = g.reshape(B, T // CHUNK, CHUNK, H).transpose(2, 3).cumsum(-1)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    pairs = (b[..., :, None] - b[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    o = ((q @ k.mT) * pairs).to(v.dtype) @ v
    added = (k * (b[..., -1:] - b).exp()[..., None]).to(v.dtype).mT @ v
    state, before = torch.zeros_like(added[:, 0], dtype=torch.float32), []
    for n in range(T // CHUNK):
        before.append(state)
        state = state * b[:, n, :, -1].exp()[..., None, None] + added[:, n]
    o = o + (q * b.exp()[..., None]).to(v.dtype) @ torch.stack(before, 1).to(v.dtype)
    return o.transpose(2, 3).reshape(B, T, H, V) * q.shape[-1] ** -0.5


def scan_loop(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """A selective scan by torch's compiler, which unrolls CHUNK tokens at a time."""
    step = F.softplus(delta.float())
    h, parts = torch.zeros(u.shape[0], *A.shape, device=u.device), []
    for t in range(0, u.shape[1], CHUNK):
        h, y = _scan_chunk(h, *(x[:, t : t + CHUNK] for x in (u, step)), A, *(x[:, t : t + CHUNK] for x in (B, C)))
        parts.append(y)
    return torch.cat(parts, 1)


@torch.compile(dynamic=False)
def _scan_chunk(h: Tensor, u: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    rows: list[Tensor] = []
    for t in range(u.shape[1]):
        taken = (step[:, t] * u[:, t])[..., None] * B[:, t, None]
        h = torch.exp(step[:, t, :, None] * A) * h + taken
        rows.append((h * C[:, t, None]).sum(-1))
    return h, torch.stack(rows, 1).to(u.dtype)


def softmax(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Causal softmax attention on the same arrays."""
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=q.shape[2] != v.shape[2]).transpose(1, 2)


def fla_decay(*arrays: Tensor) -> Tensor:
    """Scalar decay by flash-linear-attention."""
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(*arrays)[0]


def fla_gated(*arrays: Tensor) -> Tensor:
    """Decays of channels by flash-linear-attention."""
    from fla.ops.gla import chunk_gla

    return chunk_gla(*arrays)[0]


def fla_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """The gated delta rule by flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g, beta)[0]


def fla_kimi(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """Kimi delta attention by flash-linear-attention."""
    from fla.ops.kda import chunk_kda

    return chunk_kda(q, k, v, g, beta)[0]


def mamba_ssd(*arrays: Tensor) -> Tensor:
    """SSD by mamba-ssm, with the chunks that its layer uses."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined(*arrays, 256, dt_softplus=True)


def matrix_cases(B: int, T: int, H: int, K: int, V: int) -> Iterator[Case]:
    """Every operator over matrix states at one size."""
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (torch.randn(B, T, H, K, **kind) for _ in range(2))
    v, unit = torch.randn(B, T, H, V, **kind), F.normalize(k.float(), dim=-1).to(k.dtype)
    g, beta = -torch.rand(B, T, H, device="cuda"), torch.rand(B, T, H, device="cuda")
    shape, work = f"B={B} T={T} H={H} K={K} V={V}", 4.0 * B * T * H * K * V
    compiled = torch.compile(chunked, dynamic=False)
    peers = {"fla": fla_decay, "torch, compiled chunks": compiled, "softmax": softmax}
    yield Case("scalar_decay", shape, [q, k, v, g], {"saccade": recurrent.scalar_decay, **peers}, work)
    yield Case("linear_attention", shape, [q, k, v], {"saccade": recurrent.linear_attention, "softmax": softmax}, work)
    x, A = v, -torch.rand(H, device="cuda")
    shared = [torch.randn(B, T, 1, K, **kind) for _ in range(2)]
    space: Call = lambda x, dt, A, b, c: recurrent.ssd(x, dt, A, b, c, dt_softplus=True)  # noqa: E731
    yield Case("ssd", shape, [x, beta, A, *shared], {"saccade": space, "mamba-ssm": mamba_ssd}, work)
    channels = -torch.rand(B, T, H, K, device="cuda")
    gated: dict[str, Call] = {"saccade": recurrent.gated_linear, "fla": fla_gated}
    yield Case("gated_linear", shape, [q, k, v, channels], gated, work)
    delta: dict[str, Call] = {"saccade": recurrent.gated_delta_rule, "fla": fla_delta}
    yield Case("gated_delta_rule", shape, [q, unit, v, beta, g], delta, 1.5 * work)
    kimi: dict[str, Call] = {"saccade": recurrent.gated_delta_rule, "fla": fla_kimi}
    yield Case("kimi_delta_attention", shape, [q, unit, v, beta, channels], kimi, 1.5 * work)


def scan_cases(B: int, T: int, D: int, N: int) -> Iterator[Case]:
    """Operators over diagonal states at one size."""
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    u, delta = (torch.randn(B, T, D, **kind) for _ in range(2))
    A, (b, c) = -torch.rand(D, N, device="cuda"), (torch.randn(B, T, N, **kind) for _ in range(2))
    bytes_of = lambda *xs: float(sum(x.numel() * x.element_size() for x in xs))  # noqa: E731
    shape = f"B={B} T={T} D={D} N={N}"
    ours = partial(recurrent.selective_scan, delta_softplus=True)
    scan: dict[str, Call] = {"saccade": ours, "torch, compiled loop": scan_loop}
    yield Case("selective_scan", shape, [u, delta, A, b, c], scan, bytes_of(u, delta, b, c, u), "GB/s")
    lru = [u, delta, torch.randn_like(u), torch.randn(D, device="cuda")]
    yield Case("rg_lru", shape, lru, {"saccade": recurrent.rg_lru}, bytes_of(*lru[:3], u), "GB/s")
    weight = torch.randn(D, 4, **kind)
    conv: dict[str, Call] = {
        "saccade": partial(recurrent.causal_conv1d, activation="silu"),
        "torch conv1d": lambda x, w: F.silu(F.conv1d(x.mT, w[:, None], padding=3, groups=D)[..., :T]).mT,
    }
    yield Case("causal_conv1d", shape, [u, weight], conv, bytes_of(u, u), "GB/s")


def reached() -> dict[str, float]:
    """What a matrix product and a copy reach on this machine, in the units of the rows."""
    a = torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16)
    x = torch.empty(COPIED, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    square, copy = (timing(by_events(call)).median for call in (lambda: a @ a, lambda: y.copy_(x)))
    return {"TFLOP/s": 2 * SQUARE**3 / square / 1e12, "GB/s": 2 * x.numel() * x.element_size() / copy / 1e9}


def stage_of(provider: str) -> str:
    """The stage in which a provider is measured."""
    return next((stage for stage in STAGES if stage in provider), STAGES[0])


def rows(case: Case, base: Row, ceilings: dict[str, float], providers: list[str]) -> Iterator[Row]:
    """Rows of these providers: forward, and forward with backward; compiled peers have the forward alone."""
    base = replace(base, case=case.name, dtype="bfloat16", shape=case.shape)
    ours = torch.no_grad()(case.calls["saccade"])(*case.inputs).float()
    for provider in providers:
        call, row = case.calls[provider], replace(base, provider=provider)
        row = row.with_text(note({"version": version_of(provider)}))
        with torch.no_grad(), forms.using({provider.rpartition(", ")[2]} & forms.FORMS.keys()):
            try:
                o = call(*case.inputs).float()
                if provider not in ("saccade", "softmax"):
                    row = replace(row, error=((o - ours).norm() / ours.norm()).item())
                for kind in case.kinds(provider):
                    row = replace(row, kind=kind)
                    yield measured(row, case, call, ceilings)
            except Exception as error:
                # a peer that is not installed, or breaks with this version of its compiler
                if provider == "saccade" and not isinstance(error, Unsupported):
                    raise
                yield row.with_text(f"{type(error).__name__}: {error}".splitlines()[0])


def measured(row: Row, case: Case, call: Call, ceilings: dict[str, float]) -> Row:
    """The row with times and rates of one call."""
    run: Callable[[], Any] = lambda: call(*case.inputs)  # noqa: E731
    backward = row.kind in ("both", "host")
    if backward:
        leaves, do = [x.clone().requires_grad_() for x in case.inputs], torch.randn_like(run())

        def run() -> Any:
            with torch.enable_grad():
                return torch.autograd.grad(call(*leaves), leaves, do, allow_unused=True)

    ahead = {"warm": 50, "inside": 100, "before": torch.cuda.synchronize}
    samples = by_clock(run, **ahead) if row.kind in HOST else by_events(run)
    time, ceiling = timing(samples), ceilings[case.unit]
    rate = case.work * (3 if backward else 1) / time.median / (1e12 if case.unit == "TFLOP/s" else 1e9)
    row = replace(row, rate=rate, rate_unit=case.unit, ceiling=ceiling, fraction=rate / ceiling)
    return replace(row, **time._asdict())


def every(base: Row, args: argparse.Namespace, earlier: list[Row]) -> Iterator[Row]:
    """The rows of all cases, stage by stage, except those of an earlier run."""
    ceilings, done = reached(), {(row.case, row.shape, row.provider) for row in earlier}
    matrices = [partial(matrix_cases, *size) for size in MATRICES]
    scans = [partial(scan_cases, *size) for size in SCANS]
    for stage, make in product(STAGES, chosen((*matrices, *scans), args.part)):
        for case in make():
            if args.only in case.name:
                for form in forms.of_kind(case.name):
                    case.calls[f"saccade, {form}"] = case.calls["saccade"]
                names = [name for name in case.calls if stage_of(name) == stage]
                names = [name for name in names if (case.name, case.shape, name) not in done]
                yield from rows(case, base, ceilings, names) if names else ()


def main() -> None:
    """Measure and write the rows."""
    args, env, earlier = started(gpu_parser(__doc__))
    with forms.using(args.using):
        write(args.out, every(Row(*env, "", "", "forward"), args, earlier), earlier)


if __name__ == "__main__":
    main()
