"""`saccade draw`: a mask as a picture in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import show


def draw(
    mask: Annotated[str, typer.Argument(metavar="MASK", help='A mask, e.g. "causal & window(15, 0)".')],
    queries: Annotated[int, typer.Option(help="Number of queries.")] = 64,
    keys: Annotated[int, typer.Option(help="Number of keys; 0 for as many as queries.")] = 0,
    head: Annotated[int, typer.Option(help="Head of a mask that differs among heads.")] = 0,
    size: Annotated[int, typer.Option(help="Cells to a side at most; each stands for several pairs then.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Write the picture here too: .svg, .png or .txt.")] = None,
) -> None:
    """Print a mask as a picture: queries down, keys across; █ all of a cell, ▒ a part, · nothing."""
    from saccade.mask import parse

    for name, value, least in (("queries", queries, 1), ("keys", keys, 0), ("head", head, 0), ("size", size, 1)):
        if value < least:
            show.fail(f"--{name} is {value}; expected at least {least}")
    show.folder_of(out, "--out")
    try:
        parsed = parse(mask)
        picture = parsed.draw(queries, keys or queries, out, head=head, size=size)
    except (ValueError, TypeError, OSError) as error:
        show.fail(show.sentence(error), "draw")
    typer.echo(picture)
    typer.echo(f"{parsed}: {queries} queries, {keys or queries} keys")
