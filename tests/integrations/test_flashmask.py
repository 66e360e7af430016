"""FlashMask's columns, converted from and to masks, compared with their definition pair by pair."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade import mask as masks
from saccade.integrations.flashmask import from_flashmask, to_flashmask
from saccade.mask.size import TooManyBands
from saccade.testing.cases import MASKS
from saccade.testing.masks import MaskCase, random_case

B, H, TQ, TK = 2, 4, 70, 101
FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]


def seen(x: np.ndarray, causal: bool, Tq: int) -> np.ndarray:
    """The pairs that columns leave, bool [B, H, Tq, Tk], as PaddlePaddle's tests have them."""
    t, n = np.arange(Tq)[:, None], x.shape[-1]
    lts, last = x[:, :, None, :, 0], x[:, :, None, :, -1]
    if causal:
        hidden = (t >= lts) & (t < last) if n == 2 else t >= lts
        return ~hidden & (t >= np.arange(x.shape[2]) - (x.shape[2] - Tq))
    if n == 2:
        return ~((t >= lts) | (t < last))
    lte, uts = x[:, :, None, :, 1], x[:, :, None, :, 2]
    return ~((t >= lts) & (t < lte) | (t >= uts) & (t < last))


def evaluated(mask: masks.Mask, b: int, h: int, Tq: int, Tk: int) -> np.ndarray:
    return np.broadcast_to(mask.evaluate(b, h, Tq, Tk), (b, h, Tq, Tk))


def most_runs(allowed: np.ndarray) -> int:
    """The largest number of runs of rows in which a key is hidden."""
    hidden = np.pad(~allowed, ((0, 0), (0, 0), (1, 0), (0, 0)))
    return int((hidden[:, :, 1:] & ~hidden[:, :, :-1]).sum(2).max(initial=0))


def check_there_and_back(case: MaskCase) -> bool:
    """Whether a mask has columns, as it must unless a key is hidden in three runs; checks what they say."""
    mask, b, h, Tq, Tk = case
    allowed = case.allowed()
    if most_runs(allowed) > 2:
        with pytest.raises(ValueError, match=r"runs of rows|bands"):
            to_flashmask(mask, b, Tq, Tk)
        return False
    try:
        x, causal = to_flashmask(mask, b, Tq, Tk)
    except TooManyBands:
        return False
    assert x.dtype == np.int32
    assert x.shape[0] == b
    assert x.shape[1] in (1, h)
    assert (causal, x.shape[3]) in FORMS
    assert np.array_equal(np.broadcast_to(seen(x, causal, Tq), allowed.shape), allowed), case
    assert np.array_equal(evaluated(from_flashmask(x, causal), b, h, Tq, Tk), allowed), case
    return True


@pytest.mark.parametrize("name", MASKS)
def test_every_kind_of_mask(name) -> None:
    case = MaskCase(masks.parse(MASKS[name]), B, H, TQ, TK)
    assert check_there_and_back(case) == (most_runs(case.allowed()) <= 2)


@given(st.randoms(use_true_random=False))
def test_random_masks(r) -> None:
    check_there_and_back(random_case(r))


def test_many_random_masks(seed) -> None:
    r = random.Random(seed)
    assert sum(check_there_and_back(random_case(r)) for _ in range(1500)) > 500


@pytest.mark.parametrize(("causal", "n"), FORMS)
@pytest.mark.parametrize("Tq", [1, 9, 17])
def test_any_columns(causal, n, Tq, rng) -> None:
    """Also starts behind ends and missing rows; columns for all heads, for each head, and for groups of heads."""
    for b, h, Tk in ((1, 1, 9), (2, 2, 13), (0, 1, 3), (3, 2, 0)):
        x = rng.integers(-2, Tq + 3, (b, h, Tk, n)).astype(np.int32)
        mask = from_flashmask(x, causal)
        want = seen(x, causal, Tq)
        assert np.array_equal(evaluated(mask, b, h, Tq, Tk), want)
        again, kind = to_flashmask(mask, b, Tq, Tk)
        assert np.array_equal(np.broadcast_to(seen(again, kind, Tq), want.shape), want)
        if h > 1:
            grouped = from_flashmask(x, causal, Hq=3 * h)
            assert np.array_equal(evaluated(grouped, b, 3 * h, Tq, Tk), want.repeat(3, 1))


T, J = 64, np.arange(64)
ENDS = np.array([20, 45, 64])
# masks of the paper, and the form with the fewest columns
PAPER = {
    "full": (masks.full(), False, 2),
    "causal": (masks.causal(), True, 1),
    "sliding window": (masks.causal() & masks.window(9, 0), True, 1),
    "causal documents": (masks.causal() & masks.documents(cu_seqlens=[0, *ENDS]), True, 1),
    "documents": (masks.documents(cu_seqlens=[0, *ENDS]), False, 2),
    "shared question": (masks.causal() & (masks.documents(cu_seqlens=[0, *ENDS]) | masks.prefix(20)), True, 1),
    "global and window": (masks.window(5, 5) | masks.global_tokens(4), False, 4),
    "causal blocks": (masks.causal() & ~masks.columns(ENDS.repeat([20, 25, 19]), np.where(J < 45, 45, T)), True, 2),
    "prefix": (masks.causal() | masks.prefix(11), False, 2),
    "evicted keys": (masks.causal() & masks.columns(stop=J + 1 + J * 7 % 23), True, 1),
}


@pytest.mark.parametrize("name", PAPER)
def test_masks_of_the_paper_take_the_fewest_columns(name) -> None:
    mask, causal, n = PAPER[name]
    assert check_there_and_back(MaskCase(mask, 2, 1, T, T))
    x, kind = to_flashmask(mask, 2, T, T)
    assert (kind, x.shape) == (causal, (2, 1, T, n))


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    x, causal = to_flashmask(PAPER["documents"][0], 1, T, T)
    assert from_flashmask(torch.from_numpy(x), causal) == from_flashmask(x, causal)


def test_long_sequences_hold_no_pairs() -> None:
    long = 1 << 17
    mask = masks.causal() & masks.documents(np.arange(long) // 5000)
    start = time.perf_counter()
    x, causal = to_flashmask(mask, 1, long, long)
    assert time.perf_counter() - start < 5
    assert causal
    assert np.array_equal(x[0, 0, :, 0], np.minimum(np.arange(long) // 5000 * 5000 + 5000, long))


WRONG = {
    "rank": (np.zeros((1, 5, 1), np.int32), True, None, ValueError, r"\[1, 5, 1\].*\[B, H, Tk, n\]"),
    "four causal columns": (np.zeros((1, 1, 5, 4), np.int32), True, None, ValueError, "n of 1 or 2"),
    "one column": (np.zeros((1, 1, 5, 1), np.int32), False, None, ValueError, "n of 2 or 4"),
    "no heads": (np.zeros((1, 0, 5, 1), np.int32), True, None, ValueError, "H >= 1"),
    "dtype": (np.zeros((1, 1, 5, 1)), True, None, TypeError, "float64; expected int32"),
    "heads": (np.zeros((1, 2, 5, 1), np.int32), True, 3, ValueError, "2 heads and Hq is 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_columns(name) -> None:
    x, causal, heads, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        from_flashmask(x, causal, Hq=heads)


def test_what_has_no_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"key 0 of batch entry 0 is hidden in 4 runs of rows; .* columns for two"):
        to_flashmask(masks.strided(3), 1, 12, 12)
    with pytest.raises(ValueError, match="start has shape"):
        to_flashmask(masks.columns([0, 1]), 1, 3, 3)
