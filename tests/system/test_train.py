"""`saccade train` and `saccade generate` as a user runs them, killed and resumed."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

for module in ("torch", "safetensors", "typer", "rich"):
    pytest.importorskip(module)

from saccade.cli import show  # noqa: E402

# errors are the only lines, however slow the machine is
show.HEARTBEAT = 1e6

# one thread each: what is compared is bits, and idle threads of another process slow these tiny steps
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "saccade.cli.main"]
TEXT = [argparse.__file__, ast.__file__]
MODEL = ["--layers", 2, "--width", 48, "--context", 64, "--batch", 2]
SIZE = [*MODEL, "--tokenizer", "bytes", "--seed", 5, "--checkpoint-every", 10]
STEPS = 60


def saccade(*args: object, status: int = 0) -> Any:
    """Runs a command in this process; returns its ``stdout`` and ``stderr``."""
    from typer.testing import CliRunner

    from saccade.cli.main import app

    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == status, (done.stderr, done.exception)
    return done


def saccade_process(*args: object) -> str:
    command = [*COMMAND, *map(str, args)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, encoding="utf-8", timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(out: Path) -> list[object]:
    return ["train", "--out", out, "--text", *TEXT, *SIZE, "--steps", STEPS]


def logged(out: Path) -> list[dict[str, Any]]:
    path = out / "losses.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def run_and_kill(args: list[object], out: Path, after: int) -> None:
    """Starts a run and kills it -9 once its log shows more than ``after`` steps."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*COMMAND, *map(str, args)], env=ENVIRONMENT, **quiet)
    limit = time.monotonic() + 60
    while len(logged(out)) <= after:
        assert process.poll() is None, f"ended with {process.returncode} before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.002)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("run") / "unbroken"
    return out, json.loads(saccade_process(*start(out), "--json"))


def test_loss_falls_and_files_are_there(unbroken: tuple[Path, dict[str, Any]]) -> None:
    out, summary = unbroken
    steps = logged(out)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert summary["loss_first"] == steps[0]["loss"] > 5
    assert summary["loss_last"] < summary["loss_first"] - 1.5
    assert summary["steps"] == STEPS
    assert summary["tokens"] == STEPS * 2 * 64
    assert not summary["resumed"]
    names = {path.name for path in out.iterdir()}
    expected = {"checkpoint.safetensors", "model.safetensors", "config.json", "tokenizer.json", "losses.jsonl"}
    assert expected <= names
    assert not any(name.endswith(".tmp") for name in names)
    for picture in summary["pictures"]:
        assert Path(picture).read_bytes()[:4] == b"\x89PNG"


def test_killed_twice_and_resumed_to_the_same_bits(unbroken: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "killed"
    run_and_kill(start(out), out, after=13)
    saccade("train", "--out", out, status=2)
    run_and_kill([*start(out), "--resume"], out, after=34)
    resumed = json.loads(saccade_process("train", "--out", out, "--resume", "--json"))
    assert resumed["resumed"]
    ours, theirs = logged(out), logged(unbroken[0])
    for key in ("step", "loss", "lr", "grad_norm"):
        assert [step[key] for step in ours] == [step[key] for step in theirs]
    assert (out / "model.safetensors").read_bytes() == (unbroken[0] / "model.safetensors").read_bytes()
    assert resumed["validation"] == unbroken[1]["validation"]


def test_resuming_another_run_is_refused(unbroken: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    refused = saccade("train", "--out", unbroken[0], "--resume", "--lr", 0.5, "--batch", 2, status=2)
    assert "lr=0.5 (its own: 0.004)" in refused.stderr
    assert "batch" not in refused.stderr
    other = tmp_path / "changed.py"
    other.write_text(Path(TEXT[0]).read_text())
    out = tmp_path / "run"
    size = ["--out", out, "--text", other, "--steps", 2, "--layers", 1, "--context", 64, "--tokenizer", "bytes"]
    saccade("train", *size)
    other.write_text(Path(TEXT[1]).read_text())
    assert "not the one" in saccade("train", "--out", out, "--resume", status=2).stderr


def test_generate(unbroken: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    model = ["generate", "--model", unbroken[0], "--tokens", 30]
    plain = saccade(*model, "--prompt", "def ", "--seed", 3)
    assert plain.stdout.startswith("def ")
    assert "token/s" in plain.stderr
    greedy = [*model, "--json", "--temperature", 0]
    many = json.loads(saccade(*greedy, "--prompt", "def ", "--prompt", "import os, ").stdout)
    assert many["new_tokens"] == 2 * 30
    for prompt, text in zip(many["prompts"], many["texts"], strict=True):
        alone = json.loads(saccade(*greedy, "--prompt", prompt, "--chunk", 2).stdout)
        assert alone["texts"] == [text]
        assert text.startswith(prompt)
    drafted = json.loads(saccade(*greedy, "--prompt", "def ", "--prompt", "import os, ", "--draft", "ngram").stdout)
    assert drafted["texts"] == many["texts"]
    assert drafted["tokens_per_call"] >= 1
    assert "tokens per call" in saccade(*model, "--prompt", "def ", "--draft", "ngram").stderr
    assert "expected 'ngram'" in saccade(*model, "--prompt", "def ", "--draft", "model", status=2).stderr
    halves = json.loads(
        saccade(*greedy, "--prompt", "def ", "--dtype", "bfloat16", "--window", 16, "--sinks", 2).stdout
    )
    assert halves["texts"][0].startswith("def ")
    assert halves["new_tokens"] == 30
    listed = tmp_path / "prompts.txt"
    listed.write_text("def \n\n" + json.dumps("import os, ") + "\n")
    lines = saccade(*greedy, "--prompts", listed, "--batch", 1).stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == many["texts"]
    assert "--- 2 of 2 ---\nimport os, " in saccade(*model, "--prompts", listed).stdout
    listed.write_text('"import')
    assert "JSON string" in saccade(*greedy, "--prompts", listed, status=2).stderr


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", "--text", "no/such/file"], "no/such/file"),
        (["train", "--steps", 3, "--minutes", 1], "give one of them"),
        (["train", "--tokenizer", "words", "--text", *TEXT], "expected one of bpe, bytes"),
        (
            ["train", "--heads", 5, "--text", *TEXT, "--tokenizer", "bytes"],
            "--width 128 is not a multiple of --heads 5",
        ),
        (["train", "--backend", "metal", "--steps", 1, "--text", *TEXT, *SIZE], "metal"),
        (["generate", "--model", "no/such/run"], "no/such/run"),
        (["generate", "--dtype", "half"], "'float32' or 'bfloat16'"),
    ],
)
def test_mistakes_are_one_line(args: list[object], message: str, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out"] if args[0] == "train" else []
    refused = saccade(*args, *out, status=2)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


TINY: dict[str, Any] = {
    "text": (TEXT[0],), "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "context": 32, "batch": 1,
    "tokenizer": "bytes",
}  # fmt: skip


def test_no_checkpoint_follows_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    """The run ends at the step whose gradient is infinite, and goes on from the checkpoint before it."""
    from saccade.models.training import Trainer

    trainer = Trainer(tmp_path, TINY | {"steps": 6, "checkpoint_every": 2})
    run = trainer.run()
    for _ in range(3):
        next(run)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    weight = next(iter(trainer.model.parameters()))
    weight.register_hook(lambda gradient: gradient + float("inf"))
    with pytest.raises(FloatingPointError, match="the gradient norm of step 4 is inf; a smaller learning rate"):
        next(run)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert [step["step"] for step in logged(tmp_path)] == [1, 2, 3]
    assert [step.step for step in Trainer(tmp_path, {}, resume=True).run()] == [3, 4, 5, 6]


def test_no_checkpoint_follows_a_held_out_loss_that_is_not_finite(tmp_path: Path, monkeypatch: Any) -> None:
    """The run ends before the checkpoint if the held-out text has no loss."""
    from saccade.models.training import Trainer

    trainer = Trainer(tmp_path, TINY | {"steps": 2})
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    monkeypatch.setattr(trainer, "validate", lambda: float("nan"))
    with pytest.raises(FloatingPointError, match="the loss of the held-out text is nan; a smaller learning rate"):
        list(trainer.run())
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_minutes_count_the_time_before_a_resumption(tmp_path: Path) -> None:
    """A run that has trained longer than its minutes ends as soon as its steps are measured."""
    from saccade.models.settings import MEASURED
    from saccade.models.training import Trainer

    trainer = Trainer(tmp_path, TINY | {"minutes": 0.05})
    for step in trainer.run():
        trainer.stopping = step.step == 5
    resumed = Trainer(tmp_path, {}, resume=True)
    assert resumed.progress.seconds == trainer.progress.seconds > 0
    resumed.progress.seconds = 60.0
    assert [step.step for step in resumed.run()] == list(range(6, 6 + MEASURED))
