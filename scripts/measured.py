"""Draws the rows in benchmarks/results, as the documentation shows them: `python scripts/measured.py FOLDER`."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from saccade.cli.bench import report
from saccade.plot import measured, training

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def ratios(name: str, path: Path) -> None:
    """Rows of `saccade bench` beside their bars."""
    measured.ratios(report.verdicts(report.read(RESULTS / f"{name}.csv")), path)


def rates(
    name: str, path: Path, *, unit: str, column: str = "rate", factor: float = 1.0, log: bool = False,
    chosen: Callable[[Row], bool] = lambda row: True, label: Callable[[Row], str] = lambda row: row["case"],
) -> None:  # fmt: skip
    """A figure of each provider by case: the first row where a case was measured again."""
    kept = [row for row in rows(name) if row[column] and chosen(row)]
    found: dict[str, dict[str, float]] = {label(row): {} for row in kept}
    # ours has the first colour and mark
    for row in sorted(kept, key=lambda row: not row["provider"].startswith("saccade")):
        found[label(row)].setdefault(row["provider"], factor * float(row[column]))
    title = f"{kept[0]['device']}; {kept[0].get('driver') or kept[0].get('torch', '')}".rstrip("; ") if kept else ""
    measured.rates(found, unit, path, title=title, log=log)


def spread(
    name: str, path: Path, *, unit: str, column: str, label: str, best: Callable[..., float] = min
) -> None:  # fmt: skip
    """Every figure that a search met, by the case that `label` makes of its columns."""
    found: dict[str, list[float]] = {}
    for row in rows(name):
        found.setdefault(label.format(**row), []).append(float(row[column]))
    measured.spread(found, unit, path, best=best)


def of(direction: str, codes: bool = False) -> Callable[[Row], bool]:
    """Rows of one direction in bfloat16, over codes or over numbers."""
    return lambda row: (
        row["case"].startswith(f"{direction}-")
        and row["dtype"] == "bfloat16"
        and ("int" in row["provider"] or "fp8" in row["provider"]) == codes
        and not patterned(row)
    )


def patterned(row: Row) -> bool:
    """Whether a row is of a sparse pattern by its name, forward or backward."""
    return bool(re.fullmatch(r"[a-z-]+", row["mask"]))


def unit_is(unit: str) -> Callable[[Row], bool]:
    return lambda row: row["rate_unit"] == unit and not recurrent(row)


def recurrent(row: Row) -> bool:
    return bool(re.search(r"-(linear|scalar-decay|scan)-\d", row["case"]))


def simulated(name: str, path: Path) -> None:
    """Efficiency by GPUs, as benchmarks/scaling.py draws what it simulated."""
    found = [{n: x if n == "bound" else float(x) for n, x in row.items()} for row in rows(name)]
    runpy.run_path(str(BENCHMARKS / "scaling.py"))["draw"](found, "two H200s", path)


def crossing(name: str, path: Path) -> None:
    """Linear attention beside softmax over lengths, as benchmarks/recurrent.py draws it."""
    # which imports what lies beside it
    sys.path.append(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "recurrent.py"))["plot"](rows(name), path)


def trained(name: str, path: Path) -> None:
    """Losses and speeds of the runs of benchmarks/train_models.py."""
    found, runs = rows(name), dict[str, list[dict[str, float]]]()
    for row in found:
        step = {"step": int(row["step"]), "loss": float(row["loss"]), "seconds": float(row["seconds"])}
        runs.setdefault(row["model"], []).append(step)
    training.comparison(path, runs, int(found[0]["tokens"]))


def over_ranks(row: Row) -> str:
    kind = {"both": "forward and backward"}.get(row["pass"], row["pass"])
    return f"{int(row['tokens']) // 1024}k tokens a GPU, {kind}"


def verbed(row: Row) -> str:
    return f"{row['case']} {row['verb']}"


def long(row: Row) -> bool:
    """Whether a recurrence's row is of its longest sequence."""
    return "T=8192" in row["shape"]


def short(row: Row) -> str:
    """A case without what its picture says."""
    return re.sub(r"^\w+-|-bfloat16$|(?<=-T)1x|x\d+(?=-H)", "", row["case"]).replace("-", "  ")


def pattern(row: Row) -> str:
    return re.sub(r"^patterns-|fp32-|-B1-.*", "", row["case"])


def typed(row: Row) -> str:
    return f"{row['case']} {row['dtype']}"


def passed(row: Row) -> str:
    return f"{row['case']} {row['pass']}"


BENCHED = (
    "cpu-headline", "cpu-decode", "cpu-sparse", "cpu-naive", "cpu-sweep", "zen4-headline", "zen4-decode", "zen4-sparse",
    "zen4-sweep", "zen4-v3-headline", "zen4-v3-decode",
)  # fmt: skip
DRAWINGS: dict[str, partial[None]] = {
    **{name: partial(ratios, name) for name in BENCHED},
    "zen4-paged": partial(rates, "zen4-paged", unit="GB/s"),
    "zen4-patterns": partial(rates, "zen4-patterns", unit="GFLOP/s of the allowed pairs", label=pattern),
    "zen4-generation": partial(rates, "zen4-generation", unit="tokens a second", label=typed),
    "zen4-recurrent": partial(
        rates,
        "zen4-recurrent",
        unit="ms",
        column="median",
        factor=1e3,
        label=passed,
        log=True,
        chosen=lambda row: row["case"].endswith("-4096"),
    ),
    "zen4-recurrent-crossing": partial(crossing, "zen4-recurrent"),
    "zen4-train-models": partial(trained, "zen4-train-models"),
    "zen4-recurrent-diagonal": partial(
        rates, "zen4-recurrent-diagonal", unit="ms", column="seconds", factor=1e3, label=passed, log=True
    ),
    "nvidia-h200-forward": partial(rates, "nvidia-h200", unit="TFLOP/s", chosen=of("forward"), label=short),
    "nvidia-h200-backward": partial(rates, "nvidia-h200", unit="TFLOP/s", chosen=of("backward"), label=short),
    "nvidia-h200-decode": partial(rates, "nvidia-h200", unit="GB/s", chosen=of("decode"), label=short),
    "nvidia-h200-codes": partial(rates, "nvidia-h200", unit="GB/s", chosen=of("decode", codes=True), label=short),
    "nvidia-h200-patterns": partial(
        rates,
        "nvidia-h200",
        unit="ms",
        column="median",
        factor=1e3,
        chosen=patterned,
        label=lambda row: f"{row['mask']}, {row['case'].partition('-')[0]}",
        log=True,
    ),
    "nvidia-h200-tiles": partial(
        spread, "nvidia-h200-tiles", unit="µs", column="us", label="{kernel}, {bytes} bytes, D = {D}"
    ),
    "nvidia-h200-recurrent": partial(
        rates, "nvidia-h200-recurrent", unit="ms", column="median", factor=1e3, label=verbed, chosen=long
    ),
    **{
        f"nvidia-h200x{n}-distributed": partial(
            rates,
            f"nvidia-h200x{n}-distributed",
            unit="TFLOP/s a GPU",
            column="tflops",
            label=over_ranks,
            chosen=lambda row: "flash" not in row["provider"] and "overlap" not in row["provider"],
        )
        for n in (4, 2)
    },
    "nvidia-h200x2-scaling": partial(simulated, "nvidia-h200x2-scaling"),
    "webgpu-h200-recurrent": partial(
        rates, "webgpu-h200", unit="ms", column="median", factor=1e3, chosen=recurrent, log=True
    ),
    "webgpu-h200": partial(rates, "webgpu-h200", unit="TFLOP/s", chosen=unit_is("TFLOP/s")),
    "webgpu-h200-decode": partial(rates, "webgpu-h200", unit="GB/s", chosen=unit_is("GB/s"), label=typed),
    "webgpu-h200-splits": partial(
        spread, "webgpu-h200-splits", unit="GB/s", column="rate", label="{dtype}, {keys} keys", best=max
    ),
}
# whose rows are drawn
FILES = {draw.args[0] for draw in DRAWINGS.values()}


def main() -> None:
    """Draw all into a folder."""
    for name, draw in DRAWINGS.items():
        draw(Path(sys.argv[1]) / f"{name}.svg")


if __name__ == "__main__":
    main()
