"""The charts of the site, from the rows in benchmarks/results: `python scripts/measured.py PAGE.html` shows all.

While the site is built, scripts/site_pages.py puts a chart of DRAWINGS where a page has a line `<!-- chart: NAME -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from charts import Chart, html_of, variables
from row_charts import by_time, rates, ratios, simulated, spread, sweep, train_speeds, trained
from verdicts import TASKS
from verdicts import chart as verdicts

from saccade.cli.bench.rows import Row

STYLE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "site.css"


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


def long(row: Row) -> bool:
    """Whether a row of a recurrence has the longest sequence."""
    return "T=8192" in row.shape


def of_4096(row: Row) -> bool:
    return row.case.endswith("-4096")


def linear(row: Row) -> bool:
    return row.case.startswith("linear-")


def over_ranks(row: Row) -> bool:
    """Selects rows of several GPUs, without forms that are only measured to explain others."""
    return "flash" not in row.provider and "overlap" not in row.provider


COMPARED = (
    "cpu-headline",
    "cpu-decode",
    "cpu-sparse",
    "cpu-naive",
    "zen4-headline",
    "zen4-decode",
    "zen4-sparse",
    "xeon-headline",
    "xeon-decode",
    "zen4-v3-headline",
    "zen4-v3-decode",
)
milliseconds = partial(rates, unit="ms", measure=by_time)
h100 = partial(rates, "nvidia-h100")
DRAWINGS: dict[str, partial[Chart]] = {
    "verdicts": partial(verdicts),
    **{name: partial(ratios, name) for name in COMPARED},
    **{name: partial(sweep, name) for name in ("cpu-sweep", "zen4-sweep", "zen4-v3-sweep")},
    "cpu-generation": partial(rates, "cpu-generation", unit="tokens per second"),
    "cpu-training": partial(rates, "cpu-training", unit="tokens per second"),
    "zen4-training": partial(rates, "zen4-training", unit="tokens per second"),
    "nvidia-h200-training": partial(rates, "nvidia-h200-training", unit="tokens per second"),
    "nvidia-h200-generation": partial(rates, "nvidia-h200-generation", unit="tokens per second", log=True),
    "cpu-methods": partial(milliseconds, "cpu-methods", log=True),
    "zen4-paged": partial(rates, "zen4-paged", unit="GB/s"),
    "zen4-patterns": partial(rates, "zen4-patterns", unit="GFLOP/s of the allowed pairs"),
    "zen4-generation": partial(rates, "zen4-generation", unit="tokens per second"),
    "zen4-recurrent": partial(milliseconds, "zen4-recurrent", log=True, chosen=of_4096),
    "zen4-recurrent-crossing": partial(milliseconds, "zen4-recurrent", log=True, chosen=linear),
    "zen3-recurrent": partial(milliseconds, "zen3-recurrent", log=True, chosen=of_4096),
    "zen4-recurrent-diagonal": partial(milliseconds, "zen4-recurrent-diagonal", log=True),
    "zen4-train-models": partial(trained, "zen4-train-models"),
    "zen4-train-speeds": partial(train_speeds, "zen4-train-models"),
    "nvidia-h100-forward": partial(h100, unit="TFLOP/s", chosen=of("forward")),
    "nvidia-h100-backward": partial(h100, unit="TFLOP/s", chosen=of("backward")),
    "nvidia-h100-decode": partial(h100, unit="GB/s", chosen=decoded),
    "nvidia-h100-codes": partial(h100, unit="GB/s", chosen=of("decode", codes=True)),
    "nvidia-h100-patterns": partial(h100, unit="ms", measure=by_time, chosen=patterned, log=True),
    "nvidia-h200-tiles": partial(spread, "nvidia-h200-tiles", unit="µs", measure=lambda row: 1e6 * row.median),
    "nvidia-h200-recurrent": partial(milliseconds, "nvidia-h200-recurrent", log=True, chosen=long),
    **{
        name: partial(rates, name, unit="TFLOP/s per GPU", chosen=over_ranks)
        for name in ("nvidia-h200x4-distributed", "nvidia-h200x2-distributed")
    },
    "nvidia-h200x2-scaling": partial(simulated, "nvidia-h200x2-scaling"),
    "webgpu-h200": partial(rates, "webgpu-h200", unit="TFLOP/s", chosen=unit_is("TFLOP/s")),
    "webgpu-h200-decode": partial(rates, "webgpu-h200", unit="GB/s", chosen=unit_is("GB/s")),
    "webgpu-h200-recurrent": partial(milliseconds, "webgpu-h200", log=True, chosen=recurrent),
    "webgpu-h200-splits": partial(spread, "webgpu-h200-splits", unit="GB/s", measure=lambda row: row.rate, best=max),
}
# names of the files whose rows are drawn
FILES = {draw.args[0] for draw in DRAWINGS.values() if draw.args}
FILES |= {file for tasks in TASKS.values() for task in tasks for file in task.files}


def drawn(name: str) -> str:
    """The HTML of a chart; raises ValueError for a name that is not in DRAWINGS."""
    if name not in DRAWINGS:
        raise ValueError(f"there is no chart {name!r}; expected one of {', '.join(DRAWINGS)} (scripts/measured.py)")
    return html_of(DRAWINGS[name](), name)


def page() -> str:
    """All charts on one page, in the theme that the reader prefers."""
    plain = {"color-foreground-primary": ("#1b2430", "#d0d4da"), "color-foreground-secondary": ("#55606d", "#9aa4b0")}
    plain |= {"color-background-primary": ("#ffffff", "#131416"), "color-background-border": ("#dedad2", "#303335")}
    themes: list[str] = []
    for n, theme in enumerate(("light", "dark")):
        values = variables(theme) | {name: pair[n] for name, pair in plain.items()}
        themes.append(":root{" + "".join(f"--{name}:{value};" for name, value in values.items()) + "}")
    body = "\n".join(f"<h2>{name}</h2>\n{drawn(name)}" for name in DRAWINGS)
    return (
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Charts</title><style>{themes[0]}@media (prefers-color-scheme: dark){{{themes[1]}}}"
        "body{font:16px system-ui;max-width:46em;margin:1rem auto;padding:0 1rem;color:var(--color-foreground-primary);"
        f"background:var(--color-background-primary)}}\n{STYLE.read_text(encoding='utf-8')}</style>\n{body}\n"
    )


def main() -> None:
    """Write a page with all charts."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("page", type=Path)
    words.parse_args().page.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
