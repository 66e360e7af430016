"""Every function and class that the pages docs/api/*.md list has an example in its docstring, and all of them run.

Those that need a WebGPU device run in a process of their own, on a driver of software.
"""

from __future__ import annotations

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCSTRINGS = runpy.run_path(str(ROOT / "scripts" / "docstrings.py"))
NAMES: list[str] = DOCSTRINGS["names"]()


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    for package in filter(None, ("torch", DOCSTRINGS["need"](name, DOCSTRINGS["PACKAGES"]))):
        pytest.importorskip(package)
    if device := DOCSTRINGS["need"](name, DOCSTRINGS["DEVICES"]):
        assert device == "webgpu"
        assert DOCSTRINGS["sections"](name), name
    else:
        assert DOCSTRINGS["run"](name)


def test_examples_on_webgpu(drivers: dict[str, Path], tmp_path: Path) -> None:
    for package in ("torch", "wgpu"):
        pytest.importorskip(package)
    if not drivers["swiftshader"].exists():
        pytest.skip("no Vulkan driver swiftshader: make system")
    driver = {"VK_DRIVER_FILES": str(drivers["swiftshader"]), "SACCADE_WEBGPU_ADAPTER": "swiftshader"}
    done = subprocess.run(
        [sys.executable, "scripts/docstrings.py", "--on", "webgpu"], cwd=ROOT,
        env={**os.environ, **driver, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    on_webgpu = [name for name in NAMES if DOCSTRINGS["need"](name, DOCSTRINGS["DEVICES"])]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == on_webgpu


def test_no_example_is_left_out() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("wgpu")
    ran = "".join(section for name in NAMES for section in DOCSTRINGS["sections"](name)).count(">>>")
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "src" / "saccade").rglob("*.py"))
    assert ran == sum(text.count(">>> ") for text in texts)


DOCUMENTED = '''
def right():
    """One.

    Examples:
        >>> np.arange(3).tolist()
        [0, 1, 2]
        >>> x = 1
    """
def wrong():
    """One.

    Examples:
        >>> 1 + 1
        3
    """
def silent():
    """One."""
'''


def test_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    module = ModuleType("documented")
    exec(inspect.cleandoc(DOCUMENTED), vars(module))
    monkeypatch.setitem(sys.modules, "documented", module)
    assert DOCSTRINGS["run"]("documented.right") == 2
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        DOCSTRINGS["run"]("documented.wrong")
    with pytest.raises(AssertionError, match=r"documented\.silent has no example"):
        DOCSTRINGS["run"]("documented.silent")
