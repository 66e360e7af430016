"""What a user starts by torchrun: an example, and the command line."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade.cli.bench import rows
from saccade.models import corpus

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *args: object) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*command, *map(str, args)], env=ENVIRONMENT, capture_output=True, text=True, encoding="utf-8", timeout=110
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_disaggregated_prefill_and_decode() -> None:
    told = torchrun(4, ROOT / "examples" / "torchrun" / "disaggregated.py")
    assert "2 ranks read 301 tokens, 2 wrote [" in told
    # of 301 and 12 new tokens, every other one
    assert "rank 2 stores [157, 157] keys, by layer" in told
    assert "one process gives the same" in told


def test_train_by_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    size = ["--layers", 1, "--width", 24, "--context", 32, "--batch", 2, "--tokenizer", "bytes", "--heads", 6]
    start = ["-m", "saccade", "train", "--out", out, "--json"]
    told = torchrun(2, *start, "--context-parallel", 2, "--text", argparse.__file__, *size, "--steps", 3)
    # one line, of the first rank, next to what torch 2.9 prints
    (line,) = [line for line in told.splitlines() if not line.startswith("[Gloo]")]
    summary = json.loads(line)
    assert summary["steps"] == len((out / "losses.jsonl").read_text().splitlines()) == 3
    assert summary["loss_first"] > 5
    assert {path.name for path in out.iterdir()} >= {
        "checkpoint.json",
        "checkpoint-3",
        "model.safetensors",
        "config.json",
    }


@pytest.mark.slow
def test_benchmark_of_training_over_ranks(tmp_path: Path) -> None:
    files = [corpus.Source("Python", Path(m.__file__).name, Path(m.__file__)) for m in (argparse, ast)]
    corpus.prepare(tmp_path / "tokens", vocab=300, files=files)
    changes = {"layers": 1, "width": 24, "heads": 6, "kv_heads": 2, "vocab": 300, "compile": False, "dtype": "float32"}
    script = [sys.executable, ROOT / "benchmarks" / "training_ranks.py", tmp_path / "rows.csv", "--context", "32"]
    script += ["--data", tmp_path / "tokens", "--steps", "5", "--changes", json.dumps(changes)]
    for more, providers in (
        ([], ["one", "FSDP2, 2", "context parallel, 2"]),
        (["--kill"], ["FSDP2, 2, one killed after step 4, resumed on one"]),
    ):
        done = subprocess.run([*script, *more], env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        found = rows.read(tmp_path / "rows.csv")
        assert [row.provider for row in found] == providers
        assert all(float(row.notes.get("difference", 0)) < 1e-5 and row.rate > 0 for row in found)
