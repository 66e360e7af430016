"""Trains the attention, hybrid and linear models of equal size on the demo text; their losses and speeds in one figure.

    python benchmarks/train_models.py OUT [--steps N] [--context T]

writes OUT/models.csv, losses.csv, models.png and the folder of each run, which ``saccade generate --model`` reads.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from saccade.cli.train import share_cores, summarise

share_cores()

from saccade.models.losses import read_losses  # noqa: E402
from saccade.models.training import Trainer  # noqa: E402
from saccade.models.variants import MODELS  # noqa: E402
from saccade.plot.training import comparison  # noqa: E402

COLUMNS = ("model", "parameters", "steps", "tokens_per_second", "loss_last", "validation", "bits_per_byte")


def main() -> None:
    """Run the three one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--text", type=Path, nargs="*")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    runs, tokens = {}, 0
    with open(chosen.out / "models.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        rows.writeheader()
        for name in MODELS:
            given = {"model": name, "steps": chosen.steps, "context": chosen.context}
            given |= {"text": chosen.text} if chosen.text else {}
            trainer = Trainer(chosen.out / name, given, overwrite=True)
            for _ in trainer.run():
                pass
            rows.writerow(summarise(trainer))
            file.flush()
            runs[name], tokens = read_losses(trainer.out), trainer.settings.batch * trainer.settings.context
    with open(chosen.out / "losses.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, ("model", "tokens", "step", "loss", "seconds"), extrasaction="ignore")
        rows.writeheader()
        for name, steps in runs.items():
            rows.writerows({"model": name, "tokens": tokens, **step} for step in steps)
    comparison(chosen.out / "models.png", runs, tokens)


if __name__ == "__main__":
    main()
