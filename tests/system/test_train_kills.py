"""A run killed at any moment, between any two file operations, resumes to the bits of one that was not."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for module in ("torch", "safetensors"):
    pytest.importorskip(module)
if not hasattr(os, "fork"):
    pytest.skip("children are forked", allow_module_level=True)

GIVEN = {
    "text": [argparse.__file__], "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "context": 32, "batch": 1,
    "tokenizer": "bytes", "steps": 6, "checkpoint_every": 2, "validation_rows": 1,
}  # fmt: skip
# at least as many as the file operations of a checkpoint with its step's log, and of the beginning of a run
CHECKPOINT, BEGIN, MOMENTS = 26, 64, 30

Ask = Callable[..., dict[str, Any]]


# of a mapped file, over more than one epoch, with products in bfloat16 and recomputed blocks
MAPPED = {**GIVEN, "dtype": "bfloat16", "recompute": True, "steps": 24, "checkpoint_every": 4}
KILLS = 10


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    script = Path(__file__).with_name("training_children.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], env=environment, **pipes) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        stdin, stdout = server.stdin, server.stdout

        def asked(out: Path, more: dict[str, Any] | None = None, **options: bool) -> dict[str, Any]:
            given = {} if options.get("resume") else GIVEN
            stdin.write(json.dumps({"out": str(out), "given": given, "options": options, **(more or {})}) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        yield asked
        stdin.close()


@pytest.fixture(scope="module")
def unbroken(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("run") / "unbroken"
    told = ask(out)
    assert told["status"] == 0
    return out, told


def contents(out: Path) -> dict[str, Any]:
    """What two runs of the same settings share: all but the times."""
    from safetensors.torch import load_file

    from saccade.models.checkpoint import read_state
    from saccade.models.losses import read_losses

    state = read_state(out / "checkpoint.safetensors")
    state.pop("seconds")
    weights, checkpoint = load_file(out / "model.safetensors"), load_file(out / "checkpoint.safetensors")
    assert {name: x.tolist() for name, x in weights.items()} == {
        name.removeprefix("model."): x.tolist() for name, x in checkpoint.items() if name.startswith("model.")
    }
    losses = [{name: value for name, value in line.items() if name != "seconds"} for line in read_losses(out)]
    files = {path.name: path.read_bytes() for path in out.iterdir() if path.name not in LEFT_OUT}
    tensors = {name: x.tolist() for name, x in checkpoint.items()}
    return {"state": state, "losses": losses, "files": files, "tensors": tensors}


# they hold times
LEFT_OUT = {"checkpoint.safetensors", "losses.jsonl"}


def check_resumed(ask: Ask, out: Path, unbroken: Path) -> None:
    told = ask(out, resume=True)
    assert told["status"] == 0
    assert "error" not in told
    assert contents(out) == contents(unbroken)


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", range(CHECKPOINT))
def test_killed_between_two_file_operations_of_a_checkpoint(
    place: int, ask: Ask, unbroken: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    operations = unbroken[1]["operations"]
    assert operations[4] - operations[3] <= CHECKPOINT
    told = ask(tmp_path / "run", {"operation": operations[3] + 1 + place})
    assert told["status"] == -9
    check_resumed(ask, tmp_path / "run", unbroken[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", range(CHECKPOINT))
def test_killed_between_two_file_operations_of_the_last_checkpoint(
    place: int, ask: Ask, unbroken: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    operations = unbroken[1]["operations"]
    # as many as there are from the end on, and the first of them more than once
    told = ask(tmp_path / "run", {"operation": min(operations[5] + 1 + place, operations[6])})
    assert told["status"] == -9
    check_resumed(ask, tmp_path / "run", unbroken[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", range(BEGIN))
def test_killed_while_a_run_begins(place: int, ask: Ask, unbroken: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert unbroken[1]["operations"][0] <= BEGIN
    if place % 2:
        # over a finished run
        ask(out)
    told = ask(out, {"operation": 1 + place}, overwrite=True)
    assert told["status"] == -9
    if (out / "checkpoint.safetensors").exists():
        check_resumed(ask, out, unbroken[0])
    else:
        assert "nothing to resume" in ask(out, resume=True)["error"]
        assert "error" not in ask(out, overwrite=True)
        assert contents(out) == contents(unbroken[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_killed_at_a_random_moment(
    moment: int, seed: int, ask: Ask, unbroken: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, draw = tmp_path / "run", random.Random(seed)
    told = ask(out, {"seconds": draw.uniform(0, unbroken[1]["took"])})
    assert told["status"] in (-9, 0)
    # once more, on its way to the end
    if (out / "checkpoint.safetensors").exists():
        assert ask(out, {"seconds": draw.uniform(0, unbroken[1]["took"])}, resume=True)["status"] in (-9, 0)
        check_resumed(ask, out, unbroken[0])
    else:
        assert "error" not in ask(out, overwrite=True)
        assert contents(out) == contents(unbroken[0])


def test_killed_ten_times_in_one_run(seed: int, ask: Ask, tmp_path: Path) -> None:
    from saccade.models.corpus import Source, prepare

    lines, files = Path(argparse.__file__).read_text().split("\n"), []
    for n in range(0, 400, 20):
        (tmp_path / f"{n}.py").write_text("\n".join(lines[n : n + 20]))
        files.append(Source("argparse 1.0", f"{n}.py", tmp_path / f"{n}.py"))
    prepare(tmp_path / "tokens", "bytes", files=files)
    given = {name: value for name, value in MAPPED.items() if name != "text"} | {"data": str(tmp_path / "tokens")}
    whole = ask(tmp_path / "whole", {"given": given})
    assert "error" not in whole

    out, draw, kills = tmp_path / "killed", random.Random(seed), 0
    while kills < KILLS:
        # until there is a checkpoint, the run starts again
        begun = (out / "checkpoint.safetensors").exists()
        job = {"given": {} if begun else given, "seconds": draw.uniform(0.3, 0.9) * whole["took"]}
        told = ask(out, job, resume=begun, overwrite=not begun)
        assert told["status"] in (-9, 0), told
        if told["status"] == 0:
            # it was faster than the clock; the same run from the start has more moments
            assert contents(out) == contents(tmp_path / "whole")
            (out / "checkpoint.safetensors").unlink()
        kills += told["status"] == -9
    begun = (out / "checkpoint.safetensors").exists()
    assert "error" not in ask(out, {"given": {} if begun else given}, resume=begun, overwrite=not begun)
    assert contents(out) == contents(tmp_path / "whole")
