"""The tests tested: every mutant of the kernels must be found, every problem must pass without one."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade.testing import run
from saccade.testing.compare import require
from saccade.testing.inputs import make

from .mutants import BACKWARD, FORWARD, PROBLEMS, Mutant


def verify(problem: str, backward: bool) -> None:
    x = make(PROBLEMS[problem], "float32", seed=1)
    require(run.verify(x, "metal", backward=backward), problem)


def changed(mutant: Mutant, text: str) -> str:
    if f"kernel void {mutant.kernel}(" not in text:
        return text
    parts = text.split(mutant.old)
    assert len(parts) > mutant.nth + 1, f"{mutant.old!r} stands {len(parts) - 1} times in {mutant.kernel}"
    at = mutant.nth + 1
    return mutant.old.join(parts[:at]) + mutant.new + mutant.old.join(parts[at:])


@pytest.mark.sample(4)
@pytest.mark.parametrize("problem", PROBLEMS)
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


@pytest.mark.sample(8)
@pytest.mark.parametrize("mutant", FORWARD, ids=lambda m: m.name)
def test_forward(emulator, mutant) -> None:
    found(emulator, mutant, False)


@pytest.mark.sample(4)
@pytest.mark.parametrize("mutant", BACKWARD, ids=lambda m: m.name)
def test_backward(emulator, mutant) -> None:
    found(emulator, mutant, True)


@pytest.mark.parametrize("mutated", [False, True])
def test_what_is_excluded_stays_out(emulator, mutated) -> None:
    """An infinite value reaches the rows that see it alone; without its own path it reaches all of a tile."""
    change = Mutant("", "forward", "if (w != 0.0f) total", "total", "")
    emulator(change=(lambda text: changed(change, text)) if mutated else None)
    x = make(PROBLEMS["small"], "float32", seed=1)
    clean = saccade.attention(x.q, x.k, x.v, x.mask, backend="metal")
    v = x.v.copy()
    v[:, -1] = np.inf
    o = saccade.attention(x.q, x.k, v, x.mask, backend="metal")
    assert np.array_equal(o[:, :-1], clean[:, :-1]) != mutated
    assert not np.isfinite(o[:, -1]).any()
