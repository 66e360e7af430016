"""What comes out: CSV rows, ratios beside their bars, a table for people and one for the README."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from saccade import cost


@dataclass(frozen=True)
class Row:
    """One (commit, device, driver, case, provider). Times are seconds; `rate` counts allowed pairs, or bytes read once.

    `rate_unit` is GFLOP/s, GB/s, or B for memory; `fraction` is of `ceiling`, in the same unit. `error` is the largest
    absolute error against the float64 oracle, `error_allowed` what the tolerance rule grants. `note` says why a row
    has no figures, or what a pattern costs beside no mask.
    """

    commit: str
    device: str
    driver: str
    case: str
    provider: str
    group: str
    kind: str
    dtype: str
    shape: str
    mask: str
    pairs: int
    median: float
    p10: float
    p90: float
    samples: int
    rate: float
    rate_unit: str
    ceiling: float
    ceiling_source: str
    fraction: float
    error: float
    error_allowed: float
    bar: float
    against: str
    aim: float
    note: str = ""


class Writer:
    """Appends rows to a CSV as they come, so that a run that is cut short keeps what it measured."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._csv = csv.DictWriter(stream, [f.name for f in fields(Row)])
        self._csv.writeheader()

    def add(self, rows: Iterable[Row]) -> None:
        self._csv.writerows({k: _text(v) for k, v in asdict(row).items()} for row in rows)
        self._stream.flush()


def _text(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def read(path: Path) -> list[Row]:
    """The rows of a CSV that `Writer` wrote; raises ValueError when its columns are others."""
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    with path.open(newline="") as stream:
        table = csv.DictReader(stream)
        if table.fieldnames != [f.name for f in fields(Row)]:
            raise ValueError(
                f"{path} has columns {table.fieldnames}; expected those of a file written by saccade bench"
            )
        return [Row(**{f.name: kinds[str(f.type)](line[f.name]) for f in fields(Row)}) for line in table]


def failures(rows: Iterable[Row]) -> list[Row]:
    """Our own rows that have no figures, or whose error is more than the tolerance rule grants."""
    ours = (row for row in rows if row.provider == "saccade")
    return [row for row in ours if not row.samples or not row.error <= row.error_allowed]


@dataclass(frozen=True)
class Verdict:
    """A case and its bar: `figure` is the peer's median over ours, or our own seconds or bytes without a peer."""

    case: str
    group: str
    ours: Row
    peers: Mapping[str, Row]
    figure: float
    bar: float
    met: bool

    @property
    def text(self) -> str:
        """The figure with its unit."""
        if self.ours.against:
            return f"{self.figure:.2f} ×"
        return cost.size(self.figure) if self.ours.kind == "memory" else cost.duration(self.figure)

    @property
    def bar_text(self) -> str:
        """The bar with its unit."""
        if not self.bar:
            return "none"
        if self.ours.against:
            return f"{self.bar:g} × {self.ours.against}"
        return cost.size(self.bar) if self.ours.kind == "memory" else cost.duration(self.bar)


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One verdict a case that we ran; a case whose named peer has no figure meets nothing."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.provider] = row
    found: list[Verdict] = []
    for name, by in cases.items():
        ours = by.get("saccade")
        if ours is None or not ours.samples:
            continue
        peers = {p: r for p, r in by.items() if p != "saccade"}
        if ours.against:
            peer = peers.get(ours.against)
            figure = peer.median / ours.median if peer and peer.samples else 0.0
            met = figure >= ours.bar
        else:
            figure = ours.rate if ours.kind == "memory" else ours.median
            met = not ours.bar or figure <= ours.bar
        found.append(Verdict(name, ours.group, ours, peers, figure, ours.bar, met))
    return found


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return cost.duration(row.median) if row.samples else "no"


HEAD = (
    "case",
    "saccade",
    "torch SDPA",
    "naive",
    "FlexAttention",
    "ONNX Runtime",
    "ratio",
    "bar",
    "rate",
    "of ceiling",
    "error / allowed",
)


def _cells(v: Verdict) -> tuple[str, ...]:
    peers = tuple(_cell(v.peers.get(p)) for p in ("sdpa", "naive", "flex", "onnxruntime"))
    rate = f"{v.ours.rate:.3g} {v.ours.rate_unit}" if v.ours.rate else ""
    fraction = f"{v.ours.fraction:.0%}" if v.ours.fraction else ""
    error = f"{v.ours.error:.1e} / {v.ours.error_allowed:.1e}" if v.ours.error_allowed else ""
    return (v.case, cost.duration(v.ours.median), *peers, v.text, v.bar_text, rate, fraction, error)


def table(found: Iterable[Verdict]) -> Table:
    """The verdicts for a terminal; a bar that is missed is red."""
    head, lines = _columns(found := list(found))
    out = Table(*head, box=None, pad_edge=False)
    for v, cells in zip(found, lines, strict=True):
        out.add_row(*cells, style=None if v.met else "red")
    return out


def markdown(found: Iterable[Verdict]) -> str:
    """The verdicts as a Markdown table."""
    head, lines = _columns(list(found))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def _columns(found: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    # a column that no case fills is left out
    lines = [_cells(v) for v in found]
    used = [n for n in range(len(HEAD)) if any(cells[n] for cells in lines)]
    return [HEAD[n] for n in used], [[cells[n] for n in used] for cells in lines]
