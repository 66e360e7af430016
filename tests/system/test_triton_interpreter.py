"""The contract suite's small shapes on Triton's kernels in its interpreter, which a process is started for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS, ALL_SECONDS = 1800, 3 * 3600

# every mask form, option and dtype of the kernels once, with random numbers and one needle; a sample takes a sixth
BACKWARD = (
    "T1-float32", "B0-float32", "T9x0-sinks-float32", "D7-Dv13-float32", "heads-gqa-bfloat16",
    "mask-keys-batch-float16", "mask-documents-causal-float32", "mask-strided-window-float32",
    "mask-global-list-bfloat16", "mask-per-head-and-float32", "mask-tiles-batch-float32", "all-float32",
    "all-alibi-float32", "bias-1h1k-float32", "all-relative-float32", "gates-bfloat16",
)  # fmt: skip
MASKS = ("test_arrays_where_the_others_live[triton-cu-each]",)
PAGED = ("test_mixes[triton-mixed-16-bfloat16]", "test_options[triton-all]", "test_a_shared_prefix[triton-sinks]")
DECODE = ("test_lengths[triton-ragged-gqa-4-bfloat16]", "test_options[triton-alibi-batch-ragged]")

RECURRENT = (
    "test_shapes[triton-scalar_decay-float32-heads]", "test_shapes[triton-ssd-bfloat16-odd]",
    "test_packed_sequences[triton-linear-elu+1-borders1]", "test_shapes[triton-linear-all-float16-wide keys]",
    "test_shapes[triton-gated_linear-float32-small]", "test_shapes[triton-gated_delta_rule-bfloat16-small]",
    "test_without_the_state[triton-gated_delta_rule-37]",
    "test_shapes[triton-gated_delta_rule-channels-float32-small]",
    "test_without_the_state[triton-gated_delta_rule-channels-37]",
)  # fmt: skip
DIAGONAL = (
    "test_lengths[triton-selective_scan-float32-7]", "test_lengths[triton-rg_lru-documents-bfloat16-7]",
    "test_packed_documents[triton-causal_conv1d-borders1]",
)  # fmt: skip


@pytest.mark.timeout(0)
def test_contract(
    tmp_path: Path, close_with: Callable[[str], None], emulated: bool, pytestconfig: pytest.Config
) -> None:
    if emulated:
        chosen = ["tests/contract", "-m", "not slow", "-k", "not fuzz"]
    else:
        seed, every = pytestconfig.getoption("--seed"), pytestconfig.getoption("--all")
        backward = tuple(f"test_case[triton-{name}]" for name in BACKWARD)
        files = {
            "backward": backward, "decode": DECODE, "paged": PAGED, "masks": MASKS, "recurrent": RECURRENT,
            "recurrent_diagonal": DIAGONAL,
        }  # fmt: skip
        draw = random.Random(seed)
        cases = {name: x if every else draw.sample(x, -(-len(x) // 6)) for name, x in files.items()}
        chosen = [f"tests/contract/test_{name}.py::{case}" for name, x in cases.items() for case in x]
    chosen += [f"tests/triton/on_{name}.py" for name in ("append", "device", "elements", "one_row")]
    limit = ALL_SECONDS if emulated else SECONDS
    begin = time.perf_counter()
    words = [sys.executable, "-m", "pytest", "--triton", "--color=no", "-q", "--timeout", "1800", *chosen]
    words += [] if emulated else ["--all"]
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        run = subprocess.run(
            words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=limit, check=False,
            env={**os.environ, "TRITON_INTERPRET": "1"},
        )  # fmt: skip
    lines = log.read_text().splitlines()
    assert run.returncode == 0, "\n".join(lines[-100:])
    close_with(f"Triton's interpreter: {lines[-1]}, {time.perf_counter() - begin:.0f} s with its start")
