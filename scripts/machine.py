"""What this machine is and which optional things it lacks: the last line of `make test`, the head of a log."""

from __future__ import annotations

import importlib.util
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DRIVERS = runpy.run_path(str(Path(__file__).parent / "drivers.py"))


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


def header() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    dirty = " with uncommitted changes" if git("status", "--porcelain") else ""
    lines = [f"commit {git('rev-parse', 'HEAD') or 'unknown'}{dirty}", f"cpu {cpu_name()}"]
    lines.append(f"{platform.system()} {platform.machine()}, Python {platform.python_version()}")
    for name in ("numpy", "torch"):
        if have_module(name):
            lines.append(f"{name} {importlib.import_module(name).__version__}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(header())
    print(lacks_line())
