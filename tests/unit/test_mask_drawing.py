"""Pictures of masks."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import numpy as np
import pytest

from saccade import mask as sm
from saccade.mask.drawing import cell_states, sizes_of
from saccade.mask.size import TooManyBands
from saccade.testing.masks import random_case


def test_drawing(tmp_path) -> None:
    mask = sm.causal() & sm.window(1, 0)
    assert mask.draw(3, 4) == "██··\n·██·\n··██"
    assert sm.causal().draw(2, 3) == "██·\n███"
    assert sm.per_head([sm.causal(), ~sm.causal()]).draw(2, 2, head=1) == "·█\n··"
    assert sm.causal().draw(128, 128, size=2) == "▒·\n█▒"
    assert sm.keys([1, 2]).draw(1, 2, B=2, batch=0) == "█·"
    for name in ("a.svg", "a.png", "a.txt"):
        (mask | sm.global_tokens([3])).draw(70, 90, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 100
    with pytest.raises(ValueError, match="svg"):
        mask.draw(3, 3, tmp_path / "a.gif")


def test_a_picture_of_an_entry_that_is_not_there() -> None:
    mask = sm.documents(np.zeros((2, 256), int))
    with pytest.raises(ValueError, match="a batch of 2, and B is 1; give B=2"):
        mask.draw(64, 64)
    assert mask.draw(256, 256, B=2, batch=1, size=2) == "██\n██"
    with pytest.raises(ValueError, match="batch is 2, expected 0 to 1"):
        mask.draw(256, 256, B=2, batch=2)
    with pytest.raises(ValueError, match="head is 1, expected 0 to 0"):
        sm.causal().draw(4, 4, head=1)


SIZES = {
    "causal() & window(3, 0)": (None, None, None),
    "causal([1, 2, 3])": (3, None, None),
    "keys([4]) | prefix(2)": (None, None, None),
    "documents([0, 0, 1, 1]) & causal()": (None, None, 4),
    "documents([[0], [1]], [[0, 0], [1, 1]])": (2, 1, 2),
    "documents(cu_seqlens=[0, 7, 9])": (None, None, 9),
    "documents(cu_q=[0, 2], cu_k=[[0, 5], [1, 3]])": (2, 2, 5),
    "~(causal() & global_tokens([[1], [2]]))": (2, None, None),
    "columns([0, 1, 2])": (None, None, 3),
    "ranges(None, [[0, 1]])": (None, 2, None),
    "padding([[1, 0], [1, 1]])": (2, None, 2),
    "tiles([[1, 0, 0]], (3, 5))": (None, 3, 15),
    "dense([[1, 0], [0, 0], [1, 1]])": (None, 3, 2),
    "per_head([causal(), dense([[[1]], [[0]]])])": (2, 1, 1),
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_that_arrays_fix(text: str) -> None:
    assert sizes_of(sm.parse(text)) == SIZES[text]


def picture(mask: sm.Mask) -> list[str]:
    """The lines of text in a notebook's picture, which is XML."""
    text = mask._repr_svg_()
    assert text is not None
    return ["".join(x.itertext()) for x in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]


def test_a_notebook_shows_the_picture_and_says_of_what() -> None:
    assert picture(sm.causal() & ~sm.prefix(2)) == ["causal() & ~prefix(2)", "32 queries, 32 keys"]
    ids = sm.documents(np.zeros((3, 200), int))
    assert picture(ids) == ["documents(<int32[3, 200]>)", "200 queries, 200 keys, a cell is 4 × 4", "entry 0 of 3"]
    heads = sm.per_head([sm.causal(), sm.full()]) & sm.keys([1, 2])
    assert picture(heads)[1:] == ["32 queries, 32 keys", "entry 0 of 2, head 0 of 2"]
    assert "#1f4e79" in str(sm.causal()._repr_svg_())


def test_a_mask_without_a_picture_is_shown_as_text() -> None:
    torch = pytest.importorskip("torch")
    for mask in (
        sm.documents([0, 1]) & sm.documents([0, 1, 1]),
        sm.dense(np.zeros((0, 3), bool)),
        sm.documents(torch.zeros(4, dtype=torch.int64, device="meta")),
    ):
        assert mask._repr_svg_() is None


def test_a_large_drawing_agrees_with_the_predicate(seed) -> None:
    r = random.Random(seed)
    for _ in range(100):
        case = random_case(r)
        if not case.Tq or not case.Tk:
            continue
        try:
            states = cell_states(case.mask, case.Tq, case.Tk, B=case.B, size=3)
        except TooManyBands:
            continue
        allowed = case.allowed()[0, 0]
        cell = -(-max(case.Tq, case.Tk) // 3)
        for (y, x), state in np.ndenumerate(states):
            block = allowed[y * cell : (y + 1) * cell, x * cell : (x + 1) * cell]
            assert state or not block.any()
            assert state < 2 or block.all()
