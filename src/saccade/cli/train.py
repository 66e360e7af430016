"""`saccade train`: a small language model on real text, through Saccade's own attention."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from . import show
from .devices import checked_backend

if TYPE_CHECKING:
    from saccade.models.training import Trainer, TrainingStep

DEFAULT_OUT = Path("demo")
CHART_LINES = 8
MAP_TOKENS = 48


def share_cores() -> None:
    """To be called before torch is imported: its idle OpenMP threads sleep soon, and leave their cores to others.

    By default they spin between operators, beside the attention's own workers: 5 % slower on a quiet machine of two
    cores, 4 to 30 times slower on a busy one.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def train(
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoint, weights, tokenizer, losses, pictures.")] = (
        DEFAULT_OUT
    ),
    text: Annotated[
        list[Path] | None, typer.Option(help="Text files, a document each. (Python's standard library)")
    ] = None,
    more: Annotated[list[Path] | None, typer.Argument(metavar="FILE...", help="More files after --text.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Or minutes to train, turned into steps. (2)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew over any run in the folder.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and of the order of the text. (0)")] = None,
    model: Annotated[str | None, typer.Option(help="attention, hybrid or linear, of equal size. (attention)")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="bpe (trained on the text) or bytes. (bpe)")] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens of a trained BPE. (1024)")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks. (4)")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the residual stream. (192)")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads. (6)")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads. (2)")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a row. (512)")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a step. (2)")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. (0.002)")] = None,
    tie: Annotated[bool | None, typer.Option(help="Use the embedding as the head.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints. (50)")] = None,
    backend: Annotated[str | None, typer.Option(help="Attention backend; by default chosen by device.")] = None,
    pictures: Annotated[str, typer.Option(help="What pictures are written as, png or svg.")] = "png",
    context_parallel: Annotated[int | None, typer.Option(help="Under torchrun: ranks that share a row. (1)")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; progress goes to stderr.")
    ] = False,
) -> None:
    """Train a small model on real text, and draw its loss curve and, of attention, a map."""
    if more and not text:
        show.fail(f"{more[0]} is given without --text; text files follow --text", "train")
    if pictures not in ("png", "svg"):
        show.fail(f"--pictures is {pictures!r}; expected png or svg", "train")
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "tie": tie, "vocab": vocab}
    steps_of = {"steps": steps, "minutes": minutes, "context": context, "batch": batch, "lr": lr, "seed": seed}
    named = {**sizes, **steps_of, "model": model, "tokenizer": tokenizer, "checkpoint_every": checkpoint_every}
    settings: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if text:
        settings["text"] = [*text, *(more or [])]
    share_cores()
    console = Console(stderr=True, soft_wrap=True)
    with show.plain_errors("train", "train"):
        check_options(settings, resume=resume)
        checked_backend(backend)
        with console.status("reading the text, training the tokenizer"):
            trainer = make_trainer(out, settings, context_parallel, resume=resume, overwrite=overwrite, backend=backend)
        console.quiet = not trainer.main
        console.print(described(trainer))
        run_to_its_end(trainer, console)
        if not trainer.main:
            return
        summary = summarise(trainer)
        summary["pictures"] = draw_pictures(trainer, console, pictures)
    print(json.dumps(summary) if as_json else summary_lines(summary))


def check_options(settings: dict[str, Any], *, resume: bool) -> None:
    """Raises ValueError that names options, for settings that are wrong; those of a run to resume are its own."""
    from saccade.models.fields import SETTINGS, check_fields
    from saccade.models.settings import check_settings
    from saccade.models.tokens import KINDS
    from saccade.models.variants import MODELS

    named = {name: value for name, value in settings.items() if name != "text"}
    if resume:
        check_fields(named, SETTINGS, spelled=show.flag)
    else:
        check_settings(named, spelled=show.flag)
    for name, known in (("model", MODELS), ("tokenizer", KINDS)):
        if settings.get(name, known[0]) not in known:
            raise ValueError(f"{show.flag(name)} is {settings[name]!r}; expected one of {', '.join(known)}")
    for path in settings.get("text", ()):
        if not path.is_file():
            raise ValueError(f"--text names {str(path)!r}, which is {'a folder' if path.is_dir() else 'no file'}")


def run_to_its_end(trainer: Trainer, console: Console) -> None:
    """Train; where Ctrl-C ends it first, say what is saved and raise KeyboardInterrupt."""
    again = f"saccade train --resume --out {trainer.out} goes on from there"
    try:
        with stopping_after_a_step(trainer):
            watch(trainer, console)
    except KeyboardInterrupt:
        console.print(f"stopped; the last checkpoint stays: {again}")
        raise
    if trainer.stopping and trainer.progress.step != trainer.progress.total:
        console.print(f"stopped after step {trainer.progress.step}, which is saved: {again}")
        raise KeyboardInterrupt


@contextmanager
def stopping_after_a_step(trainer: Trainer) -> Generator[None]:
    """The first Ctrl-C lets the step at work end and saves it; the second stops at once, as the first does on ranks."""
    if not trainer.alone or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        if trainer.stopping:
            raise KeyboardInterrupt
        trainer.stopping = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def make_trainer(out: Path, settings: dict[str, Any], context_parallel: int | None, **options: Any) -> Trainer:
    """A trainer of this process alone, or of the ranks that torchrun started."""
    import torch.distributed as dist

    if context_parallel is None and not dist.is_torchelastic_launched():
        from saccade.models.training import Trainer

        return Trainer(out, settings, **options)
    from saccade.models.parallel import ParallelTrainer

    return ParallelTrainer(out, settings, context_parallel=context_parallel or 1, **options)


def described(trainer: Trainer) -> str:
    """One paragraph: the text, the model, and where the run stands."""
    config, data, progress = trainer.model.config, trainer.data, trainer.progress
    start = f"\nresumed at step {progress.step} of {progress.total or '?'}" if trainer.resumed else ""
    return (
        f"text   {trainer.documents} documents, {data.tokens / 1e6:.2f} M tokens of "
        f"{progress.bytes_per_token:.2f} bytes, "
        f"{trainer.settings.tokenizer} vocabulary of {config.vocab_size}\n"
        f"model  {trainer.settings.model}, {trainer.parameters / 1e6:.2f} M parameters, {config.num_hidden_layers} "
        f"layers of width {config.hidden_size}, "
        f"heads {config.num_attention_heads}:{config.num_key_value_heads} of {config.head_dim}\n"
        f"step   {trainer.settings.batch} rows of {trainer.settings.context} tokens, "
        f"each token attending to its own document{start}"
    )


def watch(trainer: Trainer, console: Console) -> None:
    """Runs the trainer: a live chart and bar on a terminal, about twenty lines elsewhere."""
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
        for step in trainer.run():
            total = trainer.progress.total
            shown = step.step in (1, total) or step.step % max(1, (total or 20) // 20) == 0
            if trainer.main and shown:
                print(f"step {step.step}/{total or '?'}  {figures_of(trainer, step)}", file=sys.stderr, flush=True)
        return
    with Live(view(), console=console, refresh_per_second=4) as live:
        for step in trainer.run():
            losses.append(step.loss)
            bar.update(task, completed=step.step, total=trainer.progress.total, description=figures_of(trainer, step))
            live.update(view())


def figures_of(trainer: Trainer, step: TrainingStep) -> str:
    """The figures of a step, on one line."""
    return f"loss {step.loss:.3f}  lr {step.lr:.1e}  |g| {step.grad_norm:.2f}  {trainer.tokens_per_second:,.0f} token/s"


def summary_lines(summary: dict[str, Any]) -> str:
    """The summary for people."""
    out, first, last = Path(summary["out"]), summary["loss_first"], summary["loss_last"]
    return (
        f"loss {'not logged' if first is None else f'{first:.3f} -> {last:.3f} nats a token'} in "
        f"{summary['steps']} steps, {summary['tokens']} tokens, {summary['seconds']:.0f} s\n"
        f"held-out text: {summary['validation']:.3f} nats a token, {summary['bits_per_byte']:.2f} bits a byte\n"
        f"in {out}: {', '.join(sorted(path.name for path in out.iterdir() if not path.name.startswith('.')))}"
    )


def summarise(trainer: Trainer) -> dict[str, Any]:
    """The figures of a finished run; losses in nats a token, `loss_last` the mean of the last ten steps.

    Both are None where the log was removed.
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
        "model": trainer.settings.model,
        "parameters": trainer.parameters,
        "loss_first": losses[0] if losses else None,
        "loss_last": sum(losses[-10:]) / len(losses[-10:]) if losses else None,
        "validation": validation,
        "bits_per_byte": validation / math.log(2) / progress.bytes_per_token,
    }


def draw_pictures(trainer: Trainer, console: Console, kind: str) -> list[str]:
    """Writes `loss.png` and, for a model of attention alone, `attention.png` (or .svg, as kind says); their paths.

    Without matplotlib it says so, and returns none.
    """
    from saccade.models.attended import attended
    from saccade.models.llama import Llama
    from saccade.models.losses import read_losses
    from saccade.plot import training as plot

    loss, attention = (trainer.out / f"{name}.{kind}" for name in ("loss", "attention"))
    tokens = trainer.data.validation(1).tokens[0, :MAP_TOKENS].tolist()
    layer = trainer.settings.layers // 2
    try:
        with console.status("drawing"):
            plot.losses(loss, read_losses(trainer.out), trainer.progress.validation)
            model = trainer.whole()
            if not isinstance(model, Llama):
                return [str(loss)]
            weights = attended(model, tokens, trainer.backend)[layer]
            labels = [trainer.tokenizer.decode([token]) or "<|end|>" for token in tokens]
            plot.attention(attention, weights, labels, f"layer {layer}: what each token attends to (√ of the weight)")
    except ModuleNotFoundError:
        console.print("no pictures: matplotlib is not installed")
        return []
    return [str(loss), str(attention)]
