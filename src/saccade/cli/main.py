"""The `saccade` command. Each subcommand is a module of this folder and imports what it needs when it runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

from saccade.errors import how_to_install

try:
    import typer
except ImportError:
    raise SystemExit(f"saccade: the command line needs typer and rich: {how_to_install('cli')}") from None

from saccade.cli import show

COMMANDS = {
    "verify": ("verify", "Compare every backend of this machine with the float64 oracle."),
    "bench": ("bench.command", "Measure Saccade and other libraries in turn, and the limits of the machine."),
    "explain": ("explain", "Print the plan and the cost of a shape, a mask and a device."),
    "draw": ("draw", "Print a mask as a picture in the terminal."),
    "devices": ("devices", "List the backends of this machine, and the devices that `explain` knows."),
    "train": ("train", "Train a small model on text, with Saccade's attention."),
    "generate": ("generate", "Sample text from a trained model, through the KV cache."),
    "lab": ("lab", "Serve a local page of six views: masks, online softmax, maps, roofline, caches, your GPU."),
}

app = typer.Typer(
    name="saccade",
    help="Exact attention, forward, backward and decode, on every device. "
    "`saccade --install-completion` completes commands and options in your shell.",
    pretty_exceptions_enable=False,
)


def root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())
    if version:
        from saccade import __version__

        typer.echo(__version__)
        raise typer.Exit


app.callback(invoke_without_command=True)(root)


def _missing(error: ImportError) -> Callable[[], None]:
    def stub() -> None:
        show.fail(show.install(error, ""))

    return stub


def main() -> None:
    """Run the command line."""
    # where no desktop has set it, drivers of GPUs print that it is missing; this is no folder, so nothing is read there
    os.environ.setdefault("XDG_RUNTIME_DIR", os.devnull)
    app()


for _name, (_module, _help) in COMMANDS.items():
    try:
        _command = getattr(importlib.import_module(f"saccade.cli.{_module}"), _name)
    except ImportError as _error:
        _command = _missing(_error)
    app.command(_name, short_help=_help)(_command)


if __name__ == "__main__":
    main()
