"""Reordered keys: the same pairs in fewer tiles if the columns of a mask are scattered, else unchanged."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from saccade import mask as sm
from saccade.mask.gathering import gathered
from saccade.mask.lowering import lower
from saccade.mask.size import TooManyBands
from saccade.plan import Limits, Plan, make_plan
from saccade.problem import Problem
from saccade.testing.masks import random_case

from .plans import check_plan, lowered_dense


def plan_of(mask: sm.Mask, T: int, limits: Limits) -> Plan:
    return make_plan(Problem(1, T, T, 1, 1, 64, 64, mask=mask), limits)


SCATTERED = {
    "fixed": sm.patterns.fixed_factors(32, 3, 1024),
    "seen by all": sm.window(20, 20) | sm.columns(stop=np.where(np.arange(1024) % 61 == 5, 1024, 0)),
    "in no order": sm.causal() & (sm.chunked(32) | sm.columns(stop=np.where(np.arange(1024) % 37 < 2, 900, 0))),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_scattered_columns_fill_tiles_of_their_own(name: str) -> None:
    mask, limits = SCATTERED[name], Limits("test", 64, 32, quantum=32)
    allowed = mask.evaluate(1, 1, 1024, 1024)
    plan = plan_of(mask, 1024, replace(limits, gathers=True))
    check_plan(plan, allowed)
    check_plan(plan, allowed, transposed=64)
    assert sorted(plan.order) == list(range(1024))
    assert plan.visited_tiles < plan_of(mask, 1024, limits).visited_tiles / 2
    assert not any(r.axis == "k" for part in plan.parts for m in part.masks for r in m.rows)
    assert "another order" in str(plan)


IN_PLACE = sm.causal(), sm.window(5, 5) | sm.global_tokens(40), sm.columns(start=np.arange(256))


@pytest.mark.parametrize("mask", IN_PLACE)
def test_columns_side_by_side_stay(mask: sm.Mask) -> None:
    assert plan_of(mask, 256, Limits("test", 64, 32, quantum=32, gathers=True)).order is None


def test_random_masks_in_another_order(seed) -> None:
    r = random.Random(seed)
    found = 0
    while found < 100:
        case = random_case(r)
        try:
            moved = gathered(lower(case.mask, case.B, case.Hq, case.Tq, case.Tk), case.Tq, case.Tk, r.randint(2, 8))
        except TooManyBands:
            continue
        if moved is not None:
            found += 1
            assert np.array_equal(
                lowered_dense(moved.heads, case.B, case.Tq, case.Tk), case.allowed()[..., moved.order]
            ), str(case.mask)
