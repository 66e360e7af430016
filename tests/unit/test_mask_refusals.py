"""Masks that are refused: wrong arguments, and arrays that do not fit a problem."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import mask as sm

WRONG = [
    (lambda: sm.window(-1), ValueError),
    (lambda: sm.window(1, -2), ValueError),
    (lambda: sm.window(1.0), TypeError),
    (lambda: sm.window(True), TypeError),
    (lambda: sm.causal("a"), TypeError),
    (lambda: sm.documents([1, 0]), ValueError),
    (lambda: sm.documents([[0, 1], [1, 0]]), ValueError),
    (lambda: sm.documents([0.5, 1.0]), TypeError),
    (lambda: sm.documents(3), ValueError),
    (lambda: sm.documents(), TypeError),
    (lambda: sm.documents([0], cu_seqlens=[0, 1]), TypeError),
    (lambda: sm.documents(cu_q=[0, 1]), TypeError),
    (lambda: sm.documents([0], each=sm.causal()), TypeError),
    (lambda: sm.documents(cu_seqlens=[0, 1], each=sm.documents([0])), ValueError),
    (lambda: sm.documents(cu_seqlens=[0, 1], each=sm.keys([1])), ValueError),
    (lambda: sm.documents(cu_seqlens=[0, 1], each=3), TypeError),
    (lambda: sm.documents(cu_seqlens=[0, 4, 2]), ValueError),
    (lambda: sm.documents(np.array([0, 1 << 32, 1])), ValueError),
    (lambda: sm.keys(-1), ValueError),
    (lambda: sm.keys([[1]]), ValueError),
    (lambda: sm.prefix(None), TypeError),
    (lambda: sm.prefix(1.5), TypeError),
    (lambda: sm.global_tokens(-2), ValueError),
    (lambda: sm.columns(), TypeError),
    (lambda: sm.columns([0.5, 1.0]), TypeError),
    (lambda: sm.columns(3), ValueError),
    (lambda: sm.columns(np.int64(3)), ValueError),
    (lambda: sm.columns([0, 2], [1, 1]), ValueError),
    (lambda: sm.columns([0, 2], [1, 3, 4]), ValueError),
    (lambda: sm.columns([[0, 1]] * 2, [[1, 1]] * 3), ValueError),
    (lambda: sm.documents(cu_seqlens=[0, 1], each=sm.columns([0])), ValueError),
    (lambda: sm.ranges(), TypeError),
    (lambda: sm.ranges([0, 2], [1, 1]), ValueError),
    (lambda: sm.ranges([[0, 1]] * 2, [[1, 1]] * 3), ValueError),
    (lambda: sm.padding(None), TypeError),
    (lambda: sm.padding([[[True]]]), ValueError),
    (lambda: sm.documents([0, 1], position_ids=[0, 1]), TypeError),
    (lambda: sm.documents(None, [0, 1], position_ids=[0, 1]), TypeError),
    (lambda: sm.documents(position_ids=[0, 1], each=sm.causal()), TypeError),
    (lambda: sm.documents(position_ids=[[[0, 1]]]), ValueError),
    (lambda: sm.strided(0), ValueError),
    (lambda: sm.strided(3, 3), ValueError),
    (lambda: sm.strided(2.0), TypeError),
    (lambda: sm.dilated(-1, 2), ValueError),
    (lambda: sm.dilated(1, 0), ValueError),
    (lambda: sm.chunked(0), ValueError),
    (lambda: sm.tiles([1, 0], 2), ValueError),
    (lambda: sm.tiles([[1]], 0), ValueError),
    (lambda: sm.tiles([[1]], (1, 2, 3)), ValueError),
    (lambda: sm.dense([1.0]), TypeError),
    (lambda: sm.tree([0]), ValueError),
    (lambda: sm.tree([-2]), ValueError),
    (lambda: sm.tree([[-1, 0], [1, 0]]), ValueError),
    (lambda: sm.tree([[[-1]]]), ValueError),
    (lambda: sm.tree(None), TypeError),
    (lambda: sm.tree([-1.0]), TypeError),
    (lambda: sm.select([[[0]]]), ValueError),
    (lambda: sm.select([[[[0.5]]]]), TypeError),
    (lambda: sm.select([[[[True]]]]), TypeError),
    (lambda: sm.select([[[[0]]]], 0), ValueError),
    (lambda: sm.select([[[[0]]]], 4, 1.0), TypeError),
    (lambda: ~sm.select([[[[0]]]]), ValueError),
    (lambda: sm.select([[[[0]]]]) | sm.causal(), ValueError),
    (lambda: sm.causal() | (sm.causal() & sm.select([[[[0]]]])), ValueError),
    (lambda: sm.select([[[[0]]]]) & sm.select([[[[0]]]]), ValueError),
    (lambda: sm.per_head([sm.select([[[[0]]]])]), ValueError),
    (lambda: sm.documents(cu_seqlens=[0, 1], each=sm.select([[[[0]]]])), ValueError),
    (lambda: sm.per_head([]), ValueError),
    (lambda: sm.per_head([3]), TypeError),
    (lambda: sm.per_head([sm.per_head([None])]), ValueError),
]


@pytest.mark.parametrize(("make", "error"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(make, error) -> None:
    with pytest.raises(error, match=r"."):
        make()


REFUSED = [
    (lambda: sm.per_head(sm.causal()), TypeError, "per_head takes a list of masks, .* got a Mask"),
    (lambda: sm.per_head(2), TypeError, "per_head takes a list of masks, .* got a int"),
    (
        lambda: sm.padding([1.0, 0.0]),
        TypeError,
        r"has dtype float64, expected a boolean array; .* mask\.padding\(~key_padding_mask\)",
    ),
    (lambda: sm.padding([[1, 2]]), ValueError, "tokens runs from 1 to 2, expected booleans, or integers 0 and 1"),
    (
        lambda: sm.padding([[1, 0], [0, 0]]),
        ValueError,
        r"sequence 1 has no token; .* mask\.padding\(~key_padding_mask\)",
    ),
    (lambda: sm.padding([[1, 1, 1], [1, 0, 1]]), ValueError, "between the tokens of sequence 1, .* columns"),
    (
        lambda: sm.documents([3, 3, 4, 0, 0]),
        ValueError,
        r"after index 2; .*Where 0 .*where\(ids == 0, ids\.max\(\) \+ 1",
    ),
    (lambda: sm.documents([[5, 6], [7, -1]]), ValueError, "Where -1 marks padding"),
    (lambda: sm.documents([3, 0, 4, 0]), ValueError, "so that it never does$"),
    (lambda: sm.documents(cu_seqlens=[0, 4, 0]), ValueError, "so that it never does$"),
    (
        lambda: sm.documents(position_ids=[[0, 1], [0, 2]]),
        ValueError,
        r"has 2 at index \[1, 1\], expected 0 or one more",
    ),
    (lambda: sm.documents(position_ids=[0, 1, 1]), ValueError, "padding may have position 0"),
    (lambda: sm.documents(position_ids=[-1, 0]), ValueError, "has -1"),
    (lambda: sm.ranges([2], [1]), ValueError, "row 0 is given keys from 2 to 1, .* the row sees no key"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_cure(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


def test_the_cure_for_padding_behind_documents() -> None:
    ids = np.array([3, 3, 4, 0, 0])
    tokens = ids != 0
    mask = sm.documents(np.where(ids == 0, ids.max() + 1, ids))
    allowed = (mask & sm.padding(tokens)).evaluate(1, 1, 5, 5)[0, 0]
    assert np.array_equal(allowed, (ids[:, None] == ids) & tokens)
    assert np.array_equal(mask.evaluate(1, 1, 5, 5)[0, 0], ids[:, None] == ids)


MISFITS = [
    (sm.documents([0, 1]), "ids"),
    (sm.documents([0, 1], [0, 1]), "ids_q"),
    (sm.documents([0, 1, 1], [0, 1]), "ids_k"),
    (sm.keys([1, 2, 3]), "keys"),
    (sm.causal([1, 2, 3]), "causal"),
    (sm.tiles([[1, 0]], 2), "tiles"),
    (sm.dense([[1, 0]]), "dense"),
    (sm.tree([[-1]] * 3), "tree"),
    (sm.tree([-1] * 30), "30 nodes"),
    (sm.per_head([None, None, None]), "per_head"),
    (sm.documents(cu_q=[0, 1], cu_k=[0, 1, 2]), "cu_k"),
    (sm.documents(cu_seqlens=np.zeros((3, 2), int)), "cu_seqlens"),
    (sm.global_tokens(np.zeros((3, 2), int)), "global_tokens"),
    (sm.columns([0, 1, 1]), "start"),
    (sm.columns(stop=np.zeros((3, 5), int)), "stop"),
    (sm.ranges([0, 1, 1, 2, 2]), "start"),
    (sm.padding([1, 1, 0]), "tokens"),
    (sm.select(np.zeros((2, 1, 1, 1), int), 1, 2), "indices"),
    (sm.select(np.zeros((3, 1, 3, 1), int)), "indices"),
]


@pytest.mark.parametrize(("mask", "word"), MISFITS, ids=range(len(MISFITS)))
def test_arrays_that_do_not_fit(mask, word) -> None:
    from saccade.mask.lowering import lower

    for use in (lambda: mask.check(2, 3, 5, 2), lambda: mask.evaluate(2, 2, 3, 5), lambda: lower(mask, 2, 2, 3, 5)):
        with pytest.raises(ValueError, match=word):
            use()


@pytest.mark.parametrize(
    "mask",
    [sm.keys(9), sm.keys([1, 9]), sm.prefix([6, 1]), sm.keys(2, 6), sm.global_tokens([5]), sm.global_tokens([-1]),
     sm.documents(cu_seqlens=[0, 9]), sm.documents(cu_q=[0, 4], cu_k=[0, 5])],
    ids=str,
)  # fmt: skip
def test_contents_out_of_range(mask) -> None:
    with pytest.raises(ValueError, match="expected"):
        mask.check(2, 3, 5)


@pytest.mark.parametrize("sizes", [(-1, 1, 2, 2), (1, 1, -2, 2), (1, 1, 2, -3)])
def test_negative_sizes(sizes) -> None:
    B, Hq, Tq, Tk = sizes
    for use in (lambda: sm.causal().evaluate(*sizes), lambda: sm.causal().check(B, Tq, Tk, Hq)):
        with pytest.raises(ValueError, match=f"{min(sizes)} given, expected an integer >= 0"):
            use()


def test_sizes_that_are_no_integers() -> None:
    with pytest.raises(TypeError, match=r"Tq is an integer, got 4\.5"):
        sm.causal().evaluate(1, 1, 4.5, 4)
