"""Few tokens on the CPU, which every instruction set computes along the head dimension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade.backends.cpu import _core
from saccade.testing import cases, run
from saccade.testing.compare import require
from saccade.testing.inputs import make

NAMES = ("T1-full", "T6-full", "T6-window", "T16-full", "T30-full", "T30-window", "T64", "mask-padding", "D40-Dv24")


@pytest.fixture(params=_core.isas())
def isa(request) -> Iterator[str]:
    before = _core.isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_results(name, dtype, isa) -> None:
    case = cases.by_name(name)
    for kind in ("random", "last", "after"):
        x = make(case, dtype, kind=kind)
        require(run.verify(x, "cpu", backward=False), f"{name} {dtype} {kind} {isa}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_that_overflow_and_means_that_do_not(dtype, isa) -> None:
    x = make(cases.by_name("T30-full"), dtype)
    v = np.full_like(x.v, np.finfo(dtype).max / 2)
    np.testing.assert_allclose(saccade.attention(x.q, x.k, v, backend="cpu"), v[0, 0, 0, 0], rtol=1e-5)


def test_only_rows_that_see_a_number_that_is_not_finite_have_it(isa) -> None:
    x = make(cases.by_name("T30-window"), poison=False)
    expected = saccade.attention(x.q, x.k, x.v, x.mask, backend="cpu")
    seen = (np.arange(30) >= 11) & (np.arange(30) <= 16)
    for name, number in (("k", np.nan), ("v", np.nan), ("v", np.inf)):
        array = getattr(x, name).copy()
        array[:, 13] = number
        y = replace(x, **{name: array})
        o = saccade.attention(y.q, y.k, y.v, y.mask, backend="cpu")
        np.testing.assert_allclose(o[:, ~seen], expected[:, ~seen], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(o[:, seen], np.full_like(o[:, seen], number))
