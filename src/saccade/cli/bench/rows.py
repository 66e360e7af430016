"""The form in which all benchmarks store a measured figure: a row of a CSV, written as soon as it is measured."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

from saccade import cost

NAN = math.nan


@dataclass(frozen=True)
class Row:
    """One figure of a provider in a case. A number that was not measured is NaN, or 0 samples or pairs: an empty cell.

    kind: the call that is timed: forward, backward, both, decode, step (a mask, forward and backward), plan, link, ...
    shape: sizes joined by x; of attention B, Tq, Tk, Hq, Hk, D. pairs: allowed (query head, query, key).
    median, p10, p90: seconds of a call, over `samples` samples.
    rate: work per second in `rate_unit`, of the allowed pairs or of the bytes that have to be read; or another figure.
    ceiling: what the machine reaches in that unit, probed in the same run; fraction: the rate's share of a ceiling.
    error: the largest error against the oracle, or against Saccade where the script says so; allowed: its limit.
    note: parts joined by "; ", each `name=value` or a text: a bar, memory, why a row has no figure.
    """

    commit: str
    device: str
    driver: str
    case: str
    provider: str
    kind: str
    dtype: str = ""
    shape: str = ""
    mask: str = ""
    pairs: int = 0
    median: float = NAN
    p10: float = NAN
    p90: float = NAN
    samples: int = 0
    rate: float = NAN
    rate_unit: str = ""
    ceiling: float = NAN
    fraction: float = NAN
    error: float = NAN
    allowed: float = NAN
    note: str = ""

    @property
    def measured(self) -> bool:
        """Whether there is a time."""
        return not math.isnan(self.median)

    @property
    def notes(self) -> dict[str, str]:
        """Values of the note by their names."""
        parts = (part.partition("=") for part in self.note.split("; "))
        return {name: value for name, equals, value in parts if equals and re.fullmatch(r"\w+", name)}

    def with_text(self, text: str) -> Row:
        """This row, with the text appended to its note."""
        return replace(self, note="; ".join(filter(None, (self.note, text))))


COLUMNS = [field.name for field in fields(Row)]
# what to do with a damaged line
REMEDY = "remove the line, or measure again"


def note(values: Mapping[str, object], text: str = "") -> str:
    """A note with these values, without those that are empty or 0, and a text."""
    texts = {name: _text(value) for name, value in values.items()}
    parts = [f"{name}={value}" for name, value in texts.items() if value not in ("", "0")]
    return "; ".join([*parts, text] if text else parts)


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value or "")


class Writer:
    """Appends rows to a CSV as they come, so that a run that is cut short keeps what it measured."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._csv = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        self._csv.writeheader()

    def add(self, rows: Iterable[Row]) -> None:
        self._csv.writerows({name: _text(value) for name, value in asdict(row).items()} for row in rows)
        self._stream.flush()


def write(path: str | Path, rows: Iterable[Row], earlier: Iterable[Row] = ()) -> list[Row]:
    """The rows, each written to the CSV at path and printed as it comes; the file starts with the earlier ones."""
    done: list[Row] = []
    with Path(path).open("w", newline="", encoding="utf-8") as stream:
        writer = Writer(stream)
        writer.add(earlier)
        for row in rows:
            writer.add([row])
            print(line(row), flush=True)
            done.append(row)
    return done


def line(row: Row) -> str:
    """A row as a line of text."""
    time = cost.duration(row.median) if row.measured else ""
    rate = "" if math.isnan(row.rate) else f"{row.rate:.4g} {row.rate_unit}"
    error = "" if math.isnan(row.error) else f"error {row.error:.1e}"
    return f"{row.case:48} {row.provider:20} {row.kind:9} {time:>10} {rate:>16}  {error:14} {row.note}".rstrip()


def read(path: Path) -> list[Row]:
    """The rows of a CSV that `Writer` wrote; raises ValueError for other columns, and for a damaged line."""
    return [_row(path, number, texts) for number, texts in _lines(path)]


def _row(path: Path, number: int, texts: Mapping[str, str]) -> Row:
    kinds: dict[str, Callable[[str], Any]] = {
        "int": lambda text: int(text or 0),
        "float": lambda text: float(text or NAN),
        "str": str,
    }
    convert = {field.name: kinds[str(field.type)] for field in fields(Row)}
    try:
        return Row(**{name: convert[name](text) for name, text in texts.items()})
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}; {REMEDY}") from None


def kept(path: Path, origin: tuple[str, str, str]) -> list[Row]:
    """The rows that an interrupted run left at path, if they have this commit, device and driver.

    The rows of the last case are left out, because some of its providers may be missing.
    """
    rows = [_row(path, number, texts) for number, texts in _lines(path, cut=True)] if path.exists() else []
    rows = [row for row in rows if (row.commit, row.device, row.driver) == origin]
    last = rows[-1].case if rows else ""
    while rows and rows[-1].case == last:
        rows.pop()
    return rows


def _lines(path: Path, *, cut: bool = False) -> list[tuple[int, dict[str, str]]]:
    """The number and the cells of every line. Raises as `read`; cut: leave out a last line that a kill cut short."""
    with path.open(newline="", encoding="utf-8") as stream:
        table = csv.reader(stream)
        try:
            head = next(table, [])
            lines = [(table.line_num, cells) for cells in table if cells]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is no table ({error}); expected a file written by saccade bench") from None
    if head != COLUMNS:
        raise ValueError(f"{path} has columns {head}; expected those of a file written by saccade bench")
    if cut and lines and len(lines[-1][1]) < len(COLUMNS):
        lines.pop()
    for number, cells in lines:
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{path}, line {number}: {len(cells)} cells; expected {len(COLUMNS)}: {REMEDY}")
    return [(number, dict(zip(COLUMNS, cells, strict=True))) for number, cells in lines]


def update(path: Path, new: Path) -> None:
    """Replace rows of the CSV at path by those of a new CSV with the same device, case, shape, provider and kind.

    Digits are copied unchanged.
    """

    def key(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[name] for name in ("device", "case", "shape", "provider", "kind"))

    rows = [texts for _, texts in _lines(new)]
    again = {key(row) for row in rows}
    older = [texts for _, texts in _lines(path) if key(texts) not in again] if path.exists() else []
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(older + rows)
