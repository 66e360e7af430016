"""A lowered mask restricted to some rows and keys, compared with the predicate."""

from __future__ import annotations

import random

import numpy as np
import pytest

from saccade import mask as sm
from saccade.mask.excerpt import Places, excerpt
from saccade.mask.lowering import lower
from saccade.mask.size import TooManyBands
from saccade.plan import Limits, make_plan
from saccade.problem import Problem
from saccade.testing.masks import random_case

from .plans import check_plan, lowered_dense

PARTS, PAIRS = 8, 400


def places(r: random.Random, n: int) -> Places:
    """Some positions below n: an affine run, or any that ascend."""
    if r.random() < 0.6:
        start, step = r.randint(0, max(0, n - 1)), r.randint(1, 4)
        return Places(np.arange(start, n, step)[: r.randint(0, n)], step)
    return Places(np.array(sorted(r.sample(range(n), r.randint(0, n))), np.int64))


@pytest.mark.parametrize("part", range(PARTS))
def test_any_mask_between_any_places(part: int, request: pytest.FixtureRequest):
    r = random.Random(f"excerpt {request.config.getoption('--seed')} {part}")
    many = refused = 0
    for _ in range(PAIRS):
        case = random_case(r)
        q, k = places(r, case.Tq), places(r, case.Tk)
        if r.random() < 0.3 and case.Tq == case.Tk:
            k = q
        try:
            heads = lower(*case)
        except TooManyBands:
            continue
        many += 1
        try:
            local, hull = excerpt(heads, q, k)
        except TooManyBands:
            refused += 1
            continue
        allowed = case.allowed()[:, :, q.at][:, :, :, k.at]
        assert np.array_equal(lowered_dense(local, case.B, q.n, k.n), allowed), (case, q.at, k.at)
        outside = allowed.copy()
        if hull is not None:
            assert hull.pairs >= allowed.sum() / case.B / case.Hq - 1e-9
            outside[:, :, hull.q_begin : hull.q_end, hull.k_begin : hull.k_end] = False
        assert not outside.any(), (case, q.at, k.at, hull)
        problem = Problem(case.B, q.n, k.n, case.Hq, 1, 8, 8)
        check_plan(make_plan(problem, Limits("test", r.randint(1, 4), r.randint(1, 5)), local), allowed)
    assert refused < many // 20


def zigzag(chunk: int, of: int, n: int = 8) -> Places:
    """Chunks `chunk` and of - 1 - chunk."""
    both = [np.arange(n) + n * c for c in (chunk, of - 1 - chunk)]
    return Places(np.concatenate(both))


def test_causal_zigzag_is_one_band_or_no_mask():
    heads = lower(sm.causal(), 1, 1, 64, 64)
    own, _ = excerpt(heads, zigzag(1, 8), zigzag(1, 8))
    (mask,) = own.masks
    assert mask.nb == 1
    assert not mask.rows
    assert mask.bands[0, 0, 0] == 0
    # an earlier rank's first chunk, whole, and a later rank's both, for the second half of the rows
    for rank, hull in ((0, (0, 16, 0, 8)), (2, (8, 16, 0, 16))):
        _, found = excerpt(heads, zigzag(1, 8), zigzag(rank, 8))
        assert found == (*hull, 128)
        cut, _ = excerpt(heads, zigzag(1, 8).cut(*hull[:2]), zigzag(rank, 8).cut(*hull[2:]))
        assert np.array_equal(lowered_dense(cut, 1, hull[1] - hull[0], hull[3] - hull[2]).all(), True)
        assert not cut.masks[0].rows


@pytest.mark.parametrize("step", [2, 5])
def test_stripes_of_a_window_are_bands(step: int):
    heads = lower(sm.causal() & sm.window(9, 0), 1, 1, 60, 60)
    for rank in range(step):
        local, hull = excerpt(heads, Places(np.arange(1, 60, step), step), Places(np.arange(rank, 60, step), step))
        assert local.masks[0].nb == 1
        assert not local.masks[0].rows
        assert hull is not None


def test_far_keys_are_out_of_sight():
    heads = lower(sm.causal() & sm.window(9, 0), 1, 1, 64, 64)
    near, far = (excerpt(heads, Places(np.arange(32, 48), 1), Places(np.arange(a, a + 16), 1))[1] for a in (16, 0))
    assert near is not None
    assert far is None
