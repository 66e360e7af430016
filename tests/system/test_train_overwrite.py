"""What `saccade train --overwrite` leaves of an earlier model, and training without enough memory or a compiler."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for module in ("torch", "safetensors", "typer", "rich"):
    pytest.importorskip(module)

from typer.testing import CliRunner  # noqa: E402

from saccade.cli import show  # noqa: E402
from saccade.cli.main import app  # noqa: E402

# errors are the only lines, however slow the machine is
show.HEARTBEAT = 1e6

SIZE = ["--layers", 1, "--width", 16, "--heads", 2, "--kv-heads", 1, "--context", 32, "--batch", 1]
SHORT = ["--text", argparse.__file__, *SIZE, "--tokenizer", "bytes", "--steps", 2]


def saccade(*args: object, status: int = 0) -> Any:
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == status, (done.stderr, done.exception)
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("short") / "run"
    saccade("train", "--out", out, *SHORT)
    return out


@pytest.mark.parametrize("name", ["checkpoint-500/model.pt", "checkpoint-notes.txt", "loss.svg"])
def test_files_of_other_programs_stay(name: str, tmp_path: Path) -> None:
    out, other = tmp_path / "run", tmp_path / "run" / name
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    told = saccade("train", "--out", out, *SHORT, status=2).stderr
    assert f"already holds {name.partition('/')[0]}" in told
    assert "--overwrite" in told
    assert [path for path in out.rglob("*") if path.is_file()] == [other]
    saccade("train", "--out", out, *SHORT, "--overwrite")
    # the pictures of a run are replaced
    assert other.exists() == (name != "loss.svg")


@pytest.mark.parametrize("index", ["whole", "damaged"])
def test_no_weights_of_a_sharded_model_are_left(index: str, finished: Path, tmp_path: Path) -> None:
    from saccade.models.weights import weight_files

    out = Path(shutil.copytree(finished, tmp_path / "run"))
    (out / "checkpoint.safetensors").unlink()
    (out / "model.safetensors").rename(out / "model-1-of-1.safetensors")
    named = {"weight_map": {"a": "model-1-of-1.safetensors", "b": "notes.txt"}} if index == "whole" else {}
    (out / "model.safetensors.index.json").write_text(json.dumps(named))
    for other in ("tokenizer_config.json", "notes.txt"):
        (out / other).write_text("{}")
    assert "--overwrite" in saccade("train", "--out", out, *SHORT, status=2).stderr
    saccade("train", "--out", out, *SHORT, "--overwrite")
    assert weight_files(out) == ([out / "model.safetensors"], {})
    assert (out / "model-1-of-1.safetensors").exists() == (index == "damaged")
    assert (out / "notes.txt").exists()
    # a tokenizer of bytes has no settings for transformers
    assert not (out / "tokenizer_config.json").exists()


def test_pictures_are_those_of_the_run(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    (out / "loss.txt").write_text("mine")
    saccade("train", "--out", out, "--resume", "--pictures", "svg")
    assert {path.name for path in out.glob("*.*g")} == {"loss.svg", "attention.svg"}
    # nothing is drawn of a run that stops at its first step
    saccade("train", "--out", out, *SHORT, "--overwrite", "--lr", 1e30, status=2)
    assert not list(out.glob("*.svg"))
    for name in ("loss.png", "attention.svg"):
        (out / name).write_text("old")
    words = saccade("train", "--out", out, *SHORT, "--overwrite", "--model", "linear").stdout
    assert [path.name for path in out.glob("*.*g")] == ["loss.png"]
    assert (out / "loss.txt").read_text() == "mine"
    # the lab shows attention, which this model lacks
    assert "saccade generate" in words
    assert "saccade lab" not in words


@pytest.mark.parametrize(
    "error, words",
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), "4096 bytes"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "2.00 GiB"),
        (MemoryError("Unable to allocate 7.28 TiB for an array"), "7.28 TiB"),
        (MemoryError(), "there is too little memory; give a smaller --batch"),
        (RuntimeError("a defect"), ""),
    ],
)
def test_too_little_memory_is_one_line(error: Exception, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("saccade.models.training.make_model", fail)
    done = saccade("train", "--out", tmp_path / "run", *SHORT, status=2 if words else 1)
    if words:
        assert words in done.stderr
        assert all(option in done.stderr for option in ("--batch", "--context", "--width", "--recompute"))
        assert len(done.stderr.strip().splitlines()) == 1
    else:
        assert done.exception is error


def test_a_missing_compiler_is_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    command = [sys.executable, "-m", "saccade", "train", "--out", tmp_path / "run", *SHORT, "--compile"]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("saccade train: --compile needs a C++ compiler")
    assert "--no-compile" in done.stderr
    of_triton = RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
    assert str(show.lacking(of_triton, "train")).startswith("Triton needs a C compiler")


def short(out: Path, **options: Any) -> Any:
    from saccade.models.training import Trainer

    sizes = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "context": 32, "batch": 1}
    own = {} if options.get("resume") else {"text": (argparse.__file__,), **sizes, "tokenizer": "bytes", "steps": 4}
    return Trainer(out, own, **options)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    running = short(tmp_path).run()
    next(running)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=r"a run is being trained in .*; wait until it ends, or stop it"):
            short(tmp_path, **options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert [step.step for step in running] == [2, 3, 4]
    assert short(tmp_path, resume=True).progress.step == 4


def test_a_run_that_cannot_begin_keeps_the_old_one(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="nope"):
        short(folder, overwrite=True, backend="nope")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_end_tokens_of_an_earlier_model_go(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 65}')
    assert "already holds generation_config.json" in saccade("train", "--out", tmp_path, *SHORT, status=2).stderr
    saccade("train", "--out", tmp_path, *SHORT, "--overwrite")
    assert not (tmp_path / "generation_config.json").exists()


def test_names_that_are_not_utf8(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "caf\udce9"
    try:
        shutil.copytree(finished, folder)
    except OSError:
        pytest.skip("this file system has names of UTF-8 only")
    told = "is not UTF-8, and safetensors opens no such file; rename the folder"
    with pytest.raises(ValueError, match=told):
        short(folder, resume=True)
    from saccade.models.loading import load_model

    with pytest.raises(ValueError, match=told):
        load_model(folder)


def test_text_and_tokens_are_not_both_given(tmp_path: Path) -> None:
    from saccade.models.training import Trainer

    with pytest.raises(ValueError, match=r"text .* and data .* are given; give one of them"):
        Trainer(tmp_path, {"text": (argparse.__file__,), "data": "tokens"})
    with pytest.raises(ValueError, match=r"text is 'a\.txt'; expected a tuple of paths"):
        Trainer(tmp_path, {"text": "a.txt"})
