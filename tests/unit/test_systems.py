"""The wheels that the workflow promises, and how the core is compiled for systems other than this one."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS, SYSTEMS = (runpy.run_path(str(ROOT / "scripts" / name)) for name in ("wheels.py", "other_systems.py"))
# what Zig prints with ZIG_VERBOSE_CC, shortened
SAID = (
    "zig clang empty.cpp -target {target} -g -nostdinc -D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=0 "
    "-isystem '/a folder/include' -O0 -Xclang -target-cpu -c -o empty.o"
)


@pytest.fixture
def settings() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_workflow_builds_each_wheel_and_tries_later_versions(settings: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    cibuildwheel = settings["tool"]["cibuildwheel"]
    own = [version for version in WHEELS["VERSIONS"] if float(version[2:]) <= float(WHEELS["ABI3_FROM"][2:])]
    assert cibuildwheel["build"] == [f"cp{version.replace('.', '')}-*" for version in own]
    assert settings["tool"]["scikit-build"]["wheel"]["py-api"] == f"cp{WHEELS['ABI3_FROM'].replace('.', '')}"
    assert "abi3audit --strict" in cibuildwheel["audit-command"]
    systems = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "macos-15-intel", "windows-2022"}
    assert systems < set(jobs["wheels"]["strategy"]["matrix"]["os"])
    assert systems == set(jobs["later"]["strategy"]["matrix"]["os"])
    assert not set(jobs["later"]["strategy"]["matrix"]["python"]) & set(own)
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", name) for name in used)


@pytest.fixture
def zig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of Zig that prints its arguments, and to stderr what Zig passes to clang."""
    path = tmp_path / "zig"
    path.write_text(f'#!/bin/sh\necho "$@"\n>&2 echo "{SAID.format(target="$3")}"\n')
    path.chmod(0o755)
    for name, value in {"ZIG": path, "FOLDER": tmp_path}.items():
        monkeypatch.setitem(SYSTEMS["compiler"].__globals__, name, value)
    return path


@pytest.mark.parametrize("name", SYSTEMS["SYSTEMS"])
def test_the_compiler_of_a_system_gets_flags_as_they_are(name: str, zig: Path, tmp_path: Path) -> None:
    system = SYSTEMS["SYSTEMS"][name]
    program = SYSTEMS["compiler"](system, tmp_path)

    def arguments(*words: str) -> str:
        return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout

    compiled = arguments("-march=x86-64-v4", "-c", "a.cpp")
    assert compiled.startswith("clang -nostdinc -nostdinc++ -target " + system.target)
    assert "-isystem /a folder/include" in compiled
    assert "-O0" not in compiled
    assert f"ANNOTATIONS={int(system.cmake == 'Darwin')} " in compiled
    assert compiled.endswith("-march=x86-64-v4 -c a.cpp\n")
    for kind in ("-shared", "-bundle"):
        linked = arguments(kind, "-ldl", "-Wl,@symbols", "a.o")
        assert linked.startswith(f"c++ -target {system.target} ")
        assert linked.endswith(" -shared a.o\n")
