"""Draws the charts of the documentation from the rows in benchmarks/results: `python scripts/measured.py FOLDER`."""

from __future__ import annotations

import argparse
import math
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from saccade.cli.bench import report
from saccade.cli.bench.rows import Row, read
from saccade.plot import measured, training

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"


def rows(name: str) -> list[Row]:
    return read(RESULTS / f"{name}.csv")


def ratios(name: str, path: Path) -> None:
    """Ratios of `saccade bench`, with the target of each case."""
    measured.ratios(report.verdicts(rows(name)), path)


def by_rate(row: Row) -> float:
    return row.rate


def by_time(row: Row) -> float:
    """Milliseconds."""
    return 1e3 * row.median


def rates(
    name: str,
    path: Path,
    *,
    unit: str,
    figure: Callable[[Row], float] = by_rate,
    log: bool = False,
    chosen: Callable[[Row], bool] = lambda row: True,
    label: Callable[[Row], str] = lambda row: row.case,
) -> None:
    """One figure per case and provider. Of a case that was measured again, the first row is drawn."""
    drawn = [row for row in rows(name) if not math.isnan(figure(row)) and chosen(row)]
    cases: dict[str, dict[str, float]] = {label(row): {} for row in drawn}
    # Saccade has the first colour and mark
    for row in sorted(drawn, key=lambda row: not row.provider.startswith("saccade")):
        cases[label(row)].setdefault(row.provider, figure(row))
    title = f"{drawn[0].device}; {drawn[0].driver}".rstrip("; ") if drawn else ""
    measured.rates(cases, unit, path, title=title, log=log)


def spread(
    name: str,
    path: Path,
    *,
    unit: str,
    figure: Callable[[Row], float],
    label: Callable[[Row], str],
    best: Callable[..., float] = min,
) -> None:
    """Every figure of a search, grouped by case."""
    cases: dict[str, list[float]] = {}
    for row in rows(name):
        if not math.isnan(figure(row)):
            cases.setdefault(label(row), []).append(figure(row))
    measured.spread(cases, unit, path, best=best)


def of(kind: str, codes: bool = False) -> Callable[[Row], bool]:
    """Selects rows of one kind in bfloat16, over codes or over numbers, without sparse patterns."""
    return lambda row: (
        row.kind == kind
        and row.dtype == "bfloat16"
        and ("int" in row.provider or "fp8" in row.provider) == codes
        and not patterned(row)
    )


def decoded(row: Row) -> bool:
    """Selects decode over numbers, without the two caches that are as fast as contiguous arrays and pages of 16."""
    return of("decode")(row) and row.provider not in ("saccade, cache", "saccade, pages of 1")


def patterned(row: Row) -> bool:
    """Whether the mask of a row is the name of a sparse pattern."""
    return bool(re.fullmatch(r"[a-z-]+", row.mask))


def unit_is(unit: str) -> Callable[[Row], bool]:
    return lambda row: row.rate_unit == unit and not recurrent(row)


def recurrent(row: Row) -> bool:
    return bool(re.search(r"-(linear|scalar-decay|scan)-\d", row.case))


def simulated(name: str, path: Path) -> None:
    """Efficiency over the number of GPUs, drawn by benchmarks/scaling.py from its simulation."""
    runpy.run_path(str(BENCHMARKS / "scaling.py"))["draw"](rows(name), "two H200s", path)


def crossing(name: str, path: Path) -> None:
    """Linear attention and softmax attention over lengths, drawn by benchmarks/recurrent.py."""
    # the script imports a module next to it
    sys.path.append(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "recurrent.py"))["plot"](rows(name), path)


def trained(name: str, path: Path) -> None:
    """Losses and speeds of the runs of benchmarks/train_models.py."""
    table, runs = rows(name), dict[str, list[dict[str, float]]]()
    for row in table:
        step = {"step": int(row.case.removeprefix("step-")), "loss": row.rate, "seconds": row.median}
        runs.setdefault(row.provider, []).append(step)
    training.comparison(path, runs, int(table[0].notes["tokens"]))


def over_ranks(row: Row) -> str:
    kind = {"both": "forward and backward"}.get(row.kind, row.kind)
    return f"{int(row.case.rpartition('x')[2]) // 1024}k tokens per GPU, {kind}"


def long(row: Row) -> bool:
    """Whether a row of a recurrence has the longest sequence."""
    return "T=8192" in row.shape


def short(row: Row) -> str:
    """A case's name without the parts that its chart states."""
    return re.sub(r"^\w+-|-bfloat16$|(?<=-T)1x|x\d+(?=-H)", "", row.case).replace("-", "  ")


def pattern(row: Row) -> str:
    return re.sub(r"^patterns-|fp32-|-B1-.*", "", row.case)


def typed(row: Row) -> str:
    return f"{row.case} {row.dtype}"


def passed(row: Row) -> str:
    return f"{row.case} {row.kind}"


def tiled(row: Row) -> str:
    kernel, size, head = row.case.split("-")
    return f"{kernel}, {size.removesuffix('bytes')} bytes, D = {head[1:]}"


SUITES = {
    "cpu": ("headline", "decode", "sparse", "naive", "sweep"),
    "zen4": ("headline", "decode", "sparse", "sweep"),
    "zen4-v3": ("headline", "decode"),
}
BENCHED = [f"{machine}-{suite}" for machine, suites in SUITES.items() for suite in suites]
DRAWINGS: dict[str, partial[None]] = {
    **{name: partial(ratios, name) for name in BENCHED},
    "zen4-paged": partial(rates, "zen4-paged", unit="GB/s"),
    "zen4-patterns": partial(rates, "zen4-patterns", unit="GFLOP/s of the allowed pairs", label=pattern),
    "zen4-generation": partial(rates, "zen4-generation", unit="tokens per second", label=typed),
    "zen4-recurrent": partial(
        rates,
        "zen4-recurrent",
        unit="ms",
        figure=by_time,
        label=passed,
        log=True,
        chosen=lambda row: row.case.endswith("-4096"),
    ),
    "zen4-recurrent-crossing": partial(crossing, "zen4-recurrent"),
    "zen4-train-models": partial(trained, "zen4-train-models"),
    "zen4-recurrent-diagonal": partial(
        rates, "zen4-recurrent-diagonal", unit="ms", figure=by_time, label=passed, log=True
    ),
    "nvidia-h100-forward": partial(rates, "nvidia-h100", unit="TFLOP/s", chosen=of("forward"), label=short),
    "nvidia-h100-backward": partial(rates, "nvidia-h100", unit="TFLOP/s", chosen=of("backward"), label=short),
    "nvidia-h100-decode": partial(rates, "nvidia-h100", unit="GB/s", chosen=decoded, label=short),
    "nvidia-h100-codes": partial(rates, "nvidia-h100", unit="GB/s", chosen=of("decode", codes=True), label=short),
    "nvidia-h100-patterns": partial(
        rates,
        "nvidia-h100",
        unit="ms",
        figure=by_time,
        chosen=patterned,
        label=lambda row: f"{row.mask}, {row.kind}",
        log=True,
    ),
    "nvidia-h200-tiles": partial(
        spread, "nvidia-h200-tiles", unit="µs", figure=lambda row: 1e6 * row.median, label=tiled
    ),
    "nvidia-h200-recurrent": partial(
        rates, "nvidia-h200-recurrent", unit="ms", figure=by_time, label=passed, chosen=long
    ),
    **{
        f"nvidia-h200x{n}-distributed": partial(
            rates,
            f"nvidia-h200x{n}-distributed",
            unit="TFLOP/s per GPU",
            label=over_ranks,
            chosen=lambda row: "flash" not in row.provider and "overlap" not in row.provider,
        )
        for n in (4, 2)
    },
    "nvidia-h200x2-scaling": partial(simulated, "nvidia-h200x2-scaling"),
    "webgpu-h200-recurrent": partial(rates, "webgpu-h200", unit="ms", figure=by_time, chosen=recurrent, log=True),
    "webgpu-h200": partial(rates, "webgpu-h200", unit="TFLOP/s", chosen=unit_is("TFLOP/s")),
    "webgpu-h200-decode": partial(rates, "webgpu-h200", unit="GB/s", chosen=unit_is("GB/s"), label=typed),
    "webgpu-h200-splits": partial(
        spread,
        "webgpu-h200-splits",
        unit="GB/s",
        figure=by_rate,
        label=lambda row: f"{row.dtype}, {row.case.removeprefix('decode-')} keys",
        best=max,
    ),
}
# names of the files whose rows are drawn
FILES = {draw.args[0] for draw in DRAWINGS.values()}


def main() -> None:
    """Draw all charts into a folder."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("folder", type=Path)
    folder = words.parse_args().folder
    for name, draw in DRAWINGS.items():
        draw(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
