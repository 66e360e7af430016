"""Pictures of cells in three states, as masks have them: nothing, part or all of a cell. It needs only NumPy."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from textwrap import shorten

import numpy as np
from numpy.typing import NDArray

# the colours of the lab and of every picture: blue on bone
NONE, SOME, ALL = "#efece5", "#86b0d1", "#1f4e79"
# the background of a picture with a caption, and the margin around it in pixels
PAPER, MARGIN = "#ffffff", 8

States = NDArray[np.uint8]


def svg(states: States, title: str, pixels: int = 8) -> str:
    """states uint8 [rows, columns] of 0, 1 and 2 as an SVG picture whose cells are `pixels` wide and high."""
    rows, columns = states.shape
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns} {rows}" width="{columns * pixels}" '
        f'height="{rows * pixels}" shape-rendering="crispEdges">',
        f"<title>{_safe(title)}</title>",
        f'<rect width="{columns}" height="{rows}" fill="{NONE}"/>',
    ]
    for y, row in enumerate(states):
        # one rectangle for each run of a state
        edges = np.flatnonzero(np.diff(row.astype(np.int16), prepend=-1, append=-1))
        for x, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if row[x]:
                colour = ALL if row[x] == 2 else SOME
                lines.append(f'<rect x="{x}" y="{y}" width="{end - x}" height="1" fill="{colour}"/>')
    return "\n".join([*lines, "</svg>", ""])


def captioned(states: States, title: str, lines: Sequence[str]) -> str:
    """`svg` of about 256 pixels above lines of text, with a background that suits light and dark pages."""
    rows, columns = states.shape
    pixels = max(4, min(32, 256 // max(rows, columns)))
    lines = [shorten(title, 46, placeholder="…"), *lines]
    width, height = max(columns * pixels, 256) + 2 * MARGIN, rows * pixels + 14 * len(lines) + 3 * MARGIN
    text = (
        f'<text x="{MARGIN}" y="{rows * pixels + 2 * MARGIN + 14 * n + 9}">{_safe(line)}</text>'
        for n, line in enumerate(lines)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
            f'<rect width="{width}" height="{height}" rx="{MARGIN // 2}" fill="{PAPER}"/>',
            f'<g transform="translate({MARGIN} {MARGIN})">{svg(states, title, pixels)}</g>',
            f'<g font-family="ui-monospace, monospace" font-size="9" fill="{ALL}">{"".join(text)}</g>',
            "</svg>",
            "",
        ]
    )


def _safe(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def png(states: States) -> bytes:
    """states as a PNG picture whose longer side has about 512 pixels."""
    scale = max(1, 512 // max(1, *states.shape))
    colours = np.array([list(bytes.fromhex(colour[1:])) for colour in (NONE, SOME, ALL)], np.uint8)
    pixels = colours[states.repeat(scale, 0).repeat(scale, 1)]
    height, width = pixels.shape[:2]
    # every line starts with its filter: 0 for none
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
