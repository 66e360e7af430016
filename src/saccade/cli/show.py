"""The output of every command: progress on the error stream, a table or a JSON document on the output stream."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from saccade.errors import Unsupported, how_to_install

# width in columns of a table that is not printed on a terminal
PIPED = 120
# seconds between two lines about a long step, in a file or a pipe
HEARTBEAT = 4.0

# what to do when a command has too little memory
LESS_MEMORY = {
    "train": "give a smaller --batch, --context or --width, or --recompute",
    "generate": "give fewer prompts, a smaller --batch, --tokens or --chunk, or --dtype bfloat16",
}

Json = Annotated[bool, typer.Option("--json", help="Write one JSON document instead of a table.")]


def progress(*, quiet: bool = False) -> Progress:
    """A progress bar on the error stream, which disappears at the end; none if that stream is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)


@contextmanager
def working(console: Console, text: str) -> Generator[Callable[[str], None]]:
    """Show on a console what is being done; call the yielded function to show what comes next.

    A terminal shows a spinner. Elsewhere a long step prints a line every `HEARTBEAT` seconds.
    """
    if console.is_terminal or console.quiet:
        with console.status(text) as status:
            yield status.update
        return
    ended, said, since = threading.Event(), [text], time.monotonic()

    def repeat() -> None:
        while not ended.wait(HEARTBEAT):
            console.print(f"{said[-1]} ({time.monotonic() - since:.0f} s)", markup=False, highlight=False)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield said.append
    finally:
        ended.set()
        thread.join()


def document(data: Any) -> None:
    """Write data as JSON; NaN and infinities become null."""
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
    """Print a titled list of names and values, one per line."""
    typer.secho(title, bold=True)
    width = max((len(name) for name in rows), default=0)
    for name, value in rows.items():
        typer.echo(f"  {name:<{width}}  {value}")


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """Print a table on the output stream, with cells folded to its width."""
    out = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name in head:
        out.add_column(name, overflow="fold")
    for row in rows:
        # brackets, as in .[metal], are not markup
        out.add_row(*(escape(str(cell)) for cell in row))
    render(out)


def render(out: Table) -> None:
    """Print a rich table; in a file or a pipe it is `PIPED` columns wide."""
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
    """Which extra to install for a missing module; extra: the one that has all modules of a command."""
    if error.name is None or error.name.partition(".")[0] not in EXTRAS:
        return str(error)
    name = error.name.partition(".")[0]
    return f"{name} is not installed; {how_to_install(extra or EXTRAS[name])}"


def need(module: str, extra: str = "") -> None:
    """End the command, before it has done anything, if a module is missing."""
    from importlib.util import find_spec

    # find_spec raises for a blocked module, which is None in sys.modules
    try:
        missing = find_spec(module) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        fail(install(ModuleNotFoundError(name=module), extra))


def sentence(error: BaseException) -> str:
    """An error on one line: file and fault if the system raised it, the reasons if a backend did."""
    if isinstance(error, Unsupported):
        return f"{error.what}: {'; '.join(error.reasons)}"
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error) or type(error).__name__


def lacking(error: MemoryError | RuntimeError, command: str) -> str | None:
    """What the machine lacks for a command, and what to do; None for any other error."""
    if "Failed to find C compiler" in str(error):
        return "Triton needs a C compiler, and there is none: install one (gcc on Debian), or name it in CC"
    if "No working C++ compiler" in str(error):
        without = "give --no-compile" if command == "train" else "leave out --compile"
        return f"--compile needs a C++ compiler, and there is none: install one (g++ on Debian), or {without}"
    if not (isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", str(error))):
        return None
    size = re.search(r"allocate ([\d.]+ \w+)", str(error))
    smaller = LESS_MEMORY.get(command, "measure smaller cases")
    return f"there is too little memory{f' for {size[1]} more' if size else ''}; {smaller}"


@contextmanager
def plain_errors(command: str, extra: str = "") -> Generator[None]:
    """Turn errors that a user can fix into one line on the error stream and status 2, and Ctrl-C into status 130.

    extra: the extra that has all modules of the command; by default that of the missing module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        fail(install(error, extra), command)
    except (MemoryError, RuntimeError) as error:
        if (message := lacking(error, command)) is None:
            raise
        fail(message, command)
    except (ValueError, OSError, FloatingPointError, Unsupported) as error:
        fail(sentence(error), command)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def flag(name: str) -> str:
    """A parameter's name as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def at_least(least: int, **values: int | None) -> None:
    """End the command if one of these options is given and smaller."""
    for name, value in values.items():
        if value is not None and value < least:
            fail(f"{flag(name)} is {value}; expected at least {least}")


def picture(path: Path | None) -> None:
    """End the command, before it has done anything, if it cannot draw a picture in the file that --plot names."""
    from saccade.plot.canvas import checked

    if path is not None:
        try:
            checked(path)
        except ValueError as error:
            fail(error)
        need("matplotlib")
        folder_of(path, "--plot")


def folder_of(path: Path | None, option: str) -> None:
    """End the command if the folder of a file to be written is missing, or the file is a folder."""
    if path is not None and path.is_dir():
        fail(f"{option} is {str(path)!r}, which is a folder; name a file")
    if path is not None and not path.parent.is_dir():
        fail(f"{option} is {str(path)!r}, and there is no folder {str(path.parent)!r}; make it first")


def fail(message: object, command: str = "") -> NoReturn:
    """End the command with status 2 and one line on the error stream."""
    typer.secho(f"saccade {command}".rstrip() + f": {message}", err=True, fg="red")
    raise typer.Exit(2)
