"""The next forward of a training run, which a GPU is given before the loss of the last step is read."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from saccade.models import training
from saccade.models.training import Trainer

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 64, "batch": 2, "tokenizer": "bytes"}
SMALL |= {"steps": 8, "checkpoint_every": 3, "validation_rows": 2, "text": (argparse.__file__,)}


class OnGpu(Trainer):
    """A run that takes its device for a GPU while it reads numbers back."""

    def _read_back(self, *args: object) -> tuple[float, ...]:
        self.device, real = SimpleNamespace(type="cuda"), self.device
        try:
            return super()._read_back(*args)
        finally:
            self.device = real


def test_a_forward_ahead_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def later(numbers: tuple[torch.Tensor, ...]) -> object:
        values = [x.item() for x in numbers]
        return lambda: begun.append(ahead._ahead) or values

    monkeypatch.setattr(training, "later", later)
    plain, ahead = Trainer(tmp_path / "plain", SMALL), OnGpu(tmp_path / "ahead", SMALL)
    expected, found = ([(x.loss, x.grad_norm, x.lr) for x in one.run()] for one in (plain, ahead))
    assert found == expected
    assert ahead.progress.validation == plain.progress.validation
    for a, b in zip(plain.model.parameters(), ahead.model.parameters(), strict=True):
        assert torch.equal(a, b)
    # not after steps 3 and 6, which have checkpoints, nor after the last
    assert len(begun) == 5
    assert all(begun)
