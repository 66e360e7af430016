"""A training run: its losses on the terminal and as a picture, and what each head attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .canvas import BAR, LIGHT, OURS, SERIES, drawing

BARS = " ▁▂▃▄▅▆▇█"


def smooth(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """The running mean that weighs the past by `weight`, corrected for its start."""
    mean, out = 0.0, list[float]()
    for count, loss in enumerate(losses, 1):
        mean = weight * mean + (1 - weight) * loss
        out.append(mean / (1 - weight**count))
    return out


def text_chart(losses: Sequence[float], width: int, height: int) -> str:
    """The losses as `height` lines of `width` block characters, the range of values at the left."""
    if not losses:
        return "\n" * (height - 1)
    columns = [part.mean() for part in np.array_split(np.asarray(losses), min(width, len(losses)))]
    low, high = min(columns), max(columns)
    levels = [round((value - low) / (high - low or 1) * (8 * height - 1)) + 1 for value in columns]
    lines = ["".join(BARS[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(height))]
    labels = [f"{high:6.2f} "] + ["       "] * (height - 2) + [f"{low:6.2f} "]
    return "\n".join(label + line for label, line in zip(labels[-height:], lines, strict=True))


def losses(path: str | Path, steps: Sequence[dict[str, Any]], validation: Sequence[tuple[int, float]]) -> None:
    """Draw the loss of every step, its running mean and the validation losses."""
    numbers, values = [step["step"] for step in steps], [step["loss"] for step in steps]
    with drawing(path, 7, [4]) as (axes,):
        axes.plot(numbers, values, color=LIGHT, linewidth=0.8, label="each step")
        axes.plot(numbers, smooth(values), color=OURS, linewidth=1.8, label="running mean")
        if validation:
            axes.plot(*zip(*validation, strict=True), "o-", color=BAR, markersize=3, label="held-out text")
        axes.set(xlabel="step", ylabel="loss (nats a token)", title="saccade train")
        axes.grid(alpha=0.25)
        axes.legend()


def comparison(path: str | Path, runs: Mapping[str, Sequence[dict[str, Any]]], tokens: int) -> None:
    """Draw the running losses of runs over what they read, and beside them their speeds.

    runs: a run's steps, as of `read_losses`, by its name; tokens: of a step of each.
    """
    with drawing(path, 10, [4], across=2) as (falling, speeds):
        for (name, steps), colour in zip(runs.items(), SERIES, strict=False):
            read = [step["step"] * tokens / 1e3 for step in steps]
            falling.plot(read, smooth([step["loss"] for step in steps]), linewidth=1.6, color=colour, label=name)
            # the first steps are slower than the rest
            spent = [later["seconds"] - step["seconds"] for step, later in pairwise(steps)]
            speeds.bar(name, tokens / float(np.median(spent)) if spent else 0.0, color=colour)
        falling.set(xlabel="thousand tokens", ylabel="loss, running mean (nats a token)", title="models of equal size")
        falling.legend()
        speeds.set(ylabel="tokens a second", title="training speed")
        for axes in (falling, speeds):
            axes.grid(alpha=0.25)


def attention(path: str | Path, weights: np.ndarray, labels: Sequence[str], title: str) -> None:
    """Draw weights [H, T, T] as one square per head, queries down and keys across, labelled by their T tokens."""
    heads, count = weights.shape[:2]
    across = min(3, heads)
    # spaces would push a label off its place, and $ would begin a formula
    ticks = [label.replace("\n", "⏎").replace("$", r"\$").strip(" ") or "␣" for label in labels]
    with drawing(path, 3.6 * across, [3.8] * -(-heads // across), across=across, title=title) as grid:
        for head, axes in enumerate(grid):
            axes.set_axis_off()
            if head < heads:
                axes.set_axis_on()
                axes.imshow(np.sqrt(weights[head]), cmap="magma_r", vmin=0, vmax=1)
                axes.set_title(f"head {head}")
                axes.set_xticks(range(count), ticks, rotation=90, fontsize=4)
                axes.set_yticks(range(count), ticks, fontsize=4)
                axes.tick_params(length=0, pad=1)
