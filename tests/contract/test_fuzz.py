"""A thousand random configurations from a seed, forward and backward; --seed draws another thousand."""

from __future__ import annotations

import pytest

from saccade.testing.compare import require
from saccade.testing.fuzz import random_case, random_dtype
from saccade.testing.inputs import NEEDLES, make
from saccade.testing.run import verify

PER_TEST = 50
KINDS = ("random", *NEEDLES)


def check(numbers, backend, convert) -> int:
    """How many of these cases have more bands than masks may; all others hold the tolerance rule."""
    refused = 0
    for n in numbers:
        case, dtype, kind = random_case(n), random_dtype(n), KINDS[n % len(KINDS)]
        try:
            require(verify(make(case, dtype, kind=kind), backend, **convert), f"{case} {dtype} {kind}")
        except ValueError as error:
            if "bands" not in str(error):
                raise AssertionError(f"{case} {dtype} {kind}: {error}") from error
            refused += 1
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{case} {dtype} {kind}: {error!r}") from error
    return refused


@pytest.mark.parametrize("part", range(1000 // PER_TEST))
def test_random_configurations(backend, convert, part, request) -> None:
    first = request.config.getoption("--seed") * 1_000_000 + part * PER_TEST
    assert check(range(first, first + PER_TEST), backend, convert) <= PER_TEST // 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100))
def test_many_random_configurations(backend, convert, part, request) -> None:
    first = request.config.getoption("--seed") * 1_000_000 + 100_000 + part * 200
    assert check(range(first, first + 200), backend, convert) <= 20
