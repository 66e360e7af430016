"""`saccade train`: a small language model on real text, through Saccade's own attention."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.prompt import Prompt

from . import show
from .devices import checked_backend
from .watch import (
    DEFAULT_OUT,
    KINDS,
    command,
    described,
    draw_pictures,
    next_lines,
    pictures_of,
    remove_pictures,
    summarise,
    summary_lines,
    watch,
)

if TYPE_CHECKING:
    from saccade.models.training import Trainer

# what to do with a run that is already in the folder
AGAIN = ("ask", "keep", "resume", "overwrite")
DEFAULT_DATA = Path("tokens")

Preset = Annotated[
    str | None, typer.Option(help="llama-30m, gpt2-124m or llama-350m; other options change single settings.")
]
Text = Annotated[list[Path] | None, typer.Option(help="Text files; each is one document. (Python's standard library)")]
Data = Annotated[
    Path | None, typer.Option(help="Folder of tokens, made of installed packages if missing. (with a preset: tokens)")
]
Again = Annotated[
    str, typer.Option(help="If the folder has a run: ask, keep (finish it or leave it), resume or overwrite.")
]


def share_cores() -> None:
    """Make torch's idle OpenMP threads sleep soon, so that the attention's workers get their cores.

    Call this before torch is imported. By default the threads spin between operators, which makes training 5 % slower
    on a quiet machine with two cores, and 4 to 30 times slower on a busy one.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def train(
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoint, weights, tokenizer, losses, pictures.")] = (
        DEFAULT_OUT
    ),
    preset: Preset = None,
    text: Text = None,
    data: Data = None,
    more: Annotated[list[Path] | None, typer.Argument(metavar="FILE...", help="More text files, after --text.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Or minutes to train. (2, and at least 600 steps)")] = None,
    again: Again = "ask",
    resume: Annotated[bool, typer.Option("--resume", help="The same as --again resume.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="The same as --again overwrite.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the weights and of the order of the text. (0)")] = None,
    model: Annotated[str | None, typer.Option(help="attention, hybrid, linear, delta or gpt2. (attention)")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="bpe (trained on the text) or bytes. (bpe)")] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens in the vocabulary of a BPE. (1024)")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of blocks. (4)")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the residual stream. (128)")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads. (4)")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads. (2)")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per row. (512)")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows per step. (2)")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. (0.004)")] = None,
    tie: Annotated[bool | None, typer.Option(help="Use the embedding as the head.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16, of matrix products. (float32)")] = None,
    compile_blocks: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile the blocks.")] = None,
    recompute: Annotated[bool | None, typer.Option(help="Recompute blocks in the backward: less memory.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints. (50)")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the model: cpu, cuda, cuda:1. (cpu)")] = None,
    backend: Annotated[str | None, typer.Option(help="Attention backend; by default chosen by device.")] = None,
    pictures: Annotated[str, typer.Option(help="Format of the pictures: png or svg.")] = "png",
    context_parallel: Annotated[int | None, typer.Option(help="Under torchrun: ranks that share a row. (1)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Summary as JSON; progress goes to stderr.")] = False,
) -> None:
    """Train a small model on text; draw its loss curve and the attention of four heads.

    Ctrl-C saves the current step; `saccade train --resume` continues and ends with the same bits.
    """
    if more and not text:
        show.fail(f"{more[0]} is given without --text; text files follow --text", "train")
    if pictures not in KINDS:
        show.fail(f"--pictures is {pictures!r}; expected png or svg", "train")
    if tokenizer == "bytes" and vocab is not None:
        show.fail(f"--vocab {vocab} is for --tokenizer bpe; bytes have a vocabulary of 257: leave it out", "train")
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "tie": tie, "vocab": vocab}
    steps_of = {"steps": steps, "minutes": minutes, "context": context, "batch": batch, "lr": lr, "seed": seed}
    ways = {"dtype": dtype, "compile": compile_blocks, "recompute": recompute, "checkpoint_every": checkpoint_every}
    named = {**sizes, **steps_of, **ways, "model": model, "tokenizer": tokenizer}
    settings: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if text:
        settings["text"] = [*text, *(more or [])]
    if data is not None:
        settings["data"] = str(data)
    share_cores()
    with show.plain_errors("train", "train"):
        settings = with_preset(preset, settings)
        again = chosen_again(again, resume=resume, overwrite=overwrite)
        check_options(settings, resume=again in ("keep", "resume"))
        checked_backend(backend)
        options = {"context_parallel": context_parallel, "backend": backend, "device": device}
        run(out, settings, again, pictures, as_json=as_json, **options)


def run(out: Path, settings: dict[str, Any], again: str, pictures: str, *, as_json: bool, **options: Any) -> None:
    """Train with checked options, draw the pictures, and print the summary."""
    console = Console(stderr=True, soft_wrap=True)
    again = settled(again, out, settings, console, asking=not as_json)
    if again == "keep":
        print(json.dumps(kept_summary(out)) if as_json else next_lines(out))
        return
    with show.working(console, "loading PyTorch") as say:
        refuse_pictures(again, out)
        chosen = {"resume": again == "resume", "overwrite": again == "overwrite"}
        trainer = make_trainer(out, settings, **options, **chosen, say=say)
    if trainer.main and not trainer.resumed:
        remove_pictures(out)
    console.quiet = not trainer.main
    console.print(described(trainer))
    run_to_its_end(trainer, console)
    if trainer.main:
        summary = summarise(trainer)
        summary["pictures"] = draw_pictures(trainer, console, pictures)
        print(json.dumps(summary) if as_json else summary_lines(summary))


def refuse_pictures(again: str, out: Path) -> None:
    """Raise ValueError if a new run would replace pictures that belong to no run."""
    from saccade.models.folders import FILES

    names = [path.name for path in pictures_of(out)]
    if names and not again and not any((out / name).exists() for name in FILES):
        raise ValueError(
            f"{out} already holds {' and '.join(names)}; replace them with --overwrite, or choose another folder with "
            "--out"
        )


def with_preset(name: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a preset with those that are given, and a folder of tokens if no text is."""
    if name is None:
        return settings
    from saccade.models.presets import preset_settings

    text = {} if settings.get("text") else {"data": str(DEFAULT_DATA)}
    return {**preset_settings(name), **text, **settings}


def check_options(settings: dict[str, Any], *, resume: bool) -> None:
    """Raises ValueError, in terms of options, for wrong settings; a run to resume uses its own for the others."""
    from saccade.models.fields import SETTINGS, check_fields
    from saccade.models.settings import check_settings
    from saccade.models.tokens import KINDS
    from saccade.models.variants import MODELS

    named = {name: value for name, value in settings.items() if name != "text"}
    if named.get("data") and settings.get("text"):
        raise ValueError("--text and --data are both given; give one of them")
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


def chosen_again(again: str, *, resume: bool, overwrite: bool) -> str:
    """What --again, --resume and --overwrite ask for. Raises ValueError for an unknown word or for two options."""
    if again not in AGAIN:
        raise ValueError(f"--again is {again!r}; expected one of {', '.join(AGAIN)}")
    options = [f"--again {again}"] * (again != "ask") + ["--resume"] * resume + ["--overwrite"] * overwrite
    if len(options) > 1:
        raise ValueError(f"{' and '.join(options)} are both given; give one of them")
    return "resume" if resume else "overwrite" if overwrite else again


def settled(again: str, out: Path, settings: dict[str, Any], console: Console, *, asking: bool) -> str:
    """What to do with the run in the folder: keep, resume or overwrite it; "" to train because there is none.

    `ask` asks on a terminal; elsewhere it becomes "", and the trainer refuses a folder with a run. For `keep`, ranks
    resume the run, which leaves a finished one as it is. Raises ValueError if settings differ from a kept run's.
    """
    asking = asking and sys.stdin.isatty() and console.is_terminal
    if again not in ("ask", "keep") or (again == "ask" and not asking) or not out.is_dir():
        return "" if again in ("ask", "keep") else again
    with show.working(console, f"reading the run in {out}"):
        from torch.distributed import is_torchelastic_launched

        from saccade.models.progress import read_run
        from saccade.models.settings import agreed, located

        progress = read_run(out)
    if progress is None:
        return ""
    name = f"{out} holds a {'finished' if progress.finished else 'stopped'} run of {progress.step} steps"
    if is_torchelastic_launched():
        return "resume" if again == "keep" else ""
    if again == "ask":
        choices = ["keep" if progress.finished else "resume", "overwrite"]
        return Prompt.ask(f"{name}. What shall be done with it?", choices=choices, default=choices[0], console=console)
    if not progress.finished or not (out / "model.safetensors").exists():
        return "resume"
    agreed(progress.settings, located(settings))
    again = command("train", out, "--overwrite")
    typer.echo(f"{name}, which is kept. To train from the start, add the same options to: {again}", err=True)
    return "keep"


def kept_summary(out: Path) -> dict[str, Any]:
    """What `--json` prints of a finished run that is kept."""
    return {"out": str(out), "kept": True, "pictures": [str(path) for path in pictures_of(out)]}


def run_to_its_end(trainer: Trainer, console: Console) -> None:
    """Train; if Ctrl-C ends training early, print what is saved and raise KeyboardInterrupt."""
    options = ["--resume"] + ([] if trainer.backend is None else ["--backend", trainer.backend])
    options += ["--device", str(trainer.device)] if trainer.alone and trainer.device.type != "cpu" else []
    # on a line of its own and printed unchanged: rich would wrap it, and take brackets in a path for markup
    again = f"{'' if trainer.alone else 'torchrun -m '}{command('train', trainer.out, *options)}"
    try:
        with stopping_after_a_step(trainer):
            watch(trainer, console)
    except KeyboardInterrupt:
        typer.echo(f"stopped; the last checkpoint stays. To continue:\n{again}", err=True)
        raise
    if trainer.stopping and trainer.progress.step != trainer.progress.total:
        typer.echo(f"stopped after step {trainer.progress.step}, which is saved. To continue:\n{again}", err=True)
        raise KeyboardInterrupt


@contextmanager
def stopping_after_a_step(trainer: Trainer) -> Generator[None]:
    """Ctrl-C ends and saves the current step; a second Ctrl-C stops at once, as does the first one on ranks."""
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


def make_trainer(out: Path, settings: dict[str, Any], *, context_parallel: int | None, **options: Any) -> Trainer:
    """A trainer of this process alone, or of the ranks that torchrun started."""
    import torch.distributed as dist

    if context_parallel is None and not dist.is_torchelastic_launched():
        from saccade.models.training import Trainer

        return Trainer(out, settings, **options)
    from saccade.models.parallel import ParallelTrainer

    return ParallelTrainer(
        out, settings, context_parallel=1 if context_parallel is None else context_parallel, **options
    )
