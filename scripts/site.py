"""A hook of mkdocs that draws masks, charts of measured rows and formulas while the site is built.

Formulas become MathML, which browsers draw themselves. A block ```masks has one expression of `saccade.mask` per line,
each drawn for 64 queries and keys, or for the number in the block's first line. `measured/NAME.svg` are the charts of
scripts/measured.py.
"""

from __future__ import annotations

import html
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

from saccade import mask
from saccade.mask.drawing import cell_states
from saccade.plot import cells

ROOT = Path(__file__).resolve().parent.parent
MEASURED = runpy.run_path(str(ROOT / "scripts" / "measured.py"))
MASKS = re.compile(r"^```masks *(\d*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"^```python (\w+)$", re.MULTILINE)
# the words that scripts/blocks.py accepts
TITLES = {
    "webgpu": "on a WebGPU device",
    "cuda": "on an NVIDIA GPU, or in Triton's interpreter",
    "mlx": "with MLX",
    "transformers": "with transformers",
    "jax": "with JAX",
    "onnxruntime": "with ONNX Runtime",
}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
CELLS = 64


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the charts of measured rows."""
    with tempfile.TemporaryDirectory() as folder:
        for name, draw in MEASURED["DRAWINGS"].items():
            path = Path(folder) / f"{name}.svg"
            draw(path)
            files.append(File.generated(config, f"measured/{name}.svg", content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Draw blocks of masks, and put the device or package that a block of Python needs above it."""
    markdown = NEEDS.sub(lambda match: f'```python title="{TITLES[match[1]]}"', markdown)
    return MASKS.sub(lambda match: _masks(match[2].splitlines(), int(match[1] or CELLS)), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML."""
    return FORMULA.sub(lambda match: _formula(match[2], match[1]), content)


def _masks(expressions: list[str], tokens: int) -> str:
    figures = []
    for text in expressions:
        picture = cells.svg(cell_states(mask.parse(text), tokens, tokens, size=CELLS), text)
        # a blank line would end the block of HTML
        figures.append(f"<figure>{picture.strip()}<figcaption><code>{html.escape(text)}</code></figcaption></figure>")
    return '<div class="masks">\n' + "\n".join(figures) + "\n</div>"


def _formula(text: str, tag: str) -> str:
    return convert(html.unescape(text), display="block" if tag == "div" else "inline")
