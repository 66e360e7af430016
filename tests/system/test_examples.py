"""Every example runs to its end and prints something."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "torch" in path.read_text():
        pytest.importorskip("torch")
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
