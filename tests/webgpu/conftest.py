"""Tests of WebGPU. Tests that open a device run only in a process with one driver, `pytest --webgpu <adapter>`."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from saccade.backends.webgpu.device import Gpu

HERE = Path(__file__).parent
# test files that open no device, or only in other processes
HOST = ("test_texts.py", "test_refusals.py", "test_tint.py", "test_browser.py")
NODE: Path = runpy.run_path(str(HERE.parent.parent / "scripts" / "drivers.py"))["NODE"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.parent == HERE and collection_path.name.startswith("test_"):
        return (collection_path.name in HOST) == bool(config.getoption("--webgpu")) or None
    return None


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The device of `--webgpu`."""
    from saccade.backends.webgpu.device import open_gpu

    return open_gpu()


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """Runs Python code in another process with the given environment variables; returns what it prints."""

    def run(code: str, **environment: str) -> str:
        variables = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), **environment}
        done = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def driver(drivers: dict[str, Path]) -> Callable[[str], str]:
    """The value of VK_DRIVER_FILES for a driver of this name."""

    def find(name: str) -> str:
        if not drivers[name].exists():
            pytest.skip(f"no Vulkan driver {name}: make system")
        return str(drivers[name])

    return find


@pytest.fixture(scope="session")
def modules() -> Path:
    """The folder of the node packages."""
    if not (NODE / "node_modules").exists() or shutil.which("node") is None:
        pytest.skip("no node, or none of its packages: make system")
    return NODE


@pytest.fixture
def node(tmp_path: Path, modules: Path) -> Callable[..., Any]:
    """Runs a script of page/ with JSON as its input; returns the JSON that it prints."""

    def run(script: str, given: Any, **environment: str) -> Any:
        variables = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), **environment}
        done = subprocess.run(
            ["node", HERE / "page" / script, modules],
            input=json.dumps(given), env=variables, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run
