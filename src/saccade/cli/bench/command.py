"""`saccade bench`: measure, write CSV rows, print ratios next to their bars."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from saccade.errors import how_to_install
from saccade.plot.canvas import checked

from .. import show
from . import report, rows
from .cases import SUITES, Case, cases
from .inputs import has_torch


def bench(
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the rows to this CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows in this file (.svg or .png).")] = None,
    read: Annotated[Path | None, typer.Option(help="Measure nothing: read the rows of this CSV file.")] = None,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this text.")] = "",
    peers: Annotated[str, typer.Option(help="Only these peers, separated by commas; 'none' for Saccade alone.")] = "",
    threads: Annotated[int, typer.Option(help="Threads of Saccade and of torch; 0 changes nothing.")] = 0,
    seconds: Annotated[float, typer.Option(help="Seconds of samples per case.")] = 4.0,
    quick: Annotated[bool, typer.Option("--quick", help="Six tiny cases, to check that everything runs.")] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names of the cases and exit.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a case misses its bar.")] = False,
    json: show.Json = False,
) -> None:
    """Measure Saccade and its peers in turn, and the limits of the machine; check outputs against the oracle."""
    try:
        chosen = cases(suite, quick=quick, only=only)
        table = rows.read(read) if read else []
        if plot:
            checked(plot)
    except (ValueError, OSError) as error:
        show.fail(show.sentence(error))
    if not chosen and not read:
        show.fail(f"--only is {only!r}, and no case of this suite has it in its name; --list prints them")
    if list_cases:
        typer.echo("\n".join(case.name for case in chosen))
        return
    if plot:
        show.need("matplotlib")
    for path, option in ((out, "--out"), (plot, "--plot")):
        show.folder_of(path, option)
    if not read and peers != "none" and not has_torch():
        show.fail(f"torch is not installed; {how_to_install('torch')}, or measure Saccade alone with --peers none")
    if not read:
        table = _measure(chosen, out, only_peers=peers, threads=threads, seconds=seconds, quick=quick)
    verdicts = report.verdicts(table)
    if json:
        show.document([asdict(row) for row in table])
    elif markdown:
        typer.echo(report.markdown(verdicts))
    else:
        show.render(report.table(verdicts))
    if plot:
        from saccade.plot.measured import ratios

        ratios(verdicts, plot)
    for row in (bad := report.failures(table)):
        reason = f"error {row.error:.2e}, allowed {row.allowed:.2e}" if row.measured else row.note
        typer.secho(f"{row.case}: {reason}", err=True, fg="red")
    if bad or (check and not all(v.met for v in verdicts)):
        raise typer.Exit(1)


def _measure(
    chosen: list[Case], out: Path | None, *, only_peers: str, threads: int, seconds: float, quick: bool
) -> list[rows.Row]:
    import saccade

    from .machine import environment
    from .run import Settings, run_all

    if threads:
        if has_torch():
            import torch

            torch.set_num_threads(threads)
        saccade.set_num_threads(threads)
    peers = tuple(p for p in only_peers.split(",") if p != "none") if only_peers else None
    settings = Settings(0.2, (2, 3), peers) if quick else Settings(seconds, peers=peers)
    table: list[rows.Row] = []
    with out.open("w", newline="") if out else io.StringIO() as stream, show.progress() as bar:
        writer = rows.Writer(stream)
        for new in run_all(chosen, environment(), settings, quick=quick, progress=bar):
            writer.add(new)
            table += new
    return table
