"""The log in a run's folder, `losses.jsonl`: one JSON object per step."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fields import is_real, is_whole

LOSSES = "losses.jsonl"
NUMBERS = ("loss", "lr", "grad_norm", "seconds")


@dataclass(frozen=True)
class TrainingStep:
    """A step, counted from 1: loss in nats per token before the update, gradient norm before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float


def read_losses(out: str | Path) -> list[dict[str, Any]]:
    """The steps logged in a run's folder, in order, without a last line that a kill cut short.

    Raises ValueError for a line that is not a step, or that does not follow the line before it.
    """
    path, steps = Path(out) / LOSSES, list[dict[str, Any]]()
    if not path.exists():
        return steps
    # a kill may have cut short the text after the last newline
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            step: Any = json.loads(line)
        except (ValueError, RecursionError):
            step = None
        if not is_step(step) or (steps and step["step"] != steps[-1]["step"] + 1):
            raise ValueError(
                f"{path}, line {number} is not the next step; repair the file, or remove it to continue without the "
                "earlier losses"
            )
        steps.append(step)
    return steps


def is_step(x: Any) -> bool:
    """Whether x is a step as training logs it."""
    return isinstance(x, dict) and is_whole(x.get("step")) and all(is_real(x.get(name)) for name in NUMBERS)


def logged_to(out: Path, last: int) -> list[dict[str, Any]]:
    """The logged steps up to `last`, the step of the checkpoint; none without a log.

    Raises ValueError as `read_losses`, and if the log ends before the checkpoint.
    """
    steps = read_losses(out)
    earlier = [step for step in steps if step["step"] <= last]
    if steps and (not earlier or earlier[-1]["step"] != last) and last:
        raise ValueError(
            f"{out / LOSSES} has steps {steps[0]['step']} to {steps[-1]['step']}, and the checkpoint is at {last}; "
            "restore the log, or remove it to continue without the earlier losses"
        )
    return earlier


def finite(value: float, what: str) -> float:
    """The value; raises FloatingPointError if it is not finite, before a checkpoint is replaced."""
    if not math.isfinite(value):
        raise FloatingPointError(f"{what} is {value}; a smaller learning rate may help")
    return value
