"""The notebooks: their format, their code, what they show, and their pages on the site."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))
PROSE = runpy.run_path(str(ROOT / "scripts" / "prose.py"))
PATHS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
# the width of a line of code on the site
WIDTH = 88


def shown(name: str) -> list[Any]:
    return list(NOTEBOOKS["run"](PATHS[name]))


def pictures(outputs: list[Any]) -> list[str]:
    return [output.svg for output in outputs if output.svg]


def test_masks_and_plans() -> None:
    for package in ("typer", "rich"):
        pytest.importorskip(package)
    outputs = shown("masks_and_plans")
    drawn, printed = pictures(outputs), "".join(output.printed for output in outputs)
    assert len(drawn) == 5
    assert all("<svg" in picture and "32 queries, 32 keys" in picture for picture in drawn)
    assert "cpu      64 ×  64" in printed
    assert "prefill on h100" in printed
    assert re.search(r"largest difference \d", printed)


def test_train_and_inspect() -> None:
    for package in ("torch", "tokenizers", "safetensors", "matplotlib"):
        pytest.importorskip(package)
    outputs = shown("train_and_inspect")
    loss, heads = pictures(outputs)
    assert "nats per token" in loss
    assert re.search(r"layer \d, head \d", heads)
    printed = "".join(output.printed for output in outputs)
    losses = [float(number) for number in re.findall(r"step +\d+  loss ([\d.]+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert printed.count("mean") == 8
    assert outputs[-1].printed.startswith("def ")


@pytest.mark.parametrize("name", PATHS)
def test_what_is_stored(name: str) -> None:
    cells = NOTEBOOKS["read"](PATHS[name])
    assert cells[0].kind == "markdown"
    assert cells[0].text.startswith("# ")
    wide = [line for cell in cells if cell.kind == "code" for line in cell.text.splitlines() if len(line) > WIDTH]
    assert not wide, "\n".join(wide)
    text = "\n\n".join(cell.text for cell in cells if cell.kind == "markdown")
    assert not list(PROSE["places"](f"{name}.md", text))
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    assert links
    assert all((PATHS[name].parent / link).exists() for link in links)


def test_ruff_accepts_the_code() -> None:
    program = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if program is None:
        pytest.skip("ruff is not installed")
    for words in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run([program, *words, "notebooks"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def book(*cells: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5, **fields}


def code(text: str, name: str = "a", **fields: Any) -> dict[str, Any]:
    cell = {"cell_type": "code", "id": name, "metadata": {}, "source": text, "execution_count": None, "outputs": []}
    return {**cell, **fields}


def prose(text: str, name: str = "b") -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": [text]}


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def store(content: dict[str, Any]) -> Path:
        path = tmp_path / "book.ipynb"
        path.write_text(json.dumps(content))
        return path

    return store


@pytest.mark.parametrize(
    "content, message",
    [
        (book(nbformat_minor=4), r"nbformat is \(4, 4\); expected \(4, 5\)"),
        (book(worksheets=[]), "the fields are"),
        (book(code("1"), code("2")), "several cells have the id 'a'"),
        (book(code("1", "a b")), "cell 0: id is 'a b'"),
        (book(code("1", cell_type="raw")), "cell_type is 'raw'; expected markdown or code"),
        (book({"cell_type": "code", "metadata": {}, "source": "1"}), "cell 0: the fields are"),
        (book(code("1", outputs=[{}])), "cell 0: it has outputs; clear all outputs"),
        (book(code("1", execution_count=1)), "cell 0: it has outputs"),
        (book(code("1", source=1)), "source is int; expected a string"),
    ],
)
def test_what_is_refused(stored: Callable[[dict[str, Any]], Path], content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NOTEBOOKS["read"](stored(content))


DRAWN = """class Drawn:
    def _repr_svg_(self):
        return "<svg>\\n\\n</svg>"


x = 3
Drawn()"""


def test_what_a_cell_shows(stored: Callable[[dict[str, Any]], Path]) -> None:
    cells = code(DRAWN), prose("# Text"), code("print(x)\nx + 1", "c"), code("x;", "d"), code("None", "e")
    path = stored(book(*cells))
    first, *others = NOTEBOOKS["run"](path)
    assert first.svg == "<svg>\n\n</svg>"
    assert [(output.printed, output.text) for output in others] == [("3\n", "4"), ("", ""), ("", "")]
    page = NOTEBOOKS["markdown"](path, True)
    assert '<div class="output">\n<svg>\n</svg>\n</div>' in page
    assert "# Text\n\n```{code-block} python\nprint(x)\nx + 1\n```\n\n```text\n3\n4\n```" in page
    assert "text\n3" not in NOTEBOOKS["markdown"](path, False)


def test_an_error_names_the_cell(stored: Callable[[dict[str, Any]], Path]) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(NOTEBOOKS["run"](stored(book(code("x = 0"), code("\n1 / x", "second")))))
    last = caught.traceback[-1]
    assert (str(last.path).rpartition("/")[2], last.lineno) == ("book.ipynb, cell second", 1)
