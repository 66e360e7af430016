"""How every command speaks: progress on the error stream, one table or one JSON document on the output stream."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from saccade.errors import Unsupported

# columns of a table that is not printed on a terminal
PIPED = 120

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
    """A table on the output stream, whose cells fold to its width."""
    out = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name in head:
        out.add_column(name, overflow="fold")
    for row in rows:
        # a bracket is no markup: saccade[metal]
        out.add_row(*(escape(str(cell)) for cell in row))
    render(out)


def render(out: Table) -> None:
    """Print a rich table; in a file or a pipe cells fold to `PIPED` columns."""
    console = Console()
    (console if console.is_terminal else Console(width=PIPED)).print(out)


EXTRAS = {
    "matplotlib": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "torch": "torch",
    "anyio": "lab",
    "starlette": "lab",
    "uvicorn": "lab",
    "jinja2": "webgpu",
    "wgpu": "webgpu",
    "typer": "cli",
    "rich": "cli",
}


def install(error: ImportError, extra: str) -> str:
    """What to install for a module that is missing; extra: the one that a command's other needs come with."""
    if error.name is None or error.name.partition(".")[0] not in EXTRAS:
        return str(error)
    name = error.name.partition(".")[0]
    return f"{name} is not installed; pip install 'saccade[{extra or EXTRAS[name]}]'"


def need(module: str, extra: str = "") -> None:
    """End the command where a module is missing, before it has done anything."""
    from importlib.util import find_spec

    # a module that is blocked stands in sys.modules as None, for which find_spec raises
    try:
        missing = find_spec(module) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        fail(install(ModuleNotFoundError(name=module), extra))


def sentence(error: BaseException) -> str:
    """An error on one line: of the system's errors the file and what is wrong with it, of a backend its reasons."""
    if isinstance(error, Unsupported):
        return f"the {error.backend} backend cannot compute this: {'; '.join(error.reasons)}"
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error) or type(error).__name__


@contextmanager
def plain_errors(command: str, extra: str = "") -> Generator[None]:
    """Turns what a user can mend into one line on the error stream and status 2, Ctrl-C into 130.

    extra: the one that the command's modules come with, by default that of the missing module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        fail(install(error, extra), command)
    except (ValueError, OSError, FloatingPointError, MemoryError, Unsupported) as error:
        fail(sentence(error), command)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def flag(name: str) -> str:
    """A parameter's name as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def folder_of(path: Path | None, option: str) -> None:
    """End the command where the folder that a file is to be written in is missing."""
    if path is not None and not path.parent.is_dir():
        fail(f"{option} is {str(path)!r}, and there is no folder {str(path.parent)!r}; make it first")


def fail(message: object, command: str = "") -> NoReturn:
    """End the command with status 2 and one line on the error stream."""
    typer.secho(f"saccade {command}".rstrip() + f": {message}", err=True, fg="red")
    raise typer.Exit(2)
