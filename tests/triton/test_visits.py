"""Which key tiles 64 rows compute in the Hopper forward, by the kernel's own functions on NumPy's numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from saccade.backends.triton.hopper import masking
from saccade.mask import causal, chunked, documents, window

ROWS = 64


@pytest.fixture
def visits_of(monkeypatch):
    numbers = SimpleNamespace(
        cdiv=lambda a, b: -(-a // b),
        minimum=min,
        maximum=max,
        where=lambda test, a, b: a if test else b,
        constexpr=None,
    )
    monkeypatch.setattr(masking, "gl", numbers)
    return masking.visits_of.fn


def seen_by(lo, hi, first):
    # as the kernel reads it, from the keys [lo, hi) of every row
    at = slice(first, first + ROWS)
    lo, hi = lo[at], hi[at]
    return masking.Seen(lo[0], hi[-1], lo[-1], hi[0], lo, hi)


def computed(visits, BN):
    # (key tile, whether it is tested) in the kernel's order
    yield visits.first, visits.test
    yield from ((j, True) for j in range(visits.begin, visits.low, BN))
    yield from ((j, False) for j in range(visits.low, visits.high, BN))
    yield from ((j, True) for j in range(visits.high, visits.end, BN))


def masks(rng, T):
    cuts = np.unique(np.concatenate([[0, T], rng.integers(1, T, rng.integers(0, 12))]))
    packed = documents(cu_seqlens=cuts)
    yield from (
        packed,
        packed & causal(),
        packed & window(100, 0),
        packed & window(5, 70),
        packed & causal() & chunked(96),
    )
    yield from (causal(), window(int(rng.integers(0, 300)), int(rng.integers(0, 200))))


@pytest.mark.parametrize(("BM", "BN"), [(192, 128), (128, 128), (64, 64), (128, 64)])
def test_rows_sum_exactly_the_keys_they_see(visits_of, BM, BN):
    rng = np.random.default_rng([BM, BN])
    untested = 0
    for _ in range(30):
        T = int(rng.integers(1, 1000))
        for mask in masks(rng, T):
            sees = mask.evaluate(1, 1, T, T)[0, 0]
            lo = sees.argmax(1)
            hi = T - sees[:, ::-1].argmax(1)
            for tile in range(0, T, BM):
                begin, end = lo[tile], hi[min(tile + BM, T) - 1]
                begin -= (begin % BN) * int(rng.integers(0, 2))
                for first in range(tile, min(tile + BM, T), ROWS):
                    visits = visits_of(begin, end, seen_by(lo, hi, first), BN)
                    at = slice(first, min(first + ROWS, T))
                    summed = np.zeros((at.stop - first, T + BN), np.int64)
                    for n, (j, test) in enumerate(computed(visits, BN)):
                        assert j == visits.first + n * BN
                        summed[:, j : j + BN] += sees_of(sees, at, j, BN) if test else 1
                        untested += not test
                    np.testing.assert_array_equal(summed[:, :T], sees[at])
                    assert visits.first == begin + visits.before * BN
                    assert visits.before + n + 1 + visits.behind == -(-(end - begin) // BN)
    assert untested


def sees_of(sees, at, j, BN):
    found = np.zeros((at.stop - at.start, BN), np.int64)
    part = sees[at, j : j + BN]
    found[:, : part.shape[1]] = part
    return found
