"""A test of the tests: every mutant of the kernels must be found, and every problem must pass without a mutant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import saccade
from saccade import reference
from saccade.mask import causal
from saccade.testing import recurrent, run
from saccade.testing.compare import measure_all, require
from saccade.testing.inputs import make

from .mutants import (
    BACKWARD,
    CODES,
    CODES_PROBLEMS,
    FORWARD,
    LINEAR,
    LINEAR_PROBLEMS,
    PROBLEMS,
    Mutant,
)  # fmt: skip


def verify_codes(kind: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 24)).astype(np.float32) for n, h in ((3, 4), (40, 2), (40, 2)))
    cache = saccade.KVCache(1, 40, 2, 24, quantised=kind, group=10)
    cache.append(k, v)
    o, lse = saccade.decode(q, cache, mask=causal(), return_lse=True, backend="metal")
    both = [
        dict(
            zip(("o", "lse"), reference.forward(q, *cache.numbers(), causal(), scale=24**-0.5, dtype=kind), strict=True)
        )
        for kind in (np.float64, np.float32)
    ]
    require(measure_all({"o": o, "lse": lse}, *both, "float32"), kind)


def verify(problem: str, backward: bool) -> None:
    if problem in CODES_PROBLEMS:
        verify_codes(problem)
        return
    if problem in LINEAR_PROBLEMS:
        name, sizes = LINEAR_PROBLEMS[problem]
        require(recurrent.verify(recurrent.by_name(name), sizes, "float32", "metal", 1, backward=backward), problem)
        return
    x = make(PROBLEMS[problem], "float32", seed=1)
    require(run.verify(x, "metal", backward=backward), problem)


def changed(mutant: Mutant, text: str) -> str:
    if f"kernel void {mutant.kernel}(" not in text:
        return text
    parts = text.split(mutant.old)
    assert len(parts) > mutant.nth + 1, f"{mutant.old!r} occurs {len(parts) - 1} times in {mutant.kernel}"
    at = mutant.nth + 1
    return mutant.old.join(parts[:at]) + mutant.new + mutant.old.join(parts[at:])


@pytest.mark.sample(1)
@pytest.mark.parametrize("problem", [*PROBLEMS, *LINEAR_PROBLEMS, *CODES_PROBLEMS])
def test_no_mutant(emulator, problem) -> None:
    emulator()
    verify(problem, True)


def found(emulator, mutant: Mutant, backward: bool) -> None:
    emulator(sanitizer=mutant.sanitizer or "process", change=lambda text: changed(mutant, text))
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        verify(mutant.problem, backward)
    message = str(caught.value)
    assert "does not compile" not in message, message
    assert f"times in {mutant.kernel}" not in message, message
    if mutant.sanitizer == "thread":
        assert "data race" in message
    if mutant.sanitizer == "address":
        assert "heap-buffer-overflow" in message


@pytest.mark.sample(5)
@pytest.mark.parametrize("mutant", FORWARD, ids=lambda m: m.name)
def test_forward(emulator, mutant) -> None:
    found(emulator, mutant, False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mutant", BACKWARD, ids=lambda m: m.name)
def test_backward(emulator, mutant) -> None:
    found(emulator, mutant, True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mutant", LINEAR, ids=lambda m: f"{m.kernel}: {m.name}")
def test_linear(emulator, mutant) -> None:
    found(emulator, mutant, True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mutant", CODES, ids=lambda m: m.name)
def test_codes(emulator, mutant) -> None:
    found(emulator, mutant, False)


def test_the_page_counts_them() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "metal.md").read_text()
    assert f"{len([*FORWARD, *BACKWARD, *LINEAR, *CODES])} mistakes in the kernels" in page


@pytest.mark.parametrize("mutated", [False, True])
def test_what_is_excluded_stays_out(emulator, mutated) -> None:
    """An infinite value reaches only the rows that see it; without the careful path it reaches a whole tile."""
    change = Mutant("", "forward", "if (w != 0.0f) total", "total", "")
    emulator(change=(lambda text: changed(change, text)) if mutated else None)
    x = make(PROBLEMS["small"], "float32", seed=1)
    clean = saccade.attention(x.q, x.k, x.v, x.mask, backend="metal")
    v = x.v.copy()
    v[:, -1] = np.inf
    o = saccade.attention(x.q, x.k, v, x.mask, backend="metal")
    assert np.array_equal(o[:, :-1], clean[:, :-1]) != mutated
    assert not np.isfinite(o[:, -1]).any()
