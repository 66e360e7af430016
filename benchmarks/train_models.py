"""Trains models of equal size on the demo text, of attention, recurrent layers and both; plots losses and speeds.

    python benchmarks/train_models.py OUT [--steps N] [--context T]

writes OUT/models.csv, losses.csv, models.png and the folder of each run, which `saccade generate --model` reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.cli.bench.machine import Environment, environment
from saccade.cli.bench.rows import Row, note, write
from saccade.cli.train import share_cores, summarise

share_cores()

from saccade.models.losses import read_losses  # noqa: E402
from saccade.models.training import Trainer  # noqa: E402
from saccade.models.variants import EQUAL  # noqa: E402
from saccade.plot.training import comparison  # noqa: E402

FIGURES = ("parameters", "steps", "loss_last", "validation", "bits_per_byte")
Steps = dict[str, list[dict[str, Any]]]


def train(args: argparse.Namespace, env: Environment, runs: Steps) -> Iterator[Row]:
    """Train the models in turn: a row per model; `runs` gets the losses."""
    for name in EQUAL:
        settings = {"model": name, "steps": args.steps, "context": args.context}
        settings |= {"text": args.text} if args.text else {}
        trainer = Trainer(args.out / name, settings, overwrite=True)
        for _ in trainer.run():
            pass
        summary = summarise(trainer)
        tokens = {"tokens": trainer.settings.batch * trainer.settings.context}
        row = Row(*env, "train", name, "train", median=summary["seconds"], rate=summary["tokens_per_second"])
        yield replace(row, rate_unit="token/s", note=note(tokens | {figure: summary[figure] for figure in FIGURES}))
        runs[name] = read_losses(trainer.out)


def losses(env: Environment, runs: Steps, tokens: int) -> Iterator[Row]:
    """A row per step: its loss, and the seconds since the start; `tokens` is the number of tokens per step."""
    for name, steps in runs.items():
        for step in steps:
            row = Row(*env, f"step-{step['step']}", name, "train", median=step["seconds"], rate=step["loss"])
            yield replace(row, rate_unit="nats a token", note=note({"tokens": tokens}))


def main() -> None:
    """Train, write the rows, plot them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--text", type=Path, nargs="*")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    env, runs = environment(), Steps()
    models = write(args.out / "models.csv", train(args, env, runs))
    tokens = int(models[0].notes["tokens"])
    write(args.out / "losses.csv", losses(env, runs, tokens))
    comparison(args.out / "models.png", runs, tokens)


if __name__ == "__main__":
    main()
