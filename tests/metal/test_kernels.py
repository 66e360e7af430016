"""The tiled kernels in every schedule and dtype: no finding of the sanitizers, and the same bits each time."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade.testing import run
from saccade.testing.compare import require
from saccade.testing.inputs import make
from saccade.testing.metal import SCHEDULES

from .mutants import PROBLEMS


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_schedule(emulator, problem, dtype) -> None:
    """Each schedule also distributes matrix elements over lanes in another way."""
    x = make(PROBLEMS[problem], dtype, seed=2)
    first: list[np.ndarray] = []
    for n, schedule in enumerate(SCHEDULES):
        emulator(schedule=schedule, seed=n)
        require(run.verify(x, "metal"), f"{problem} {dtype} {schedule}")
        o = saccade.attention(x.q, x.k, x.v, x.mask, sinks=x.sinks, backend="metal", **x.scores)
        first.append(o.view(np.uint16) if dtype == "bfloat16" else o)
    for o in first[1:]:
        np.testing.assert_array_equal(o, first[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("problem", ["small", "decode", "union", "bias", "scores"])
def test_sanitized(emulator, problem, sanitizer) -> None:
    emulator(sanitizer=sanitizer)
    require(run.verify(make(PROBLEMS[problem], "float32", seed=2), "metal"), f"{problem} {sanitizer}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sanitized_in_16_bits(emulator, dtype) -> None:
    emulator(sanitizer="thread")
    require(run.verify(make(PROBLEMS["small"], dtype, seed=2), "metal", backward=False), dtype)


@pytest.mark.sample(1)
@pytest.mark.parametrize("problem", ["small", "strided"])
def test_heads_before_rows(emulator, problem) -> None:
    """MLX's own layout gives the same bits, with axes exchanged."""
    from saccade.backends import Extras, Inputs, Outputs, metal
    from saccade.plan import make_plan
    from saccade.problem import Problem, Scores

    emulator()
    x = make(PROBLEMS[problem], "float32", seed=3)
    (B, Tq, Hq, D), (_, Tk, Hk, _) = x.q.shape, x.k.shape
    p = Problem(B, Tq, Tk, Hq, Hk, D, D, mask=x.mask, scores=Scores(scale=0.2, sinks=x.sinks is not None))
    plan, extras = make_plan(p, metal.limits(p)), Extras(sinks=x.sinks)
    given = {name: getattr(x, name) for name in ("q", "k", "v", "do")}
    turned = {name: np.ascontiguousarray(a.swapaxes(1, 2)) for name, a in given.items()}
    found = []
    for a, heads_first in ((given, False), (turned, True)):
        inputs = Inputs(a["q"], a["k"], a["v"], extras)
        o, lse = metal.forward(p, plan, inputs, heads_first=heads_first)
        grads = metal.backward(p, plan, inputs, Outputs(o, lse, a["do"]), heads_first=heads_first)[:3]
        found.append([y.swapaxes(1, 2) if heads_first else y for y in (o, lse, *grads)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    one = PROBLEMS["decode"]
    x = make(one, "float32", seed=3)
    p = Problem(2, 1, 300, 4, 2, 40, 40, scores=Scores(sinks=True, scale=0.2))
    plan, extras = make_plan(p, metal.limits(p)), Extras(sinks=x.sinks)
    plain = metal.decode(p, plan, Inputs(x.q, x.k, x.v, extras))
    heads = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in (x.q, x.k, x.v)]
    for a, b in zip(plain, metal.decode(p, plan, Inputs(*heads, extras), heads_first=True), strict=True):
        np.testing.assert_array_equal(a, b.swapaxes(1, 2))
