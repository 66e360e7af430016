"""Stages of a backward on the CPU: the memory of one serves all, and no bit of a gradient depends on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade import mask as sm
from saccade.backends import cpu
from saccade.plan import make_plan
from saccade.problem import Problem, Scores

IDS = np.sort(np.random.default_rng(0).integers(0, 40, (2, 3000)), 1)
GAP = (np.arange(5000) >= 2000) & (np.arange(5000) < 3500)
MASKS = {
    "window": (3000, 3000, lambda: sm.causal() & sm.window(100, 0)),
    "both sides": (2000, 5000, lambda: sm.window(70, 30)),
    "rows without keys": (5000, 3000, lambda: sm.causal() & sm.window(50, 0)),
    "documents of a batch": (3000, 3000, lambda: sm.documents(IDS) & sm.causal()),
    "heads": (2500, 2500, lambda: sm.per_head([sm.window(40, 40), sm.causal() & sm.window(200, 0)] * 2)),
    "keys that no row sees": (
        5000,
        5000,
        lambda: sm.columns(np.zeros(5000, int), np.where(GAP, 0, 5000)) & sm.window(9, 9),
    ),
}
OPTIONS = {
    "plain": {},
    "terms": {"softcap": 3.0, "sinks": np.linspace(-1, 1, 4), "dropout": 0.2, "seed": 5},
    "slopes": {"bias": saccade.alibi(np.linspace(0.1, 0.4, 4))},
    "negative scale": {"scale": -0.2},
    "any batch": {"deterministic": "batch"},
}


def gradients(shape: tuple[int, ...], mask: sm.Mask, dtype: str, options: dict) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    Tq, Tk = shape
    q, do = (rng.standard_normal((2, Tq, 4, 24)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((2, Tk, 2, 24)).astype(dtype) for _ in range(2))
    o, lse = saccade.attention(q, k, v, mask, return_lse=True, backend="cpu", **options)[:2]
    *results, more = saccade.attention_backward(do, q, k, v, o, lse, mask, backend="cpu", **options)
    return [*results, *more.values()]


@pytest.mark.sample(15)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_keep_their_bits(name, dtype, options, monkeypatch):
    Tq, Tk, mask = MASKS[name]
    usual = cpu.limits
    expected = gradients((Tq, Tk), mask(), dtype, OPTIONS[options])
    p = Problem(2, Tq, Tk, 4, 2, 24, 24, dtype=dtype, mask=mask(), scores=Scores(scale=0.2))
    # without stages, or with one
    assert make_plan(p, usual(p)).parts[0].rows_of_sums(Tk) >= Tk // 3
    monkeypatch.setattr(cpu, "limits", lambda problem: replace(usual(problem), stage=4))
    stages = make_plan(p, cpu.limits(p)).parts[0].stages
    assert stages is not None
    assert len(stages) > 3
    for now, before in zip(gradients((Tq, Tk), mask(), dtype, OPTIONS[options]), expected, strict=True):
        assert now.tobytes() == before.tobytes()


def test_gates_have_a_plan_of_their_own():
    # the gradients of gates take memory for each owner, whatever was planned before
    shape = 1, 1 << 18, 1 << 18, 32, 2, 64, 64
    mask = sm.causal() & sm.window(4095, 0)
    problems = [Problem(*shape, mask=mask, scores=Scores(scale=0.1, gates=gates)) for gates in (False, True, False)]
    plain, gated, again = (make_plan(p, cpu.limits(p)).owners for p in problems)
    assert gated < plain == again
