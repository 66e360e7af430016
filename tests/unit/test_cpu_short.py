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
        require(run.verify(x, "cpu"), f"{name} {dtype} {kind} {isa}")


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_a_part_of_the_keys(dtype, isa) -> None:
    x = make(cases.by_name("T30-full"), dtype)
    o, lse = saccade.attention(x.q, x.k, x.v, return_lse=True, backend="cpu")
    whole = saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, backend="cpu")
    parts = [
        saccade.attention_backward(x.do, x.q, x.k[:, keys], x.v[:, keys], o, lse, backend="cpu")
        for keys in (slice(0, 13), slice(13, 30))
    ]
    close = {"rtol": 0, "atol": 1e-5 if dtype == "float32" else 1e-13}
    np.testing.assert_allclose(parts[0][0] + parts[1][0], whole[0], **close)
    for n in (1, 2):
        np.testing.assert_allclose(np.concatenate([part[n] for part in parts], 1), whole[n], **close)


def test_gradients_of_numbers_that_are_not_finite(isa) -> None:
    x = make(cases.by_name("T30-window"), poison=False)
    seen = (np.arange(30) >= 11) & (np.arange(30) <= 16)
    o, lse = saccade.attention(x.q, x.k, x.v, x.mask, return_lse=True, backend="cpu")
    expected = saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, x.mask, backend="cpu")
    k = x.k.copy()
    k[:, 13] = np.nan
    o, lse = saccade.attention(x.q, k, x.v, x.mask, return_lse=True, backend="cpu")
    dq, *_ = saccade.attention_backward(x.do, x.q, k, x.v, o, lse, x.mask, backend="cpu")
    np.testing.assert_allclose(dq[:, ~seen], expected[0][:, ~seen], rtol=1e-5, atol=1e-6)
    assert np.isnan(dq[:, seen]).all()
