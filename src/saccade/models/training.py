"""Training of a small model on packed text: AdamW, warmup and cosine, clipping, checkpoints that resume bit for bit.

A run's folder holds ``config.json`` and ``model.safetensors`` (Hugging Face layout), ``tokenizer.json``,
``checkpoint.safetensors`` (weights, optimizer, generator, step; see checkpoint.py) and ``losses.jsonl``, a line a step.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from saccade import mask as masks
from saccade.models.checkpoint import load_checkpoint, read_state, save_checkpoint, save_weights, write_atomic
from saccade.models.data import IGNORED, Batch, PackedText, read_documents
from saccade.models.settings import Settings, agreed
from saccade.models.tokens import Tokenizer, load_tokenizer, make_tokenizer
from saccade.models.variants import make_model

MEASURED = 24  # steps after which a run given in minutes fixes its number of steps
CHECKPOINT, WEIGHTS, CONFIG = "checkpoint.safetensors", "model.safetensors", "config.json"
# where a run over ranks says how far it is
RANKS = "checkpoint.json"
TOKENIZER, LOSSES = "tokenizer.json", "losses.jsonl"


@dataclass(frozen=True)
class Step:
    """One step done, counted from 1: loss in nats a token before the update, gradient norm before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float


@dataclass
class Progress:
    """Where a run stands; what its checkpoint holds beside tensors."""

    settings: dict[str, Any]
    fingerprint: str
    bytes_per_token: float
    step: int = 0
    total: int | None = None
    seconds: float = 0.0
    validation: list[tuple[int, float]] = field(default_factory=list)


class Trainer:
    """A run in a folder: made fresh, or from its last checkpoint; ``run`` yields a ``Step`` after every step.

    Raises ValueError where the folder holds an unfinished run (unless ``resume`` or ``overwrite``), where the text is
    not the one the checkpoint was trained on, or where settings contradict; FileNotFoundError for missing text.
    """

    # the file that says where a run stands, that of the other kind of trainer, and who writes the folder
    state, foreign, main = CHECKPOINT, RANKS, True

    def __init__(
        self,
        out: str | Path,
        given: dict[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        backend: str | None = None,
    ) -> None:
        """``given``: the fields of ``Settings`` the caller chose; on resuming they must agree with the run's own."""
        self.out, self.backend = Path(out), backend
        if (self.out / self.foreign).exists() and not overwrite:
            one, many = "one process (saccade train)", "ranks (torchrun -m saccade train)"
            kind = many if self.foreign == RANKS else one
            raise ValueError(
                f"{self.out} holds a run of {kind}; go on with it so, overwrite it, or choose another folder"
            )
        found = self._found()
        self.resumed = resume and found is not None
        if "text" in given:
            given = {**given, "text": tuple(str(Path(path).resolve()) for path in given["text"])}
        if found is not None and not (resume or overwrite or found["step"] == found["total"]):
            done = f"{self.out} holds a run stopped at step {found['step']} of {found['total'] or '?'}"
            raise ValueError(f"{done}; resume it, overwrite it, or choose another folder")
        self.settings = agreed(found["settings"], given) if found is not None and resume else Settings(**given)

        texts = read_documents(self.settings.text)
        tokenizer_path = self.out / TOKENIZER
        self.tokenizer: Tokenizer
        if self.resumed:
            self.tokenizer = load_tokenizer(tokenizer_path)
        else:
            self.tokenizer = make_tokenizer(self.settings.tokenizer, texts, self.settings.vocab)
        ids = self.tokenizer.encode(texts)
        self.data = PackedText(ids, self.settings.context, self.settings.seed)
        bytes_per_token = sum(len(text.encode()) for text in texts) / sum(map(len, ids))
        self.documents = len(texts)
        self.progress = Progress(
            asdict(self.settings), self.data.fingerprint, bytes_per_token, total=self.settings.steps
        )

        torch.manual_seed(self.settings.seed)
        self.model = make_model(self.settings.model, self.settings.config(self.tokenizer.vocab_size))
        self._place()
        self.optimizer = make_optimizer(self.model, self.settings)
        if self.resumed:
            self._restore()
        else:
            if self.main:
                self._begin()
            self._save()

    def _found(self) -> dict[str, Any] | None:
        path = self.out / self.state
        return read_state(path) if path.exists() else None

    def _place(self) -> None:
        """Where the model is to lie; as it is."""

    def _begin(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        for name in (CHECKPOINT, RANKS):
            (self.out / name).unlink(missing_ok=True)
        self.tokenizer.save(self.out / TOKENIZER)
        write_atomic(self.out / CONFIG, json.dumps(self.model.config.to_dict(), indent=2).encode())
        write_atomic(self.out / LOSSES, b"")

    @property
    def parameters(self) -> int:
        """Numbers in the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def tokens_per_second(self) -> float:
        """The mean over the whole run."""
        tokens = self.progress.step * self.settings.batch * self.settings.context
        return tokens / max(self.progress.seconds, 1e-9)

    def run(self) -> Iterator[Step]:
        """Trains to the end, yielding each step; the last checkpoint and the weights are written before it returns."""
        progress, settings = self.progress, self.settings
        before, times = progress.seconds, list[float]()
        began = time.perf_counter()
        with open(self.out / LOSSES if self.main else os.devnull, "a", encoding="utf-8") as log:
            while progress.total is None or progress.step < progress.total:
                started = time.perf_counter()
                loss, norm, lr = self._step()
                progress.step += 1
                now = time.perf_counter()
                progress.seconds = before + now - began
                times.append(now - started)
                done = Step(progress.step, loss, lr, norm, progress.seconds)
                log.write(json.dumps(asdict(done)) + "\n")
                log.flush()
                fixed = progress.total is None and len(times) == MEASURED
                if fixed:
                    left = settings.seconds - (now - began)
                    # the first steps are slower than the rest
                    usual = statistics.median(times[MEASURED // 2 :])
                    progress.total = self._common(progress.step + max(0, int(left / usual)))
                if fixed or progress.step % settings.checkpoint_every == 0 or progress.step == progress.total:
                    self._save()
                yield done

    def _step(self) -> tuple[float, float, float]:
        progress, settings = self.progress, self.settings
        lr = settings.lr_at(progress.step, progress.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        loss = self._loss(self.data.batch(progress.step, settings.batch))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(value := self._value(loss)):
            raise FloatingPointError(f"loss {value} at step {progress.step + 1}; a smaller learning rate may help")
        return value, self._value(norm), lr

    def _common(self, steps: int) -> int:
        # a number that all processes are to share
        return steps

    def _value(self, x: Tensor) -> float:
        return x.item()

    def _loss(self, batch: Batch) -> Tensor:
        mask = masks.causal() & masks.documents(batch.documents)
        tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
        logits = self.model(tokens, positions, mask, backend=self.backend)
        targets = torch.from_numpy(batch.targets)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    @torch.no_grad()
    def validate(self) -> float:
        """Loss in nats a token on the text held out."""
        self.model.eval()
        return self._value(self._loss(self.data.validation(self.settings.validation_rows)))

    def whole(self) -> nn.Module:
        """The trained model in this process alone."""
        return self.model

    def _save(self) -> None:
        if self.progress.step:
            self.progress.validation.append((self.progress.step, self.validate()))
        self._write()

    def _write(self) -> None:
        save_checkpoint(self.out / CHECKPOINT, self.model, self.optimizer, asdict(self.progress))
        save_weights(self.out / WEIGHTS, self.model)

    def _read(self) -> dict[str, Any]:
        return load_checkpoint(self.out / CHECKPOINT, self.model, self.optimizer)

    def _restore(self) -> None:
        state = self._read()
        if state["fingerprint"] != self.data.fingerprint:
            raise ValueError(
                f"the text is not the one {self.out / self.state} was trained on; give that text, or start a new run"
            )
        self.progress = Progress(**state)
        kept = [json.dumps(line) + "\n" for line in read_losses(self.out) if line["step"] <= self.progress.step]
        if self.main:
            write_atomic(self.out / LOSSES, "".join(kept).encode())


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def read_losses(out: str | Path) -> list[dict[str, Any]]:
    """The steps logged in a run's folder, in order; a line cut short by a kill is left out."""
    path, steps = Path(out) / LOSSES, list[dict[str, Any]]()
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            steps.append(json.loads(line))
        except ValueError:
            break
    return steps
