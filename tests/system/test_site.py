"""The documentation site is built strictly, and fetches nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# what a browser fetches by itself, by tag and attribute
FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
}
OUTSIDE = re.compile(r"(?:https?:)?//", re.IGNORECASE)


class Fetched(HTMLParser):
    """Collects what a page fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        # the address that a page is known by is no request
        if given.get("rel") != "canonical":
            self.found += [value for name, value in attrs if (tag, name) in FETCHED and value]


@pytest.mark.timeout(300)
def test_the_site(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install 'saccade[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    whole(tmp_path)
    nothing_from_elsewhere(tmp_path)


def whole(site: Path) -> None:
    """Every page is there, and what the build makes."""
    markdown = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    sources = {path for path in markdown if path.parts[0] != "logs"}
    pages = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert pages == sources | {Path("404")}
    assert not (site / "logs").exists()
    masks, derivation = ((site / name).read_text() for name in ("masks.html", "inside/derivation.html"))
    assert masks.count("<figure><svg") == 24
    assert derivation.count("<math") > 40
    assert "arithmatex" not in derivation
    assert "saccade.api.attention" in (site / "api" / "attention.html").read_text()
    drawn = set(re.findall(r'src="(measured/[\w.-]+)"', (site / "performance.html").read_text()))
    assert drawn == {f"measured/{path.name}" for path in (site / "measured").iterdir()}


def nothing_from_elsewhere(site: Path) -> None:
    """No page and no style names a file of another host."""
    for path in site.rglob("*.html"):
        outside = [found for found in Fetched(path.read_text()).found if OUTSIDE.match(found)]
        assert not outside, f"{path.relative_to(site)} fetches {outside}"
    for path in site.rglob("*.css"):
        outside = [x for x in re.findall(r"url\(['\"]?([^'\")]+)", path.read_text()) if OUTSIDE.match(x)]
        assert not outside, f"{path.relative_to(site)} fetches {outside}"


def test_the_support_table_is_current() -> None:
    for package in ("torch", "triton", "wgpu"):
        pytest.importorskip(package)
    table = runpy.run_path(str(ROOT / "scripts" / "support.py"))
    assert table["PAGE"].read_text() == table["page"](), "run python scripts/support.py to write it"


def test_the_readme_is_current(tmp_path: Path) -> None:
    for package in ("torch", "triton", "wgpu", "matplotlib"):
        pytest.importorskip(package)
    page = runpy.run_path(str(ROOT / "scripts" / "readme.py"))
    text = page["README"].read_text()
    assert text == page["filled"](text), "run python scripts/readme.py to write it"
    assert text.count("✓") > 20
    assert (page["PICTURES"] / "masks.svg").read_text() == page["strip"]()
    page["speed"](tmp_path / "speed.svg")
    assert (page["PICTURES"] / "speed.svg").read_text() == (tmp_path / "speed.svg").read_text()


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 130
    assert len(text.split()) <= 1000
    assert (ROOT / "DESIGN.md").read_text().count("\n") <= 100
