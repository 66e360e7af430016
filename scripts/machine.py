"""Describes this machine, its software and the commit for the head of a log, and lists what the machine lacks.

`python scripts/machine.py [COMMIT]`: name the commit where git is missing. `make test` prints the list last.
"""

from __future__ import annotations

import importlib.util
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

DRIVERS, ARM64 = (runpy.run_path(str(Path(__file__).parent / name)) for name in ("drivers.py", "arm64.py"))


def have_module(name: str) -> bool:
    # a module blocked in sys.modules counts as absent
    return sys.modules.get(name, True) is not None and importlib.util.find_spec(name) is not None


def have_program(*names: str) -> bool:
    return any(shutil.which(name) for name in names)


WANTED: dict[str, Callable[[], bool]] = {
    "torch": lambda: have_module("torch"),
    "ml_dtypes": lambda: have_module("ml_dtypes"),
    "tokenizers": lambda: have_module("tokenizers"),
    "NVIDIA driver": lambda: have_program("nvidia-smi"),
    "triton": lambda: have_module("triton"),
    "wgpu": lambda: have_module("wgpu"),
    **{f"Vulkan driver {name}": place.exists for name, place in DRIVERS["DRIVERS"].items()},
    "node packages": lambda: (DRIVERS["NODE"] / "node_modules").exists() and have_program("node"),
    "browser": lambda: have_program("chromium", "chromium-browser", "google-chrome", "firefox"),
    "clang": lambda: have_program("clang"),
    "arm64 in software": lambda: ARM64["there"](),
    "mlx": lambda: have_module("mlx"),
}


def lacks_line() -> str:
    missing = [name for name, there in WANTED.items() if not there()]
    return "not on this machine: " + (", ".join(missing) or "nothing")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


def output(*words: str) -> str:
    """The output of a program, without surrounding white space; empty if the program is missing."""
    if not shutil.which(words[0]):
        return ""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def header(commit: str = "") -> str:
    # a commit is named where this tree is not the one that git sees; logs of other slices are no change
    changed = not commit and output("git", "status", "--porcelain", "--", ".", ":!docs/logs")
    dirty = " with uncommitted changes" if changed else ""
    lines = [f"commit {commit or output('git', 'rev-parse', 'HEAD') or 'unknown'}{dirty}"]
    lines += [f"date {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC", f"cpu {cpu_name()}"]
    lines += output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    lines += output("rocm-smi", "--showproductname", "--csv").splitlines()
    lines.append(f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")
    for name in ("numpy", "torch", "triton"):
        if have_module(name):
            lines.append(f"{name} {importlib.import_module(name).__version__}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(header(*sys.argv[1:]))
    print(lacks_line())
