"""Runs a sample of the suite with other versions of Python, NumPy and torch, and writes the table of
docs/start/install.md. Each case has a clone of HEAD and an environment of its own.

`python scripts/versions.py [NAME ...]` runs these cases, or all whose log is missing, and keeps each log in
docs/logs/versions. `--table` only writes the table from the logs. Interpreters are found as by scripts/wheels.py; a
missing one is named. A torch built for CUDA is installed without CUDA's libraries: see scripts/torch_without_cuda.py.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER, LOGS = ROOT / "build" / "versions", ROOT / "docs" / "logs" / "versions"
PAGE = ROOT / "docs" / "start" / "install.md"
BEGIN, END = "<!-- versions -->", "<!-- end of versions -->"
interpreter = runpy.run_path(str(ROOT / "scripts" / "wheels.py"))["interpreter"]
without_cuda = runpy.run_path(str(ROOT / "scripts" / "torch_without_cuda.py"))["wheel"]
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
# pages in browsers, and kernels for other devices
EMULATED = ("arm64", "metal_emulator", "triton_interpreter", "webgpu_drivers")
OTHERS = ("lab", "metal", "triton", "webgpu", *(f"system/test_{name}.py" for name in EMULATED))


class Case(NamedTuple):
    """Versions that differ from constraints.txt.

    With another NumPy or torch, the tests of `OTHERS` are left out, and the sample has at most three cases of a test.
    """

    python: str
    numpy: str = ""
    torch: str = ""

    @property
    def name(self) -> str:
        parts = {"python": self.python, "numpy": self.numpy, "torch": self.torch}
        return "-".join(f"{name}-{version}" for name, version in parts.items() if version)


# each Python with the versions of constraints.txt, and each other version of NumPy and torch once
CASES = (
    Case("3.10"),
    Case("3.11"),
    Case("3.12"),
    Case("3.13"),
    Case("3.10", numpy="1.24.4", torch="2.9.1"),
    Case("3.11", numpy="1.25.2", torch="2.10.0"),
    Case("3.12", numpy="1.26.4", torch="2.11.0"),
    Case("3.13", numpy="2.1.3", torch="2.12.1"),
    Case("3.12", torch="2.14.1"),
)


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    print("+", *words, flush=True)
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def prepare(case: Case, python: Path) -> Path:
    """A clone with everything that `make dev` installs, except what these versions exclude."""
    tree = FOLDER / case.name
    shutil.rmtree(tree, ignore_errors=True)
    run("git", "clone", "--quiet", ROOT, tree, cwd=ROOT)
    run(python, "-m", "venv", tree / ".venv", cwd=tree)
    inside = tree / ".venv" / "bin" / "python"
    run(inside, *PIP, "--upgrade", "pip", cwd=tree)
    constraints = tree / "constraints.txt"
    pins = [line for line in constraints.read_text().splitlines() if line and line[0] != "#"]
    torch = case.torch or next(pin for pin in pins if pin.startswith("torch=")).partition("==")[2]
    # many of the others have no release for 3.10
    kept = "triton=" if case.python == "3.10" else ""
    pins = [pin for pin in pins if pin.startswith(kept) and not pin.startswith("torch=")]
    pins.append(f"torch @ {without_cuda(torch, inside, FOLDER / 'wheels').as_uri()}")
    constraints.write_text("\n".join(pins) + "\n")
    run("make", "dev", cwd=tree)
    if case.numpy:
        # of ml_dtypes, which bfloat16 in NumPy needs, a version that agrees
        run(inside, *PIP, f"numpy=={case.numpy}", "ml_dtypes", cwd=tree)
        while lost := excluded(inside, tree):
            print("needs another NumPy:", *lost, flush=True)
            run(inside, "-m", "pip", "uninstall", "--quiet", "--yes", *lost, cwd=tree)
    return inside


def excluded(python: Path, cwd: Path) -> list[str]:
    """Installed packages that refuse an installed version of another."""
    words = [str(python), "-m", "pip", "check"]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    lost = {line.split()[0] for line in done.stdout.splitlines() if " has requirement " in line or " requires " in line}
    return sorted(lost - {"saccade"})


def test(case: Case, python: Path) -> None:
    """Run the sample, and keep what pytest printed; a case that failed keeps no log."""
    tree = FOLDER / case.name
    words = [python, "-m", "pytest", "-m", "not slow", "-n", "3", "--dist", "worksteal"]
    if case.numpy or case.torch:
        words += ["--most", "3", *(f"--ignore=tests/{name}" for name in OTHERS)]
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    # the clone has other constraints than its commit
    commit = run("git", "rev-parse", "HEAD", cwd=tree).strip()
    head = run(python, "scripts/machine.py", commit, cwd=tree, PATH=path)
    print("+", *words, flush=True)
    done = subprocess.run(
        list(map(str, words)), cwd=tree, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    # logs name no folders of this machine
    text = head + re.sub(
        r"(^|[^.])/\S*/lib/python", r"\1python", done.stdout.replace(str(tree), "."), flags=re.MULTILINE
    )
    if done.returncode:
        (FOLDER / f"{case.name}.failed").write_text(text + done.stderr)
        raise SystemExit(f"status {done.returncode}; see {FOLDER / case.name}.failed")
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / f"{case.name}.log").write_text(text)


def table() -> str:
    """A row of each log: versions, tests that passed and were skipped, and the commit."""
    lines = ["| Python | NumPy | torch | passed | skipped | commit |", "|---|---|---|---|---|---|"]
    for case in CASES:
        if not (log := LOGS / f"{case.name}.log").exists():
            continue
        text = log.read_text()
        matches = [re.search(pattern, text, re.MULTILINE) for pattern in (
            r"Python (\S+)$", r"^numpy (\S+)$", r"^torch ([\d.]+)", r"^=+ (\d+) passed", r"^=+ .* (\d+) skipped",
            r"^commit (.{7})"
        )]  # fmt: skip
        lines.append("| " + " | ".join(match[1] if match else "0" for match in matches) + " |")
    return "\n".join(lines)


def main() -> int:
    names = [name for name in sys.argv[1:] if name != "--table"]
    if unknown := set(names) - {case.name for case in CASES}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(case.name for case in CASES)}")
    failed: list[str] = []
    for case in CASES:
        if "--table" in sys.argv or (case.name not in names if names else (LOGS / f"{case.name}.log").exists()):
            continue
        if (python := interpreter(case.python)) is None:
            failed.append(f"{case.name}: no Python {case.python} on this machine")
            continue
        try:
            test(case, prepare(case, python))
        except (SystemExit, subprocess.CalledProcessError) as stop:
            failed.append(f"{case.name}: {stop}")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
    print(*failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
