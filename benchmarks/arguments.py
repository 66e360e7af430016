"""Arguments of the scripts that write rows: `python benchmarks/NAME.py rows.csv [--only WORD] [--part 1/3]`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of `out`, --only, --part and --commit; a script adds its own arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the CSV to write")
    parser.add_argument("--only", default="", help="cases whose name contains this word")
    parser.add_argument("--part", default="1/1", help="a slice of the cases: 2/3 is the second of three")
    parser.add_argument("--commit", default="", help="the commit to write if git reports none")
    return parser


def chosen(items: Iterable[T], part: str) -> list[T]:
    """The items of a slice: 2/3 gives every third item, starting with the second."""
    n, of = map(int, part.split("/"))
    if not 1 <= n <= of:
        raise ValueError(f"--part is {part!r}; expected one of 1/{of} to {of}/{of}")
    return list(items)[n - 1 :: of]
