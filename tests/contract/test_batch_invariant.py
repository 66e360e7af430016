"""With `deterministic="batch"`, no bit of a row depends on the batch, on chunks, on pages or on the function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from saccade import Unsupported
from saccade.testing.compare import require
from saccade.testing.compositions import Composition, composition
from saccade.testing.fuzz import random_case, random_dtype
from saccade.testing.inputs import NEEDLES, make
from saccade.testing.run import computed, verify

PER_TEST = 10
KINDS = ("random", *NEEDLES)
DTYPES = {"cpu": ("float32", "bfloat16", "float16", "float64")}
ON_DEVICES = ("float32", "bfloat16", "float16")


def instruction_sets(backend: str) -> Iterator[str]:
    """Each instruction set of this CPU in turn, or that of the device."""
    if backend != "cpu":
        yield backend
        return
    from saccade.backends.cpu import _core

    before = _core.isa()
    try:
        for name in _core.isas():
            _core.set_isa(name)
            yield name
    finally:
        _core.set_isa(before)


def same(got, want) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=False))


def compositions(part: int, backend: str, seed: int) -> Iterator[Composition]:
    # Triton's interpreter takes seconds for a call of a few hundred tokens
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    longest, step = (90, PER_TEST) if interpreted else (700, 1)
    for n in range(part * PER_TEST, (part + 1) * PER_TEST, step):
        yield composition(seed * 1_000_000 + n, DTYPES.get(backend, ON_DEVICES), longest, left=backend == "cpu")


@pytest.mark.sample(20)
@pytest.mark.parametrize("part", range(1000 // PER_TEST))
def test_outputs_depend_on_their_sequence_alone(backend, part, request) -> None:
    wrong = []
    for isa in instruction_sets(backend):
        for case in compositions(part, backend, request.config.getoption("--seed")):
            want = case.alone(backend)
            # a cache of codes is compared with itself
            of_codes: dict[str, tuple[np.ndarray, ...]] = {}
            for where, rows, got in case.outputs(backend):
                expected = [x[:, rows] for x in want]
                if case.quantised and where in ("contiguous", "paged", "paged_attention"):
                    expected = of_codes.setdefault(str(rows), got)
                if not same(got, expected):
                    wrong.append(f"{isa}: {case.name}, {where} {rows}")
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)


@pytest.mark.sample(20)
@pytest.mark.parametrize("part", range(1000 // PER_TEST))
def test_gradients_depend_on_their_sequence_alone(backend, part, request) -> None:
    wrong = []
    for isa in instruction_sets(backend):
        for case in compositions(part, backend, request.config.getoption("--seed")):
            (_, want), *others = case.gradients(backend)
            wrong += [f"{isa}: {case.name}, {where}" for where, got in others if not same(got, want)]
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)


@pytest.mark.sample(20)
@pytest.mark.parametrize("part", range(1000 // PER_TEST))
def test_random_configurations(backend, part, request) -> None:
    """They are as accurate as the default; what depends on the batch is refused."""
    refused, wrong, compute = [], [], partial(computed, deterministic="batch")
    first = request.config.getoption("--seed") * 1_000_000 + part * PER_TEST
    for n in range(first, first + PER_TEST):
        case, dtype, kind = replace(random_case(n), dropout=0.0), random_dtype(n), KINDS[n % len(KINDS)]
        try:
            require(verify(make(case, dtype, kind=kind), backend, compute=compute), f"{case} {dtype} {kind}")
        except AssertionError as error:
            wrong.append(str(error))
        except Exception as error:
            if not isinstance(error, Unsupported) and "bands" not in str(error):
                raise
            refused.append(error)
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)
    if len(refused) == PER_TEST:
        raise refused[-1]
