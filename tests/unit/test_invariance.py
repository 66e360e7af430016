"""`deterministic="batch"`: what is refused, where sequences start, and plans that do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import saccade
from saccade import Unsupported, backends
from saccade import mask as masks
from saccade.invariance import not_invariant
from saccade.mask import Mask, causal, documents, padding, window
from saccade.mask.sequences import sequences
from saccade.plan import Limits, Plan, make_plan
from saccade.plan_parts import Part
from saccade.problem import Problem, Scores

PLAIN = Problem(1, 256, 256, 4, 4, 64, 64, scores=Scores(scale=0.1), deterministic="batch")
RIGHT, LEFT = np.array([[1, 1, 1, 0], [1, 1, 0, 0]]), np.array([[0, 1, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize("value", ["rows", "True", "", None, 1, 0, b"batch", ["batch"]])
@pytest.mark.parametrize("name", ["attention", "attention_backward", "decode", "paged_attention"])
def test_another_value_is_refused(name: str, value: Any) -> None:
    x = np.zeros((1, 4, 2, 8), np.float32)
    cache = saccade.KVCache(1, 4, 2, 8)
    cache.append(x, x)
    pages = saccade.PagedKVCache(2, 4, 2, 8)
    pages.append([of := pages.add()], x[0], x[0])
    calls: dict[str, Any] = {
        "attention": lambda: saccade.attention(x, x, x, deterministic=value),
        "attention_backward": lambda: saccade.attention_backward(x, x, x, x, x, x[..., 0], deterministic=value),
        "decode": lambda: saccade.decode(x, cache, deterministic=value),
        "paged_attention": lambda: saccade.paged_attention(x[0], pages.view([of]), deterministic=value),
    }
    with pytest.raises((TypeError, ValueError), match='expected True, False or "batch"'):
        calls[name]()


@pytest.mark.parametrize("backend", ["webgpu", "metal"])
def test_other_backends_refuse(backend: str) -> None:
    problem = replace(PLAIN, device="webgpu" if backend == "webgpu" else "mlx")
    reasons = backends.lacking(backends.load(backend), problem)
    assert any('deterministic="batch" is not computed here' in reason for reason in reasons)


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"scores": Scores(dropout=0.5)}, "with dropout: its pattern"),
        ({"scores": Scores(gates=True)}, "with gates: they are sums"),
        ({"mask": causal() & masks.strided(4)}, "with strided: the plan"),
        ({"mask": masks.dilated(3, 2)}, "with dilated: the plan"),
        ({"mask": causal() | documents(cu_seqlens=[0, 9, 256])}, r"with documents inside \|"),
        ({"mask": ~documents(np.arange(256) // 9)}, r"with documents inside \|"),
        ({"mask": causal() | padding(np.ones(256, bool))}, r"with padding inside \|"),
    ],
)
def test_what_depends_on_the_batch_is_refused(more: dict[str, Any], reason: str) -> None:
    problem = replace(PLAIN, **more)
    with pytest.raises(Unsupported, match=reason):
        backends.choose(problem)
    assert not_invariant(replace(problem, deterministic=True)) == []


def test_selected_keys_are_refused() -> None:
    problem = replace(PLAIN, mask=masks.select(np.zeros((1, 4, 1, 1), np.int64), 64, 256))
    with pytest.raises(Unsupported, match='selected keys with deterministic="batch"'):
        backends.choose(problem)


@pytest.mark.parametrize(
    "mask, sizes, expected",
    [
        (None, (2, 5, 7), (None, [0], [0], [5], [7])),
        (causal(), (2, 5, 7), (None, [0], [0], [5], [7])),
        (documents(cu_seqlens=[0, 3, 7]), (1, 7, 7), (None, [0, 3], [0, 3], [3, 4], [3, 4])),
        # the last five rows of seven
        (documents(cu_seqlens=[0, 3, 7]) & causal(), (1, 5, 7), (None, [0, 1], [0, 3], [1, 4], [3, 4])),
        (documents(cu_seqlens=[0, 3, 7], each=causal()), (2, 7, 7), (None, [0, 3], [0, 3], [3, 4], [3, 4])),
        (documents(cu_q=[0, 2, 3], cu_k=[0, 4, 9]), (1, 4, 9), (None, [0, 2, 3], [0, 4, 0], [2, 1, 1], [4, 5, 0])),
        (documents([[0, 0, 1], [0, 1, 1]]), (2, 3, 3),
         ([0, 0, 1, 1], [0, 2, 0, 1], [0, 2, 0, 1], [2, 1, 1, 2], [2, 1, 1, 2])),
        # lengths and padding to the right move no start
        (padding(RIGHT), (2, 4, 4), (None, [0], [0], [4], [4])),
        (masks.keys([3, 5]) & causal(), (2, 2, 5), (None, [0], [0], [2], [5])),
        (padding(LEFT), (2, 4, 4), ([0, 0, 1], [0, 1, 0], [1, 1, 0], [1, 3, 4], [3, 3, 4])),
        (causal(), (1, 0, 3), (None, [0], [0], [0], [3])),
    ],
)  # fmt: skip
def test_where_sequences_start(mask: Mask | None, sizes: tuple[int, int, int], expected: tuple[Any, ...]) -> None:
    assert tuple(x if x is None else x.tolist() for x in sequences(mask, *sizes)) == expected


def plan_of(B: int, Tq: int, Tk: int, mask: Mask | None, limits: Limits, Hk: int = 2) -> Plan:
    problem = Problem(B, Tq, Tk, 4, Hk, 64, 64, mask=mask, scores=Scores(scale=0.1), deterministic="batch")
    return make_plan(problem, limits)


@pytest.mark.parametrize("B, Tq, Tk", [(1, 1, 1), (1, 1, 9000), (64, 1, 9000), (3, 8, 500), (1, 700, 700)])
def test_ranges_and_owners_are_fixed(B: int, Tq: int, Tk: int) -> None:
    limits = Limits("test")
    plan = plan_of(B, Tq, Tk, None, limits)
    assert plan.split_keys in (0, limits.split_least)
    assert (plan.split_keys > 0) == (Tq <= limits.few_queries and (Tq == 1 or Tk >= limits.split_from))
    # owners beyond the first tiles would add zeros
    assert plan.owners == min(8, plan.parts[0].n_tiles)


def rows_of(part: Part, tile: int) -> dict[int, tuple[int, list[list[int]]]]:
    """For each row, the first key of its sequence, and the segments of its tile relative to it."""
    rows: dict[int, tuple[int, list[list[int]]]] = {}
    for c, (start, count) in enumerate(zip(part.q_start, part.nq, strict=True)):
        for t in range(count):
            at = c * part.n_tiles + t // tile
            first, last = part.ranges.ptr[at : at + 2]
            rows[int(start) + t] = int(part.k_start[c]), part.ranges.seg[first:last].tolist()
    return rows


def test_a_document_has_the_plan_that_it_has_alone() -> None:
    limits, cu = Limits("test"), [0, 70, 71, 400, 530]
    packed = rows_of(plan_of(1, 530, 530, causal() & window(99, 0) & documents(cu_seqlens=cu), limits).parts[0], 64)
    for start, stop in zip(cu, cu[1:], strict=False):
        alone = rows_of(plan_of(1, stop - start, stop - start, causal() & window(99, 0), limits).parts[0], 64)
        for t, (first, segments) in alone.items():
            assert first == 0
            assert packed[start + t] == (start, segments)
