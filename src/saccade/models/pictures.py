"""Pictures of a run: the loss curve, and what each head attends to.  matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import saccade
from saccade import mask as masks
from saccade.models.llama import Llama

BARS = " ▁▂▃▄▅▆▇█"


def smooth(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """The running mean that weighs the past by ``weight``, corrected for its start."""
    mean, out = 0.0, list[float]()
    for count, loss in enumerate(losses, 1):
        mean = weight * mean + (1 - weight) * loss
        out.append(mean / (1 - weight**count))
    return out


def text_chart(losses: Sequence[float], width: int, height: int) -> str:
    """The losses as ``height`` lines of ``width`` block characters, the range of values at the left."""
    if not losses:
        return "\n" * (height - 1)
    columns = [part.mean() for part in np.array_split(np.asarray(losses), min(width, len(losses)))]
    low, high = min(columns), max(columns)
    levels = [round((value - low) / (high - low or 1) * (8 * height - 1)) + 1 for value in columns]
    lines = ["".join(BARS[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(height))]
    labels = [f"{high:6.2f} "] + ["       "] * (height - 2) + [f"{low:6.2f} "]
    return "\n".join(label + line for label, line in zip(labels[-height:], lines, strict=True))


def draw_losses(path: str | Path, steps: Sequence[dict[str, Any]], validation: Sequence[tuple[int, float]]) -> None:
    """Writes the loss of every step, its running mean and the validation losses to path (.png, .svg or .pdf)."""
    figure, axes = new_figure(7, 4)
    numbers, losses = [step["step"] for step in steps], [step["loss"] for step in steps]
    axes.plot(numbers, losses, color="#9db4c9", linewidth=0.8, label="each step")
    axes.plot(numbers, smooth(losses), color="#1f4e79", linewidth=1.8, label="running mean")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#c8553d", markersize=3, label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="saccade train")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def draw_comparison(path: str | Path, runs: Mapping[str, Sequence[dict[str, Any]]], tokens: int) -> None:
    """Writes the running losses of runs over what they read, and beside them their speeds.

    runs: a run's steps, as of ``read_losses``, by its name; tokens: of a step of each.
    """
    figure, (losses, speeds) = new_figure(10, 4, across=2)
    for name, steps in runs.items():
        read = [step["step"] * tokens / 1e3 for step in steps]
        losses.plot(read, smooth([step["loss"] for step in steps]), linewidth=1.6, label=name)
        # the first steps are slower than the rest
        spent = [later["seconds"] - step["seconds"] for step, later in pairwise(steps)]
        speeds.bar(name, tokens / float(np.median(spent)) if spent else 0.0)
    losses.set(xlabel="thousand tokens", ylabel="loss, running mean (nats a token)", title="models of equal size")
    losses.legend(frameon=False)
    speeds.set(ylabel="tokens a second", title="training speed")
    for axes in (losses, speeds):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


@torch.no_grad()
def attention_weights(model: Llama, tokens: Sequence[int], layer: int, backend: str | None = None) -> np.ndarray:
    """The weights [Hq, T, T] of a layer's causal heads on one sequence of T tokens.

    With v the identity, attention's output is its weights: o[i] = Σ_j p[i, j] e_j.
    """
    count = len(tokens)
    turn = model.turn(torch.arange(count))
    x = model.model.embed_tokens(torch.as_tensor(tokens)[None])
    *before, block = model.blocks[: layer + 1]
    for one in before:
        x = one(x, turn, masks.causal(), None, backend)
    q, k, _ = block.self_attn.project(block.input_layernorm(x), turn)
    identity = torch.eye(count, dtype=q.dtype)[None, :, None].expand(1, count, k.shape[2], count)
    o = saccade.attention(q, k, identity, masks.causal(), backend=backend)
    return o[0].transpose(0, 1).float().numpy()


def draw_attention(path: str | Path, weights: np.ndarray, labels: Sequence[str], title: str) -> None:
    """Writes weights [H, T, T] as one square per head, queries down and keys across, labelled by their T tokens."""
    heads, count = weights.shape[:2]
    across = min(3, heads)
    down = -(-heads // across)
    figure, grid = new_figure(3.6 * across, 3.8 * down, down, across)
    # spaces would push a label off its place, and $ would begin a formula
    ticks = [label.replace("\n", "⏎").replace("$", r"\$").strip(" ") or "␣" for label in labels]
    for head, axes in enumerate(np.ravel(grid)):
        axes.set_axis_off()
        if head < heads:
            axes.set_axis_on()
            axes.imshow(np.sqrt(weights[head]), cmap="magma_r", vmin=0, vmax=1)
            axes.set_title(f"head {head}", fontsize=9)
            axes.set_xticks(range(count), ticks, rotation=90, fontsize=4)
            axes.set_yticks(range(count), ticks, fontsize=4)
            axes.tick_params(length=0, pad=1)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def new_figure(width: float, height: float, down: int = 1, across: int = 1) -> tuple[Any, Any]:
    """A figure that needs no display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(down, across)
