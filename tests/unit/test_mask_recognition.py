"""Boolean arrays as masks: equal to any array, and constructors by name if it is a band or ranges."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from saccade import mask as sm
from saccade.testing.masks import random_case

T = 12
TEXTS = (
    "full()", "~full()", "causal()", "~causal()", "causal(-3)", "~causal(2)", "window(3, 0)", "window(2, 1)",
    "window(4)", "window(None, 2)", "window(1, 0, 2)", "prefix(5)", "prefix(7) & ~prefix(3)", "causal() & prefix(5)",
    "causal() & ~prefix(2)", "causal() | prefix(4)", "causal() | prefix([4, 6])", "causal() & prefix([5, 12])",
    "prefix([12, 7]) & ~prefix([2, 0])", "causal() & prefix([12, 7]) & ~prefix([2, 0])",
    "ranges([0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])",
    "columns([0, 12, 0, 1, 12, 0], [12, 12, 12, 12, 12, 3])",
    f"dense({[[int((3 * t + j * j) % 5 < 2) for j in range(T)] for t in range(T)]})",
)  # fmt: skip
NAMED = {
    "keys(3, 7)": "prefix(7) & ~prefix(3)",
    "keys(0)": "~full()",
    "padding([1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0])": "prefix(8)",
    "causal() & padding([0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1])": "causal() & ~prefix(3)",
    "window(2, 2) & ~causal()": "window(1, 0, 2)",
    "causal([0, 0])": "causal()",
}


def array_of(mask: sm.Mask, B: int, Tq: int, Tk: int) -> np.ndarray:
    return np.broadcast_to(mask.evaluate(B, 1, Tq, Tk)[:, 0], (B, Tq, Tk))


def require_equal(allowed: np.ndarray) -> None:
    mask = sm.from_dense(allowed)
    entries = allowed if allowed.ndim == 3 else allowed[None]
    assert np.array_equal(array_of(mask, *entries.shape), entries), mask
    mask.check(*entries.shape)
    # what it prints is what it is
    assert sm.parse(str(mask)) == mask


@given(st.integers(0, 1 << 32))
def test_an_expression_comes_back_as_an_equal_mask(seed: int) -> None:
    for allowed in np.moveaxis(random_case(random.Random(seed)).allowed(), 1, 0):
        require_equal(allowed)
        require_equal(allowed[0])


@given(st.lists(st.integers(0, 6), min_size=2, max_size=3).flatmap(lambda shape: arrays(np.bool_, tuple(shape))))
def test_any_array_comes_back(allowed: np.ndarray) -> None:
    require_equal(allowed)


@pytest.mark.parametrize("text", TEXTS)
def test_forms_that_are_found(text: str) -> None:
    B = 2 if "prefix([" in text else 1
    assert str(sm.from_dense(array_of(sm.parse(text), B, T, 6 if "columns" in text else T))) == text


@pytest.mark.parametrize("text", NAMED)
def test_other_masks_are_named_by_their_bands(text: str) -> None:
    assert str(sm.from_dense(array_of(sm.parse(text), 2, T, T))) == NAMED[text]


@pytest.mark.parametrize("size", [(7, 12), (12, 7), (1, 12), (12, 1)])
def test_positions_count_from_the_bottom_right(size: tuple[int, int]) -> None:
    for text in ("causal()", "window(3, 0)", "window(2, 1)"):
        allowed = array_of(sm.parse(text), 1, *size)[0]
        assert np.array_equal(array_of(sm.from_dense(allowed), 1, *size)[0], allowed)
    assert str(sm.from_dense(array_of(sm.causal(), 1, 7, 12)[0])) == "causal()"


def test_a_batch_of_one_form_for_all_is_one_form() -> None:
    every = np.broadcast_to(np.tri(T, dtype=bool), (3, T, T))
    assert sm.from_dense(every) == sm.causal()
    assert sm.from_dense(every).evaluate(5, 1, T, T).shape == (1, 1, T, T)


def test_what_is_read_and_what_is_refused() -> None:
    torch = pytest.importorskip("torch")
    allowed = torch.ones(4, 4).tril().bool()
    mask = sm.from_dense(allowed)
    allowed[:] = False
    assert mask == sm.causal() == sm.from_dense(torch.ones(4, 4, dtype=torch.int64).tril())
    assert sm.from_dense([[1, 0], [1, 1]]) == sm.causal()
    random_ = torch.from_numpy(np.random.default_rng(0).random((9, 9)) < 0.5)
    copied = sm.from_dense(random_)
    random_[:] = True
    assert copied.kind == "dense"
    assert not copied.evaluate(1, 1, 9, 9).all()
    with pytest.raises(TypeError, match="from_dense: allowed has dtype float64, expected a boolean array"):
        sm.from_dense(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="expected 2 or 3 dimensions"):
        sm.from_dense(np.zeros((1, 1, 3, 3), bool))
