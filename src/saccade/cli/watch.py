"""What `saccade train` prints and draws: the run, each step as it ends, a summary and two pictures."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from . import show

if TYPE_CHECKING:
    from saccade.models.losses import TrainingStep
    from saccade.models.training import Trainer

DEFAULT_OUT = Path("demo")
PICTURES, KINDS = ("loss", "attention"), ("png", "svg")
CHART_LINES = 8
# tokens and heads of the attention picture
MAP_TOKENS, MAP_HEADS = 32, 4
# seconds between two lines of a run that does not print to a terminal
BETWEEN = 4.0
# packages that are named of a text's many
MOST_PACKAGES = 3


def command(name: str, out: Path, *options: str) -> str:
    """A `saccade` command on a run's folder, quoted for a shell; a folder that is the command's default is omitted."""
    folder = [] if out == DEFAULT_OUT and name != "lab" else ["--out" if name == "train" else "--model", str(out)]
    return shlex.join(["saccade", name, *options, *folder])


def described(trainer: Trainer) -> str:
    """One paragraph: the text, the model, and the step at which a run is resumed."""
    settings, data, progress = trainer.settings, trainer.data, trainer.progress
    start = f"\nresumed at step {progress.step} of {progress.total or '?'}" if trainer.resumed else ""
    return (
        f"text   {source_of(trainer)}{trainer.text.documents} documents, {data.tokens / 1e6:.2f} M tokens of "
        f"{progress.bytes_per_token:.2f} bytes, "
        f"{settings.tokenizer} vocabulary of {trainer.tokenizer.vocab_size}\n"
        f"model  {settings.model}, {trainer.parameters / 1e6:.2f} M parameters, {settings.layers} "
        f"layers of width {settings.width}, "
        f"heads {settings.heads}:{settings.kv_heads} of {settings.width // settings.heads}\n"
        f"step   {settings.batch} rows of {settings.context} tokens, "
        f"each token attending to its own document{start}"
    )


def source_of(trainer: Trainer) -> str:
    """The packages whose text is used: how many, and those with the most."""
    packages = trainer.text.packages
    if not packages:
        return ""
    most = sorted(packages, key=lambda name: -packages[name])[:MOST_PACKAGES]
    return f"{len(packages)} packages ({', '.join(most)}, ...), listed in {trainer.settings.data}: "


def speed(trainer: Trainer) -> str:
    """How long the rest of the run takes at the measured speed."""
    total, seconds, settings = trainer.progress.total or 0, trainer.step_seconds or 0.0, trainer.settings
    left = (total - trainer.progress.step) * seconds
    text = f"this machine makes {1 / max(seconds, 1e-9):.1f} steps per second; training takes {duration(left)}"
    if settings.least_steps == total and left > 1.5 * settings.seconds:
        text += f": after fewer than {total} steps sampled text does not read like code"
    return text


def duration(seconds: float) -> str:
    """Seconds in words, rounded to minutes from 90 seconds on."""
    number, unit = (seconds, "second") if seconds < 90 else (seconds / 60, "minute")
    return f"{number:.0f} {unit}{'' if round(number) == 1 else 's'}"


def watch(trainer: Trainer, console: Console) -> None:
    """Run the trainer, with a live chart and bar on a terminal, and a line every few seconds elsewhere."""
    from saccade.models.losses import read_losses
    from saccade.plot.training import smooth, text_chart

    losses = [line["loss"] for line in read_losses(trainer.out)]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    task = bar.add_task("starting", total=trainer.progress.total, completed=trainer.progress.step)

    def view() -> Group:
        chart = text_chart(smooth(losses), max(20, min(100, console.width - 10)), CHART_LINES)
        return Group(Text(chart, style="cyan", no_wrap=True), bar)

    if not console.is_terminal:
        print_steps(trainer)
        return
    measured = False
    with Live(view(), console=console, refresh_per_second=4) as live:
        for step in trainer.run():
            losses.append(step.loss)
            bar.update(task, completed=step.step, total=trainer.progress.total, description=figures_of(trainer, step))
            if trainer.step_seconds is not None and not measured:
                live.console.print(speed(trainer), highlight=False)
                measured = True
            live.update(view())


def print_steps(trainer: Trainer) -> None:
    """Run the trainer; print a line on the error stream for its first and last step, and for one every few seconds."""
    printed, measured = 0.0, False
    for step in trainer.run():
        total, now = trainer.progress.total, time.monotonic()
        if not trainer.main:
            continue
        if trainer.step_seconds is not None and not measured:
            print(speed(trainer), file=sys.stderr)
            measured = True
        if now - printed >= BETWEEN or step.step in (1, total):
            left = 0.0 if total is None or trainer.step_seconds is None else (total - step.step) * trainer.step_seconds
            rest = f"  {duration(left)} left" if left else ""
            print(f"step {step.step}/{total or '?'}  {figures_of(trainer, step)}{rest}", file=sys.stderr, flush=True)
            printed = now


def figures_of(trainer: Trainer, step: TrainingStep) -> str:
    """The figures of a step, on one line; the share of the peak is that of one process."""
    from saccade.models.speed import memory

    share = trainer.meter.share if trainer.alone else None
    peak = "" if share is None else f"  {100 * share:.0f} % of peak"
    return (
        f"loss {step.loss:.3f}  lr {step.lr:.1e}  |g| {step.grad_norm:.2f}  {trainer.tokens_per_second:,.0f} token/s"
        f"{peak}  {memory(trainer.device) / 1e9:.2f} GB"
    )


def summary_lines(summary: dict[str, Any]) -> str:
    """The summary as text for people, and what to do next."""
    from saccade.models.settings import LEAST_STEPS

    out, first, last = Path(summary["out"]), summary["loss_first"], summary["loss_last"]
    few = f"{summary['steps']} steps are few; more give better text: --steps, --minutes\n"
    return (
        f"loss {'not logged' if first is None else f'{first:.3f} -> {last:.3f} nats per token'} in "
        f"{summary['steps']} steps, {summary['tokens']} tokens, {summary['seconds']:.0f} s\n"
        f"held-out text: {summary['validation']:.3f} nats per token, {summary['bits_per_byte']:.2f} bits per byte\n"
        f"{few if summary['steps'] < LEAST_STEPS else ''}"
        f"in {out}: {', '.join(sorted(path.name for path in out.iterdir() if not path.name.startswith('.')))}\n"
        f"{next_lines(out)}"
    )


def next_lines(out: Path) -> str:
    """Where the pictures of a run are, and the commands that use its model."""
    from saccade.models.files import read_object
    from saccade.models.hybrid_config import ATTENTION

    files = pictures_of(out)
    # a Llama and a GPT-2 have no list of mixers: all their layers are attention
    mixers = read_object(out / "config.json").get("mixers", ATTENTION)
    rows = {
        **({"pictures": " and ".join(map(str, files))} if files else {}),
        "sample text": command("generate", out),
        **({"attention in the browser": command("lab", out)} if set(mixers) & set(ATTENTION) else {}),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name + ':':<{width + 1}} {text}" for name, text in rows.items())


def pictures_of(out: Path) -> list[Path]:
    """The pictures in a run's folder."""
    return [path for name in PICTURES for kind in KINDS if (path := out / f"{name}.{kind}").exists()]


def remove_pictures(out: Path, *, but: Sequence[Path] = ()) -> None:
    """Remove the pictures in a run's folder, except those that belong to the run."""
    for path in pictures_of(out):
        if path not in but:
            path.unlink()


def summarise(trainer: Trainer) -> dict[str, Any]:
    """The figures of a finished run; losses in nats per token, `loss_last` the mean of the last ten steps.

    `loss_first` and `loss_last` are None if the log was removed.
    """
    from saccade.models.losses import read_losses

    losses = [line["loss"] for line in read_losses(trainer.out)]
    progress = trainer.progress
    validation = progress.validation[-1][1]
    return {
        "out": str(trainer.out),
        "resumed": trainer.resumed,
        "steps": progress.step,
        "tokens": progress.step * trainer.settings.batch * trainer.settings.context,
        "seconds": progress.seconds,
        "tokens_per_second": trainer.tokens_per_second,
        "share_of_peak": trainer.meter.share if trainer.alone else None,
        "model": trainer.settings.model,
        "parameters": trainer.parameters,
        "loss_first": losses[0] if losses else None,
        "loss_last": sum(losses[-10:]) / len(losses[-10:]) if losses else None,
        "validation": validation,
        "bits_per_byte": validation / math.log(2) / progress.bytes_per_token,
    }


def draw_pictures(trainer: Trainer, console: Console, kind: str) -> list[str]:
    """Write `loss.png` and, for a model of attention alone, `attention.png` (or .svg, as kind says); return the paths.

    If matplotlib is missing, this prints so and returns no path.
    """
    import torch

    from saccade.models.gpt2 import Gpt2
    from saccade.models.llama import Llama
    from saccade.models.losses import read_losses
    from saccade.plot import training as plot

    drawn = [loss, attention] = [trainer.out / f"{name}.{kind}" for name in PICTURES]
    try:
        with show.working(console, "drawing the pictures"):
            plot.losses(loss, read_losses(trainer.out), trainer.progress.validation)
            model = trainer.whole()
            if isinstance(model, (Llama, Gpt2)):
                # what is compiled for training would be compiled again for a single text
                with torch.compiler.set_stance("force_eager"):
                    draw_attention(trainer, model, attention)
            else:
                drawn.remove(attention)
    except ModuleNotFoundError:
        console.print("no pictures: matplotlib is not installed; pip install matplotlib", highlight=False)
        return []
    # those of the other format
    remove_pictures(trainer.out, but=drawn)
    return [str(path) for path in drawn]


def draw_attention(trainer: Trainer, model: Any, path: Path) -> None:
    """Draw the heads of a Llama that differ most on the start of the held-out text."""
    import numpy as np

    from saccade.models.attended import attended
    from saccade.plot import training as plot

    tokens = trainer.data.validation(1).tokens[0, :MAP_TOKENS].tolist()
    weights = attended(model, tokens, trainer.backend)
    heads = plot.most_different(weights, MAP_HEADS)
    labels = [trainer.tokenizer.decode([token]) or "<|end|>" for token in tokens]
    future = np.triu(np.ones(weights.shape[-2:], bool), 1)
    shown = np.stack([np.where(future, np.nan, weights[layer, head]) for layer, head in heads])
    names = [f"layer {layer}, head {head}" for layer, head in heads]
    plot.attention(path, shown, labels, names, "what each token attends to: the heads that differ most")
