"""The machinery of the contract suite: the tolerance rule, and needles that show every edge that is off by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from saccade import mask as masks
from saccade.testing import cases, run
from saccade.testing.compare import eps, measure, require
from saccade.testing.fuzz import random_case
from saccade.testing.inputs import LAYOUTS, NEEDLES, lay, make, targets

DTYPES = ("float32", "bfloat16", "float16", "float64")

# right, and wrong by one key or one row
OFF_BY_ONE = [
    ("causal(31)", "causal(32)"),
    ("causal(31)", "causal(30)"),
    ("window(13, 5)", "window(14, 5)"),
    ("window(13, 5)", "window(12, 5)"),
    ("window(13, 5)", "window(13, 6)"),
    ("window(13, 5)", "window(13, 4)"),
    ("keys(60)", "keys(59) & causal(200)"),
    ("keys(60)", "keys(61) & causal(200)"),
    ("keys(9, 60)", "keys(8, 60)"),
    ("keys(9, 60)", "keys(10, 60)"),
    ("documents(cu_seqlens=[0, 31, 64, 101])", "documents(cu_q=[0, 1, 33, 70], cu_k=[0, 31, 64, 101])"),
    ("strided(8)", "strided(8, 1)"),
    ("full()", "keys(100) & causal(200)"),
    ("full()", "keys(1, 101) & causal(200)"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("right", "wrong"), OFF_BY_ONE)
def test_needles_show_an_edge_off_by_one(right: str, wrong: str, dtype: str) -> None:
    case = cases.Case("edge", 70, 101, 1, 2, 1, 24, 24, mask=right)
    shown = []
    for kind in NEEDLES:
        x = make(case, dtype, kind=kind, poison=False)
        ref, plain = run.expected(x, backward=False), run.plain(x, backward=False)
        got = run.expected(replace(x, mask=masks.parse(wrong)), x.q.dtype, backward=False)
        assert measure("o", run.expected(x, x.q.dtype, backward=False)["o"], ref["o"], plain["o"], x.q.dtype).ok
        shown.append(not measure("o", got["o"], ref["o"], plain["o"], x.q.dtype).ok)
    assert any(shown)


def test_targets_are_the_ends_of_intervals() -> None:
    allowed = np.zeros((1, 1, 3, 9), bool)
    allowed[0, 0, 0, 2:5] = allowed[0, 0, 0, 7:] = allowed[0, 0, 1, :4] = allowed[0, 0, 1, 6:8] = True
    want = {"first": [2, 6, 2], "last": [4, 7, 2], "before": [1, 5, 2], "after": [5, 8, 2]}
    assert {kind: targets(allowed, kind)[0, 0].tolist() for kind in NEEDLES} == want


def test_the_rule() -> None:
    ref, plain = np.array([1.0, -4.0]), np.array([[1.0, -4.0 - 3e-6], [1.0 + 1e-6, -4.0]])
    allowed = 2 * 3e-6 + 4 * eps(np.float32) * 4
    for error, ok in ((0.0, True), (0.99 * allowed, True), (1.01 * allowed, False), (np.nan, False), (np.inf, False)):
        assert measure("o", ref + [error, 0], ref, plain, np.float32).ok is ok
    lse = np.array([0.5, 50.0, -np.inf])
    assert measure("lse", lse + [7 * eps(np.float32), 0, 0], lse, lse, np.float32).ok
    assert not measure("lse", lse + [9 * eps(np.float32), 0, 0], lse, lse, np.float32).ok
    assert measure("lse", lse + [0, 390 * eps(np.float32), 0], lse, lse, np.float32).ok
    assert not measure("lse", np.array([0.5, 50.0, -1e30]), lse, lse, np.float32).ok
    assert measure("o", ref + 60 * 4 * eps(np.float64), ref, ref, np.float64).ok
    assert not measure("o", ref + 70 * 4 * eps(np.float64), ref, ref, np.float64).ok
    assert not measure("o", ref[:1], ref, ref, np.float64).ok
    with pytest.raises(AssertionError, match="o: error"):
        require([measure("o", ref + 1, ref, ref, np.float32)], "a case")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_equal_arrays(layout: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 4, 5))
    y = lay(x, layout)
    np.testing.assert_array_equal(x, y)
    assert (y.strides == np.ascontiguousarray(x).strides) == (layout in ("plain", "shifted"))


def test_poison_lies_where_nothing_may_read() -> None:
    for case in cases.select(without=("slow",)):
        x = make(case)
        for name, a in run.expected(x).items():
            assert np.isfinite(a).all() or name == "lse", f"{case.name} {name}"


def test_names_are_unique_and_fuzz_follows_from_its_seed() -> None:
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)
    assert random_case(7) == random_case(7) != random_case(8)
    assert set(cases.MASKS) == {c.name[5:] for c in cases.select("primary") if c.name.startswith("mask-")}
