"""Masks of numbers near the ends of their dtypes, of other kinds of arrays, and of tensors before any check."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import mask as sm
from saccade.mask import Mask
from saccade.mask.lowering import lower
from saccade.mask.text import DEEPEST
from saccade.mask.trees import depths

U64 = np.uint64
MOST = 2**64 - 1


def matrix(rows: object) -> np.ndarray:
    # the constructor warns that the class is old
    return np.atleast_2d(np.array(rows)).view(np.matrix)


def pairs(mask: Mask, B: int = 1, T: int = 4) -> np.ndarray:
    """The allowed pairs [B, T, T], which the predicate and the lowered form agree on."""
    allowed = np.broadcast_to(mask.evaluate(B, 1, T, T)[:, 0], (B, T, T))
    lowered = lower(mask, B, 1, T, T).masks[0]
    t, j = np.ogrid[:T, :T]
    for b in range(B):
        assert np.array_equal(lowered.test(t, j, b), allowed[b])
    return allowed


@pytest.mark.parametrize(
    "make",
    [
        lambda x: sm.columns(stop=x),
        lambda x: sm.ranges(None, x),
        lambda x: sm.documents(x),
        lambda x: sm.documents([0, 1], x),
        lambda x: sm.documents(cu_seqlens=x),
        lambda x: sm.keys(x),
        lambda x: sm.prefix(x),
        lambda x: sm.causal(x),
        lambda x: sm.global_tokens(x),
    ],
)
def test_numbers_that_int64_lacks_are_refused(make) -> None:
    # as int64 they would be negative
    with pytest.raises(ValueError, match=rf"has {MOST}, expected numbers below 2\*\*63"):
        make(np.array([0, MOST], U64))


def test_a_tensor_of_numbers_that_int64_lacks_is_refused() -> None:
    torch = pytest.importorskip("torch")
    mask = sm.columns(stop=torch.from_numpy(np.full(4, MOST, U64)))
    with pytest.raises(ValueError, match=rf"columns: stop has {MOST}"):
        mask.check(1, 4, 4)


def test_ids_of_two_dtypes_are_compared_exactly() -> None:
    # as float64 all of them are equal
    ids = 2**60 + np.arange(4)
    assert np.array_equal(pairs(sm.documents(ids, ids.astype(U64)))[0], np.eye(4, dtype=bool))


def test_a_matrix_is_an_array_of_two_dimensions() -> None:
    lower_half = np.tri(4, dtype=bool)
    blocks = np.kron(np.tri(2), np.ones((2, 2))) == 1
    for mask, allowed in (
        (sm.documents(matrix([0, 0, 1, 1])), np.kron(np.eye(2), np.ones((2, 2))) == 1),
        (sm.columns(matrix([0, 1, 2, 3])), lower_half),
        (sm.dense(matrix(lower_half)), lower_half),
        (sm.tiles(matrix([[1, 0], [1, 1]]), 2), blocks),
        (sm.padding(matrix([0, 1, 1, 1])), np.arange(4) > np.zeros((4, 1))),
    ):
        assert np.array_equal(pairs(mask)[0], allowed), mask


@pytest.mark.parametrize("make", [sm.keys, sm.prefix, sm.global_tokens])
def test_a_negative_count_is_refused_however_it_is_given(make) -> None:
    with pytest.raises(ValueError, match="-3 given, expected an integer >= 0"):
        make(np.array(-3))


@pytest.mark.parametrize("make", [sm.keys, sm.prefix, lambda x: sm.keys(0, x)])
def test_negative_counts_are_refused(make) -> None:
    with pytest.raises(ValueError, match="has -1, expected integers >= 0"):
        make([-1, 5])


@pytest.mark.parametrize("far", [2**31, 2**62, 2**63 - 1, 2**63, 2**64, 2**70])
def test_patterns_that_reach_far_are_unbounded(far: int) -> None:
    half = np.tri(4, dtype=bool)
    first = np.arange(4) < np.array([1, 2])[:, None, None]
    assert np.array_equal(pairs(sm.window(far, 0))[0], half)
    assert pairs(sm.window(None, far)).all()
    assert pairs(sm.dilated(far, 1)).all()
    assert np.array_equal(pairs(sm.prefix(far) & sm.prefix([1, 2]), 2), np.broadcast_to(first, (2, 4, 4)))
    assert np.array_equal(pairs(sm.window(far, 0) & sm.window(3, 0, [0, 0]), 2)[1], half)
    each = sm.documents(cu_seqlens=[0, 2, 4], each=sm.window(far, 0) & sm.global_tokens(far))
    assert np.array_equal(pairs(each)[0], np.kron(np.eye(2), np.tri(2)) == 1)


@pytest.mark.parametrize("offset", [2**61 + 1, -(2**63), 2**70, [2**61 + 1, 0], [-(2**63), 0], np.array(-(2**63))])
def test_offsets_whose_sums_would_overflow_are_refused(offset) -> None:
    for make in (sm.causal, lambda x: sm.window(1, 0, x)):
        with pytest.raises(ValueError, match=r"offset runs from .*, expected -2305843009213693952 to"):
            make(offset)
    assert pairs(sm.causal(2**61)).all()
    assert not pairs(sm.causal([-(2**61)])).any()
    assert pairs(sm.window(2**63, 2**63, [-(2**61), 2**61]), 2).all()


def test_an_offset_in_a_tensor_is_checked_when_it_is_read() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="causal: offset runs from -9223372036854775808"):
        sm.causal(torch.tensor([-(2**63), 0])).check(2, 4, 4)


@pytest.mark.parametrize("parents", [[0], [0, 1, 0], [2, -1, -1], [7, -1]])
def test_a_tensor_that_is_no_tree_is_refused_when_it_is_read(parents: list[int]) -> None:
    torch = pytest.importorskip("torch")
    mask = sm.tree(torch.tensor(parents))
    for read in (lambda: mask.evaluate(1, 1, 4, 4), lambda: mask.draw(4, 4), lambda: depths(torch.tensor(parents))):
        with pytest.raises(ValueError, match="list parents before children"):
            read()
    assert mask._repr_svg_() is None


def test_indices_out_of_range_are_refused_where_they_are_read() -> None:
    mask = sm.select([[[[9]]]], 16, 32)
    with pytest.raises(ValueError, match="indices runs from 9 to 9, expected -1 to 1"):
        mask.evaluate(1, 1, 32, 32)
    assert mask._repr_svg_() is None


@pytest.mark.parametrize("bounds", [[], np.zeros((2, 0), int)])
def test_documents_have_one_bound_more_than_documents(bounds) -> None:
    for name in ({"cu_seqlens": bounds}, {"cu_q": bounds, "cu_k": bounds}):
        with pytest.raises(ValueError, match=r"expected n \+ 1 bounds; \[0\] for none"):
            sm.documents(**name)
    assert not pairs(sm.documents(cu_seqlens=[0])).any()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 4, 0), "draw: size 0 given, expected an integer >= 1"),
        ((4, 4, -1), "draw: size -1 given"),
        ((-1, 4, 9), "draw: Tq is -1, expected 0 to"),
        ((4, 10**20, 9), "draw: Tk is 100000000000000000000, expected 0 to"),
    ],
)
def test_pictures_of_sizes_that_no_mask_has(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sm.causal().draw(*sizes[:2], size=sizes[2])


def test_a_text_is_as_deep_as_every_function_can_read() -> None:
    def nested(levels: int) -> str:
        return "~(causal & " * levels + "full" + ")" * levels

    mask = sm.parse(nested(DEEPEST // 2 - 1))
    assert sm.parse(str(mask)) == mask
    assert mask.draw(4, 4)
    with pytest.raises(ValueError, match=rf"levels of masks inside masks, expected at most {DEEPEST}"):
        sm.parse(nested(190))
    # a chain is flat, however long it is
    chain = sm.parse(" | ".join(["prefix(1)"] * 1500))
    assert len(chain.children) == 1500
    assert sm.parse(str(chain)) == chain


@pytest.mark.parametrize("text", [None, 5, b"causal()", ["causal"], sm.causal()])
def test_only_a_str_is_parsed(text) -> None:
    with pytest.raises(TypeError, match=f"text is {type(text).__name__}, expected a str"):
        sm.parse(text)
