"""A million (mask, shape) pairs lowered and planned against the predicate."""

from __future__ import annotations

import random

import numpy as np
import pytest

from saccade.mask.lowering import lower
from saccade.mask.size import TooManyBands
from saccade.plan import Limits, make_plan
from saccade.problem import Problem
from saccade.testing.masks import random_case

from .plans import check_plan, lowered_dense

PARTS, PAIRS = 50, 20_000
# every so many pairs are planned too
PLANNED = 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_million_pairs(part, request) -> None:
    r = random.Random(f"{request.config.getoption('--seed')} {part}")
    refused = 0
    for n in range(PAIRS):
        case = random_case(r)
        mask, B, Hq, Tq, Tk = case
        try:
            heads = lower(mask, B, Hq, Tq, Tk)
        except TooManyBands:
            refused += 1
            continue
        allowed = case.allowed()
        assert np.array_equal(lowered_dense(heads, B, Tq, Tk), allowed), case
        if n % PLANNED == 0:
            problem = Problem(B, Tq, Tk, Hq, 1, 8, 8, mask=mask)
            plan = make_plan(problem, Limits("test", r.randint(1, 4), r.randint(1, 5), quantum=r.choice([1, 1, 2])))
            check_plan(plan, allowed)
            check_plan(plan, allowed, transposed=r.randint(1, 4))
    assert refused < PAIRS // 100
