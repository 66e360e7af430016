"""Rotary positions inside the kernel give the same bits as q and k rotated before the call."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade.backends import Inputs, metal
from saccade.mask import causal
from saccade.plan import make_plan
from saccade.problem import Problem, Scores


@pytest.mark.sample(2)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("Tq", "Tk"), [(21, 40), (40, 21), (1, 300)])
def test_same_bits_as_rotated_before(emulator, Tq, Tk, interleaved) -> None:
    emulator()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, h, 72)).astype(np.float16) for n, h in ((Tq, 4), (Tk, 2), (Tk, 2)))
    p = Problem(2, Tq, Tk, 4, 2, 72, 72, dtype="float16", mask=causal(), scores=Scores(scale=0.1))
    plan, rotation = make_plan(p, metal.limits(p)), metal.Rotation(500.0, interleaved)
    compute = metal.decode if Tq == 1 else metal.forward
    found = compute(p, plan, Inputs(q, k, v), rotation=rotation)
    turned = [
        saccade.rope(x, at, base=500.0, interleaved=interleaved)
        for x, at in ((q, np.arange(Tk - Tq, Tk)), (k, np.arange(Tk)))
    ]
    for a, b in zip(found, compute(p, plan, Inputs(*turned, v)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_odd_heads(emulator) -> None:
    emulator()
    x = np.zeros((1, 2, 1, 7), np.float32)
    p = Problem(1, 2, 2, 1, 1, 7, 7)
    with pytest.raises(ValueError, match="expected an even size"):
        metal.forward(p, make_plan(p, metal.limits(p)), Inputs(x, x, x), rotation=metal.Rotation())
