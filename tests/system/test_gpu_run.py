"""The run on a GPU, tried without one: parts with stand-ins on the CPU, interruptions, and second starts."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from saccade.cli.bench import rows

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = [part.name for part in runpy.run_path(str(ROOT / "scripts" / "gpu_run.py"))["PARTS"]]
# the providers that some parts measure on the CPU; others are stand-ins or missing
MEASURED = {"decode": "saccade, pages of 64", "patterns-forward": "FlexAttention", "recurrent-1": "fla"}


def python(*words: object) -> subprocess.CompletedProcess[str]:
    # a run of its own, also where this test is in a worker
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = [sys.executable, *map(str, words)]
    return subprocess.run(done, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def dry_run(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return python("scripts/gpu_run.py", folder, PARTS.index(name) + 1, "--dry", "--commit", "abc", *words)


@pytest.mark.sample(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in PARTS if name != "tests-log"])
def test_dry_run(tmp_path: Path, name: str) -> None:
    done = dry_run(tmp_path, name)
    assert not done.returncode, done.stdout + done.stderr
    assert f"{name}: " in done.stdout
    (log,) = tmp_path.glob(f"*/{name}.log")
    assert log.read_text()
    if name.startswith("tests"):
        # of a slice by its number, of a form in a folder of its own
        assert list(tmp_path.glob(f"*/test-gpu-{name[6:]}.log" if name[6].isdigit() else f"*/{name}/test-gpu.log"))
    for path in tmp_path.glob("*/*.csv"):
        found = rows.read(path)
        assert found
        assert all(row.commit.startswith("abc") or (ROOT / ".git").exists() for row in found)
        assert all("torch" in row.driver and "triton" in row.driver for row in found)
        assert all(row.measured or row.kind == "error" or row.note for row in found)
        assert MEASURED.get(name, found[0].provider) in {row.provider for row in found}


def test_parts_on_several_gpus(tmp_path: Path) -> None:
    parts = [PARTS.index(f"tests-{n}-of-40") + 1 for n in (2, 3)]
    words = "--dry", "--commit", "abc", "--gpus", "0,1", "--workers", "2"
    done = python("scripts/gpu_run.py", tmp_path, *parts, *words)
    assert not done.returncode, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*/test-gpu-*-of-40.log"))) == 2
    assert "WORKERS=2" in done.stdout


def test_a_part_is_interrupted_at_its_limit(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "dense-forward", "--limit", "1")
    assert done.returncode == 1
    assert "status 124" in done.stdout
    assert "failed or interrupted: dense-forward" in done.stderr


def test_rows_of_an_interrupted_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    origin = "abc", "a GPU", "torch 1, triton 2"
    first, second = (rows.Row(*origin, case, "saccade", "forward") for case in ("first", "second"))
    assert not rows.kept(path, origin)
    rows.write(path, [first, replace(first, provider="peer"), second])
    # providers of the last case may be missing
    assert [row.case for row in rows.kept(path, origin)] == ["first", "first"]
    assert not rows.kept(path, ("another", *origin[1:]))
    rows.write(path, [replace(second, provider="peer")], rows.kept(path, origin))
    assert [row.case for row in rows.read(path)] == ["first", "first", "second"]


def test_tests_that_passed_are_left_out(tmp_path: Path) -> None:
    passed = tmp_path / "passed.txt"
    words = "-m", "pytest", "-q", "-p", "no:cacheprovider", "--passed", passed, "tests/unit/test_imports.py"
    assert not python(*words).returncode
    assert passed.read_text()
    again = python(*words)
    assert not again.returncode, again.stdout
    assert "deselected" in again.stdout


def test_logs_of_slices_are_joined(tmp_path: Path) -> None:
    def join() -> int:
        words = "make", "test-gpu-log", "SLICES=2", f"LOGS={tmp_path}"
        return subprocess.run(words, cwd=ROOT, check=False).returncode

    for n, test in ((1, "first"), (2, "second")):
        assert join()
        (tmp_path / f"test-gpu-{n}-of-2.log").write_text(f"commit abc\n{test} log\n")
        (tmp_path / f"passed-abc-{n}-of-2.txt").write_text(f"shared\n{test}\n")
    assert not join()
    lines = (tmp_path / "test-gpu.log").read_text().splitlines()
    assert lines[0] == "commit abc"
    assert lines[1].startswith("3 tests passed")
    assert {"first log", "second log"} < set(lines)
    (tmp_path / "test-gpu-2-of-2.log").write_text("commit def\n")
    assert join()


@pytest.mark.parametrize("part, status", [("2/3", 0), ("1/1", 5)])
def test_a_slice_may_have_no_chosen_test(part: str, status: int) -> None:
    words = "-q", "-p", "no:cacheprovider", "--part", part, "-k", "absent", "tests/unit/test_imports.py"
    assert python("-m", "pytest", *words).returncode == status
