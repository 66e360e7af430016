"""`saccade draw`: a mask as a picture in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.style import Style
from rich.text import Text

from . import show

if TYPE_CHECKING:
    from numpy.typing import NDArray

# queries and keys per tile, as in plans for GPUs
TILE = 64
# the fewest cells per side, and the terminal's lines that are not part of the picture
LEAST, OTHER_LINES = 8, 3


def draw(
    mask: Annotated[str, typer.Argument(metavar="MASK", help='A mask, e.g. "causal & window(15, 0)".')],
    queries: Annotated[
        int | None, typer.Option("--queries", "--q", help="Number of queries; by default the mask's or the terminal's.")
    ] = None,
    keys: Annotated[int, typer.Option("--keys", "--k", help="Number of keys; 0 for as many as queries.")] = 0,
    head: Annotated[int, typer.Option(help="Which head to draw, for a mask that differs between heads.")] = 0,
    tiles: Annotated[bool, typer.Option("--tiles", help=f"Draw tiles of {TILE} × {TILE} instead of pairs.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the picture to this file: .svg, .png or .txt.")] = None,
    json: show.Json = False,
) -> None:
    """Print a mask as a picture: queries down, keys across; █ all pairs of a cell are allowed, ▒ some, · none.

    A cell is one pair, or several if the terminal is too small. If arrays have a batch, its first entry is drawn.
    """
    from saccade.mask import drawing, parse
    from saccade.mask.text import brief

    show.at_least(1, queries=queries)
    show.at_least(0, keys=keys, head=head)
    show.folder_of(out, "--out")
    console = Console()
    unit, room = TILE if tiles else 1, _room(console, drawing.CELLS)
    try:
        parsed = parse(mask)
        B, Tq, Tk = drawing.sizes_of(parsed)
        Tq, Tk = queries or Tq or keys or Tk or room * unit, keys or Tk
        Tk = Tk or Tq

        def states_of(most: int) -> tuple[int, NDArray[Any]]:
            cell = unit * drawing.cell_size(-(-Tq // unit), -(-Tk // unit), most)
            return cell, drawing.states_of(parsed, (Tq, Tk), cell, B=B or 1, head=head)

        title = f"{brief(parsed)}: {Tq} queries, {Tk} keys"
        cell, states = states_of(room)
        if out is not None:
            drawing.write(states_of(drawing.CELLS)[1], out, title)
    except (ValueError, TypeError, OSError) as error:
        show.fail(show.sentence(error).removeprefix("draw: "), "draw")
    counts = {name: int((states == n).sum()) for n, name in enumerate(("none", "part", "all"))}
    if json:
        sizes = {"queries": Tq, "keys": Tk, "batch": B or 1, "head": head, "cell": cell}
        show.document({"mask": str(parsed), **sizes, "cells": counts, "states": states.tolist()})
        return
    if _coloured(console):
        console.print(_blocks(states), end="")
    else:
        typer.echo(drawing.text_of(states))
    if cell > 1:
        title += f"; a cell is {cell} × {cell}: {counts['all']} full, {counts['part']} in part, {counts['none']} empty"
    typer.echo(f"{title}; entry 0 of {B}" if B else title)


def _room(console: Console, most: int) -> int:
    # cells per side; with colours, a line has two rows of cells
    if not console.is_terminal:
        return most
    lines = max(1, console.height - OTHER_LINES) * (2 if _coloured(console) else 1)
    return max(LEAST, min(most, console.width, lines))


def _coloured(console: Console) -> bool:
    # 256 colours distinguish the three states, 16 colours do not
    return console.color_system in ("256", "truecolor") and not console.no_color


def _blocks(states: NDArray[Any]) -> Text:
    """Two rows of cells per line: the upper one in the character's colour, the lower one in its background."""
    from saccade.plot.cells import ALL, NONE, SOME

    colours, text = (NONE, SOME, ALL), Text()
    for y in range(0, len(states), 2):
        below = states[y + 1] if y + 1 < len(states) else [None] * states.shape[1]
        for upper, lower in zip(states[y], below, strict=True):
            text.append("▀", Style(color=colours[upper], bgcolor=None if lower is None else colours[lower]))
        text.append("\n")
    return text
