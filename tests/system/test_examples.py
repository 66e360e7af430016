"""Every example runs to its end and prints something: each is short, and checks its own result."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.backends import metal

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
# these run in a process of their own: one opens a device of software, one starts two more
WEBGPU, RING = "long_prompt_webgpu", "ring"


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {WEBGPU, RING}))
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for package in re.findall(r"^(?:import|from) (torch|transformers|mlx)\b", EXAMPLES[name].read_text(), re.MULTILINE):
        pytest.importorskip(package)
    # one of them puts an emulator in the place of a device
    before = metal.install(None)
    try:
        runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    finally:
        metal.install(before)
    assert capsys.readouterr().out


def apart(name: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES[name])], env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example_on_webgpu(drivers: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("wgpu")
    if not drivers["swiftshader"].exists():
        pytest.skip("no Vulkan driver swiftshader: make system")
    environment = {"VK_DRIVER_FILES": str(drivers["swiftshader"]), "SACCADE_WEBGPU_ADAPTER": "swiftshader"}
    assert "largest difference from the CPU" in apart(WEBGPU, XDG_RUNTIME_DIR=str(tmp_path), **environment)


def test_example_on_two_processes() -> None:
    pytest.importorskip("torch")
    assert "gradients differ by" in apart(RING)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name: str) -> None:
    assert len(EXAMPLES[name].read_text().splitlines()) < 60
