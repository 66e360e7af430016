"""A few of the contract suite's shapes on the Metal kernels in their emulator, which a process is started for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# grouped heads, a union of masks, the options, codes and a split decode once; random numbers and needles each
BACKWARD = ("heads-gqa-bfloat16", "mask-strided-window-float32", "all-alibi-float32")
DECODE = ("test_lengths[metal-ragged-gqa-4-bfloat16]", "test_codes[metal-int4-32-32-bfloat16]")
PAGED = ("test_options[metal-all]",)
RECURRENT = (
    "test_shapes[metal-linear-elu+1-bfloat16-heads]", "test_what_is_no_number_stays_after_its_token[metal-linear-sums]",
)  # fmt: skip


@pytest.mark.timeout(0)
def test_contract(tmp_path: Path, close_with: Callable[[str], None]) -> None:
    chosen = [f"tests/contract/test_backward.py::test_case[metal-{name}]" for name in BACKWARD]
    chosen += [f"tests/contract/test_decode.py::{name}" for name in DECODE]
    chosen += [f"tests/contract/test_paged.py::{name}" for name in PAGED]
    chosen += [f"tests/contract/test_recurrent.py::{name}" for name in RECURRENT]
    begin, log = time.perf_counter(), tmp_path / "log.txt"
    words = [sys.executable, "-m", "pytest", "--metal", "--all", "--color=no", "-q", "--timeout", "600", *chosen]
    with log.open("w") as out:
        run = subprocess.run(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=900, check=False)
    lines = log.read_text().splitlines()
    assert run.returncode == 0, "\n".join(lines[-100:])
    close_with(f"Metal's emulator: {lines[-1]}, {time.perf_counter() - begin:.0f} s with its start")
