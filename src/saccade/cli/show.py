"""How every command speaks: progress on the error stream, one table or one JSON document on the output stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Write one JSON document instead of a table.")]


def progress(*, quiet: bool = False) -> Progress:
    """A progress bar on the error stream that leaves nothing behind; none where that stream is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)


def document(data: Any) -> None:
    """Write data as JSON; what JSON has no word for (NaN, infinities) becomes null."""
    typer.echo(json.dumps(_plain(data), indent=2, ensure_ascii=False))


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(k): _plain(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(v) for v in data]
    if isinstance(data, float):
        return data if abs(data) < float("inf") else None
    return data


def pairs(title: str, rows: Mapping[str, object]) -> None:
    """A titled list of names and values, one a line."""
    typer.secho(title, bold=True)
    width = max((len(name) for name in rows), default=0)
    for name, value in rows.items():
        typer.echo(f"  {name:<{width}}  {value}")


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """A table on the output stream, never cut to the terminal's width when that is no terminal."""
    out = Table(*head, title=title or None, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        # a bracket is no markup: saccade[metal]
        out.add_row(*(escape(str(cell)) for cell in row))
    render(out)


def render(out: Table) -> None:
    """Print a rich table; a file or a pipe gets all of its width."""
    console = Console()
    (console if console.is_terminal else Console(width=400)).print(out)


def fail(message: object) -> NoReturn:
    """End the command with status 2 and one line on the error stream."""
    typer.secho(f"saccade: {message}", err=True, fg="red")
    raise typer.Exit(2)
