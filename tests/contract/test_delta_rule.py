"""Delta rules: the published recurrence with decays per channel, and random calls of every form of the rule."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from saccade import recurrent
from saccade.testing import recurrent as run
from saccade.testing.compare import require
from saccade.testing.recurrent import Sizes
from saccade.testing.tensors import put

torch = pytest.importorskip("torch")

RULES = [op.name for op in run.OPS if "delta" in op.name]


def published(q: Any, k: Any, v: Any, beta: Any, g: Any, initial_state: Any, scale: float) -> tuple[Any, Any]:
    """The loop of flash-linear-attention's `naive_recurrent_kda`, with a state to start from; H key heads."""
    S, outputs = initial_state, []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, :, None].exp()
        value = v[:, t] - (k[:, t, :, :, None] * S).sum(-2)
        S = S + torch.einsum("bhk,bhv->bhkv", beta[:, t, :, None] * k[:, t], value)
        outputs.append(torch.einsum("bhk,bhkv->bhv", scale * q[:, t], S))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("chunk", [None, 1, 5, 64])
@pytest.mark.parametrize("dtype", ["float64"])
def test_kimi_delta_attention_is_the_published_loop(backend, dtype, chunk, seed) -> None:
    arrays = run.make(run.by_name("gated_delta_rule-channels"), Sizes(2, 70, 3, 3, 16, 10), dtype, seed)
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    results = published(**leaves, scale=0.3)
    given = [torch.randn_like(x) for x in results]
    expected = torch.autograd.grad(results, list(leaves.values()), given)
    got = recurrent.gated_delta_rule(**leaves, scale=0.3, chunk=chunk, return_state=True, backend=backend)
    gradients = torch.autograd.grad(got, list(leaves.values()), given)
    for name, here, there in zip(("o", "state", *leaves), (*got, *gradients), (*results, *expected), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equal_channels_are_a_head(backend, dtype) -> None:
    op = run.by_name("gated_delta_rule")
    arrays = run.make(op, Sizes(T=70), dtype)
    wide = {**arrays, "g": np.repeat(arrays["g"][..., None], 8, -1)}
    given = run.cotangents(run.expected(op, arrays), dtype)
    got = run.computed(op, wide, backend, given)
    got["dg"] = got["dg"].sum(-1)
    require(run.compare(op, arrays, got, dtype, given), dtype)


DECAYS = ("", "head", "channel")


def betas_of_channels(decay: str) -> run.Op:
    """The rule with a beta per value channel, and no decay, or one per head or key channel."""

    def arrays(rng: np.random.Generator, s: Sizes) -> dict[str, Any]:
        rows = run.by_name("gated_delta_rule").make(rng, s)
        rows["beta"] = rng.uniform(0, 1, rows["v"].shape)
        if not decay:
            del rows["g"]
        if decay == "channel":
            rows["g"] = -rng.exponential(0.3, (s.B, s.T, s.H, s.K))
        return rows

    return replace(run.by_name("gated_delta_rule"), name=f"betas of channels {decay}", make=arrays)


def configuration(n: int) -> tuple[run.Op, Sizes, str, int | None, bool, bool]:
    """A rule, sizes, a dtype, a chunk, and whether decays are strong and states are returned, from a number."""
    draw = random.Random(n)
    packed, Hk = draw.random() < 0.4, draw.choice([1, 1, 2, 3])
    T = draw.choice([1, 1, 2, 5, 16, 17, 33, 63, 64, 65, 100, 130])
    borders = (0, *sorted(draw.randint(0, T) for _ in range(draw.randint(0, 3))), T) if packed else None
    sizes = Sizes(
        1 if packed else draw.randint(1, 3), T, Hk * draw.choice([1, 1, 2, 3]), Hk, draw.choice([3, 8, 16, 33, 64]),
        draw.choice([1, 5, 16, 40, 64, 100]), borders,
    )  # fmt: skip
    dtype, chunk = draw.choice(["float32", "bfloat16", "float16"]), draw.choice([None, None, 1, 5, 16, 64, 128])
    rules = (*map(run.by_name, RULES), *map(betas_of_channels, DECAYS))
    return draw.choice(rules), sizes, dtype, chunk, draw.random() < 0.3, draw.random() < 0.7


@pytest.mark.sample(20)
@pytest.mark.parametrize("part", range(100))
def test_random_configurations(backend, part, request) -> None:
    first = request.config.getoption("--seed") * 1_000_000 + part * 10
    for n in range(first, first + 10):
        op, sizes, dtype, chunk, strong, state = configuration(n)
        arrays = run.make(op, sizes, dtype, n)
        if strong and "g" in arrays:
            drawn = np.random.default_rng(n).choice([0, -1e-6, -1, -50, -1e4, -np.inf], arrays["g"].shape)
            arrays["g"] = drawn.astype(arrays["g"].dtype)
        do, dstate = run.cotangents(run.expected(op, arrays), dtype, n)
        given = do, dstate if state else np.zeros_like(dstate)
        got = run.computed(op, arrays, backend, given, state=state, chunk=chunk)
        require(run.compare(op, arrays, got, dtype, given), f"{n}: {op.name} {sizes} {dtype} {chunk} {strong} {state}")


@pytest.mark.parametrize("dtype", ["float64"])
def test_products_are_the_published_steps(backend, dtype, seed) -> None:
    """flash-linear-attention's `gated_delta_product`: a decay and then steps; a query reads after the last."""
    arrays = run.make(run.by_name("gated_delta_rule-steps"), Sizes(2, 20, 3, 3, 16, 10), dtype, seed)
    given = {name: torch.tensor(x) for name, x in arrays.items()}
    S, outputs = given["initial_state"], []
    for t in range(20):
        S = S * given["g"][:, t, :, None, None].exp()
        for step in range(3):
            k, v, beta = (given[name][:, t, step] for name in ("k", "v", "beta"))
            S = S + torch.einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, S)))
        outputs.append(torch.einsum("bhk,bhkv->bhv", given["q"][:, t] / 4, S))
    o, state = recurrent.gated_delta_rule(**given, return_state=True, backend=backend)
    torch.testing.assert_close(o, torch.stack(outputs, 1), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, S, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("borders", [None, (0, 7, 7, 20)])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_beta_per_value_channel(backend, dtype, decay, borders, seed) -> None:
    sizes = Sizes(1 if borders else 2, 20, 2, 1, 8, 3, borders)
    require(run.verify(betas_of_channels(decay), sizes, dtype, backend, seed), f"{decay} {dtype} {borders}")


@pytest.mark.parametrize("dtype", ["float32"])
def test_one_step_is_the_rule(backend, dtype) -> None:
    arrays = run.make(run.by_name("gated_delta_rule-channels"), Sizes(T=40), dtype)
    steps = {name: x[:, :, None] if name in ("k", "v", "beta") else x for name, x in arrays.items()}
    got, rule = (
        recurrent.gated_delta_rule(**{n: put(x) for n, x in given.items()}, return_state=True, backend=backend)
        for given in (steps, arrays)
    )
    for here, there in zip(got, rule, strict=True):
        assert torch.equal(here, there)
