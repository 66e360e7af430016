"""Every instruction set of this machine computes the contract, and one that it lacks is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.backends.cpu import _core

ROOT = Path(__file__).resolve().parents[2]
# options of pytest and files of the contract suite, a process each; only the default set runs the longest cases, which
# take minutes each
SHORT = ["--all", "-k", "not T2048 and not T4096"]
SAMPLE = [(["-m", "not slow", "--most=4"], ["forward", "decode", "determinism"])]
EVERY = [
    (SHORT, ["forward"]),
    (SHORT, ["backward"]),
    (SHORT, ["decode", "determinism", "masks"]),
    ([], ["recurrent", "recurrent_diagonal"]),
]


def run(isa: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env={**os.environ, "SACCADE_ISA": isa}
    )


def pytest_generate_tests(metafunc):
    if "words" in metafunc.fixturenames:
        runs = EVERY if metafunc.config.getoption("--all") else SAMPLE
        words = [[*options, *(f"tests/contract/test_{name}.py" for name in names)] for options, names in runs]
        metafunc.parametrize("words", words, ids=[names[0] for _, names in runs])


@pytest.mark.parametrize("isa", _core.isas())
def test_the_forced_set_is_the_one_in_use(isa):
    done = run(isa, "-c", "from saccade.backends import cpu; print(cpu.isa())")
    assert done.stdout.strip() == isa, done.stderr


def test_an_unknown_set_is_refused_with_what_there_is():
    done = run("avx9000", "-c", "import numpy as np, saccade; x = np.ones((1, 2, 1, 8)); saccade.attention(x, x, x)")
    assert done.returncode != 0
    assert "avx9000" in done.stderr
    assert _core.isas()[-1] in done.stderr


@pytest.mark.sample(1)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("isa", _core.isas()[1:])
def test_every_set_passes_the_contract(isa, words):
    """The sample runs what is quickest, --all all but the fuzzer: its near misses are those of the default set."""
    done = run(isa, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "1800", *words)
    assert done.returncode == 0, done.stdout[-4000:]
