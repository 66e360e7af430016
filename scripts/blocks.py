"""Runs the Python blocks of Markdown pages. The blocks of a page run in order, in one namespace.

    python scripts/blocks.py [--on webgpu,cuda] PAGE...

The word after ```python says what a block needs: a package (such as mlx), which must be installed, or a device
(webgpu, cuda), which --on must name. All other blocks with such a word are left out and counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

# a word, and how the site says it above the block
PACKAGES = {
    "mlx": "with MLX",
    "transformers": "with transformers",
    "jax": "with JAX",
    "onnxruntime": "with ONNX Runtime",
    "wgpu": "with wgpu",
}
DEVICES = {"webgpu": "on a WebGPU device", "cuda": "on an NVIDIA GPU, or in Triton's interpreter"}
FENCE = re.compile(r"^```python *(?P<needs>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block: the number of its first line, the package or device that it needs, and its code."""

    line: int
    needs: str
    code: str


def blocks(path: Path) -> list[Block]:
    """The Python blocks of a page. Raises ValueError for an unknown package or device."""
    text = path.read_text(encoding="utf-8")
    python = [
        Block(text.count("\n", 0, match.start("code")), match["needs"].strip(), match["code"])
        for match in FENCE.finditer(text)
    ]
    for line, needs, _ in python:
        if needs not in ("", *PACKAGES, *DEVICES):
            raise ValueError(f"{path.name}:{line}: a block needs {needs!r}; expected {', '.join(PACKAGES | DEVICES)}")
    return python


def run(path: Path, on: Collection[str] = ()) -> tuple[int, int]:
    """Run the blocks of a page on a machine with these devices. Returns how many ran and how many were left out."""
    names: dict[str, Any] = {"__name__": path.stem}
    python = blocks(path)
    ran = 0
    for line, needs, code in python:
        if not needs or needs in on or (needs in PACKAGES and importlib.util.find_spec(needs)):
            # the line breaks make errors name lines of the page
            exec(compile("\n" * line + code, str(path), "exec"), names)
            ran += 1
    return ran, len(python) - ran


def main() -> None:
    """Run the pages of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--on", default="", help="devices of this machine, separated by commas")
    args = parser.parse_args()
    for page in args.pages:
        ran, left = run(page, args.on.split(","))
        print(f"{page}: {ran} blocks ran, {left} left out", flush=True)


if __name__ == "__main__":
    main()
