"""Ring attention compared with one process: every layout, mask and grouping of heads, and the number of messages."""

from __future__ import annotations

import itertools

import numpy as np
import on_gpus
import pytest
import torch
from cases import ALL_MASKS, MASKS, MORE_MASKS, Case, all_errors, messages, places
from world import world

WORLDS = (1, 2, 3, 4, 8)
LAYOUTS = ("contiguous", "zigzag", "striped")
HEADS = ((4, 4), (4, 2), (4, 1))


def runs(size: int, T: int) -> list[list[tuple[int, int, int]]]:
    """A layout of affine runs of unequal length and step; the second rank holds nothing."""
    if size == 1:
        return [[(1, 2, T // 2), (0, 2, T - T // 2)]]
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    a = T // 3
    shares[0] = [(0, 2, -(-a // 2)), (a, 1, 2)]
    shares[-1] += [(1, 2, a // 2), (a + 2, 3, -(-(T - a - 2) // 3))]
    middle = 2 % size
    shares[middle] += [(a + 3, 3, -(-(T - a - 3) // 3)), (a + 4, 3, -(-(T - a - 4) // 3))]
    return shares


def close(size: int, cases: list[Case]) -> None:
    for rank in world(size).run(all_errors, cases):
        for case, found in zip(cases, rank, strict=True):
            assert max(found.values()) < 1e-12, (case, found)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", WORLDS)
def test_beside_one_process(mask: str, size: int):
    close(size, [Case(layout, mask, *heads) for layout, heads in itertools.product(LAYOUTS, HEADS)])


@pytest.mark.sample(10)
@pytest.mark.parametrize("mask", MORE_MASKS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_other_mask(mask: str, size: int):
    close(size, [Case(layout, mask) for layout in LAYOUTS])


@pytest.mark.parametrize("size", WORLDS)
def test_lists_of_runs(size: int):
    close(size, [Case(runs(size, 41), mask, T=41) for mask in ALL_MASKS])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_lengths_and_options(size: int):
    some = [Case(layout, "causal", T=T) for layout in LAYOUTS for T in (1, size - 1, 2 * size, 64)]
    options = [Case("zigzag", "window", options=(("scale", 0.3), ("softcap", 2.0)))]
    sinks = [Case(layout, mask, sinks=True) for layout in LAYOUTS for mask in ("causal", "nothing")]
    close(size, some + options + sinks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_numbers_by_the_rule(dtype: str):
    for layout, mask in (("zigzag", "causal"), ("striped", "window + global")):
        case = Case(layout, mask, T=97, D=16, dtype=dtype)
        assert world(4).run(on_gpus.compare, case, torch.device("cpu")) == [[]] * 4


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_messages(size: int):
    """P - 1 forward; back the keys once more, and their gradients from the rank after their own round to it."""
    for layout in LAYOUTS:
        counts = world(size).run(messages, Case(layout, "full", T=48))
        assert counts == [(size - 1, 3 * (size - 1))] * size
    # a causal mask: rank r's keys are seen by those behind it alone
    counts = world(size).run(messages, Case("contiguous", "causal", T=48))
    assert sum(forward for forward, _ in counts) == size * (size - 1) // 2
    for layout in ("zigzag", "striped"):
        assert [n for n, _ in world(size).run(messages, Case(layout, "causal", T=48))] == [size - 1] * size


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_window_stops_the_ring(size: int):
    T = 64
    at = places("contiguous", size, T)
    # a window of T // 5 keys before: as many ranks behind as hold any of them
    needed = sum(any(at[x][0] - T // 5 <= p for p in at[y]) for y in range(size) for x in range(y + 1, size))
    counts = world(size).run(messages, Case("contiguous", "window", T=T))
    assert sum(n for n, _ in counts) == needed < size * (size - 1) // 2
    assert np.max([n for n, _ in counts]) <= -(-(T // 5) // (T // size)) + 1
