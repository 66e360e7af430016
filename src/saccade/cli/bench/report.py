"""Reports of rows: ratios next to their bars, as a table for people and one for the README."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from saccade import cost

from .cases import SHORT
from .rows import Row


def failures(rows: Iterable[Row]) -> list[Row]:
    """Rows of Saccade that have no figures, or whose error is larger than the tolerance rule allows."""
    ours = (row for row in rows if row.provider == "saccade")
    return [row for row in ours if not row.measured or not (math.isnan(row.allowed) or row.error <= row.allowed)]


@dataclass(frozen=True)
class Verdict:
    """A case and its bar: `figure` is the peer's median over Saccade's, or Saccade's seconds or bytes."""

    ours: Row
    peers: Mapping[str, Row]
    figure: float
    bar: float
    against: str
    met: bool

    @property
    def case(self) -> str:
        """The case's name."""
        return self.ours.case

    @property
    def group(self) -> str:
        """The case's group, which is the first part of its name."""
        return self.case.partition(f"-{SHORT[self.ours.dtype]}-")[0]

    @property
    def text(self) -> str:
        """The figure with its unit."""
        if self.against:
            return f"{self.figure:.2f} ×" if self.figure else "not measured"
        return cost.size(self.figure) if self.ours.kind == "memory" else cost.duration(self.figure)

    @property
    def bar_text(self) -> str:
        """The bar with its unit."""
        if not self.bar:
            return "none"
        if self.against:
            return f"{self.bar:g} × {self.against}"
        return cost.size(self.bar) if self.ours.kind == "memory" else cost.duration(self.bar)


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One verdict per case that Saccade ran; a case whose named peer has no figure does not meet its bar.

    If the peer has no row either, because it was not asked for, the verdict has no bar.
    """
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.provider] = row
    results: list[Verdict] = []
    for by in cases.values():
        ours = by.get("saccade")
        if ours is None or not ours.measured:
            continue
        peers = {p: r for p, r in by.items() if p != "saccade"}
        bar, against = float(ours.notes.get("bar", 0)), ours.notes.get("against", "")
        if against:
            peer = peers.get(against)
            figure = peer.median / ours.median if peer and peer.measured else 0.0
            met, bar = figure >= bar, bar if peer else 0.0
        else:
            figure = ours.rate if ours.kind == "memory" else ours.median
            met = not bar or figure <= bar
        results.append(Verdict(ours, peers, figure, bar, against, met))
    return results


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return cost.duration(row.median) if row.measured else "no"


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
    ours = v.ours
    rate = "" if math.isnan(ours.rate) else f"{ours.rate:.3g} {ours.rate_unit}"
    fraction = "" if math.isnan(ours.fraction) else f"{ours.fraction:.0%}"
    error = "" if math.isnan(ours.allowed) else f"{ours.error:.1e} / {ours.allowed:.1e}"
    return (v.case, cost.duration(ours.median), *peers, v.text, v.bar_text, rate, fraction, error)


def table(results: Sequence[Verdict]) -> Table:
    """The verdicts for a terminal; a bar that is missed is red."""
    head, lines = _columns(results)
    out = Table(*head, box=None, pad_edge=False)
    for v, cells in zip(results, lines, strict=True):
        out.add_row(*cells, style="red" if v.bar and not v.met else None)
    return out


def markdown(results: Sequence[Verdict]) -> str:
    """The verdicts as a Markdown table."""
    head, lines = _columns(results)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def _columns(results: Sequence[Verdict]) -> tuple[list[str], list[list[str]]]:
    # a column that no case fills is left out
    lines = [_cells(v) for v in results]
    used = [n for n in range(len(HEAD)) if any(cells[n] for cells in lines)]
    return [HEAD[n] for n in used], [[cells[n] for n in used] for cells in lines]
