"""Training of a model on packed text: AdamW, warmup and cosine, clipping, checkpoints that resume bit for bit.

A run's folder has `config.json`, `model.safetensors` and the tokenizer's files (Hugging Face layout),
`checkpoint.safetensors` (weights, optimizer, generator, step; see checkpoint.py) and `losses.jsonl`, one line per step.
The checkpoint decides at which step a run resumes. The weights are renamed into place before it. On resuming, the log
is cut to the checkpoint's step, and weights that differ from the checkpoint are written again. So a run that is killed
at any moment and resumed ends with the same bits as one that is not.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from .checkpoint import encode_checkpoint, load_checkpoint, read_state
from .data import Batch
from .files import check_readable, naming, write_atomic, write_together
from .folders import CONFIG, claimed, contents, remove_run, remove_temporaries
from .loading import device_of
from .losses import LOSSES, TrainingStep, finite, logged_to
from .objective import Objective, make_optimizer, set_up
from .progress import CHECKPOINT, RANKS, Progress, read_progress
from .settings import MEASURED, Settings, agreed, located
from .speed import Meter
from .texts import Text, load_text
from .tokens import TOKENIZER, Tokenizer, load_tokenizer, save_tokenizer
from .transfers import later
from .variants import make_model
from .weights import WEIGHTS, encode_weights


class Trainer:
    """A new run in a folder, or one from its last checkpoint; `run` yields a `TrainingStep` after every step.

    Set `stopping` to end `run` after the current step, with a checkpoint of it.
    Raises ValueError if the folder already has a run or a model (unless `resume` or `overwrite`), if it has none to
    `resume`, if the text differs from the checkpoint's, or if settings contradict each other; FileNotFoundError for
    missing text.
    """

    # the file with the progress; that of the other kind of trainer; whether this process writes the folder; whether
    # it is the only process
    state, foreign, main, alone = CHECKPOINT, RANKS, True, True

    def __init__(
        self,
        out: str | Path,
        settings: dict[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        backend: str | None = None,
        device: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """settings: the fields of `Settings` that the caller chose; to resume, they must agree with the run's own.
        device: of the model, as torch names it; None is the CPU, and with ranks the device of each. say: called with a
        few words before each part of the preparation that takes seconds.
        """
        self.out, self.backend, self.stopping = Path(out), backend, False
        check_readable(self.out)
        self.device = self._device(device)
        # the usual time of a step, once MEASURED steps have been timed
        self.step_seconds: float | None = None
        say = say if say is not None and self.main else lambda _: None
        progress = self._resumable(resume=resume, overwrite=overwrite)
        self.resumed = progress is not None
        settings = located(settings)
        self.settings = Settings(**settings) if progress is None else agreed(progress.settings, settings)

        self.text = self._load_text(load_tokenizer(self.out / TOKENIZER) if self.resumed else None, say)
        self.data, self.tokenizer = self.text.rows, self.text.tokenizer
        total = self.settings.steps
        self.progress = Progress(asdict(self.settings), self.data.fingerprint, self.text.bytes_per_token, total=total)

        say("making the model")
        torch.manual_seed(self.settings.seed)
        self.model = make_model(self.settings.model, self.settings.config(self.tokenizer.vocab_size))
        set_up(self.model, self.settings)
        self._place()
        self.meter = Meter(self.model, self.settings, self.device)
        self.objective = Objective(self.model, self.settings, self.device, self.backend)
        self.optimizer = make_optimizer(self.model, self.settings)
        # the batch and the loss of the next step, if its forward has begun
        self._ahead: tuple[Batch, Tensor] | None = None
        with self._claimed():
            if self.resumed:
                self._restore()
            else:
                if overwrite:
                    # what cannot be computed fails before the old run is removed
                    self.validate()
                if self.main:
                    self._begin()
                self._save()

    def _claimed(self) -> AbstractContextManager[None]:
        return claimed(self.out) if self.main else nullcontext()

    def _resumable(self, *, resume: bool, overwrite: bool) -> Progress | None:
        """The progress of the run to resume, None for a new run."""
        if resume and overwrite:
            raise ValueError("--resume and --overwrite are both given; give one of them")
        if overwrite:
            return None
        one, many = "one process (saccade train)", "ranks (torchrun -m saccade train)"
        if (self.out / self.foreign).exists():
            kind = many if self.foreign == RANKS else one
            raise ValueError(
                f"{self.out} holds a run of {kind}; continue it in the same way with --resume, replace it with "
                "--overwrite, or choose another folder with --out"
            )
        if resume:
            if not (self.out / self.state).exists():
                raise ValueError(
                    f"there is nothing to resume in {self.out}, which has no {self.state}; leave out --resume, or give "
                    "the folder of the run with --out"
                )
            return self._stored()
        if files := contents(self.out):
            raise ValueError(
                f"{self.out} already holds {' and '.join(files[:2])}; continue that run with --resume, replace it with "
                "--overwrite, or choose another folder with --out"
            )
        return None

    def _stored(self) -> Progress:
        return read_progress(read_state(self.out / self.state), self.out / self.state)

    def _load_text(self, tokenizer: Tokenizer | None, say: Callable[[str], None]) -> Text:
        return load_text(self.settings, tokenizer, say)

    def _device(self, name: str | None) -> torch.device:
        return device_of(name or "cpu")

    def _place(self) -> None:
        """Move the model to its device."""
        self.model.to(self.device)

    def _begin(self) -> None:
        remove_run(self.out)
        save_tokenizer(self.tokenizer, self.out, self.settings.context)
        write_atomic(self.out / CONFIG, json.dumps(self.model.config.to_dict(), indent=2).encode())
        write_atomic(self.out / LOSSES, b"")

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def tokens_per_second(self) -> float:
        """The mean speed over the whole run."""
        tokens = self.progress.step * self.settings.batch * self.settings.context
        return tokens / max(self.progress.seconds, 1e-9)

    def run(self) -> Iterator[TrainingStep]:
        """Trains to the end, yielding each step; the last checkpoint and the weights are written before it returns."""
        progress, settings = self.progress, self.settings
        before, times = progress.seconds, list[float]()
        began, path = time.perf_counter(), self.out / LOSSES
        with self._claimed(), open(path if self.main else os.devnull, "a", encoding="utf-8") as log:
            while progress.total is None or progress.step < progress.total:
                started = time.perf_counter()
                loss, norm, lr = self._step()
                progress.step += 1
                now = time.perf_counter()
                progress.seconds = before + now - began
                times.append(now - started)
                self.meter.add(self._batch, times[-1])
                done = TrainingStep(progress.step, loss, lr, norm, progress.seconds)
                with naming(path):
                    log.write(json.dumps(asdict(done)) + "\n")
                    log.flush()
                fixed = len(times) == MEASURED and self._measure(times, settings.seconds - progress.seconds)
                due = fixed or progress.step % settings.checkpoint_every == 0 or progress.step == progress.total
                if due:
                    self._sync(log)
                    self._save()
                yield done
                if self.stopping:
                    if not due:
                        self._sync(log)
                        # without validation, so that the figures equal those of a run that was not stopped
                        self._write()
                    return

    def _measure(self, times: list[float], left: float) -> bool:
        """Note the usual time of a step; return whether this fixed the number of steps, for `left` more seconds."""
        # the first steps are slower than the rest
        self.step_seconds = statistics.median(times[MEASURED // 2 :])
        if self.progress.total is not None:
            return False
        steps = self.progress.step + max(0, int(left / self.step_seconds))
        self.progress.total = self._common(max(steps, self.settings.least_steps))
        return True

    def _sync(self, log: IO[str]) -> None:
        # the log up to a checkpoint's step must be on the disk before the checkpoint
        if self.main:
            with naming(self.out / LOSSES):
                os.fsync(log.fileno())

    def _step(self) -> tuple[float, float, float]:
        progress, settings = self.progress, self.settings
        lr = settings.lr_at(progress.step, progress.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        (self._batch, loss), self._ahead = self._ahead or self._forward(progress.step), None
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value, length = self._read_back(loss, norm, progress.step + 1)
        where = f"of step {progress.step + 1}"
        return finite(value, f"the loss {where}"), finite(length, f"the gradient norm {where}"), lr

    def _read_back(self, loss: Tensor, norm: Tensor, following: int) -> tuple[float, ...]:
        # a GPU is given the next forward before it is asked for numbers, unless a checkpoint is between the steps
        due = following % self.settings.checkpoint_every == 0 or self.progress.total in (None, following)
        if due or self.device.type != "cuda" or not self.alone:
            return self._value(loss), self._value(norm)
        read, self._ahead = later((loss, norm)), self._forward(following)
        return tuple(read())

    def _forward(self, step: int) -> tuple[Batch, Tensor]:
        batch = self.data.batch(step, self.settings.batch)
        return batch, self._loss(batch)

    def _common(self, steps: int) -> int:
        # the same number in all processes
        return steps

    def _value(self, x: Tensor) -> float:
        return x.item()

    def _loss(self, batch: Batch) -> Tensor:
        return self.objective.loss(batch)

    def _mean(self, batch: Batch) -> Tensor:
        return self.objective.mean(batch)

    @torch.no_grad()
    def validate(self) -> float:
        """The loss in nats per token on the held-out text."""
        self.model.eval()
        return self._value(self._mean(self.data.validation(self.settings.validation_rows)))

    def whole(self) -> nn.Module:
        """The trained model in this process alone."""
        return self.model

    def _save(self) -> None:
        if self.progress.step:
            loss = finite(self.validate(), "the loss of the held-out text")
            self.progress.validation.append((self.progress.step, loss))
        self._write()

    def _write(self) -> None:
        def files() -> Iterator[tuple[Path, bytes]]:
            # weights first: if the process dies between the two renames, the old checkpoint restores its weights
            yield self.out / WEIGHTS, encode_weights(self.model)
            yield self.out / CHECKPOINT, encode_checkpoint(self.model, self.optimizer, asdict(self.progress))

        write_together(files())

    def _read(self) -> dict[str, Any]:
        return load_checkpoint(self.out / CHECKPOINT, self.model, self.optimizer)

    def _complete(self) -> None:
        """Write the weights of the checkpoint if a kill or damage left others."""
        path, own = self.out / WEIGHTS, encode_weights(self.model)
        if not path.exists() or path.read_bytes() != own:
            write_atomic(path, own)

    def _restore(self) -> None:
        self.progress = read_progress(self._read(), self.out / self.state)
        if self.progress.fingerprint != self.data.fingerprint:
            raise ValueError(
                f"the text is not the one {self.out / self.state} was trained on; give that text, or start a new run"
            )
        log = "".join(json.dumps(line) + "\n" for line in logged_to(self.out, self.progress.step))
        if self.main:
            remove_temporaries(self.out)
            write_atomic(self.out / LOSSES, log.encode())
        self._complete()
