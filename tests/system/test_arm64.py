"""The core for arm64: compiled by a cross compiler, and the contract suite under qemu with each instruction set."""

from __future__ import annotations

import os
import runpy
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARM64: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "arm64.py"))
# files of the contract suite whose calls the core computes
FILES = ("forward", "backward", "decode", "masks", "paged", "latent", "outputs", "recurrent", "recurrent_diagonal")
SAMPLE = ("forward", "decode")
# a test that fills more memory than qemu may map, and random cases, which take minutes each
LEFT_OUT = "not 32_bits and not random"


@pytest.fixture(scope="module")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python on an arm64 chip with an instruction set."""
    if not ARM64["there"]():
        pytest.skip("no arm64 machine in software: make system arm64")

    def run(isa: str, *words: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [*ARM64["python"](ARM64["CHIPS"][isa]), *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)

    return run


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("isa", ARM64["CHIPS"])
def test_a_chip_uses_its_widest_set(isa: str, python: Callable[..., Any]) -> None:
    done = python(isa, "-c", "from saccade.backends import cpu; print(cpu.isa())")
    assert done.stdout.strip() == isa, done.stderr


@pytest.mark.timeout(0)
@pytest.mark.parametrize("isa", ARM64["CHIPS"])
def test_every_set_passes_the_contract(
    isa: str, python: Callable[..., Any], pytestconfig: pytest.Config, close_with: Callable[[str], None]
) -> None:
    every = pytestconfig.getoption("--all")
    most, names = ("3", FILES) if every else ("1", SAMPLE)
    options = ["-q", "-x", "-m", "not slow", "-k", LEFT_OUT, "--timeout", "1800", f"--most={most}"]
    options += [f"--seed={pytestconfig.getoption('--seed')}", "--color=no"]
    files = [f"tests/contract/test_{name}.py" for name in names]
    begin = time.perf_counter()
    done = python(isa, "-m", "pytest", *options, *files)
    assert done.returncode == 0, done.stdout[-4000:]
    close_with(f"arm64, {isa}, under qemu: {done.stdout.splitlines()[-1]}, {time.perf_counter() - begin:.0f} s")
