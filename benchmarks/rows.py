"""Rows of a benchmark on disk as soon as they are found: what stops it later loses none."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]], shown: Sequence[str]) -> list[dict[str, Any]]:
    """The rows, each written to the CSV file at path and its shown columns printed as it comes; the first names all."""
    found: list[dict[str, Any]] = []
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (), lineterminator="\n")
        for row in rows:
            if not found:
                writer.fieldnames = list(row)
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            print(*(row[name] for name in shown), flush=True)
            found.append(row)
    return found
