"""Pictures of masks: text, SVG or PNG, queries downward and keys to the right."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..plot import cells
from .algebra import Mask
from .arguments import Sizes, positive
from .forms import INF
from .heads import head_count
from .kinds import KINDS
from .lowering import lower
from .segments import segments
from .strides import classes_of
from .text import brief
from .tiling import View

_SIGNS = np.array(["·", "▒", "█"])
# cells per side of a picture; queries and keys of a picture in a notebook if the mask has no arrays
CELLS, DEFAULT = 64, 32


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
    positive(size, "draw", "size")
    tq, tk = sizes
    states = cell_states(mask, tq, tk, B=B, batch=batch, head=head, size=size)
    if path is not None:
        write(states, path, f"{brief(mask)}, {tq} queries, {tk} keys")
    return text_of(states)


def text_of(states: NDArray[np.uint8]) -> str:
    """States as characters, one line per row of cells."""
    return "\n".join("".join(row) for row in _SIGNS[states])


def write(states: NDArray[np.uint8], path: str | os.PathLike[str], title: str) -> None:
    """Write states as .svg (with the title), .png or .txt; raises ValueError for another suffix."""
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        Path(path).write_text(cells.svg(states, title), encoding="utf-8")
    elif suffix == ".png":
        Path(path).write_bytes(cells.png(states))
    elif suffix == ".txt":
        Path(path).write_text(text_of(states) + "\n", encoding="utf-8")
    else:
        raise ValueError(f"draw: {os.fspath(path)!r} ends in {suffix!r}, expected .svg, .png or .txt")


def notebook(mask: Mask) -> str | None:
    """The first batch entry and head as SVG, at the sizes of the mask's arrays; None if it cannot be drawn."""
    try:
        B, Tq, Tk = sizes_of(mask)
        Tq, Tk = Tq or Tk or DEFAULT, Tk or Tq or DEFAULT
        states = cell_states(mask, Tq, Tk, B=B or 1)
    except (ValueError, RuntimeError, TypeError):
        # the arrays do not fit together, have no contents, or need too many bands
        return None
    heads, unit = head_count(mask), cell_size(Tq, Tk, CELLS)
    caption = f"{Tq} queries, {Tk} keys" + (f", a cell is {unit} × {unit}" if unit > 1 else "")
    firsts = [f"entry 0 of {B}"] * bool(B) + [f"head 0 of {heads}"] * (heads > 1)
    return cells.captioned(states, brief(mask), [caption, *([", ".join(firsts)] if firsts else [])])


def sizes_of(mask: Mask) -> Sizes:
    """(B, Tq, Tk) of the mask's arrays, None for each size that they do not determine. Reads bounds of documents."""
    kind = KINDS.get(mask.kind)
    every = [kind.sizes(mask)] if kind is not None and kind.sizes is not None else []
    every += [sizes_of(child) for child in mask.children]
    B, Tq, Tk = (next((n for n in sizes if n is not None), None) for sizes in zip((None,) * 3, *every, strict=True))
    return B, Tq, Tk


def cell_size(tq: int, tk: int, size: int) -> int:
    """Queries and keys per cell such that the longer side has at most `size` cells."""
    return max(1, -(-max(tq, tk) // size))


def cell_states(
    mask: Mask, tq: int, tk: int, *, B: int = 1, batch: int = 0, head: int = 0, size: int = CELLS
) -> NDArray[np.uint8]:
    """The cells of a picture, uint8 [rows, columns]: 0 nothing, 1 some, 2 all. Sizes beyond `size` take O(cells)."""
    return states_of(mask, (tq, tk), cell_size(tq, tk, size), B=B, batch=batch, head=head)


def states_of(
    mask: Mask, sizes: tuple[int, int], cell: int, *, B: int = 1, batch: int = 0, head: int = 0
) -> NDArray[np.uint8]:
    """Like `cell_states`, for cells of `cell` queries and keys; sizes: (Tq, Tk). ValueError for a missing entry."""
    tq, tk = sizes
    for name, length in (("Tq", tq), ("Tk", tk)):
        # the lowered form holds no longer sequence
        if not 0 <= length < INF:
            raise ValueError(f"draw: {name} is {length}, expected 0 to 2**30 - 1")
    entries = sizes_of(mask)[0] or B
    if entries != B:
        raise ValueError(f"draw: the mask's arrays have a batch of {entries}, and B is {B}; give B={entries}")
    heads = head_count(mask)
    for name, value, count in (("batch", batch, B), ("head", head, heads)):
        if not 0 <= value < count:
            raise ValueError(f"draw: {name} is {value}, expected 0 to {count - 1}")
    if cell == 1:
        allowed = mask.evaluate(B, heads, tq, tk)
        return allowed[min(batch, len(allowed) - 1), min(head, allowed.shape[1] - 1)].astype(np.uint8) * 2
    lowered = lower(mask, B, heads, tq, tk)
    chosen = lowered.masks[lowered.head[head]]
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
