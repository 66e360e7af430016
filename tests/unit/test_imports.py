"""Modules that import each other in a circle, by the text of the source: imports inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import saccade

ROOT = Path(saccade.__file__).parent


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `saccade`, the package itself as ""."""
    paths = {path: path.relative_to(ROOT).with_suffix("").parts for path in ROOT.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in paths.items()}


def statements(node: ast.AST, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports in a module, those under TYPE_CHECKING only with `types`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif types or not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from statements(child, types)


def imports(name: str, path: Path, known: dict[str, Path], types: bool) -> set[str]:
    """The modules of the package that a module imports; a package counts where a name of its own is imported."""
    package = ("saccade." + name).strip(".").split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    targets: set[str] = set()
    for statement in statements(ast.parse(path.read_text(encoding="utf-8")), types):
        if isinstance(statement, ast.Import):
            targets |= {alias.name for alias in statement.names}
            continue
        above = package[: len(package) - statement.level + 1] if statement.level else []
        base = ".".join([*above, *([statement.module] if statement.module else [])])
        names = {f"{base}.{alias.name}" for alias in statement.names}
        targets |= {x if x.removeprefix("saccade.") in known else base for x in names}
    return {x.removeprefix("saccade.") for x in targets if x.startswith("saccade.")} & known.keys() - {name}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach one another."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, stack = set(), [start]
        while stack:
            new = graph[stack.pop()] - seen
            seen |= new
            stack += new
        reached[start] = seen
    sets = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
    return sorted((set(x) for x in sets), key=sorted)


# also those that imports under TYPE_CHECKING would close
@pytest.mark.parametrize("types", [False, True], ids=["run time", "types"])
def test_no_import_circles(types: bool) -> None:
    known = modules()
    assert circles({name: imports(name, path, known, types) for name, path in known.items()}) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
