"""Replaces rows by those that were measured again: `python benchmarks/update.py results/rows.csv new.csv`."""

from __future__ import annotations

import sys
from pathlib import Path

from saccade.cli.bench.rows import update

if __name__ == "__main__":
    update(*map(Path, sys.argv[1:]))
