"""The origin of a row: commit, device, driver."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade import __version__


class Environment(NamedTuple):
    """The origin of a figure; driver: the libraries that compute it, with their versions and threads."""

    commit: str
    device: str
    driver: str


def environment(commit: str = "") -> Environment:
    """The origin of a figure of the CPU; commit: the name to write if git has none."""
    return Environment(commit or commit_name(), cpu_name(), _driver())


def gpu_environment(commit: str = "") -> Environment:
    """The origin of a figure of this process's NVIDIA GPU."""
    import torch

    import triton

    driver = f"torch {torch.__version__}, triton {triton.__version__}"
    return Environment(commit or commit_name(), torch.cuda.get_device_name(), driver)


def commit_name() -> str:
    """The commit of this tree, with + where files differ from it.

    Outside a repository: the name in the file build/commit, if the source tree has one, or else the version.
    """
    root = Path(__file__).resolve().parent
    named = root.parents[3] / "build" / "commit"

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return named.read_text().strip() if named.exists() else f"v{__version__}"


def cpu_name() -> str:
    """The system's name of the processor, with its family if the name says little, and the cores in use."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    family = f" family {fields['cpu family']} model {fields.get('model', '?')}" if "cpu family" in fields else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}{family}, {cores} cores"


def _driver() -> str:
    import saccade

    from .inputs import has_torch

    parts = [f"numpy {np.__version__}", f"threads {saccade.get_num_threads()}"]
    if has_torch():
        import torch

        parts = [f"torch {torch.__version__}", f"threads {torch.get_num_threads()}"]
    try:
        from saccade import backends

        cpu: Any = backends.load("cpu")
        parts.append(f"isa {cpu.isa()}")
    except Exception:
        parts.append("no compiled core")
    return "; ".join(parts)
