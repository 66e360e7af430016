"""`saccade bench`: measure, write CSV rows, print ratios next to their bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from saccade.errors import how_to_install

from .. import show
from . import report, rows
from .cases import SUITES, Case, cases
from .inputs import has_torch
from .machine import environment
from .run import Settings, run_all

SECONDS = 4.0


def bench(
    suite: Annotated[str | None, typer.Option(help=f"One of {', '.join(SUITES)}. (cpu)")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows in this file (.svg or .png).")] = None,
    read: Annotated[Path | None, typer.Option(help="Measure nothing: read the rows of this CSV file.")] = None,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this text.")] = "",
    peers: Annotated[str, typer.Option(help="Only these peers, separated by commas; 'none' for Saccade alone.")] = "",
    threads: Annotated[int, typer.Option(help="Threads of Saccade and of torch; 0 changes nothing.")] = 0,
    seconds: Annotated[float, typer.Option(help="Seconds of samples per case.")] = SECONDS,
    quick: Annotated[bool, typer.Option("--quick", help="Six tiny cases, to check that everything runs.")] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the names of the cases and exit.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a case misses its bar.")] = False,
    json: show.Json = False,
) -> None:
    """Measure Saccade and its peers in turn, and the limits of the machine; check outputs against the oracle."""
    measuring = {"--out": out, "--peers": peers, "--threads": threads, "--seconds": seconds != SECONDS}
    printing = {"--plot": plot, "--markdown": markdown, "--check": check}
    _refuse(read, "--read, which measures nothing", measuring | {"--suite": suite, "--quick": quick})
    _refuse(list_cases, "--list, which prints names alone", measuring | printing)
    _refuse(json, "--json, which prints no table", {"--markdown": markdown})
    show.at_least(0, threads=threads)
    if not 0 <= seconds < math.inf:
        show.fail(f"--seconds is {seconds}; expected a finite number of at least 0")
    try:
        chosen = [] if read else cases(suite or "cpu", quick=quick, only=only)
        table = [row for row in rows.read(read) if only in row.case] if read else []
    except (ValueError, OSError) as error:
        show.fail(show.sentence(error))
    if only and not chosen and not table:
        where = "of this suite has it in its name; --list prints them" if not read else f"in {read} has it in its name"
        show.fail(f"--only is {only!r}, and no case {where}")
    if list_cases:
        names = [case.name for case in chosen] or list(dict.fromkeys(row.case for row in table))
        show.document(names) if json else typer.echo("\n".join(names))
        return
    show.picture(plot)
    show.folder_of(out, "--out")
    with show.plain_errors("bench"):
        if not read:
            settings = _settings(chosen, peers, seconds, quick=quick, plot=plot is not None)
            table = _measure(chosen, settings, out, threads=threads, quick=quick)
        _print(table, plot, markdown=markdown, check=check, json=json)


def _refuse(first: object, what: str, others: Mapping[str, object]) -> None:
    """Ends the command if an option is given that another one would ignore."""
    for option, value in others.items():
        if first and value:
            show.fail(f"{option} is given with {what}; give one of them")


def _settings(chosen: list[Case], peers: str, seconds: float, *, quick: bool, plot: bool) -> Settings:
    """How to measure. Ends the command if a peer is unknown, if torch is missing, or if nothing can be drawn."""
    known = dict.fromkeys(peer for case in chosen for peer in case.peers)
    names = None if not peers else () if peers.strip() == "none" else tuple(name.strip() for name in peers.split(","))
    for name in names or ():
        if name not in known:
            show.fail(f"--peers has {name!r}; expected some of {', '.join([*known, 'none'])}, as the cases have")
    if names != () and not has_torch():
        show.fail(f"torch is not installed; {how_to_install('torch')}, or measure Saccade alone with --peers none")
    settings = Settings(0.2, (2, 3), names) if quick else Settings(seconds, peers=names)
    if plot and not any(case.against in settings.chosen(case) for case in chosen):
        show.fail("--plot draws times compared with a peer's, and no chosen case has one; leave out --plot or --peers")
    return settings


def _measure(chosen: list[Case], settings: Settings, out: Path | None, *, threads: int, quick: bool) -> list[rows.Row]:
    import saccade

    if threads:
        if has_torch():
            import torch

            torch.set_num_threads(threads)
        saccade.set_num_threads(threads)
    table: list[rows.Row] = []
    with ExitStack() as opened, show.progress() as bar:
        writer: rows.Writer | None = None
        for new in run_all(chosen, environment(), settings, quick=quick, progress=bar):
            # an earlier file is kept until there are rows to replace it
            if out and writer is None:
                writer = rows.Writer(opened.enter_context(out.open("w", newline="", encoding="utf-8")))
            if writer:
                writer.add(new)
            table += new
    return table


def _print(table: list[rows.Row], plot: Path | None, *, markdown: bool, check: bool, json: bool) -> None:
    """Print and draw the rows; exits with 1 for wrong results, and with `check` for a bar that is missed."""
    verdicts = report.verdicts(table)
    if json:
        show.document([asdict(row) for row in table])
    elif markdown:
        typer.echo(report.markdown(verdicts))
    else:
        show.render(report.table(verdicts))
    for row in (bad := report.failures(table)):
        reason = f"error {row.error:.2e}, allowed {row.allowed:.2e}" if row.measured else row.note
        typer.secho(f"{row.case}: {reason}", err=True, fg="red")
    if plot:
        from saccade.plot.measured import ratios

        ratios(verdicts, plot)
    if bad or (check and not all(v.met for v in verdicts)):
        raise typer.Exit(1)
