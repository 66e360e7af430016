"""Training and sampling on WebGPU from the command line, compared with the CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

for module in ("torch", "safetensors", "typer", "rich", "matplotlib"):
    pytest.importorskip(module)

STEPS = 3
SIZE = ["--layers", 1, "--width", 16, "--heads", 2, "--kv-heads", 1, "--context", 24, "--batch", 2]
TRAINING = ["--text", argparse.__file__, *SIZE, "--tokenizer", "bytes", "--steps", STEPS, "--seed", 3]


def saccade(*args: object) -> Any:
    """The JSON that a command writes, run in this process."""
    from typer.testing import CliRunner

    from saccade.cli.main import app

    done = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert done.exit_code == 0, (done.stderr, done.exception)
    return json.loads(done.stdout)


def test_losses_and_texts_of_the_cpu(tmp_path: Path):
    losses: dict[str, list[float]] = {}
    for backend in ("webgpu", "cpu"):
        out = tmp_path / backend
        assert saccade("train", "--out", out, *TRAINING, "--backend", backend)["steps"] == STEPS
        losses[backend] = [json.loads(line)["loss"] for line in (out / "losses.jsonl").read_text().splitlines()]
    assert len(losses["cpu"]) == STEPS
    assert losses["webgpu"] == pytest.approx(losses["cpu"], rel=1e-5)
    sample = ["generate", "--model", tmp_path / "cpu", "--prompt", "def f", "--tokens", 4, "--temperature", 0]
    texts = [saccade(*sample, "--backend", backend)["texts"] for backend in losses]
    assert texts[0] == texts[1]
