"""The part of Sphinx that knows Saccade's pages: masks, charts of measured rows, formulas and entries of the API.

Pages are Markdown that also reads well elsewhere. While the site is built, a block ```masks with one expression of
`saccade.mask` per line becomes pictures for 64 queries and keys, or for the number in its first line. A comment
`<!-- chart: NAME -->` becomes a chart of scripts/measured.py. `notebooks/NAME.md` are the notebooks, and links to a
notebook lead to its page. Formulas become MathML, which browsers draw themselves. A line `::: NAME` becomes the
documentation of an object. The list of pages in docs/conf.py is added to the first page. `static-lab/` is the lab
without its server.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from blocks import DEVICES, PACKAGES
from docutils import nodes
from latex2mathml.converter import convert
from measured import drawn
from notebooks import markdown

from saccade import mask
from saccade.lab.export import CARDS, export, grids
from saccade.mask.drawing import cell_states
from saccade.plot import cells

ROOT = Path(__file__).resolve().parent.parent
# the page of a notebook has its outputs if the notebook needs only NumPy
WITH_OUTPUTS = {"masks_and_plans": True, "train_and_inspect": False}
NOTEBOOK = re.compile(r"\]\((?:\.\./)+notebooks/(\w+)\.ipynb\)")
MASKS = re.compile(r"^```masks *(\d*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"^```python (\w+)$", re.MULTILINE)
TITLES = PACKAGES | DEVICES
CHART = re.compile(r"^<!-- chart: ([\w-]+) -->$", re.MULTILINE)
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
PAGE = re.compile(r"docs/([\w/-]+)\.md")
CELLS = 64


def setup(app: Any) -> dict[str, Any]:
    app.add_config_value("site_pages", {}, "env")
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.connect("builder-inited", write_notebooks)
    app.connect("source-read", extend)
    app.connect("autodoc-skip-member", skips)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("html-page-context", give_texts)
    app.connect("build-finished", export_lab)
    return {"parallel_read_safe": True}


def write_notebooks(app: Any) -> None:
    folder = Path(app.srcdir) / "notebooks"
    folder.mkdir(exist_ok=True)
    for name, outputs in WITH_OUTPUTS.items():
        text = markdown(ROOT / "notebooks" / f"{name}.ipynb", outputs)
        (folder / f"{name}.md").write_text(text.replace("](../docs/", "](/"), encoding="utf-8")


def export_lab(app: Any, error: Exception | None) -> None:
    """The lab that needs no server, next to the pages."""
    if error is None and app.builder.format == "html":
        # fewer plans than `saccade lab --export` makes, which would take longer than the pages
        export(Path(app.outdir) / "static-lab", "../", grids(devices=CARDS, dtypes=("bfloat16",)))


def extend(app: Any, page: str, source: list[str]) -> None:
    """Change the text of a page to what Sphinx understands."""
    text = NEEDS.sub(lambda match: f"```{{code-block}} python\n:caption: {TITLES[match[1]]}\n", source[0])
    text = MASKS.sub(lambda match: _masks(match[2].splitlines(), int(match[1] or CELLS)), text)
    text = NOTEBOOK.sub(r"](/notebooks/\1.md)", text)
    text = CHART.sub(lambda match: drawn(match[1]), text)
    text = ENTRY.sub(lambda match: _entry(match[1]), text)
    if page == app.config.root_doc:
        text += "".join(_toctree(title, pages) for title, pages in app.config.site_pages.items())
    source[0] = text


def skips(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Whether a member is a field of a named tuple, which the docstring of its class describes; else None."""
    return True if (getattr(member, "__doc__", None) or "").startswith("Alias for field number") else None


def link_pages(app: Any, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Turn the path of a page in a docstring into a link."""
    lines[:] = [PAGE.sub(r":doc:`/\1`", line) for line in lines]


def give_texts(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Put the texts of all pages into the page of the search: it requests them, which a folder does not answer."""
    if page == "search":
        texts = {f"./{name}.html": _texts(app.env.get_doctree(name)) for name in sorted(app.env.found_docs)}
        # a text must not end the script
        words = json.dumps(texts).replace("<", "\\u003c")
        app.add_js_file(None, body=f"const texts = {words}; window.fetch = async (url) => new Response(texts[url]);")


def _texts(page: nodes.document) -> str:
    """What the search takes for the page: each section with its own text."""
    parts = []
    for section in page.findall(nodes.section):
        own = (one.astext() for one in section.children if not isinstance(one, (nodes.section, nodes.raw)))
        parts.append(f'<p id="{section["ids"][0]}">{html.escape(" ".join(own))}</p>')
    return '<div role="main">' + " ".join(parts) + "</div>"


def _masks(expressions: list[str], tokens: int) -> str:
    figures = []
    for text in expressions:
        picture = cells.svg(cell_states(mask.parse(text), tokens, tokens, size=CELLS), text)
        # a blank line would end the block of HTML
        figures.append(f"<figure>{picture.strip()}<figcaption><code>{html.escape(text)}</code></figcaption></figure>")
    return '<div class="masks">\n' + "\n".join(figures) + "\n</div>"


def _entry(name: str) -> str:
    last = name.rpartition(".")[2]
    kind = "module" if name == "saccade.mask" else "class" if last[0].isupper() else "function"
    kind = "exception" if last.endswith("Error") or last == "Unsupported" else kind
    members = "" if kind == "function" else "   :members:\n"
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{members}```\n"


def _toctree(title: str, pages: dict[str, str]) -> str:
    lines = "\n".join(f"{name} <{page}>" for name, page in pages.items())
    return f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n"


def _inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Element) -> None:
    writer.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode
