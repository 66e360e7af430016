"""The rules that continuous integration holds: the arrow of imports, the budgets of size and of counts, the logs."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = runpy.run_path(str(ROOT / "scripts" / "size_table.py"))
COUNTS = runpy.run_path(str(ROOT / "scripts" / "counts.py"))
PROSE = runpy.run_path(str(ROOT / "scripts" / "prose.py"))

CPP = """
#define TWICE(x) { x; x }
namespace a {
struct S { int n = f(1); };  // a field, not a function
template <class T>
static T add(T x,
             T y) {
  if (x) { return y; }
  return x + y;
}
constexpr int table[] = {1, 2};
void empty() {}
}
"""
WGSL = """
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  for (var i = 0u; i < 4u; i++) {
  }
}
"""


def program(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def test_imports_follow_the_arrow():
    linter = program("lint-imports")
    if linter is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_logs_are_of_runs_that_passed():
    for log in (ROOT / "docs" / "logs").glob("*.log"):
        text = log.read_text(encoding="utf-8")
        assert text.startswith("commit "), log
        assert not re.search(r"^(FAILED|ERROR)|\d (failed|errors?)\b(?!: nothing came for)", text, re.M), log


def test_size_budget():
    if not (ROOT / ".git").exists():
        pytest.skip("the size table asks git for the files")
    over = [row for row in TABLE["rows"](TABLE["sources"]()) if row.count > row.budget]
    assert not over, "\n".join(map(str, over))


def test_counts_are_within_their_budgets():
    places = COUNTS["all_places"]()
    over = [
        (c.what, c.budget, found) for c, found in zip(COUNTS["COUNTS"], places, strict=True) if len(found) > c.budget
    ]
    assert not over, "\n".join(map(str, over))


WIDE = """
import numpy as made
class Call:
    def eight(self, a, b, c, /, d, e, *, f, g, **h): ...
    def seven(self, a, b, c, d, e, f, g):
        self.told = [found for found in a]
@triton.jit
def kernel(a, b, c, d, e, f, g, h):  # fmt: skip
    held: int = 1
    return given(found=held).made
"""


def test_what_is_counted():
    source = COUNTS["Source"]("a.py", WIDE, ast.parse(WIDE))

    def whats(name, *more):
        return [place.what for place in COUNTS[name](source, *more)]

    assert whats("wide", False) == ["eight: 8 parameters"]
    assert whats("wide", True) == ["kernel: 8 parameters"]
    assert whats("calls") == ["class Call"]
    assert len(whats("skips")) == 1
    # what is defined counts, not where it is read
    assert sorted(whats("vague")) == ["found", "held", "made", "told"]


def test_no_code_for_one_chip_is_linked_to_code_for_others():
    symbols = runpy.run_path(str(ROOT / "scripts" / "symbols.py"))
    if not any(symbols["OBJECTS"].glob("kernels_*.dir")):
        pytest.skip("the core was not compiled in this checkout")
    assert symbols["main"]() == 0


def test_prose_passes_its_checker():
    if not (ROOT / ".git").exists():
        pytest.skip("the checker of prose asks git for the files")
    wrong = PROSE["all_places"](PROSE["tracked"]())
    assert not wrong, "\n".join(map(str, wrong))


def test_what_the_checker_of_prose_reads():
    page = f"It is told.\n```python\ntold = 1\n```\n| [a]({'b' * 99}) | {'c' * 81} |\n"
    assert [(place.line, place.what[:4]) for place in PROSE["places"]("a.md", page)] == [(1, "told"), (5, "cccc")]
    program = 'told = 1  # a row a layer\n"""It is turned off.\n\nIt is as row S26 says."""\n'
    assert [(place.line, place.what) for place in PROSE["places"]("a.py", program)] == [
        (1, "a row a layer"),
        (4, "row S26"),
    ]


def test_functions_of_kernel_languages_are_found():
    assert TABLE["kernel_functions"](CPP) == [("add", 6), ("empty", 1)]
    assert TABLE["kernel_functions"](WGSL) == [("main", 5)]


def test_docstrings_do_not_count():
    text = 'def f(x):\n    """One.\n\n    Two.\n    """\n    return x\n'
    assert TABLE["python_functions"](text) == [("f", 2)]


def test_repeated_blocks_are_counted_once_a_line():
    source = TABLE["Source"]
    block = "".join(f"x{n} = {n}\n" for n in range(8))
    percent, _ = TABLE["repeated"]([source("a.py", block + "y = 1\n" * 2), source("b.py", block + "z = 1\n" * 2)])
    assert percent == pytest.approx(80.0)
