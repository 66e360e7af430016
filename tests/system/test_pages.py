"""Every Python block of the README and of the pages in docs/ runs, one page after the other.

Those that need a device run in processes of their own: WebGPU on a driver of software, Triton in its interpreter.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = runpy.run_path(str(ROOT / "scripts" / "blocks.py"))
PAGES = {
    str(path.relative_to(ROOT)): BLOCKS["blocks"](path)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}


# characters that a block of code shows on the site without scrolling; recipes are code of this repository, which has
# longer lines
WIDTH, LONGER = 88, "docs/recipes.md"


def pages(device: str) -> list[str]:
    return [page for page, found in PAGES.items() if any(block.needs == device for block in found)]


@pytest.mark.parametrize("page", [page for page, found in PAGES.items() if found])
def test_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    # some write a picture
    monkeypatch.chdir(tmp_path)
    found = PAGES[page]
    for package in {block.needs for block in found} & set(BLOCKS["PACKAGES"]):
        pytest.importorskip(package)
    ran, left = BLOCKS["run"](ROOT / page)
    assert left == sum(block.needs in BLOCKS["DEVICES"] for block in found)
    assert ran + left == len(found)


@pytest.mark.parametrize("page", [page for page, found in PAGES.items() if found and not page.startswith(LONGER)])
def test_lines_fit_the_site(page: str) -> None:
    wide = [
        f"{page}:{block.line + number}: {line}"
        for block in PAGES[page]
        for number, line in enumerate(block.code.splitlines(), 1)
        if len(line) > WIDTH
    ]
    assert not wide, "\n".join(wide)


def in_process(*words: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_blocks_for_webgpu(drivers: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("wgpu")
    if not drivers["swiftshader"].exists():
        pytest.skip("no Vulkan driver swiftshader: make system")
    environment = {"VK_DRIVER_FILES": str(drivers["swiftshader"]), "SACCADE_WEBGPU_ADAPTER": "swiftshader"}
    in_process("scripts/blocks.py", "--on", "webgpu", *pages("webgpu"), XDG_RUNTIME_DIR=str(tmp_path), **environment)


def test_blocks_for_nvidia() -> None:
    pytest.importorskip("triton")
    in_process("scripts/blocks.py", "--on", "cuda", *pages("cuda"), TRITON_INTERPRET="1")


def test_an_error_names_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\nand\n\n```python\n1 / (x - 1)\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        BLOCKS["run"](page)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == (page, 9)
    page.write_text("```python abacus\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:1: a block needs 'abacus'"):
        BLOCKS["blocks"](page)
