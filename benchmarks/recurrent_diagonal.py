"""Recurrences with diagonal states compared with torch's own forms, on the CPU.

    python benchmarks/recurrent_diagonal.py rows.csv              # all cases; the loops take minutes
    python benchmarks/recurrent_diagonal.py rows.csv --only conv  # cases whose name contains the word

The cases are a selective scan (B = 1, T = 2048, D = 256, N = 16, softplus, bias, D and z), RG-LRU and convolution of
the same size, forward and backward, and one token of a scan with a state. Saccade and each peer run in turn in one
process. Peers are torch's `associative_scan(combine_mode="generic")`, a loop over tokens under autograd, the scan of
transformers without kernels, and `conv1d`. `error` is the largest difference of an output or gradient from Saccade's,
relative to its largest number. The backward of a loop takes a minute, so it runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from arguments import chosen, parser
from torch import Tensor
from torch.nn import functional as F

from saccade import recurrent
from saccade.cli.bench.clocks import by_clock, timing
from saccade.cli.bench.machine import Environment, environment
from saccade.cli.bench.rows import Row, note, write

T, D, N, K = 2048, 256, 16, 4
Tensors = dict[str, Tensor]
Form = Callable[[Tensors], Tensor]


class Case(NamedTuple):
    """Inputs by name, Saccade's call, and the peers with their numbers of rounds."""

    name: str
    inputs: Tensors
    ours: Form
    peers: dict[str, tuple[Form, int]]
    backward: bool = True


def _discrete(x: Tensors) -> tuple[Tensor, Tensor]:
    step = F.softplus(x["delta"] + x["delta_bias"])
    return torch.exp(step[..., None] * x["A"]), (step * x["u"])[..., None] * x["B"][:, :, None]


def _out(h: Tensor, x: Tensors) -> Tensor:
    return ((h * x["C"][:, :, None]).sum(-1) + x["D"] * x["u"]) * F.silu(x["z"])


def associative(x: Tensors) -> Tensor:
    """The scan by torch's associative_scan, differentiated by torch."""
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
    """The scan of transformers, which has the tokens last."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    rows = (x["u"].mT, x["delta"].mT, x["A"], x["B"].mT, x["C"].mT)
    options = {"D": x["D"], "z": x["z"].mT, "delta_bias": x["delta_bias"], "delta_softplus": True}
    y: Any = mamba_selective_scan(*rows, **options)
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
    """The convolution by conv1d, which has the tokens last."""
    y = F.conv1d(x["x"].mT, x["weight"][:, None], x["bias"], padding=K - 1, groups=x["x"].shape[2])
    return F.silu(y[..., : x["x"].shape[1]]).mT


def scan_inputs(tokens: int) -> Tensors:
    """Random inputs of the scan."""
    rows = {name: torch.randn(1, tokens, D) for name in ("u", "delta", "z")}
    mixed = {name: torch.randn(1, tokens, N) for name in "BC"}
    A = -torch.arange(1.0, N + 1).expand(D, N).contiguous()
    return {**rows, **mixed, "A": A, "D": torch.randn(D), "delta_bias": torch.randn(D) - 4}


def cases() -> Iterator[Case]:
    """The cases to measure."""
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


class Pass:
    """A call on its inputs: forward, and backward from dy unless that is None. `results` are those of the last call."""

    def __init__(self, form: Form, x: Tensors, dy: Tensor | None) -> None:
        self.form, self.x, self.dy, self.results = form, x, dy, list[Tensor]()

    def __call__(self) -> None:
        leaves = {n: t.detach().requires_grad_(self.dy is not None) for n, t in self.x.items()}
        with torch.set_grad_enabled(self.dy is not None):
            y = self.form(leaves)
            if self.dy is not None:
                y.backward(self.dy)
        self.results = [y.detach(), *(t.grad for t in leaves.values() if t.grad is not None)]


def run(case: Case, env: Environment) -> Iterator[Row]:
    """A row per provider, with its largest difference from Saccade relative to the largest number."""
    with torch.no_grad():
        dy = torch.randn_like(case.ours(case.inputs)) if case.backward else None
    ours = Pass(case.ours, case.inputs, dy)
    peers = {name: (Pass(form, case.inputs, dy), rounds) for name, (form, rounds) in case.peers.items()}
    ours()
    times: dict[str, list[float]] = {"saccade": []}
    for n in range(max(rounds for _, rounds in peers.values())):
        for name, (peer, rounds) in peers.items():
            if n < rounds:
                times["saccade"] += by_clock(ours, rounds=5 if n < 20 else 1, warm=0)
                times.setdefault(name, []).extend(by_clock(peer, rounds=1, warm=0))
    outputs = {"saccade": ours.results, **{name: peer.results for name, (peer, _) in peers.items()}}
    for name, samples in times.items():
        both = zip(outputs[name], ours.results, strict=True)
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in both)
        time = timing(samples)
        ratio = note({"ratio": time.median / timing(times["saccade"]).median})
        kind = "both" if case.backward else "forward"
        yield Row(*env, case.name, name, kind, "float32", error=error, note=ratio, **time._asdict())


def main() -> None:
    """Measure and write the rows."""
    args = parser(__doc__).parse_args()
    env = environment(args.commit)
    picked = chosen((case for case in cases() if args.only in case.name), args.part)
    write(args.out, (row for case in picked for row in run(case, env)))


if __name__ == "__main__":
    main()
