"""The mask algebra: values, text, structure, checks."""

from __future__ import annotations

import gc
import pickle
import random
import re

import numpy as np
import pytest

from saccade import mask as sm
from saccade.mask import Mask, parse
from saccade.mask.text import brief
from saccade.testing.masks import random_case

EACH = [
    sm.full(),
    sm.causal(),
    sm.causal(2),
    sm.causal([1, 3]),
    sm.window(),
    sm.window(3, 0),
    sm.window(None, 2, -1),
    sm.documents([0, 0, 1, 1, 2, 2]),
    sm.documents([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 7]]),
    sm.documents([0, 1, 1, 1], [0, 0, 1, 1, 2, 2]),
    sm.documents(cu_seqlens=[0, 3, 5]),
    sm.documents(cu_seqlens=[0, 3, 5], each=sm.causal()),
    sm.documents(cu_q=[0, 2, 4], cu_k=[0, 3, 6], each=sm.causal() & ~sm.window(1)),
    sm.keys(4),
    sm.keys([2, 5]),
    sm.keys(1, 4),
    sm.keys([0, 1], [3, 6]),
    sm.prefix(2),
    sm.global_tokens(2),
    sm.global_tokens([1, 4]),
    sm.columns([0, 1, 2, 0, 4, -3], [4, 3, 2, 9, 4, 1]),
    sm.columns(stop=[[1, 2, 3, 4, 4, 4], [0, 0, 1, 4, 2, 2]]),
    sm.columns([[0, 1, 1, 2, 3, 3]]),
    sm.ranges([0, 1, 6, -3], [4, 1, 6, 9]),
    sm.ranges(stop=[[1, 2, 3, 4], [0, 0, 1, 6]]),
    sm.padding([0, 1, 1, 1, 1, 0]),
    sm.padding(np.array([[True] * 6, [False] * 4 + [True] * 2])) & sm.causal(),
    sm.documents(position_ids=[0, 1, 2, 0, 0, 1]),
    sm.strided(3),
    sm.strided(3, 1),
    sm.dilated(1, 2),
    sm.chunked(2),
    sm.tiles([[1, 0], [0, 1]], (2, 3)),
    sm.tiles([[[1], [0]], [[1], [1]]], (2, 6)),
    sm.dense(np.tri(4, 6) > 0),
    sm.tree([-1, 0, 0, 2]),
    sm.tree([[-1, 0, 1, 1, -1], [-1, -1, 0, 1, 2]]) & sm.keys([3, 6]),
    sm.per_head([sm.causal(), None]),
    ~(sm.causal() | sm.window(1, 1)) & ~sm.keys(3),
    (sm.causal() & sm.window(2)) | sm.global_tokens(1),
    sm.causal() & (sm.window(2) | sm.prefix(1)) & sm.keys(5),
]


@pytest.mark.parametrize("mask", EACH, ids=repr)
def test_text_structure_and_pickle_round_trip(mask) -> None:
    for twin in (parse(str(mask)), Mask.unflatten(*mask.flatten()), pickle.loads(pickle.dumps(mask))):
        assert twin == mask
        assert hash(twin) == hash(mask)
        assert str(twin) == str(mask)
        assert np.array_equal(twin.evaluate(2, 2, 4, 6), mask.evaluate(2, 2, 4, 6))
    mask.check(2, 4, 6)


def test_random_text_round_trips(seed) -> None:
    r = random.Random(seed)
    for _ in range(300):
        mask = random_case(r).mask
        assert parse(str(mask)) == mask


def test_structure_is_as_documented() -> None:
    mask = sm.causal() & sm.window(1023, 0)
    assert mask.flatten() == ("and(causal(_),window(#,#,_))", [1023, 0], [])
    structure, ints, data = (sm.documents([0, 1]) | sm.keys(3)).flatten()
    assert (structure, ints) == ("or(documents(@,_),keys(_,#))", [3])
    assert data[0].tolist() == [0, 1]


def test_text_reads_names_without_calls() -> None:
    assert parse("causal & window(1023, 0)") == sm.causal() & sm.window(1023, 0)
    assert parse(" ~ (full) ") == ~sm.full()
    assert str(sm.causal() & (sm.prefix(1) | ~sm.keys(2))) == "causal() & (prefix(1) | ~keys(2))"
    assert parse("window(left=3, right=None)") == sm.window(3)


@pytest.mark.parametrize(
    "text",
    [
        "", "causal(", "import os", "__import__('os')", "causal.__class__", "open('x')", "causal() + full()",
        "causal()[0]", "lambda: 0", "causal() and full()", "window(1.5)", "window('a')", "window(*[1])", "window(**{})",
        "causal(1, 2)", "window(width=3)", "nothing()", "1", "-causal()", "tiles(causal(), 2)", "[causal()]",
        "keys(1 if 1 else 2)", "(" * 5000 + ")" * 5000, "~" * 3000 + "causal()", "documents()",
        "prefix(None)", "window(True)",
    ],
)  # fmt: skip
def test_text_refuses_everything_else(text) -> None:
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("causal() &", "a mask is missing after '&' at column 10"),
        ("causal() & ~", "a mask is missing after '~' at column 12"),
        ("(causal() |) & full()", "a mask is missing after '|' at column 11"),
        ("& causal()", "a mask is missing before '&' at column 1"),
        ("causal() && full()", "a mask is missing before '&' at column 11"),
        ("causal((", "'(' at column 8 is never closed: add ')'"),
        ("documents(cu_seqlens=[0, 4)", "')' at column 27 closes no bracket"),
        ("causal)", "')' at column 7 closes no bracket"),
        ("causal() window(1, 2)", "a sign is missing before 'window(1, 2)' at column 10"),
        ("window(255 0)", "a sign is missing before '0)' at column 12"),
        ("window(left=)", "a value is missing after 'left=' at column 8"),
        ("window(left= , right=0)", "a value is missing after 'left=' at column 8"),
        ("window(left=?)", "'?)' at column 13 is no part of a mask"),
        ("x = causal()", "'= causal()' at column 3 is no part of a mask"),
        ("", "it is empty: write full()"),
        ("\ud800", "characters that are not text"),
        ("casual()", "did you mean causal()?"),
        ("full() & windw(3)", "did you mean window()?"),
        ("sliding_window(3)", "did you mean window(n - 1, 0)?"),
        ("chunked()", "needs size: write chunked(size)"),
        ("~(full() & a.b)", "cannot read 'a.b' at column 12"),
        # ast counts bytes
        ("é() & 3", "unknown mask 'é'"), ("window('é') & 3", "cannot read"),
        ("(#é\n   5)", "cannot read '5' at column 8"),
        (f"causal({'9' * 5000})", "an integer of too many digits"),
        (f"causal(-0x{'f' * 5000})", "at column 9 of the mask; expected an integer of at most 40 digits"),
        ("columns(empty(0, 99999999999999999999))", "expected empty(shape) of an array without elements"),
        ("columns(empty(False))", "expected empty(shape) of an array without elements"),
        (f"keys({'[' * 90}{']' * 90})", "stop is a list of too many levels"),
        # at once, although a word is long
        (f"{'a' * 100_000} b", "a sign is missing before 'b'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_text_and_where(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert words in str(error.value)
    assert not re.search("invalid syntax|unknown>|line 1|unmatched|positional argument", str(error.value))


def test_a_mask_has_no_truth_value_and_meets_masks_only() -> None:
    with pytest.raises(TypeError, match="&"):
        bool(sm.causal())
    with pytest.raises(TypeError, match="dense"):
        sm.causal() & np.ones((2, 2), bool)
    assert (~~sm.causal()) == sm.causal()
    assert sm.causal() != 3


def test_chains_are_flat() -> None:
    a, b, c = sm.causal(), sm.window(1), sm.keys(3)
    assert (a & (b & c)).children == ((a & b) & c).children == (a, b, c)
    assert len((a | b | c).children) == 3


def test_arrays_are_copied_and_frozen() -> None:
    ids = np.array([0, 0, 1])
    mask = sm.documents(ids)
    ids[:] = 7
    assert mask.args[0].tolist() == [0, 0, 1]
    with pytest.raises(ValueError):
        mask.args[0][0] = 1
    # what is frozen already is shared
    frozen = mask.args[0]
    assert sm.documents(frozen).args[0] is frozen


def test_text_in_messages_is_short() -> None:
    mask = sm.causal() & sm.documents(np.zeros(100000, int))
    assert brief(mask) == "causal() & documents(<int32[100000]>)"
    assert repr(mask) == str(mask)


def test_patterns_reach_beyond_short_sequences() -> None:
    (sm.prefix(64) | sm.global_tokens(9)).check(2, 3, 5)
    assert sm.prefix(64).evaluate(1, 1, 3, 5).all()


def test_keys_tell_arrays_apart_by_identity() -> None:
    ids = [0, 0, 1]
    a, b = sm.documents(ids), sm.documents(ids)
    assert a == b
    assert a.key != b.key
    assert a.key == Mask.unflatten(*a.flatten()).key
    assert sm.causal().key == sm.causal().key


def test_torch_arrays_are_kept_by_reference() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([0, 0, 1, 1])
    mask = sm.documents(ids) & sm.causal()
    assert mask.flatten()[2][0] is ids
    before = mask.key
    assert np.array_equal(mask.evaluate(1, 1, 4, 4), sm.parse(str(mask)).evaluate(1, 1, 4, 4))
    ids[2] = 0
    assert mask.key != before
    assert mask.evaluate(1, 1, 4, 4)[0, 0, 2, 0]
    assert isinstance(mask.to("numpy").flatten()[2][0], np.ndarray)
    assert isinstance(mask.to("cpu").flatten()[2][0], torch.Tensor)
    assert sm.documents(np.array([0, 1])).to("cpu").flatten()[2][0].tolist() == [0, 1]
    ids[0] = 9
    with pytest.raises(ValueError, match="decreases"):
        mask.check(1, 4, 4)
    hidden = sm.columns(torch.tensor([1, 2]), torch.tensor([2, 1]))
    with pytest.raises(ValueError, match="key 1 is given rows from 2 to 1"):
        hidden.check(1, 4, 2)
    with pytest.raises(TypeError):
        sm.documents(torch.tensor([0.5]))
    assert sm.dense(torch.ones(2, 2, dtype=torch.bool)).evaluate(1, 1, 2, 2).all()


def test_construction_reads_no_device_array() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.zeros(8, dtype=torch.int64, device="meta")
    mask = (sm.documents(ids) | sm.keys(torch.zeros(2, dtype=torch.int32, device="meta"))) & sm.causal()
    assert mask.flatten()[0] == "and(or(documents(@,_),keys(_,@)),causal(_))"
    assert "documents" in repr(mask)
    assert mask == Mask.unflatten(*mask.flatten())


def test_kept_results_go_with_their_arrays() -> None:
    from saccade.mask import lowering

    mask = sm.documents(np.arange(50))
    first = lowering.lower(mask, 1, 1, 50, 50)
    assert lowering.lower(mask, 1, 1, 50, 50) is first
    assert lowering.lower(Mask.unflatten(*mask.flatten()), 1, 1, 50, 50) is first
    gc.collect()
    size = len(lowering._MEMO.table)
    del mask
    gc.collect()
    assert len(lowering._MEMO.table) == size - 1
