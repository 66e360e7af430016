"""The patterns that benchmarks name: what they allow, and that rows say what they cost next to no mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from saccade import mask as masks
from saccade.backends import load
from saccade.plan import make_plan
from saccade.problem import Problem
from saccade.testing.patterns import PATTERNS, named


@pytest.mark.parametrize("name", PATTERNS)
def test_few_pairs_are_visited(name: str):
    mask = named(name, 1024)
    pairs = np.count_nonzero(mask.evaluate(1, 1, 1024, 1024))
    problem = Problem(1, 1024, 1024, 1, 1, 64, 64, "float32", mask)
    visited = make_plan(problem, load("cpu").limits(problem)).visited_pairs
    assert pairs <= visited < 1024 * 1024


def test_other_texts_are_masks():
    assert named("", 8) is None
    assert str(named("causal() & window(3, 0)", 8)) == str(masks.parse("causal() & window(3, 0)"))


@pytest.mark.parametrize("group", ["patterns", "patterns-backward"])
def test_a_case_says_what_its_pattern_costs(group: str):
    pytest.importorskip("rich")
    pytest.importorskip("torch")
    from saccade.cli.bench.cases import cases
    from saccade.cli.bench.machine import Environment
    from saccade.cli.bench.measure import Ceiling
    from saccade.cli.bench.run import Settings, run

    (case,) = cases("patterns", only=f"{group}-fp32-chunked-local")
    small = replace(case, Tq=1024, Tk=1024, Hq=2, Hk=2)
    ours, dense = run(small, Environment("", "", ""), Ceiling(quick=True), Settings(0.01, (1, 1)))
    assert (ours.provider, dense.provider) == ("saccade", "dense")
    assert ours.pairs == 2 * 2 * (512 * 513 // 2)
    assert dense.pairs == 2 * 1024 * 1024
    assert ours.error <= ours.allowed
    assert "25.05% of all pairs allowed, " in ours.note
    assert "of the dense speed a pair" in ours.note
