"""Counts wide signatures, vague names and lines that the formatter skips; exits with 1 if a count is over its budget.

`python scripts/counts.py [WORD]` also lists the places of every count whose name contains the word ("" for all).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WIDE = 8
VAGUE = ("found", "given", "made", "told", "held")
# where functions have the signatures of other libraries
COPIED = ("src/saccade/integrations/", "src/saccade/nn/multihead.py")


class Place(NamedTuple):
    """A line of a file, and what was counted there."""

    path: str
    line: int
    what: str


class Source(NamedTuple):
    """A Python file, or any other text with tree None."""

    path: str
    text: str
    tree: ast.AST | None


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters, without self and cls. * and ** count as one each."""
    a = node.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg)


def wide(source: Source, kernels: bool) -> Iterator[Place]:
    """Functions with 8 parameters or more: kernels of Triton and Gluon, or all others."""
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (n := parameters(node)) >= WIDE:
            jitted = any(re.search(r"\bjit\b", ast.unparse(decorator)) for decorator in node.decorator_list)
            if jitted == kernels:
                yield Place(source.path, node.lineno, f"{node.name}: {n} parameters")


def ours(source: Source, own: bool) -> Iterator[Place]:
    """Wide host functions: those of this project (own), or those that repeat another library's signature."""
    return wide(source, False) if own != source.path.startswith(COPIED) else iter(())


def skips(source: Source) -> Iterator[Place]:
    """Lines that the formatter skips."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search(r"# fmt: (skip|off)\b", line):
            yield Place(source.path, number, line.strip())


def defined(node: ast.AST) -> str:
    """The name that a node binds, or an empty string."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs):
        return node.name or ""
    return (node.asname or node.name) if isinstance(node, ast.alias) else ""


def vague(source: Source) -> Iterator[Place]:
    """Variables, parameters, attributes and functions with a vague name."""
    for node in nodes(source):
        if (name := defined(node)) in VAGUE:
            yield Place(source.path, getattr(node, "lineno", 0), name)


def calls(source: Source) -> Iterator[Place]:
    """Classes named Call."""
    for node in nodes(source):
        if isinstance(node, ast.ClassDef) and node.name == "Call":
            yield Place(source.path, node.lineno, "class Call")


class Count(NamedTuple):
    """What is counted in which folders, the most that is allowed, and the number to reach."""

    what: str
    budget: int
    aim: int
    folders: tuple[str, ...]
    places: Callable[[Source], Iterator[Place]]


# lower a budget when the count falls, until it is the aim; the two vague names in src are public, in `PeerError`
COUNTS = (
    Count("host functions with 8 parameters or more", 29, 30, ("src",), lambda source: ours(source, True)),
    Count("the same, in signatures that others wrote", 25, 25, ("src",), lambda source: ours(source, False)),
    Count("kernels with 8 parameters or more", 3, 3, ("src",), lambda source: wide(source, True)),
    Count("fmt: skip in src", 14, 60, ("src",), skips),
    Count("vague names in src", 2, 0, ("src",), vague),
    Count("vague names in scripts and benchmarks", 0, 0, ("scripts", "benchmarks"), vague),
    Count("classes named Call", 0, 0, ("src", "scripts", "benchmarks"), calls),
)
SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".wgsl", ".metal", ".h", ".js", ".mjs", ".html"}


def nodes(source: Source) -> Iterator[ast.AST]:
    return ast.walk(source.tree) if source.tree else iter(())


def read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(str(path.relative_to(ROOT)), text, ast.parse(text) if path.suffix == ".py" else None)


def sources(folder: str) -> list[Source]:
    """The files of a folder, except this one, which contains the patterns."""
    paths = sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    return [read(path) for path in paths if path != Path(__file__).resolve()]


def all_places() -> list[list[Place]]:
    """The places of every count."""
    folders = {folder: sources(folder) for folder in ("src", "tests", "scripts", "benchmarks")}
    return [[p for name in c.folders for source in folders[name] for p in c.places(source)] for c in COUNTS]


def main() -> int:
    print(f"{'':4} {'what':42} {'budget':>7} {'count':>6} {'aim':>4}")
    over = False
    for count, places in zip(COUNTS, all_places(), strict=True):
        late = len(places) > count.budget
        over |= late
        print(f"{'OVER' if late else 'ok':4} {count.what:42} {count.budget:7} {len(places):6} {count.aim:4}")
        if late or any(word in count.what for word in sys.argv[1:]):
            print("\n".join(f"       {path}:{line}: {what}" for path, line, what in places))
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
