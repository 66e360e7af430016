"""A training run: its losses on the terminal and as a picture, and pictures of attention weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .canvas import BAR, LIGHT, OURS, SERIES, drawing
from .cells import ALL

BARS = " ▁▂▃▄▅▆▇█"
# the colour of a pair that is not allowed; an allowed pair of weight 0 is white
MASKED = "#dcd5c6"


def smooth(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """The exponential running mean of losses, in which the past has weight `weight`, without bias at the start."""
    mean, out = 0.0, list[float]()
    for count, loss in enumerate(losses, 1):
        mean = weight * mean + (1 - weight) * loss
        out.append(mean / (1 - weight**count))
    return out


def text_chart(losses: Sequence[float], width: int, height: int) -> str:
    """The losses as `height` lines of `width` block characters, with the largest and the smallest at the left."""
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
        axes.set(xlabel="step", ylabel="loss (nats per token)", title="loss of the training run")
        axes.grid()
        axes.legend()


def comparison(path: str | Path, runs: Mapping[str, Sequence[dict[str, Any]]], tokens: int) -> None:
    """Draw the running losses of several runs over the tokens that they have read, and next to them their speeds.

    runs: the steps of each run, as `read_losses` returns them, by the run's name; tokens: the tokens per step.
    """
    with drawing(path, 10, [4], across=2) as (falling, speeds):
        for (name, steps), colour in zip(runs.items(), SERIES, strict=False):
            read = [step["step"] * tokens / 1e3 for step in steps]
            falling.plot(read, smooth([step["loss"] for step in steps]), linewidth=1.6, color=colour, label=name)
            # the first steps are slower than the rest
            spent = [later["seconds"] - step["seconds"] for step, later in pairwise(steps)]
            speeds.bar(name, tokens / float(np.median(spent)) if spent else 0.0, color=colour)
        falling.set(
            xlabel="thousand tokens", ylabel="loss, running mean (nats per token)", title="models of equal size"
        )
        falling.legend()
        speeds.set(ylabel="tokens per second", title="training speed")
        for axes in (falling, speeds):
            axes.grid()


def most_different(weights: np.ndarray, count: int) -> list[tuple[int, int]]:
    """(layer, head) of the `count` heads that differ most among weights [layers, H, T, T], in their order.

    The first one chosen is farthest from the mean of all heads, and each later one is farthest from those before it.
    """
    heads = weights.reshape(-1, weights.shape[-1] ** 2).astype(np.float64)
    nearest = np.linalg.norm(heads - heads.mean(0), axis=1)
    chosen = list[int]()
    while len(chosen) < min(count, len(heads)):
        chosen.append(int(np.argmax(nearest)))
        distance = np.linalg.norm(heads - heads[chosen[-1]], axis=1)
        nearest = distance if len(chosen) == 1 else np.minimum(nearest, distance)
        nearest[chosen] = -1
    return [divmod(head, weights.shape[1]) for head in sorted(chosen)]


def attention(path: str | Path, weights: np.ndarray, labels: Sequence[str], names: Sequence[str], title: str) -> None:
    """Draw weights [H, T, T], NaN for masked pairs, as a square for each of H heads: queries down, keys across.

    labels: the texts of the T tokens; names: the titles of the H squares. The square root of a weight sets its colour,
    so that small weights show.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.patches import Patch

    count, across = len(labels), min(2, len(weights))
    colours = LinearSegmentedColormap.from_list("saccade", ["#ffffff", ALL]).with_extremes(bad=MASKED)
    colour_of = ScalarMappable(PowerNorm(0.5, 0, 1), colours)
    # spaces would move a label from its place, and $ would start a formula
    ticks = [label.replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$").strip(" ") or "␣" for label in labels]
    with drawing(path, 4.8 * across + 0.6, [4.8] * -(-len(weights) // across), across=across, title=title) as grid:
        for panel, (axes, name) in enumerate(zip(grid, [*names, ""], strict=False)):
            axes.set_axis_off()
            if panel < len(weights):
                axes.set_axis_on()
                axes.imshow(np.ma.masked_invalid(weights[panel]), cmap=colours, norm=colour_of.norm)
                axes.set_title(name)
                axes.set_xticks(range(count), ticks, rotation=90, fontsize=7)
                axes.set_yticks(range(count), ticks, fontsize=7)
                axes.tick_params(length=0, pad=2)
        figure = grid[0].figure
        bar = figure.colorbar(colour_of, ax=grid, shrink=0.4, aspect=30, ticks=[0, 0.1, 0.25, 0.5, 1], label="weight")
        bar.ax.set_yticklabels(["0", "0.1", "0.25", "0.5", "1"])
        figure.legend(handles=[Patch(facecolor=MASKED, label="masked: a later token")], loc="outside lower left")
