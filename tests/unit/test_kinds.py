"""The table of constructors is complete, and all other lists of constructors agree with it."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from saccade import mask as sm
from saccade.mask import Mask, algebra, parse, structures
from saccade.mask.kinds import KINDS, Kind
from saccade.mask.lowering import lower
from saccade.testing import fuzz
from saccade.testing.masks import INSIDE, LEAVES, MASKS, TK, TQ, Draw, random_case

from .plans import lowered_dense

DOCS = Path(__file__).resolve().parents[2] / "docs" / "masks.md"
OPERATORS = {"and", "or", "not"}
# its lists have no lowered form; tests/contract/test_select.py has cases of its own
LISTS = {"select"}


def nodes(mask: Mask) -> Iterator[Mask]:
    """A mask and its sub-expressions, except those inside documents."""
    yield mask
    for child in () if mask.kind == "packed" else mask.children:
        yield from nodes(child)


# what constructors make in the catalogue, each alone
ALONE = {
    f"{node.kind}-{name}": node for name, text in MASKS.items() for node in nodes(parse(text)) if node.kind in KINDS
}


def kinds_of(*masks: Mask) -> set[str]:
    return {node.kind for mask in masks for node in nodes(mask)}


def test_a_row_without_a_column_is_an_error() -> None:
    assert not Kind._field_defaults
    with pytest.raises(TypeError, match="on_device"):
        Kind(*KINDS["full"][:-1])


def test_names() -> None:
    constructors = {kind.constructor.__name__: kind.constructor for kind in KINDS.values()}
    others = {"Mask", "from_dense", "parse", "patterns"}
    assert {name: getattr(sm, name) for name in sm.__all__ if name not in others} == constructors
    assert [name for name, kind in KINDS.items() if kind.name != name] == []
    assert set(structures.ARITY) == KINDS.keys() | OPERATORS
    assert {name for name, kind in KINDS.items() if kind.booleans} == algebra.BOOLEANS


def test_the_catalogue_and_the_random_masks_have_every_kind() -> None:
    every = (KINDS.keys() | OPERATORS) - LISTS
    assert kinds_of(*map(parse, MASKS.values())) == every
    assert {mask.kind for mask in ALONE.values()} == KINDS.keys() - LISTS
    r = random.Random(0)
    assert kinds_of(*(random_case(r).mask for _ in range(300))) == every
    # and each line of LEAVES by itself, at sizes of 0 too
    for name, (Tq, Tk) in ((name, sizes) for name in LEAVES for sizes in ((9, 11), (0, 5), (5, 0))):
        draw = Draw(r, 2, Tq, Tk, (name,), small=True)
        parse(draw.leaf()).evaluate(2, 1, Tq, Tk)


def test_the_cases_of_the_fuzz_suite_are_what_they_were() -> None:
    # near misses are listed by number in tests/contract/lacks
    cases = (fuzz.random_case(n) for n in range(300))
    drawn = str([(c.B, c.Hq, c.Tq, c.Tk, c.mask, c.seed, c.bias, c.alibi) for c in cases])
    assert hashlib.sha256(drawn.encode()).hexdigest()[:16] == "c38bfaad0ad96c4a"
    assert {*fuzz.STREAM, *INSIDE} < LEAVES.keys()


@pytest.mark.parametrize("name", ALONE)
def test_columns_agree(name: str) -> None:
    mask = ALONE[name]
    assert parse(str(mask)) == mask
    assert len(mask.args) == len(KINDS[mask.kind].leaves)
    mask.check(2, TQ, TK, 4)
    allowed = mask.evaluate(2, 4, TQ, TK)
    assert np.array_equal(lowered_dense(lower(mask, 2, 4, TQ, TK), 2, TQ, TK), np.broadcast_to(allowed, (2, 4, TQ, TK)))


@pytest.mark.parametrize("name", [name for name, mask in ALONE.items() if mask.has_data])
def test_arrays_of_every_kind_are_checked(name: str) -> None:
    mask = ALONE[name]
    shapes = {array.shape for array in mask.flatten()[2]}
    # bounds of documents, lists of tokens and trees have a length of their own, but numbers that must fit
    if mask.kind in ("packed", "global_tokens", "tree") and all(len(shape) == 1 for shape in shapes):
        with pytest.raises(ValueError, match="expected"):
            mask.check(2, TQ // 2, TK // 2)
        return
    for use in (lambda: mask.check(3, 2 * TQ, 2 * TK), lambda: lower(mask, 3, 1, 2 * TQ, 2 * TK)):
        with pytest.raises(ValueError, match="has shape"):
            use()


def test_docs_show_every_constructor() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [kind.constructor.__name__ for kind in KINDS.values() if f"{kind.constructor.__name__}(" not in text] == []


def test_triton_computes_intervals_of_the_kinds_marked_so() -> None:
    pytest.importorskip("triton")
    on_device = pytest.importorskip("saccade.backends.triton.on_device")
    assert set(on_device.INTERVALS) == {name for name, kind in KINDS.items() if kind.on_device}
    assert set(on_device.INTERVALS) > on_device.INSIDE


def test_a_mask_pickled_by_an_earlier_version() -> None:
    old = (
        b"\x80\x02csaccade.mask.algebra\n_rebuild\nq\x00XF\x00\x00\x00or(and(causal(_),window(#,#,_)),"
        b"per_head(keys(_,#),not(strided(#,#))))q\x01]q\x02(K\x03K\x00K\x02K\x03K\x01e]q\x03\x87q\x04Rq\x05."
    )
    mask = (sm.causal() & sm.window(3, 0)) | sm.per_head([sm.keys(2), ~sm.strided(3, 1)])
    assert pickle.loads(old) == mask
