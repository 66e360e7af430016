"""`saccade lab`: the local page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import show

PORT = 8642


def lab(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = PORT,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a run or checkpoint whose attention maps to show.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write a lab that needs no server into this folder, and end.")
    ] = None,
) -> None:
    """Serve a page with six views, to this machine only.

    Masks: what each query sees, and the tiles that every backend visits. Online softmax: each number, step by step.
    Attention maps: what a trained model's heads attend to (--model). Roofline: flops, bytes and bound of a shape on a
    device. Caches: bytes of keys and values. Your GPU: the kernels, run in the browser and checked against float64.
    """
    if export is not None:
        if port != PORT or not browser:
            show.fail("--port or --no-browser is given with --export, which serves nothing; leave one of them out")
        write(export, model)
        return
    try:
        from saccade.lab.server import serve
    except ImportError as error:
        show.fail(show.install(error, "lab"))

    def ready(address: str) -> None:
        typer.echo(f"saccade lab: {address} (Ctrl-C ends it)")
        if browser:
            typer.launch(address)

    try:
        serve(port, model, ready)
    except ImportError as error:
        show.fail(show.install(error, "train"))
    except (OSError, ValueError) as error:
        show.fail(show.sentence(error))


def write(folder: Path, model: Path | None) -> None:
    """Export the lab into a folder."""
    from saccade.lab.export import export

    if model is not None:
        show.fail("--model is given with --export, whose lab has no attention maps; leave one of them out")
    try:
        states = export(folder)
    except OSError as error:
        show.fail(show.sentence(error))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    typer.echo(f"{sum(states.values()):,} states in {size / 1e6:.1f} MB: open {folder / 'index.html'}")
