"""What `saccade train` does with a folder that holds a run: finished, stopped, damaged, or of other settings."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
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

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "saccade.cli.main"]
TEXT = [argparse.__file__]


def saccade(*args: object, status: int = 0) -> Any:
    """Runs a command in this process; returns its ``stdout`` and ``stderr``."""
    from typer.testing import CliRunner

    from saccade.cli.main import app

    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == status, (done.stderr, done.exception)
    return done


def logged(out: Path) -> list[dict[str, Any]]:
    path = out / "losses.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


SHORT = ["--text", TEXT[0], "--layers", 1, "--width", 16, "--heads", 2, "--kv-heads", 1, "--context", 32, "--batch", 1]
SHORT += ["--tokenizer", "bytes", "--checkpoint-every", 2, "--steps", 4]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("short") / "run"
    saccade("train", "--out", out, *SHORT)
    return out


def lost(out: Path) -> None:
    (out / "checkpoint.safetensors").unlink()


def broken(out: Path) -> None:
    path = out / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def of_ranks(out: Path) -> None:
    (out / "checkpoint.safetensors").rename(out / "checkpoint.json")


def weights_alone(out: Path) -> None:
    for path in out.iterdir():
        if path.name != "model.safetensors":
            path.unlink()


@pytest.mark.parametrize("spoil", [None, lost, broken, of_ranks, weights_alone])
def test_no_run_is_replaced_without_overwrite(spoil: Any, finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    if spoil is not None:
        spoil(out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused = saccade("train", "--out", out, *SHORT, status=2).stderr
    assert all(flag in refused for flag in ("--resume", "--overwrite", "--out"))
    assert len(refused.strip().splitlines()) == 1
    if spoil is not None:
        refused = saccade("train", "--out", out, "--resume", status=2).stderr
        assert ("nothing to resume" in refused) == (spoil in (lost, weights_alone))
        assert ("is damaged" in refused) == (spoil is broken)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    # the same run again, over any existing files
    saccade("train", "--out", out, *SHORT, "--overwrite")
    assert (out / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def test_weights_that_differ_from_the_checkpoint_are_written_again(finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    whole = (out / "model.safetensors").read_bytes()
    for spoil in (b"", whole[:-4] + b"\0\0\0\0"):
        (out / "model.safetensors").write_bytes(spoil)
        assert "train --resume" in saccade("generate", "--model", out, status=2).stderr or not spoil
        saccade("train", "--out", out, "--resume")
        assert (out / "model.safetensors").read_bytes() == whole
    (out / "model.safetensors").unlink()
    saccade("train", "--out", out, "--resume")
    assert (out / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize(
    "line, words",
    [("[1]", "line 3 is not the next step"), ("5", "line 3 is not the next step"), ("{}", "line 3"), ("{", "line 3"),
     ("[" * 100000, "line 3"), ("SECOND", "line 3")],
)  # fmt: skip
def test_a_log_whose_lines_are_no_steps_is_refused(line: str, words: str, finished: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    lines = (out / "losses.jsonl").read_text().splitlines()
    lines.insert(2, lines[1] if line == "SECOND" else line)
    (out / "losses.jsonl").write_text("\n".join(lines) + "\n")
    refused = saccade("train", "--out", out, "--resume", status=2).stderr
    assert words in refused
    assert len(refused.strip().splitlines()) == 1
    (out / "losses.jsonl").unlink()
    saccade("train", "--out", out, "--resume")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"settings": "renamed"}, "differ from this version's in batch, rows"),
        ({"settings": 5}, "has no progress that this version reads"),
        ({"step": "4"}, "has no progress that this version reads"),
        ({"validation": [[1]]}, "has no progress that this version reads"),
        ({"other": 1}, "has no progress that this version reads"),
    ],
)
def test_a_checkpoint_with_other_fields_is_refused(
    change: dict[str, Any], words: str, finished: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load, save

    from saccade.models.checkpoint import read_state
    from saccade.models.files import seal

    out = Path(shutil.copytree(finished, tmp_path / "run"))
    path = out / "checkpoint.safetensors"
    state = {**read_state(path), **change}
    if state["settings"] == "renamed":
        settings = read_state(path)["settings"]
        state["settings"] = {"rows" if name == "batch" else name: value for name, value in settings.items()}
    path.write_bytes(seal(save(load(path.read_bytes())), {"state": json.dumps(state)}))
    refused = saccade("train", "--out", out, "--resume", status=2).stderr
    assert words in refused
    assert str(path) in refused
    assert len(refused.strip().splitlines()) == 1


def test_ctrl_c_saves_the_step_at_work_and_says_how_to_go_on(finished: Path, tmp_path: Path) -> None:
    # the command stays on its line, and brackets are not markup
    out = tmp_path / ("a folder [red]with a long name" * 4)
    long = [word if word != 4 else 2000 for word in SHORT]
    long[long.index("--checkpoint-every") + 1] = 1000
    command = [*COMMAND, "train", "--out", out, *long, "--backend", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, command)], env=ENVIRONMENT, **pipes)
    limit = time.monotonic() + 60
    while len(logged(out)) < 5:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    steps = len(logged(out))
    lines = told.strip().splitlines()
    assert lines[-2] == f"stopped after step {steps}, which is saved. To continue:"
    assert lines[-1] == f"saccade train --resume --backend cpu --out '{out}'"
    from saccade.models.checkpoint import read_state

    assert read_state(out / "checkpoint.safetensors")["step"] == steps


def test_a_stop_does_not_change_the_run(finished: Path, tmp_path: Path) -> None:
    from saccade.models.checkpoint import read_state
    from saccade.models.training import Trainer

    given = {"text": (TEXT[0],), "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "context": 32, "batch": 1}
    given |= {"tokenizer": "bytes", "checkpoint_every": 2, "steps": 4}
    trainer = Trainer(tmp_path / "run", given)
    for step in trainer.run():
        trainer.stopping = step.step == 3
    assert [line["step"] for line in logged(tmp_path / "run")] == [1, 2, 3]
    assert read_state(tmp_path / "run" / "checkpoint.safetensors")["step"] == 3
    saccade("train", "--out", tmp_path / "run", "--resume")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def stopped(out: Path) -> None:
    from saccade.models.training import Trainer

    trainer = Trainer(out, dict(zip(NAMES, SHORT[3::2], strict=True)) | {"text": (TEXT[0],)})
    for step in trainer.run():
        trainer.stopping = step.step == 3


NAMES = ("layers", "width", "heads", "kv_heads", "context", "batch", "tokenizer", "checkpoint_every", "steps")


def test_keep_trains_what_is_missing_and_keeps_what_is_finished(finished: Path, tmp_path: Path) -> None:
    fresh, half = tmp_path / "fresh", tmp_path / "half"
    stopped(half)
    for out, resumed in ((fresh, False), (half, True)):
        done = saccade("train", "--out", out, *SHORT, "--again", "keep", "--json")
        assert json.loads(done.stdout)["resumed"] is resumed
        assert (out / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    before = {path.name: path.stat().st_mtime_ns for path in fresh.iterdir()}
    kept = saccade("train", "--out", fresh, "--again", "keep")
    assert kept.stderr.splitlines()[-1] == (
        f"{fresh} holds a finished run of 4 steps, which is kept. To train from the start, add the same options to: "
        f"saccade train --overwrite --out {fresh}"
    )
    assert {path.name: path.stat().st_mtime_ns for path in fresh.iterdir()} == before
    assert json.loads(saccade("train", "--out", fresh, "--again", "keep", "--json").stdout)["kept"]
    other = saccade("train", "--out", fresh, "--again", "keep", "--steps", 5, status=2).stderr
    assert "steps=5 (its own: 4)" in other
    assert "text=" in saccade("train", "--out", fresh, "--again", "keep", "--text", __file__, status=2).stderr


def test_the_end_says_where_the_pictures_are_and_what_opens_them(finished: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = saccade("train", "--out", finished, "--resume").stdout.splitlines()
    assert lines[-3].split() == ["pictures:", str(finished / "loss.png"), "and", str(finished / "attention.png")]
    assert lines[-2].endswith(f"saccade generate --model {finished}")
    assert lines[-1].endswith(f"saccade lab --model {finished}")


def test_a_preparation_that_takes_long_is_never_silent(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(show, "HEARTBEAT", 0.001)
    said = saccade("train", "--out", tmp_path / "run", *SHORT).stderr
    assert re.search(r"^(reading the text|turning the text into tokens|making the model) \(0 s\)$", said, re.M)


def test_a_slow_machine_trains_the_fewest_steps_and_says_how_long(tmp_path: Path, monkeypatch: Any) -> None:
    from saccade.cli import watch
    from saccade.models import settings
    from saccade.models.settings import MEASURED
    from saccade.models.training import Trainer

    monkeypatch.setattr(settings, "MINUTES", 1e-9)
    monkeypatch.setattr(settings, "LEAST_STEPS", MEASURED + 3)
    given = {"text": (TEXT[0],), "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "context": 32, "batch": 1}
    trainer = Trainer(tmp_path / "run", given | {"tokenizer": "bytes"})
    steps = [step.step for step in trainer.run()]
    assert len(steps) == MEASURED + 3
    trainer.step_seconds = 2.0
    trainer.progress.step = MEASURED
    assert watch.speed(trainer) == (
        "this machine makes 0.5 steps per second; training takes 6 seconds: after fewer than 27 steps sampled text "
        "does not read like code"
    )
    # minutes that are asked for are kept
    short = Trainer(tmp_path / "short", given | {"tokenizer": "bytes", "minutes": 1e-9})
    assert len(list(short.run())) == MEASURED


FLAGS: dict[str, tuple[list[object], str]] = {
    "resume nothing": (["--resume"], "there is nothing to resume in"),
    "resume and overwrite": (["--resume", "--overwrite"], "--resume and --overwrite are both given"),
    "again": (["--again", "twice"], "--again is 'twice'; expected one of ask, keep, resume, overwrite"),
    "again and overwrite": (["--again", "keep", "--overwrite"], "--again keep and --overwrite are both given"),
    "text": (["--text", "/nope"], "--text names '/nope', which is no file"),
    "a folder as text": (["--text", "/"], "--text names '/', which is a folder"),
    "more without text": (["one.txt"], "one.txt is given without --text"),
    "backend": (["--backend", "foo"], "--backend is 'foo'; expected one of cpu, triton, metal, webgpu"),
    "steps": (["--steps", 0], "--steps is 0; expected an integer from 1"),
    "minutes": (["--minutes", "nan"], "--minutes is nan"),
    "lr": (["--lr", -1], "--lr is -1.0"),
    "kv heads": (["--kv-heads", 3], "--heads 4 is not a multiple of --kv-heads 3"),
    "odd heads": (["--width", 20], "makes heads of odd size"),
    "vocab": (["--vocab", 100], "--vocab is 100; expected an integer from 257"),
    "vocab of bytes": (["--vocab", 4096, "--tokenizer", "bytes"], "--vocab 4096 is for --tokenizer bpe"),
    "layers": (["--layers", 10**6], "--layers is 1000000"),
    "pictures": (["--pictures", "gif"], "--pictures is 'gif'; expected png or svg"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_wrong_options_are_named_before_any_work(name: str, tmp_path: Path) -> None:
    words, told = FLAGS[name]
    refused = saccade("train", "--out", tmp_path / "run", *words, status=2)
    assert told in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
