"""A thousand random configurations from a seed, forward and backward; --seed draws another thousand."""

from __future__ import annotations

import pytest

from saccade.testing.compare import require
from saccade.testing.fuzz import random_case, random_dtype
from saccade.testing.inputs import NEEDLES, make
from saccade.testing.run import verify

PER_TEST = 50
KINDS = ("random", *NEEDLES)


def check(numbers: range, backend, convert) -> None:
    """Every one of these cases within the tolerance rule, but for a few whose mask takes more bands than masks may."""
    refused, wrong = 0, []
    for n in numbers:
        case, dtype, kind = random_case(n), random_dtype(n), KINDS[n % len(KINDS)]
        try:
            require(verify(make(case, dtype, kind=kind), backend, **convert), f"{case} {dtype} {kind}")
        except AssertionError as error:
            wrong.append(str(error))
        except Exception as error:
            if isinstance(error, ValueError) and "bands" in str(error):
                refused += 1
            else:
                wrong.append(f"{case} {dtype} {kind}: {error!r}")
    assert not wrong, f"{len(wrong)} of {len(numbers)}\n" + "\n".join(wrong)
    assert refused <= len(numbers) // 10


@pytest.mark.parametrize("part", range(1000 // PER_TEST))
def test_random_configurations(backend, convert, part, request) -> None:
    first = request.config.getoption("--seed") * 1_000_000 + part * PER_TEST
    check(range(first, first + PER_TEST), backend, convert)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100))
def test_many_random_configurations(backend, convert, part, request) -> None:
    first = request.config.getoption("--seed") * 1_000_000 + 100_000 + part * 200
    check(range(first, first + 200), backend, convert)
