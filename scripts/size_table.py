"""Prints the size budget of the project as a table; exits with 1 if anything is over it.

A function's lines are counted without its docstring. A line counts as repeated if it is in a run of 8 lines of code
that occurs exactly in a second place. Imports, comments, docstrings and lone punctuation are skipped.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {".cpp", ".hpp", ".h", ".wgsl", ".metal"}
FOLDERS = ("src", "scripts", "benchmarks", "examples", "tests")
HOST_FILE, KERNEL_FILE, HOST_FUNCTION, KERNEL_FUNCTION = 300, 450, 60, 150
REPEATED_PERCENT, ENVIRONMENT, PUBLIC_NAMES, RUN = 3.0, 3, 23, 8
OWN_BUDGET = {"src/saccade/reference.py": 150}
NOT_A_FUNCTION = re.compile(
    r"(namespace|struct|class|union|enum|extern|if|for|while|switch|do|else|try|catch|return)\b|=$"
)
READS_ENVIRONMENT = re.compile(r"""(?:environ(?:\.get\(|\.pop\(|\[)|getenv\()\s*["'](\w+)["']""")


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @property
    def kernel(self) -> bool:
        return Path(self.path).suffix in KERNELS

    @property
    def triton(self) -> bool:
        """Whether this Python file contains kernels in Triton's language."""
        return self.path.startswith("src/") and bool(re.search(r"^@(triton|gluon)\.jit", self.text, re.M))

    @property
    def shipped(self) -> bool:
        return not self.path.startswith("tests/")


@dataclass(frozen=True)
class Row:
    what: str
    budget: float
    count: float
    where: str


def sources() -> list[Source]:
    """Python and kernel files that git tracks, or does not track and does not ignore, without other projects'."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    listing = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [p for p in sorted(set(listing)) if Path(p).suffix in {".py", *KERNELS} and (ROOT / p).exists()]
    paths = [p for p in paths if "/vendor/" not in p]
    return [Source(p, (ROOT / p).read_text(encoding="utf-8")) for p in paths]


def docstring_lines(node: ast.AST) -> range:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return range(first.lineno, (first.end_lineno or first.lineno) + 1)
    return range(0)


def python_functions(text: str, jitted: bool | None = None) -> list[tuple[str, int]]:
    """Name and lines of every function, or only of Triton kernels (jitted), or only of all others."""
    sizes: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            marked = any(re.search(r"\b(triton|gluon)\.jit\b", ast.unparse(d)) for d in node.decorator_list)
            if jitted is not None and marked != jitted:
                continue
            sizes.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1 - len(docstring_lines(node))))
    return sizes


def without_comments(text: str) -> str:
    """The text with comments, strings and preprocessor lines removed, and its line breaks."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:[^\n\\]|\\.|\\\n)*'
    return re.sub(pattern, lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)


def function_name(head: str) -> str:
    """The name before the first parenthesis that does not belong to an attribute."""
    plain = re.sub(r"@\w+(\([^)]*\))?|\[\[.*?\]\]|__attribute__\s*\(\(.*?\)\)", "", head)
    match = re.search(r"(\w+|operator\S+)\s*\(", plain)
    return match[1] if match else plain


def kernel_functions(text: str) -> list[tuple[str, int]]:
    """Functions of C++, Metal and WGSL: the outermost brace blocks whose head has parentheses."""
    sizes: list[tuple[str, int]] = []
    depth, inside, head, start, name = 0, 0, "", 1, ""
    line = 1
    for char in without_comments(text):
        line += char == "\n"
        if char == "{":
            depth += 1
            head = re.sub(r"template\s*<[^{]*?>\s*(?=\w)", "", " ".join(head.split()))
            if not inside and "(" in head and not NOT_A_FUNCTION.match(head) and not head.endswith("="):
                inside, name = depth, function_name(head)
            head = ""
        elif char == "}":
            if inside == depth:
                sizes.append((name, line - start + 1))
                inside = 0
            depth, head = depth - 1, ""
        elif char == ";" and not inside and "(" not in head:
            head = ""
        else:
            if not inside and not head.strip():
                start = line
            head += char
            if char == ";" and head.count("(") == head.count(")"):
                head = ""
    return sizes


def code_lines(source: Source) -> list[str]:
    text = without_comments(source.text) if source.kernel else source.text
    lines = text.splitlines()
    if not source.kernel:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    lines[number - 1] = ""
            for number in docstring_lines(node):
                lines[number - 1] = ""
        lines = [line.partition("  #")[0] for line in lines]
    joined = (" ".join(line.split()) for line in lines)
    return [line for line in joined if re.search(r"\w", line) and not line.startswith("#")]


def repeated(files: list[Source]) -> tuple[float, str]:
    """Percent of code lines that are in a repeated run, and the file with most of them."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    total = 0
    for source in files:
        lines = code_lines(source)
        total += len(lines)
        for begin in range(len(lines) - RUN + 1):
            places[tuple(lines[begin : begin + RUN])].append((source.path, begin))
    marked = {(path, at + k) for spots in places.values() if len(spots) > 1 for path, at in spots for k in range(RUN)}
    per_file: dict[str, int] = defaultdict(int)
    for path, _ in marked:
        per_file[path] += 1
    worst = max(per_file, key=per_file.__getitem__, default="")
    return 100.0 * len(marked) / max(1, total), f"{worst}: {per_file[worst]} lines" if worst else ""


def largest(what: str, budget: int, sizes: list[tuple[str, int]]) -> list[Row]:
    """A row for the largest, and one for each that is over the budget."""
    ranked = sorted(sizes, key=lambda item: -item[1])
    return [Row(what, budget, size, where) for n, (where, size) in enumerate(ranked) if n == 0 or size > budget]


def rows(files: list[Source]) -> list[Row]:
    host = [f for f in files if not f.kernel and not f.triton]
    kernel = [f for f in files if f.kernel or f.triton]
    count = {f.path: len(f.text.splitlines()) for f in files}
    table = largest("host file, lines", HOST_FILE, [(f.path, count[f.path]) for f in host])
    table += largest("kernel file, lines", KERNEL_FILE, [(f.path, count[f.path]) for f in kernel])
    table += [Row("its own budget, lines", n, count[path], path) for path, n in OWN_BUDGET.items() if path in count]
    functions = [(f"{f.path}:{name}", n) for f in host for name, n in python_functions(f.text)]
    functions += [(f"{f.path}:{name}", n) for f in files if f.triton for name, n in python_functions(f.text, False)]
    table += largest("host function, lines", HOST_FUNCTION, functions)
    functions = [(f"{f.path}:{name}", n) for f in files if f.kernel for name, n in kernel_functions(f.text)]
    functions += [(f"{f.path}:{name}", n) for f in files if f.triton for name, n in python_functions(f.text, True)]
    table += largest("kernel function, lines", KERNEL_FUNCTION, functions)
    percent, where = repeated([f for f in files if f.shipped])
    table.append(Row("repeated blocks, %", REPEATED_PERCENT, percent, where))
    names = sorted({name for f in files if f.path.startswith("src/") for name in READS_ENVIRONMENT.findall(f.text)})
    table.append(Row("environment variables", ENVIRONMENT, len(names), " ".join(names)))
    init = next((f.text for f in files if f.path == "src/saccade/__init__.py"), "")
    public = re.search(r"__all__ = \[(.*?)\]", init, re.S)
    table.append(Row("public names", PUBLIC_NAMES, len(re.findall(r'"\w+"', public[1])) if public else 0, ""))
    return table


def main() -> int:
    files = sources()
    table = rows(files)
    print(f"{'':4} {'what':24} {'budget':>7} {'count':>7}  where")
    for row in table:
        mark = "OVER" if row.count > row.budget else "ok"
        print(f"{mark:4} {row.what:24} {row.budget:7g} {row.count:7.4g}  {row.where}")
    lines = {folder: sum(len(f.text.splitlines()) for f in files if f.path.startswith(folder)) for folder in FOLDERS}
    print("lines: " + ", ".join(f"{folder} {n}" for folder, n in lines.items() if n))
    return int(any(row.count > row.budget for row in table))


if __name__ == "__main__":
    sys.exit(main())
