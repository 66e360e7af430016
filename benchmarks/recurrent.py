"""Recurrences over matrix states compared with softmax attention and torch's forms, on the CPU.

    python benchmarks/recurrent.py rows.csv                  # all cases, some minutes
    python benchmarks/recurrent.py rows.csv --only linear    # cases of this name

Causal linear attention over lengths (B = 1, H = 8, K = V = 64, float32) is compared with softmax attention of Saccade
and of torch, and with the chunked form in torch, plain and compiled. The other rules are compared at T = 4096 with
chunked forms in torch and in transformers. One token with a state is measured as well. Forward, and forward with
backward ("both"), run in turn in one process. `error` is the largest difference from Saccade's float64 result, relative
to its largest number. Softmax attention computes something else and has no error. The rate of Saccade's forward counts
the products of its chunks, and its ceiling is the rate of multiply-adds that the same run reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from arguments import chosen, parser
from torch import Tensor
from torch.nn import functional as F

import saccade
from saccade import mask, recurrent
from saccade.cli.bench.clocks import in_turn
from saccade.cli.bench.machine import Environment, environment
from saccade.cli.bench.measure import Ceiling
from saccade.cli.bench.rows import NAN, Row, note, write

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
T, H, D, CHUNK = 4096, 8, 64, 64
Tensors = dict[str, Tensor]
Form = Callable[[Tensors], Tensor]


class Case(NamedTuple):
    """Inputs by name, Saccade's call, peers that compute the same, and others that compute something else."""

    name: str
    inputs: Tensors
    ours: Form
    peers: dict[str, Form]
    others: dict[str, Form]
    backward: bool = True


def inputs(tokens: int, *names: str) -> Tensors:
    """Random inputs by name: rows q, k, v, decays g per head, gates per channel, strengths beta."""
    draw: dict[str, Callable[[], Tensor]] = {
        "q": lambda: torch.randn(1, tokens, H, D),
        "k": lambda: F.normalize(torch.randn(1, tokens, H, D), dim=-1),
        "v": lambda: torch.randn(1, tokens, H, D),
        "g": lambda: -0.1 * torch.rand(1, tokens, H),
        "gates": lambda: -0.1 * torch.rand(1, tokens, H, D),
        "beta": lambda: torch.rand(1, tokens, H),
    }
    return {name: draw[name]() for name in names}


def decayed(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> Tensor:
    """The chunked form in torch, with states in sequence: q, k, v [B, T, H, .], decays [B, T, H]."""
    B, tokens, heads, K = q.shape
    cut = lambda x: x.unflatten(1, (-1, CHUNK)).movedim(3, 1)  # noqa: E731
    q, k, v = (cut(x) for x in (q, k, v))
    b = (torch.zeros(B, tokens, heads) if g is None else g).unflatten(1, (-1, CHUNK)).movedim(3, 1).cumsum(-1)
    within = torch.tril(torch.exp(torch.tril(b[..., :, None] - b[..., None, :])))
    o = ((q @ k.mT) * within) @ v
    added = (k * torch.exp(b[..., -1:] - b)[..., None]).mT @ v
    state, parts = torch.zeros(B, heads, K, v.shape[-1]), []
    for n in range(q.shape[2]):
        parts.append((q[:, :, n] * torch.exp(b[:, :, n])[..., None]) @ state)
        state = torch.exp(b[:, :, n, -1])[..., None, None] * state + added[:, :, n]
    return (o + torch.stack(parts, 2)).movedim(1, 3).flatten(1, 2)


def linear(x: Tensors) -> Tensor:
    """Linear attention by `decayed`: a column of ones in the values gives the divisors."""
    q, k = F.elu(x["q"]) + 1, F.elu(x["k"]) + 1
    o = decayed(q, k, torch.cat([x["v"], torch.ones_like(x["v"][..., :1])], -1), None)
    return o[..., :-1] / o[..., -1:]


def softmax(x: Tensors) -> Tensor:
    """The library's softmax attention."""
    return saccade.attention(x["q"], x["k"], x["v"], mask.causal())


def torch_softmax(x: Tensors) -> Tensor:
    """torch's softmax attention, which takes heads before tokens."""
    return F.scaled_dot_product_attention(*(x[n].transpose(1, 2) for n in "qkv"), is_causal=True).transpose(1, 2)


def transformers_delta(x: Tensors) -> Tensor:
    """transformers' chunked gated delta rule, as Qwen3-Next uses it without kernels."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    o: Any = torch_chunk_gated_delta_rule(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"])
    return o[0]


def loop(x: Tensors) -> Tensor:
    """A decay per channel, token by token."""
    state, rows = torch.zeros(1, H, D, D), []
    for t in range(x["q"].shape[1]):
        state = torch.exp(x["gates"][:, t])[..., None] * state + x["k"][:, t, :, :, None] * x["v"][:, t, :, None]
        rows.append((x["q"][:, t, :, None] @ state)[:, :, 0] * D**-0.5)
    return torch.stack(rows, 1)


def cases() -> Iterator[Case]:
    """The cases to measure."""
    torch.manual_seed(0)
    compiled = torch.compile(linear)
    others: dict[str, Form] = {"saccade softmax": softmax, "torch sdpa": torch_softmax}
    for n in LENGTHS:
        ours = lambda x: recurrent.linear_attention(**x)  # noqa: E731
        peers: dict[str, Form] = {"torch chunks": linear, **({"torch chunks compiled": compiled} if n <= 1024 else {})}
        yield Case(f"linear-{n}", inputs(n, "q", "k", "v"), ours, peers, others)
    scalar = lambda x: recurrent.scalar_decay(**x)  # noqa: E731
    in_torch = {"torch chunks": lambda x: decayed(x["q"] * D**-0.5, x["k"], x["v"], x["g"])}
    yield Case(f"scalar_decay-{T}", inputs(T, "q", "k", "v", "g"), scalar, in_torch, others)
    gated = lambda x: recurrent.gated_linear(x["q"], x["k"], x["v"], x["gates"])  # noqa: E731
    yield Case("gated_linear-512", inputs(512, "q", "k", "v", "gates"), gated, {"torch loop": loop}, others)
    yield Case(f"gated_linear-{T}", inputs(T, "q", "k", "v", "gates"), gated, {}, others)
    delta = lambda x: recurrent.gated_delta_rule(**x)  # noqa: E731
    peers = {"transformers": transformers_delta}
    yield Case(f"gated_delta_rule-{T}", inputs(T, "q", "k", "v", "g", "beta"), delta, peers, others)
    state = torch.randn(1, H, D, D)

    def step(x: Tensors) -> Tensor:
        kv = x["k"][:, 0, :, :, None] * x["v"][:, 0, :, None]
        return (x["q"][:, 0, :, None] @ (torch.exp(x["g"][:, 0, :, None, None]) * x["initial_state"] + kv)) * D**-0.5

    one = {**inputs(1, "q", "k", "v", "g"), "initial_state": state}
    yield Case("scalar_decay-step", one, scalar, {"torch": lambda x: step(x).transpose(1, 2)}, {}, False)


def both(f: Form, x: Tensors, do: Tensor) -> Callable[[], None]:
    """A call of f with its gradients."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}

    def call() -> None:
        for leaf in leaves.values():
            leaf.grad = None
        f(leaves).backward(do)

    return call


def flops(x: Tensors) -> int:
    """FLOPs of the forward's products: with the state, and of the pairs of tokens in chunks of 16 or 32."""
    delta, chunk = "beta" in x, 16 if "gates" in x or "beta" in x else 32
    return x["q"].shape[1] * H * 2 * D * (D * (2 + delta) + (chunk + 1) * (1 + delta))


def run(case: Case, env: Environment, ceiling: float) -> Iterator[Row]:
    """A row for each provider and pass."""
    forms = {"saccade": case.ours, **case.peers, **case.others}
    with torch.no_grad():
        truth = case.ours({name: x.double() for name, x in case.inputs.items()})
        outputs = {name: f(case.inputs) for name, f in forms.items()}
    passes: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {n: lambda f=f: f(case.inputs) for n, f in forms.items()}
    }
    if case.backward:
        do = torch.randn_like(outputs["saccade"])
        passes["both"] = {name: both(f, case.inputs, do) for name, f in forms.items()}
    for kind, calls in passes.items():
        with torch.set_grad_enabled(kind == "both"):
            times = in_turn(calls)
        for name, time in times.items():
            error = NAN if name in case.others else float((outputs[name] - truth).abs().max() / truth.abs().max())
            ratio = note({"ratio": time.median / times["saccade"].median})
            row = Row(*env, case.name, name, kind, "float32", error=error, note=ratio, **time._asdict())
            if name == "saccade" and kind == "forward":
                rate = flops(case.inputs) / time.median
                row = replace(row, rate=rate / 1e9, rate_unit="GFLOP/s", ceiling=ceiling / 1e9, fraction=rate / ceiling)
            yield row


def main() -> None:
    """Measure and write the rows."""
    args = parser(__doc__).parse_args()
    env, ceiling = environment(args.commit), Ceiling().flops("float32")
    picked = chosen((case for case in cases() if args.only in case.name), args.part)
    write(args.out, (row for case in picked for row in run(case, env, ceiling)))


if __name__ == "__main__":
    main()
