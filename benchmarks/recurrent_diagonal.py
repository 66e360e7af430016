"""Recurrences with diagonal states beside torch's own forms, on the CPU.

    python benchmarks/recurrent_diagonal.py rows.csv          # all cases; the loops take minutes
    python benchmarks/recurrent_diagonal.py rows.csv conv     # cases whose name holds the word

Selective scan (B = 1, T = 2048, D = 256, N = 16, softplus, bias, D and z), RG-LRU and convolution of the same size,
forward and backward, ours and each peer in turn in one process; one token of a scan with a state. Peers: torch's
`associative_scan(combine_mode="generic")` and a loop over tokens under autograd, transformers' own scan without
kernels, `conv1d`. `apart` is the furthest output or gradient from ours, of its largest number. A loop's backward takes
a minute: it runs once.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F

from saccade import recurrent
from saccade.cli.bench.machine import environment

T, D, N, K = 2048, 256, 16, 4
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """Inputs by name, ours, and the peers with the number of their rounds."""

    name: str
    inputs: Tensors
    ours: Callable[[Tensors], Tensor]
    peers: dict[str, tuple[Callable[[Tensors], Tensor], int]]
    backward: bool = True


def _discrete(x: Tensors) -> tuple[Tensor, Tensor]:
    step = F.softplus(x["delta"] + x["delta_bias"])
    return torch.exp(step[..., None] * x["A"]), (step * x["u"])[..., None] * x["B"][:, :, None]


def _out(h: Tensor, x: Tensors) -> Tensor:
    return ((h * x["C"][:, :, None]).sum(-1) + x["D"] * x["u"]) * F.silu(x["z"])


def associative(x: Tensors) -> Tensor:
    """The scan as an associative one, differentiated by torch."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return _out(associative_scan(combine, _discrete(x), dim=1, combine_mode="generic")[1], x)


def loop(x: Tensors) -> Tensor:
    """The scan token by token."""
    a, b = _discrete(x)
    h, states = torch.zeros_like(a[:, 0]), []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return _out(torch.stack(states, 1), x)


def transformers_scan(x: Tensors) -> Tensor:
    """transformers' scan, which has its tokens last."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    y: Any = mamba_selective_scan(
        x["u"].mT, x["delta"].mT, x["A"], x["B"].mT, x["C"].mT, D=x["D"], z=x["z"].mT, delta_bias=x["delta_bias"],
        delta_softplus=True,
    )  # fmt: skip
    return (y[0] if isinstance(y, tuple) else y).mT


def unit_loop(x: Tensors) -> Tensor:
    """RG-LRU token by token."""
    log_a = -8 * F.softplus(x["a_param"]) * torch.sigmoid(x["r"])
    a, b = log_a.exp(), torch.sqrt(-torch.expm1(2 * log_a)) * torch.sigmoid(x["i"]) * x["x"]
    h, states = x["initial_state"], []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def torch_conv(x: Tensors) -> Tensor:
    """The convolution by conv1d, which has its tokens last."""
    y = F.conv1d(x["x"].mT, x["weight"][:, None], x["bias"], padding=K - 1, groups=x["x"].shape[2])
    return F.silu(y[..., : x["x"].shape[1]]).mT


def scan_inputs(tokens: int) -> Tensors:
    """Random inputs of the scan."""
    rows = {name: torch.randn(1, tokens, D) for name in ("u", "delta", "z")}
    mixed = {name: torch.randn(1, tokens, N) for name in "BC"}
    A = -torch.arange(1.0, N + 1).expand(D, N).contiguous()
    return {**rows, **mixed, "A": A, "D": torch.randn(D), "delta_bias": torch.randn(D) - 4}


def cases() -> Iterator[Case]:
    """What is measured."""
    torch.manual_seed(0)
    peers = {"associative_scan": (associative, 5), "transformers": (transformers_scan, 1), "loop": (loop, 1)}
    ours = lambda x: recurrent.selective_scan(**x, delta_softplus=True)  # noqa: E731
    yield Case("selective_scan", scan_inputs(T), ours, peers)
    yield Case("selective_scan-forward", scan_inputs(T), ours, {n: (f, 5) for n, (f, _) in peers.items()}, False)
    unit = {name: torch.randn(1, T, D) for name in "xri"}
    unit |= {"a_param": torch.randn(D), "initial_state": torch.zeros(1, D)}
    yield Case("rg_lru", unit, lambda x: recurrent.rg_lru(**x), {"loop": (unit_loop, 1)})
    conv = {"x": torch.randn(1, T, D), "weight": torch.randn(D, K), "bias": torch.randn(D)}
    silu = lambda x: recurrent.causal_conv1d(**x, activation="silu")  # noqa: E731
    yield Case("causal_conv1d", conv, silu, {"conv1d": (torch_conv, 20)})
    step = {**scan_inputs(1), "initial_state": torch.zeros(1, D, N)}

    def torch_step(x: Tensors) -> Tensor:
        a, b = _discrete(x)
        return _out(a * x["initial_state"][:, None] + b, x)

    yield Case("selective_scan-step", step, ours, {"torch": (torch_step, 200)}, False)


def once(f: Callable[[Tensors], Tensor], x: Tensors, dy: Tensor | None) -> tuple[float, list[Tensor]]:
    """(seconds, [the output, its gradients])."""
    leaves = {n: t.detach().requires_grad_(dy is not None) for n, t in x.items()}
    begin = time.perf_counter()
    with torch.set_grad_enabled(dy is not None):
        y = f(leaves)
        if dy is not None:
            y.backward(dy)
    seconds = time.perf_counter() - begin
    return seconds, [y.detach(), *(t.grad for t in leaves.values() if t.grad is not None)]


def run(case: Case) -> Iterator[dict[str, Any]]:
    """A row of ours and one of every peer, each with its furthest difference from ours, of the largest number."""
    _, first = once(case.ours, case.inputs, None)
    dy = torch.randn_like(first[0]) if case.backward else None
    _, want = once(case.ours, case.inputs, dy)
    times: dict[str, list[float]] = {"saccade": []}
    apart = {"saccade": 0.0}
    for n in range(max(rounds for _, rounds in case.peers.values())):
        for name, (f, rounds) in case.peers.items():
            if n >= rounds:
                continue
            times["saccade"] += [once(case.ours, case.inputs, dy)[0] for _ in range(5 if n < 20 else 1)]
            seconds, got = once(f, case.inputs, dy)
            times.setdefault(name, []).append(seconds)
            apart[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
    ours = statistics.median(times["saccade"])
    for name, found in times.items():
        yield {
            **environment(), "case": case.name, "provider": name, "pass": "both" if case.backward else "forward",
            "seconds": f"{statistics.median(found):.3e}", "samples": len(found),
            "ratio": f"{statistics.median(found) / ours:.1f}", "apart": f"{apart[name]:.1e}",
        }  # fmt: skip


def main() -> None:
    """Measures every case whose name holds the second argument, and writes the rows to the first."""
    word = sys.argv[2] if len(sys.argv) > 2 else ""
    rows = (row for case in cases() if word in case.name for row in run(case))
    write_rows(sys.argv[1], rows, ("case", "provider", "pass", "seconds", "ratio", "apart"))


if __name__ == "__main__":
    main()
