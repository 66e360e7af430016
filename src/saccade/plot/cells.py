"""Squares of three states, as masks have them: nothing, part or all of a cell. NumPy alone."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

NONE, SOME, ALL = "#f4f4f1", "#7eaacc", "#1f4e79"

States = NDArray[np.uint8]


def svg(states: States, title: str) -> str:
    """states uint8 [rows, columns] of 0, 1 and 2 as an SVG picture of at least 8 pixels a cell."""
    rows, columns = states.shape
    safe = title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns} {rows}" width="{columns * 8}" '
        f'height="{rows * 8}" shape-rendering="crispEdges">',
        f"<title>{safe}</title>",
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


def png(states: States) -> bytes:
    """The same as a PNG picture, its longer side about 512 pixels."""
    scale = max(1, 512 // max(1, *states.shape))
    colours = np.array([list(bytes.fromhex(colour[1:])) for colour in (NONE, SOME, ALL)], np.uint8)
    pixels = colours[states.repeat(scale, 0).repeat(scale, 1)]
    height, width = pixels.shape[:2]
    # every line starts with its filter, none
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
