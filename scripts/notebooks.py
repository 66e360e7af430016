"""Runs Jupyter notebooks without Jupyter, and turns them into Markdown for the site.

    python scripts/notebooks.py NOTEBOOK...

The code cells of a notebook run in order, in one namespace. The value of a cell's last expression is shown as Jupyter
shows it: by `_repr_svg_` if it has one, otherwise by `repr`. Magic commands (`%`, `!`) are not supported. A stored
notebook has no outputs.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = (4, 5)
IDENTITY = re.compile(r"[A-Za-z0-9_-]{1,64}")
# the fields of a cell in format 4.5
FIELDS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}


class Cell(NamedTuple):
    """A cell: its id, "markdown" or "code", and its text."""

    name: str
    kind: str
    text: str


class Output(NamedTuple):
    """What a code cell prints, and the value of its last expression as text and as SVG; "" for what it lacks."""

    printed: str
    text: str = ""
    svg: str = ""


def read(path: Path) -> list[Cell]:
    """The cells of a notebook. Raises ValueError unless it is in format 4.5, without outputs."""
    book: Any = json.loads(path.read_text(encoding="utf-8"))
    if (version := (book.get("nbformat"), book.get("nbformat_minor"))) != FORMAT:
        raise ValueError(f"{path.name}: nbformat is {version}; expected {FORMAT}: save it with a current Jupyter")
    if set(book) != {"cells", "metadata", "nbformat", "nbformat_minor"} or not isinstance(book["metadata"], dict):
        raise ValueError(f"{path.name}: the fields are {sorted(book)}; expected cells, metadata and the format")
    cells = [_cell(path.name, number, cell) for number, cell in enumerate(book["cells"])]
    names = [cell.name for cell in cells]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path.name}: several cells have the id {repeated[0]!r}; expected one id per cell")
    return cells


def _cell(file: str, number: int, cell: Mapping[str, Any]) -> Cell:
    where, kind = f"{file}, cell {number}", cell.get("cell_type")
    if kind not in FIELDS:
        raise ValueError(f"{where}: cell_type is {kind!r}; expected {' or '.join(FIELDS)}")
    if set(cell) != FIELDS[kind] or not isinstance(cell["metadata"], dict):
        raise ValueError(f"{where}: the fields are {sorted(cell)}; expected {sorted(FIELDS[kind])}")
    if not isinstance(cell["id"], str) or not IDENTITY.fullmatch(cell["id"]):
        raise ValueError(f"{where}: id is {cell['id']!r}; expected 1 to 64 letters, digits, - and _")
    if kind == "code" and (cell["outputs"] or cell["execution_count"] is not None):
        raise ValueError(f"{where}: it has outputs; clear all outputs and save it again")
    lines = cell["source"]
    if not isinstance(lines, str) and not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
        raise ValueError(f"{where}: source is {type(lines).__name__}; expected a string or a list of strings")
    return Cell(cell["id"], kind, "".join(lines))


def run(path: Path) -> Iterator[Output]:
    """Run the code cells of a notebook in order, and yield what each of them shows."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in read(path):
        if cell.kind == "code":
            yield _execute(cell, f"{path.name}, cell {cell.name}", names)


def _execute(cell: Cell, where: str, names: dict[str, Any]) -> Output:
    tree = ast.parse(cell.text, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    # a semicolon after the last expression hides its value
    shown = last is not None and not cell.text.rstrip().endswith(";")
    with redirect_stdout(StringIO()) as printed:
        exec(compile(tree, where, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    if value is None or not shown:
        return Output(printed.getvalue())
    picture = value._repr_svg_() if hasattr(value, "_repr_svg_") else None
    return Output(printed.getvalue(), repr(value), picture or "")


def markdown(path: Path, outputs: bool) -> str:
    """A notebook as a page of Markdown, with what its cells show if `outputs`, which runs it."""
    results = run(path) if outputs else iter(())
    parts: list[str] = []
    for cell in read(path):
        if cell.kind == "markdown":
            parts.append(cell.text)
            continue
        # these fences are no blocks of scripts/blocks.py
        parts.append(f"```{{code-block}} python\n{cell.text}\n```")
        if outputs:
            parts += _shown(next(results))
    return "\n\n".join(parts) + "\n"


def _shown(output: Output) -> Iterator[str]:
    parts = output.printed.rstrip("\n"), "" if output.svg else output.text
    if text := "\n".join(filter(None, parts)):
        yield f"```text\n{text}\n```"
    if output.svg:
        # a blank line would end the block of HTML
        picture = re.sub(r"\n\s*\n", "\n", output.svg.strip())
        yield f'<div class="output">\n{picture}\n</div>'


def main() -> None:
    """Run the notebooks of the command line, and print what they show."""
    for path in map(Path, sys.argv[1:]):
        for output in run(path):
            value = f"(a picture of {len(output.svg)} characters)" if output.svg else output.text
            print(output.printed, value, sep="", flush=True)


if __name__ == "__main__":
    main()
