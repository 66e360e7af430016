"""`saccade train --model` next to attention: equal sizes, the same bits after a kill, text from trained models."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("torch", "safetensors", "typer", "rich"):
    pytest.importorskip(module)

from typer.testing import CliRunner  # noqa: E402

from saccade.cli.bench.rows import read  # noqa: E402
from saccade.models.variants import EQUAL  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SIZE = ["--layers", 4, "--width", 48, "--context", 64, "--batch", 2, "--tokenizer", "bytes", "--seed", 5]
STEPS = 12


def saccade(*args: object, status: int = 0) -> str:
    from saccade.cli.main import app

    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == status, (done.stderr, done.exception)
    return done.stderr if status else done.stdout


def train(out: Path, model: str, *more: object) -> dict:
    text = ["--text", argparse.__file__, "--model", model, "--steps", STEPS]
    return json.loads(saccade("train", "--out", out, *text, *SIZE, "--pictures", "svg", "--json", *more))


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", EQUAL[1:])
def test_models_of_equal_size_learn_and_continue_text(model, tmp_path) -> None:
    attention, found = train(tmp_path / "attention", "attention"), train(tmp_path / model, model)
    assert found["model"] == model
    # a part of a column of each feed-forward is what may lack
    assert 0 <= attention["parameters"] - found["parameters"] < 3 * 48 * 4
    assert found["loss_last"] < found["loss_first"] - 0.2
    assert [Path(path).name for path in found["pictures"]] in ([], ["loss.svg"])
    words = ["--model", tmp_path / model, "--prompt", "def", "--prompt", "import argparse", "--tokens", 9, "--json"]
    assert json.loads(saccade("generate", *words))["new_tokens"] == 2 * 9


def test_a_hybrid_resumes_to_the_same_bits(tmp_path) -> None:
    from saccade.models.training import Trainer

    given = {
        "text": (argparse.__file__,), "model": "hybrid", "layers": 4, "width": 48, "context": 64, "tokenizer": "bytes",
        "steps": 6, "checkpoint_every": 3,
    }  # fmt: skip
    whole = [step.loss for step in Trainer(tmp_path / "whole", given).run()]
    cut = Trainer(tmp_path / "cut", given).run()
    begun = [next(cut).loss for _ in range(4)]
    cut.close()
    resumed = Trainer(tmp_path / "cut", {}, resume=True)
    assert resumed.settings.model == "hybrid"
    assert begun[:3] + [step.loss for step in resumed.run()] == whole


def test_the_figure_of_models_of_equal_size(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    script = [sys.executable, ROOT / "benchmarks" / "train_models.py", tmp_path, "--steps", 3, "--context", 32]
    subprocess.run([*map(str, script), "--text", argparse.__file__], check=True, capture_output=True, timeout=300)
    assert [row.provider for row in read(tmp_path / "models.csv")] == list(EQUAL)
    steps = read(tmp_path / "losses.csv")
    assert [row.case for row in steps] == ["step-1", "step-2", "step-3"] * len(EQUAL)
    assert all(row.rate > 0 for row in steps)
    assert (tmp_path / "models.png").read_bytes()[:4] == b"\x89PNG"


def test_mistakes(tmp_path) -> None:
    from saccade.models.llama import LlamaConfig
    from saccade.models.variants import make_model

    given = ["--text", argparse.__file__, "--tokenizer", "bytes", "--steps", 2, "--model", "rnn"]
    shown = saccade("train", "--out", tmp_path / "run", *given, status=2)
    assert "--model is 'rnn'; expected one of attention, hybrid, linear, delta, gpt2" in shown
    assert shown.count("\n") == 1
    with pytest.raises(ValueError, match="the attention model has"):
        make_model("linear", LlamaConfig(vocab_size=61, intermediate_size=8))
