"""Tests attn_implementation="saccade" on every architecture of transformers, and writes docs/transformers.md.

    python scripts/transformers_matrix.py [--write] [--again] [MODEL ...]

A row is one of: equal (logits, gradients, padding on both sides and greedy text equal those of sdpa or eager
attention), refused (with the reason that is raised), not routed (the model never calls the attention interface), no
attention, not built. Anything else is an error and is never written. Models are tiny and in float64. Weights are
redrawn at 1.3/sqrt(fan-in), because the default of 0.02 makes attention nearly uniform and hides the effect of a mask.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing as mp
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import torch

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))
import transformers_tiny as tiny  # noqa: E402
from transformers_compare import Outcome, examine  # noqa: E402
from transformers_page import KINDS, page  # noqa: E402

TABLE = SCRIPTS.parent / "docs" / "assets" / "transformers.csv"
PAGE = SCRIPTS.parent / "docs" / "transformers.md"


def attempts(names: list[str], limit: float, jobs: int) -> Iterator[Outcome]:
    """`examine` each in a forked process, `jobs` at a time, each for at most `limit` seconds."""
    left, running = list(names), dict[Any, tuple[str, Any, float]]()
    while left or running:
        while left and len(running) < jobs:
            here, there = mp.Pipe(False)
            process = mp.get_context("fork").Process(target=work, args=(left[0], there))
            process.start()
            there.close()
            running[here] = left.pop(0), process, time.monotonic() + limit
        ready = mp.connection.wait(list(running), 1.0)
        for here, (name, process, end) in list(running.items()):
            if here not in ready and time.monotonic() < end:
                continue
            try:
                yield (
                    Outcome(*here.recv())
                    if here in ready
                    else Outcome(name, "not built", f"no result in {limit:.0f} s")
                )
            except EOFError:
                yield Outcome(name, "error", "the process died")
            process.kill()
            process.join()
            del running[here]


def work(name: str, there: Any) -> None:
    """Examine a model in a forked process and send its row. Output is discarded, because models print much."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    torch.set_num_threads(1)
    there.send(tuple(examine(name)))


def rows() -> dict[str, Outcome]:
    """The rows of the committed table, by model."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["model"]: Outcome(**row) for row in csv.DictReader(file)}


def write(known: dict[str, Outcome]) -> None:
    """Write the table and the page."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(Outcome._fields)
        out.writerows(known[name] for name in sorted(known))
    PAGE.write_text(page({name: known[name] for name in sorted(known)}), encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--write", action="store_true", help="write each row into the table, and the page at the end")
    parser.add_argument("--again", action="store_true", help="also run models that have a row already")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one model")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    args = parser.parse_args()
    known = rows()
    wrong = 0
    names = args.models or [n for n in tiny.model_types() if args.again or n not in known]
    for row in attempts(names, args.limit, args.jobs):
        print(*row, sep=" | ", flush=True)
        if row.outcome == "error":
            wrong += 1
            continue
        known[row.model] = row
        if args.write:
            write(known)
    print(*(f"{sum(row.outcome == kind for row in known.values())} {kind}" for kind in KINDS), sep=", ")
    sys.exit(f"{wrong} wrong" if wrong else 0)


if __name__ == "__main__":
    main()
