"""Pictures of masks: text, SVG or PNG, queries downward and keys to the right."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..plot import cells
from .algebra import Mask
from .heads import head_count
from .lowering import lower
from .segments import segments
from .strides import classes_of
from .text import brief
from .tiling import View

_SIGNS = np.array(["·", "▒", "█"])


def draw(
    mask: Mask,
    sizes: tuple[int, int],
    path: str | os.PathLike[str] | None,
    *,
    B: int,
    batch: int,
    head: int,
    size: int,
) -> str:
    """`Mask.draw`; sizes: (Tq, Tk)."""
    tq, tk = sizes
    states = cell_states(mask, tq, tk, B=B, batch=batch, head=head, size=size)
    text = "\n".join("".join(row) for row in _SIGNS[states])
    if path is None:
        return text
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        Path(path).write_text(cells.svg(states, f"{brief(mask)}, {tq} queries, {tk} keys"), encoding="utf-8")
    elif suffix == ".png":
        Path(path).write_bytes(cells.png(states))
    elif suffix == ".txt":
        Path(path).write_text(text + "\n", encoding="utf-8")
    else:
        raise ValueError(f"draw: {os.fspath(path)!r} ends in {suffix!r}, expected .svg, .png or .txt")
    return text


def cell_states(
    mask: Mask, tq: int, tk: int, *, B: int = 1, batch: int = 0, head: int = 0, size: int = 64
) -> NDArray[np.uint8]:
    """0 nothing, 1 part, 2 all, for every cell of the picture, uint8 [rows, columns]; O(cells) beyond `size` a side."""
    cell = max(1, -(-max(tq, tk) // size))
    heads = head_count(mask)
    if cell == 1:
        allowed = mask.evaluate(B, heads, tq, tk)
        return allowed[min(batch, len(allowed) - 1), min(head, allowed.shape[1] - 1)].astype(np.uint8) * 2
    lowered = lower(mask, B, heads, tq, tk)
    chosen = lowered.masks[lowered.head[min(head, heads - 1)]]
    rows, columns = -(-tq // cell), -(-tk // cell)
    counts, seg = segments(chosen, View(1, *classes_of(1, 0, tq, tk), cell, rows), B, cell)
    ends = np.concatenate([[0], np.cumsum(counts)])
    states = np.zeros((rows, columns), np.uint8)
    for row in range(rows):
        at = batch * rows + row
        for begin, end, kind in seg[ends[at] : ends[at + 1]].tolist():
            first, last = begin // cell, -(-end // cell)
            states[row, first:last] = np.maximum(states[row, first:last], 1)
            whole = slice(-(-begin // cell), columns if end >= tk else end // cell)
            if kind == 2 and whole.start < whole.stop:
                states[row, whole] = 2
    return states
