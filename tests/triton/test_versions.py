"""Other versions of Triton, each in a process of its own: all compile the kernels, and the newest interprets them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from saccade.backends import tested
from saccade.backends.triton import versions

ROOT = Path(__file__).resolve().parent.parent.parent
OTHERS = [version for version in tested.TRITON_COMPILED if version != versions.CURRENT]
NEWEST = OTHERS[-1]
# cases of the contract suite that take seconds in the interpreter
CASES = ("T1-float32", "heads-gqa-bfloat16", "mask-documents-causal-float32", "all-float32", "gates-bfloat16")


@pytest.fixture
def run(pytestconfig: pytest.Config, close_with: Callable[[str], None]) -> Callable[..., None]:
    """Run tests with a version of Triton: run(version, arguments of pytest, environment)."""

    def run(version: str, *words: str, **environment: str) -> None:
        folders = [path for path in ROOT.glob(f"build/tritons/{version}.*") if path.suffix != ".part"]
        if not folders:
            pytest.skip(f"Triton {version} is not in build/tritons: make tritons")
        paths = [str(folders[0]), *filter(None, [os.environ.get("PYTHONPATH")])]
        seed = f"--seed={pytestconfig.getoption('--seed')}"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--color=no", "-q", "--timeout=1800", seed, *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        assert done.returncode == 0, "\n".join([*lines[-100:], done.stderr[-2000:]])
        close_with(f"Triton {version}: {lines[-1]}")

    return run


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "version", [pytest.param(version, marks=[] if version == NEWEST else pytest.mark.slow) for version in OTHERS]
)
def test_kernels_compile(version, run, pytestconfig) -> None:
    every = pytestconfig.getoption("--all")
    run(version, "tests/triton/test_resources.py", "tests/triton/test_replay.py", *["--all"] if every else ["--most=1"])


@pytest.mark.timeout(0)
def test_the_interpreter_of_the_newest(run, seed) -> None:
    case = random.Random(seed).choice(CASES)
    run(NEWEST, "--triton", "--all", f"tests/contract/test_backward.py::test_case[triton-{case}]", TRITON_INTERPRET="1")
