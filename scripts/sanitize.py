"""Builds the core with sanitizers in a folder of its own and runs the contract suite and the tests of threads on it,
through NumPy.

usage: sanitize.py address,undefined | thread [pytest arguments]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
OPTIONS = {
    # no leak detection: the interpreter itself never frees everything
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"second_deadlock_stack=1:die_after_fork=0:suppressions={ROOT / 'scripts' / 'tsan.supp'}",
}


def build(kinds: str) -> Path:
    """Build an instrumented core next to a copy of the Python sources. Returns the folder for PYTHONPATH."""
    folder = ROOT / "build" / ("sanitize-" + kinds.replace(",", "-"))
    package = folder / "package" / "saccade"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "saccade", package, ignore=shutil.ignore_patterns("_core*", "core", "__pycache__"))
    definitions = [f"-DPython_EXECUTABLE={sys.executable}", f"-DSACCADE_SANITIZE={kinds}", "-DSACCADE_INPLACE=OFF"]
    cmake = [str(Path(sys.executable).parent / "cmake")]
    subprocess.run([*cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", *definitions], check=True)
    subprocess.run([*cmake, "--build", folder], check=True)
    shutil.copy(next(folder.glob("_core*.so")), package / "backends" / "cpu")
    return folder / "package"


def runtime(name: str) -> str:
    """The path of a sanitizer's shared library, which must be loaded before the interpreter starts."""
    compiler = os.environ.get("CXX", "c++")
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(path.stdout.strip()).resolve())


def main() -> int:
    kinds, more = sys.argv[1], sys.argv[2:]
    package = build(kinds)
    # the base interpreter reads no .pth files of the environment, so the editable install is not imported
    python = getattr(sys, "_base_executable", sys.executable)
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(package), sysconfig.get_paths()["purelib"]])
    env |= {"PYTHONMALLOC": "malloc", "OPENBLAS_NUM_THREADS": "1"}
    # sanitizers write to files; together with ASan, UBSan writes to stderr, which pytest must not capture
    reports = package.parent / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    env["LD_PRELOAD"] = " ".join(runtime(RUNTIMES[kind]) for kind in kinds.split(","))
    env |= {name: f"{value}:log_path={reports / 'report'}" for name, value in OPTIONS.items()}
    # no address randomisation: the thread sanitizer's shadow memory needs a fixed layout
    words = ["setarch", "-R"] if kinds == "thread" and shutil.which("setarch") else []
    words += [
        python,
        "-m",
        "pytest",
        "-m",
        "not slow",
        # those of random configurations need torch
        "-k",
        "not tangents",
        "-n",
        "2",
        "--capture",
        "sys",
        "--timeout",
        "900",
        "--block",
        "torch,triton,mlx,wgpu",
        *(more or ["tests/contract", "tests/system/test_threads.py"]),
    ]
    print("+", " ".join(words), flush=True)
    code = subprocess.run(words, cwd=ROOT, env=env, check=False).returncode
    reported = "\n".join(path.read_text(errors="replace") for path in sorted(reports.iterdir()))
    print(reported or f"{kinds}: no report in a file; pytest ended with {code}")
    return code or int(bool(reported))


if __name__ == "__main__":
    sys.exit(main())
