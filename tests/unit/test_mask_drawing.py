"""Pictures of masks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from saccade import mask as sm
from saccade.mask.drawing import cell_states
from saccade.mask.size import TooManyBands
from saccade.testing.masks import random_case


def test_drawing(tmp_path) -> None:
    mask = sm.causal() & sm.window(1, 0)
    assert mask.draw(3, 4) == "██··\n·██·\n··██"
    assert sm.causal().draw(2, 3) == "██·\n███"
    assert sm.per_head([sm.causal(), ~sm.causal()]).draw(2, 2, head=1) == "·█\n··"
    assert sm.causal().draw(128, 128, size=2) == "▒·\n█▒"
    assert sm.keys([1, 2]).draw(1, 2, B=2, batch=0) == "█·"
    for name in ("a.svg", "a.png", "a.txt"):
        (mask | sm.global_tokens([3])).draw(70, 90, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 100
    with pytest.raises(ValueError, match="svg"):
        mask.draw(3, 3, tmp_path / "a.gif")


def test_a_large_drawing_agrees_with_the_predicate(seed) -> None:
    r = random.Random(seed)
    for _ in range(100):
        case = random_case(r)
        if not case.Tq or not case.Tk:
            continue
        try:
            states = cell_states(case.mask, case.Tq, case.Tk, B=case.B, size=3)
        except TooManyBands:
            continue
        allowed = case.allowed()[0, 0]
        cell = -(-max(case.Tq, case.Tk) // 3)
        for (y, x), state in np.ndenumerate(states):
            block = allowed[y * cell : (y + 1) * cell, x * cell : (x + 1) * cell]
            assert state or not block.any()
            assert state < 2 or block.all()
