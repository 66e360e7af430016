"""The documentation site: built without a warning, read in a browser, and nothing fetched from elsewhere."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
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


class Page(HTMLParser):
    """What a page fetches, where its links lead, and the names in it that links can lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        # the address that a page is known by is no request
        if values.get("rel") != "canonical":
            self.fetched += [value for name, value in attrs if (tag, name) in FETCHED and value]
        if tag == "a" and (link := values.get("href")):
            self.links.append(link)
        if name := values.get("id"):
            self.names.add(name)


@pytest.mark.timeout(600)
def test_the_site(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for package in ("sphinx", "furo", "myst_parser", "sphinx_copybutton", "wgpu"):
        pytest.importorskip(package, reason="pip install '.[docs,webgpu]'")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "state"), "docs", str(site)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}
    whole(site, set(pages))
    nothing_from_elsewhere(site, pages)
    links_lead_somewhere(site, pages)
    read_in_a_browser(site, sorted(pages), request.getfixturevalue("browser"))


def whole(site: Path, pages: set[str]) -> None:
    """Every page is there, and what the build makes."""
    markdown = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    made = {"genindex.html", "search.html", "static-lab/index.html"}
    assert pages == {path for path in markdown if not path.startswith("logs/")} | made
    masks, derivation = ((site / name).read_text() for name in ("masks.html", "inside/derivation.html"))
    assert masks.count("<figure><svg") == 24
    assert derivation.count("<math") > 40
    assert (site / "notebooks" / "masks_and_plans.html").read_text().count('<div class="output">') == 5
    assert "$" not in re.sub(r"(?s)<script.*?</script>|<pre.*?</pre>|<code.*?</code>", "", derivation)
    assert "saccade.api.attention" in (site / "api" / "attention.html").read_text()
    drawn = [name for page in pages for name in re.findall(r'id="chart-([\w-]+)"', (site / page).read_text())]
    assert sorted(drawn) == sorted(re.findall(r"<!-- chart: ([\w-]+) -->", "".join(
        path.read_text() for path in (ROOT / "docs").rglob("*.md")
    )))  # fmt: skip
    assert len(drawn) > 30


def nothing_from_elsewhere(site: Path, pages: dict[str, Page]) -> None:
    """No page and no style names a file of another host."""
    for name, page in pages.items():
        outside = [found for found in page.fetched if OUTSIDE.match(found)]
        assert not outside, f"{name} fetches {outside}"
    for path in site.rglob("*.css"):
        outside = [x for x in re.findall(r"url\(['\"]?([^'\")]+)", path.read_text()) if OUTSIDE.match(x)]
        assert not outside, f"{path.relative_to(site)} fetches {outside}"


def links_lead_somewhere(site: Path, pages: dict[str, Page]) -> None:
    """Every link within the site has its file, and the name in it if there is one."""
    broken: list[str] = []
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            file = ((site / name).parent / path).resolve() if path else site / name
            target = pages.get(os.path.relpath(file, site).replace(os.sep, "/"))
            if not file.exists() or (anchor and target is not None and unquote(anchor) not in target.names):
                broken.append(f"{name}: {link}")
    assert not broken, "\n".join(broken)


def read_in_a_browser(site: Path, pages: list[str], browser: Any) -> None:
    """From its folder, in both themes and at the width of a phone: no complaint, nothing cut off; the search finds."""
    wrong = [
        complaint
        for theme, width in (("light", 1280), ("dark", 390))
        for complaint in complaints(site, pages, browser, theme, width)
    ]
    assert not wrong, "\n".join(wrong)


def complaints(site: Path, pages: list[str], browser: Any, theme: str, width: int) -> list[str]:
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    page = context.new_page()
    page.on("console", lambda m: m.type in ("error", "warning") and wrong.append(f"{page.url}: {m.text}"))
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    for name in pages:
        page.goto((site / name).as_uri())
        if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
            wrong.append(f"{name} is {needed} px wide where {width} are shown")
        cut = page.evaluate(
            "[...document.querySelectorAll('math[display=block]')].filter(m => m.scrollHeight > m.clientHeight + 1)"
            ".map(m => m.textContent)"
        )
        wrong += [f"{name}, {theme}: the top or foot of {text} is cut off" for text in cut]
    wrong += wrong_in_charts(page, site, theme, width)
    page.goto(f"{(site / 'search.html').as_uri()}?q=padding")
    page.wait_for_selector("#search-results li a")
    page.wait_for_selector("#search-results .context")
    assert "Cookbook" in page.inner_text("#search-results")
    assert "padding" in page.inner_text("#search-results .context >> nth=0").lower()
    context.close()
    return wrong


# the sizes of all texts of all charts in pixels, with their details open
SIZES = """() => {
  document.querySelectorAll("details").forEach((box) => (box.open = true));
  const sizes = [...document.querySelectorAll(".chart *")]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && !e.closest("path"))
    .map((e) => parseFloat(getComputedStyle(e).fontSize));
  return [sizes.length, Math.min(...sizes)];
}"""
# the colours of Saccade's mark and of the text, in a theme that the reader chose
COLOURS = """(theme) => {
  document.body.dataset.theme = theme;
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  return [style(".chart .mark").fill, style(".chart").color];
}"""


def wrong_in_charts(page: Any, site: Path, theme: str, width: int) -> list[str]:
    """A page of figures that is too tall, texts that are too small, marks that do not follow the chosen theme."""
    wrong: list[str] = []
    page.goto((site / "performance.html").as_uri())
    tall = page.evaluate("document.documentElement.scrollHeight")
    if width == 1280 and tall > 6000:
        wrong.append(f"performance.html is {tall} px tall; expected at most 6000 with its details closed")
    light, dark = (page.evaluate(COLOURS, chosen) for chosen in ("light", "dark"))
    if light[0] == dark[0] or light[1] == dark[1]:
        wrong.append(
            f"performance.html, {theme}: marks and text are {light} in the light theme, {dark} in the dark one"
        )
    texts, smallest = page.evaluate(SIZES)
    if texts < 500 or smallest < 11:
        wrong.append(f"performance.html, {width} px: the smallest of {texts} texts in charts has {smallest} px, not 11")
    if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
        wrong.append(f"performance.html with open details is {needed} px wide where {width} are shown")
    return wrong


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
    if np.__version__ < "2":
        pytest.skip("the names of clip paths depend on NumPy's repr")
    assert (page["PICTURES"] / "speed.svg").read_text() == (tmp_path / "speed.svg").read_text()


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 130
    assert len(text.split()) <= 1000
    assert (ROOT / "DESIGN.md").read_text().count("\n") <= 100
