"""The lowered form against the expression's own predicate, and what it must look like."""

from __future__ import annotations

import random
import time
import tracemalloc
from functools import reduce
from operator import and_, or_

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade import mask as sm
from saccade.mask import forms
from saccade.mask.lowering import lower, offset_of
from saccade.mask.size import TooManyBands
from saccade.testing.masks import MaskCase, inside, random_case

from .plans import lowered_dense


def compare(case: MaskCase) -> bool:
    """Whether the mask could be lowered; raises AssertionError if it then allows something else."""
    mask, B, Hq, Tq, Tk = case
    try:
        heads = lower(mask, B, Hq, Tq, Tk)
    except TooManyBands:
        return False
    assert np.array_equal(lowered_dense(heads, B, Tq, Tk), case.allowed()), f"{case}"
    for m in heads.masks:
        assert m.nb <= forms.MAX_BANDS
        assert len(m.rows) <= forms.MAX_ROWS
        assert len(m.grids) <= forms.MAX_GRIDS
        b, t, j = np.ogrid[:B, :Tq, :Tk]
        assert np.array_equal(m.transpose().test(j, t, b), m.test(t, j, b))
        assert np.array_equal(m.transpose().transpose().test(t, j, b), m.test(t, j, b))
    return True


CONSTRUCTORS = {
    "full": lambda Tq, Tk: sm.full(),
    "causal": lambda Tq, Tk: sm.causal(),
    "causal-offset": lambda Tq, Tk: sm.causal(-1),
    "causal-ragged": lambda Tq, Tk: sm.causal([0, 3]),
    "window": lambda Tq, Tk: sm.window(2, 1),
    "window-left": lambda Tq, Tk: sm.window(1),
    "window-offset": lambda Tq, Tk: sm.window(0, 2, 1),
    "documents": lambda Tq, Tk: sm.documents(np.arange(Tk) // 3),
    "documents-batch": lambda Tq, Tk: sm.documents(np.arange(Tk) // np.array([[2], [4]])),
    "documents-two": lambda Tq, Tk: sm.documents(np.arange(Tq) // 2, np.arange(Tk) // 3),
    "packed": lambda Tq, Tk: sm.documents(cu_seqlens=[0, Tk // 3, max(0, Tk - 1)]),
    "packed-two": lambda Tq, Tk: sm.documents(cu_q=[0, Tq // 2, Tq], cu_k=[Tk // 4, Tk // 2, Tk]),
    "each": lambda Tq, Tk: sm.documents(cu_seqlens=[0, Tk // 2, Tk], each=sm.causal() & sm.window(2)),
    "each-strided": lambda Tq, Tk: sm.documents(cu_q=[0, Tq // 2, Tq], cu_k=[0, Tk // 3, Tk], each=sm.strided(2)),
    "each-chunked": lambda Tq, Tk: sm.documents(cu_seqlens=[0, Tk // 3, Tk], each=~sm.chunked(2)),
    "keys": lambda Tq, Tk: sm.keys(Tk // 2),
    "keys-batch": lambda Tq, Tk: sm.keys([Tk // 3, Tk]) & sm.causal(),
    "keys-between": lambda Tq, Tk: sm.keys([0, Tk // 2], Tk) & sm.dilated(1, 2),
    "prefix": lambda Tq, Tk: sm.prefix([min(2, Tk), 0]),
    "global": lambda Tq, Tk: sm.global_tokens(2),
    "global-runs": lambda Tq, Tk: sm.global_tokens([0, 2, 3]),
    "global-list": lambda Tq, Tk: sm.global_tokens([0, 2, 4, 6]),
    "global-batch": lambda Tq, Tk: sm.keys([Tk // 2, Tk]) & sm.global_tokens([[0, 1], [1, 3]]),
    "columns": lambda Tq, Tk: sm.columns(np.arange(Tk) % 3, np.arange(Tk) // np.array([[3], [2]]) + 2),
    "columns-open": lambda Tq, Tk: sm.columns(stop=np.arange(Tk) // 2) & sm.causal(),
    "strided": lambda Tq, Tk: sm.strided(3, 2),
    "dilated": lambda Tq, Tk: sm.dilated(1, 3),
    "chunked": lambda Tq, Tk: sm.chunked(3),
    "tiles": lambda Tq, Tk: sm.tiles(np.arange(-(-Tq // 2) * -(-Tk // 3)).reshape(-(-Tq // 2), -1) % 2 == 0, (2, 3)),
    "dense": lambda Tq, Tk: sm.dense(np.arange(2 * Tq * Tk).reshape(2, Tq, Tk) % 3 == 0),
    "tree": lambda Tq, Tk: sm.tree(np.arange(min(Tk, 7)) // 2 - 1),
    "tree-runs": lambda Tq, Tk: sm.tree(np.arange(Tk) // 3 - 1) & sm.keys([Tk // 2, Tk]),
    "tree-batch": lambda Tq, Tk: ~sm.tree(np.minimum([np.arange(Tk) - 1, np.arange(Tk) // 2], np.arange(Tk) - 1)),
    "per-head": lambda Tq, Tk: sm.per_head([sm.causal(), sm.strided(2)]) & ~sm.prefix(1),
    "band-minus-band": lambda Tq, Tk: sm.window(3, 3) & ~sm.window(1, 1),
    "two-strides": lambda Tq, Tk: sm.strided(2) & ~sm.strided(3),
    "longformer": lambda Tq, Tk: (sm.window(1, 1) | sm.global_tokens(1)) & sm.keys(Tk),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_small_shape(name) -> None:
    for Tq in range(8):
        for Tk in range(8):
            if "tiles" in name and not Tq:
                continue
            mask = CONSTRUCTORS[name](Tq, Tk)
            assert compare(MaskCase(mask, 2, 2, Tq, Tk))
            # the complement of two runs of tokens is nine blocks
            assert compare(MaskCase(~mask, 2, 2, Tq, Tk)) or name == "global-batch"


@given(st.randoms(use_true_random=False))
def test_random_expressions(r) -> None:
    compare(random_case(r))


def test_many_random_expressions(seed) -> None:
    r = random.Random(seed)
    refused = sum(not compare(random_case(r)) for _ in range(3000))
    assert refused < 30


def test_random_masks_inside_documents(seed) -> None:
    r = random.Random(seed)
    for _ in range(600):
        Tq, Tk, parts = r.randint(0, 8), r.randint(0, 9), r.randint(1, 4)
        cu_q = [sorted(r.randint(0, Tq) for _ in range(parts)) for _ in range(2)]
        cu_k = sorted(r.randint(0, Tk) for _ in range(parts))
        compare(MaskCase(sm.documents(cu_q=cu_q, cu_k=cu_k, each=sm.parse(inside(r, 3))), 2, 1, Tq, Tk))


BANDS = [
    (sm.causal() & sm.window(3, 0), 1),
    (sm.causal() | ~sm.causal(), 1),
    (sm.causal() & ~sm.causal(), 0),
    (sm.causal() | sm.window(3, 0), 1),
    (sm.window(3, 3) & ~sm.window(1, 1), 2),
    (sm.strided(2) | sm.strided(2, 1), 1),
    (sm.strided(2) & sm.strided(2, 1), 0),
    (sm.strided(2) & sm.strided(3), 1),
    (sm.strided(4) | sm.strided(2), 1),
    (sm.documents([0] * 8 + [1] * 8) | ~sm.documents([0] * 8 + [1] * 8), 2),
    (sm.global_tokens([0, 1, 2, 9]), 4),
    (sm.keys(0, 4) | sm.keys(4, 16), 1),
    (sm.keys(0) | sm.prefix(0), 0),
]


@pytest.mark.parametrize(("mask", "bands"), BANDS, ids=[str(b[0])[:60] for b in BANDS])
def test_simplification(mask, bands) -> None:
    assert lower(mask, 1, 1, 16, 16).masks[0].nb == bands


def test_documents_under_a_union_keep_their_band() -> None:
    # rows are and-ed with their own band, not with every band
    mask = (sm.documents(np.arange(12) // 4) & sm.causal()) | sm.global_tokens(1)
    lowered = lower(mask, 1, 1, 12, 12).masks[0]
    assert len(lowered.rows) == 1
    assert sorted(lowered.uses[:, forms.ROWS_IN].tolist()) == [0, 0, 1]


def test_rows_inside_one_band_are_merged() -> None:
    mask = sm.documents(np.arange(12) // 4) & sm.chunked(3) & sm.causal()
    lowered = lower(mask, 1, 1, 12, 12).masks[0]
    assert (lowered.nb, len(lowered.rows)) == (1, 1)
    assert lowered.rows[0].monotone


def test_one_query_sees_a_causal_cache_without_an_element_test() -> None:
    band = lower(sm.causal(), 1, 1, 1, 100).masks[0].bands[0, 0].tolist()
    assert band[:2] == [-forms.INF, forms.INF]


def test_no_mask() -> None:
    heads = lower(None, 3, 4, 5, 6)
    assert heads.head.tolist() == [0, 0, 0, 0]
    assert lowered_dense(heads, 3, 5, 6).all()


def test_equal_heads_share_one_form() -> None:
    mask = sm.per_head([sm.causal(), sm.window(1), sm.causal(), None]) & sm.prefix(3)
    heads = lower(mask, 1, 4, 5, 5)
    assert len(heads.masks) == 3
    assert heads.head.tolist() == [0, 1, 0, 2]


def test_too_many_bands_say_how_many_and_the_way_out() -> None:
    mask = sm.window(0, 0)
    for n in range(1, 10):
        mask = mask | (sm.causal(-3 * n) & ~sm.causal(-3 * n - 1))
    with pytest.raises(ValueError, match=r"10 bands.*tiles"):
        lower(mask, 1, 1, 64, 64)
    grids = sm.dense(np.eye(4) > 0)
    for n in range(1, 5):
        grids = grids & sm.dense(np.eye(4, k=n) > 0)
    with pytest.raises(ValueError, match="grids"):
        lower(grids, 1, 1, 4, 4)


def _all_of(parts: list[sm.Mask]) -> sm.Mask:
    return reduce(and_, parts)


def _any_of(parts: list[sm.Mask]) -> sm.Mask:
    return reduce(or_, parts)


EXPLODING = {
    "two strides left out": sm.parse("~strided(61) & ~strided(59)"),
    "three strides left out": sm.parse("~strided(251) & ~strided(241) & ~strided(239)"),
    "four strides left out": sm.parse("~strided(251) & ~strided(241) & ~strided(239) & ~strided(233)"),
    "intervals and windows": _any_of([sm.keys(99 * n, 99 * n + 50) for n in range(48)])
    & _any_of([sm.window(50, 0, 80 * n) for n in range(48)]),
    "many intervals": _any_of([sm.keys(10 * n, 10 * n + 5) for n in range(400)]),
    "many intervals left out": _all_of([~sm.keys(10 * n, 10 * n + 5) for n in range(400)]),
    "many strides": _any_of([sm.strided(2 * n + 3) for n in range(400)]),
    "many strides left out": _all_of([~sm.strided(n + 3) for n in range(400)]),
    "a stride in documents": sm.documents(
        cu_q=np.arange(0, 4097, 16), cu_k=np.arange(0, 2049, 8), each=sm.strided(1000)
    ),
}


@pytest.mark.parametrize("name", EXPLODING)
def test_a_mask_whose_bands_explode_is_refused_before_they_are_built(name) -> None:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        with pytest.raises(TooManyBands):
            lower(EXPLODING[name], 1, 1, 4096, 4096)
        seconds.append(time.process_time() - start)
    # a quiet core takes at most 50 ms; in a process of many tests, a collection of garbage can take longer than that
    assert min(seconds) < 0.5
    tracemalloc.start()
    with pytest.raises(TooManyBands):
        lower(EXPLODING[name], 1, 1, 4096, 4096)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_a_stride_beyond_every_length() -> None:
    mask = sm.strided(65537, 3) & sm.strided(65539, 3)
    assert lower(mask, 1, 1, 9, 9).masks[0].bands[0].tolist() == [[3, 3, 0, 9, 0, 9, 1, 0]]
    assert compare(MaskCase(mask | sm.strided((1 << 30) - 1), 1, 1, 9, 9))
    assert compare(MaskCase(sm.window(1 << 40, 1 << 50, 1 << 45) | sm.causal(-(1 << 60)), 1, 1, 4, 4))


def test_offset_of() -> None:
    assert offset_of(None, 3, 5) == 2
    assert offset_of(sm.causal(7), 3, 5) == 2
    assert offset_of(sm.keys(4), 3, 5) == 1
    assert sm.keys(4).offset(1, 3, 5) == 1
    assert offset_of(sm.causal() & sm.keys([4, 2]) & sm.keys(3), 3, 5).tolist() == [0, -1]
    assert offset_of(sm.causal() | sm.keys(4), 3, 5) == 2


def test_results_are_kept_by_version() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([0, 0, 1, 1])
    mask = sm.documents(ids)
    first = lower(mask, 1, 1, 4, 4)
    assert lower(mask, 1, 1, 4, 4) is first
    ids[1] = 1
    second = lower(mask, 1, 1, 4, 4)
    assert second.masks[0].rows[0].lo.tolist() == [[0, 1, 1, 1]]
    with torch.inference_mode():
        free = sm.documents(torch.tensor([0, 1]))
        # an inference tensor has no version, but contents
        assert lower(free, 1, 1, 2, 2) is lower(free, 1, 1, 2, 2)
