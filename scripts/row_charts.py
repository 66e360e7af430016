"""Charts of measured rows: functions from a file in benchmarks/results to a chart of scripts/charts.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from charts import Chart, Line, figure, times

from saccade.cli.bench import report
from saccade.cli.bench.rows import Row, read
from saccade.plot.labels import shared, tokens, words
from saccade.plot.providers import provider
from saccade.plot.training import smooth

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
STEPS = (50, 100, 200, 400, 600)
RINGS = {8192: "simulated, 8k tokens per GPU", 32768: "simulated, 32k tokens per GPU"}


def rows(name: str) -> list[Row]:
    return read(RESULTS / f"{name}.csv")


def origin(drawn: Sequence[Row]) -> str:
    """Device, driver and commits of rows, as a note."""
    devices, drivers, commits = (
        ", ".join(dict.fromkeys(filter(None, (getattr(row, field) for row in drawn))))
        for field in ("device", "driver", "commit")
    )
    commits = f"commit {commits}" if commits else ""
    return f"{'; '.join(filter(None, (devices, drivers, commits)))}." if devices else ""


def notes(same: Sequence[str], drawn: Sequence[Row], *more: str) -> list[str]:
    """What all rows have in common, what else is to be said, and where the rows come from."""
    common = f"All rows: {', '.join(same)}." if same else ""
    return [text for text in (common, *more, origin(drawn)) if text]


def ratios(name: str) -> Chart:
    """Times as fast as the peer of `saccade bench`, and the target of each case."""
    results = [v for v in report.verdicts(rows(name)) if v.against and v.figure > 0]
    same, parts = shared([words(v.ours) for v in results])
    lines: list[Line] = []
    for v, label in zip(results, parts, strict=True):
        peer = v.peers[v.against]
        # other peers than the one that is compared with
        others = {p: peer.median / r.median for p, r in v.peers.items() if p != v.against and r.measured}
        share = "" if math.isnan(v.ours.fraction) else f" · {v.ours.fraction:.0%}".replace("%", " %")
        lines.append(
            Line(", ".join(label), f"{times(v.figure)} ×{share}", {"saccade": v.figure} | others, target=v.bar)
        )
    ceiling = "Percentages are shares of the machine's ceiling." if any("·" in line.value for line in lines) else ""
    unit = f"times as fast as {provider(results[0].against).name}"
    return Chart(unit, lines, notes(same, [v.ours for v in results], ceiling), log=True, origin=1)


def sweep(name: str) -> Chart:
    """Times as fast as the peer, for many shapes with the same number of tokens: each, and their median."""
    results = [v for v in report.verdicts(rows(name)) if v.against and v.figure > 0]
    groups: dict[str, list[float]] = {}
    for v in results:
        groups.setdefault(f"{v.ours.kind}, {tokens(v.ours.shape.split('x')[1])}", []).append(v.figure)
    lines = [
        Line(label, span_text(figures), {"saccade": statistics.median(figures)}, every=figures)
        for label, figures in sorted(groups.items(), key=lambda item: item[0].startswith("b"))
    ]
    note = "A thin line is a shape, the dot is the median."
    unit = f"times as fast as {provider(results[0].against).name}"
    return Chart(unit, lines, notes([], [v.ours for v in results], note), log=True, origin=1)


def span_text(figures: Sequence[float]) -> str:
    """The lowest and the highest of ratios."""
    low, high = times(min(figures)), times(max(figures))
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def by_rate(row: Row) -> float:
    return row.rate


def by_time(row: Row) -> float:
    """Milliseconds."""
    return 1e3 * row.median


def ours_first(row: Row) -> tuple[bool, bool]:
    shown = provider(row.provider)
    return shown.library != "Saccade", not shown.filled


def rates(
    name: str,
    *,
    unit: str,
    measure: Callable[[Row], float] = by_rate,
    log: bool = False,
    chosen: Callable[[Row], bool] = lambda row: True,
) -> Chart:
    """One figure per case and provider. Raises ValueError if a provider has two figures in a row."""
    drawn = [row for row in rows(name) if not math.isnan(measure(row)) and chosen(row)]
    if not drawn:
        raise ValueError(f"no row of {name} has a figure in {unit}: nothing to draw")
    same, parts = shared([words(row) for row in drawn])
    labels = {id(row): ", ".join(label) for row, label in zip(drawn, parts, strict=True)}
    cases: dict[str, dict[str, float]] = {labels[id(row)]: {} for row in drawn}
    for row in sorted(drawn, key=ours_first):
        figures = cases[labels[id(row)]]
        if row.provider in figures:
            raise ValueError(f"{name} has two figures of {row.provider!r} for {labels[id(row)]!r}; expected one")
        figures[row.provider] = measure(row)
    lines = [Line(label, figure(next(iter(figures.values()))), figures) for label, figures in cases.items()]
    first = provider(next(iter(lines[0].marks))).name
    better = "higher" if measure is by_rate else "lower"
    numbers = f"Numbers are those of {first}; {better} is better."
    return Chart(unit, lines, notes(same, drawn, numbers), log=log)


def spread(name: str, *, unit: str, measure: Callable[[Row], float], best: Callable[..., float] = min) -> Chart:
    """Every figure of a search, grouped by case, and the best of each."""
    drawn = [row for row in rows(name) if not math.isnan(measure(row))]
    same, parts = shared([words(row) for row in drawn])
    cases: dict[str, list[float]] = {}
    for row, label in zip(drawn, parts, strict=True):
        cases.setdefault(", ".join(label), []).append(measure(row))
    lines = [Line(label, figure(best(x)), {"saccade": best(x)}, every=x) for label, x in cases.items()]
    return Chart(unit, lines, notes(same, drawn, "A thin line is a candidate, the dot is the best."), log=True)


def simulated(name: str) -> Chart:
    """Efficiency over the number of GPUs."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows(name):
        gpus, tokens = (int(size) for size in row.case.removeprefix("ring-").split("x"))
        if tokens in RINGS or gpus >= 8:
            form = RINGS.get(tokens, "simulated, 10 M tokens in all")
            cases.setdefault(f"{gpus} GPU{'s' * (gpus > 1)}", {})[form] = 100 * row.fraction
    lines = [
        Line(label, f"{x[RINGS[32768]]:.0f} %", dict(sorted(x.items(), key=lambda item: item[0] != RINGS[32768])))
        for label, x in cases.items()
    ]
    note = "Zigzag ring, forward and backward, from the speeds of two H200s; more than 8 GPUs are several machines."
    return Chart("% of the speed of one GPU", lines, [note, "Numbers are for 32k tokens per GPU."])


def trained(name: str) -> Chart:
    """Losses of the runs of benchmarks/train_models.py after some of their steps."""
    runs: dict[str, list[float]] = {}
    table = rows(name)
    for row in table:
        runs.setdefault(row.provider, []).append(row.rate)
    means = {model: smooth(losses) for model, losses in runs.items()}
    lines: list[Line] = []
    for step in STEPS:
        marks = {model: mean[step - 1] for model, mean in means.items()}
        lines.append(Line(f"after {step} steps", figure(marks["attention"]), marks))
    note = f"Running means of {table[0].notes['tokens']} tokens per step; numbers are those of attention alone."
    return Chart("nats per token, lower is better", lines, [note], log=True)


def train_speeds(name: str) -> Chart:
    """Tokens per second of the runs of benchmarks/train_models.py, by the median step."""
    ends: dict[str, list[float]] = {}
    table = rows(name)
    for row in table:
        ends.setdefault(row.provider, []).append(row.median)
    tokens = int(table[0].notes["tokens"])
    speed = {
        model: tokens / statistics.median(later - earlier for earlier, later in pairwise(seconds))
        for model, seconds in ends.items()
    }
    lines = [Line(provider(model).name, figure(x), {model: x}) for model, x in speed.items()]
    return Chart("tokens per second in training, higher is better", lines)
