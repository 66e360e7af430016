"""Every example runs to its end and prints something."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from saccade.backends import metal

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "torch" in path.read_text():
        pytest.importorskip("torch")
    # one of them puts an emulator in the place of a device
    before = metal.install(None)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        metal.install(before)
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", ["recurrent", "recurrent_diagonal"])
def test_a_page(page: str) -> None:
    """A page's blocks of Python, one after the other."""
    pytest.importorskip("torch")
    path = ROOT / "docs" / f"{page}.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(compile(block, path.name, "exec"), names)
    assert names


def test_the_readme() -> None:
    """Its blocks of Python, one after the other; those of devices run where their backends are tested."""
    pytest.importorskip("torch")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    here = [block for block in blocks if "webgpu" not in block]
    if len(here) < len(blocks) - 1 or not here:
        raise AssertionError(f"{len(here)} of {len(blocks)} blocks run here")
    names: dict[str, Any] = {}
    for block in here:
        if "transformers" in block:
            pytest.importorskip("transformers")
        exec(compile(block, "README.md", "exec"), names)
