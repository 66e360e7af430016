"""The kernel of the guide, against the oracle in every schedule, and under both sanitizers."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import Unsupported, reference
from saccade import mask as masks
from saccade.backends import metal
from saccade.backends.metal.single_head import single_head
from saccade.testing.compare import measure_all, require
from saccade.testing.metal import SCHEDULES


def compared(Tq: int, Tk: int, D: int, dtype: str, causal: bool) -> None:
    rng = np.random.default_rng(Tq * 1000 + Tk)
    q = rng.standard_normal((Tq, D)).astype(dtype)
    k, v = rng.standard_normal((2, Tk, D)).astype(dtype)
    found = dict(zip(("o", "lse"), single_head(q, k, v, causal=causal), strict=True))
    heads = [x[None, :, None] for x in (q, k, v)]
    mask = masks.causal() if causal else None
    both = []
    for kind in (np.float64, np.dtype(dtype)):
        o, lse = reference.forward(*heads, mask, scale=D**-0.5, dtype=kind)
        both.append({"o": o[0, :, 0], "lse": lse[0, :, 0]})
    require(measure_all(found, *both, dtype), f"{Tq} {Tk} {D} {dtype} {causal}")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_against_the_oracle(emulator, schedule, dtype) -> None:
    emulator(schedule=schedule, seed=1)
    for Tq, Tk in ((13, 21), (21, 13), (1, 1), (4, 40)):
        for causal in (False, True):
            compared(Tq, Tk, 40, dtype, causal)


@pytest.mark.parametrize("D", [1, 32, 128, 256])
def test_head_sizes(emulator, D) -> None:
    made = emulator()
    compared(5, 9, D, "float16", True)
    assert made.bytes <= 8 * D + 30


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitized(emulator, sanitizer) -> None:
    emulator(sanitizer=sanitizer)
    compared(7, 5, 40, "float32", True)


def test_a_missing_barrier_is_a_race(emulator) -> None:
    barrier = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    emulator(sanitizer="thread", change=lambda text: text.replace(barrier, "", 1))
    with pytest.raises(RuntimeError, match="data race"):
        compared(7, 5, 40, "float32", False)


def test_bad_input(emulator) -> None:
    emulator()
    x = np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match="expected \\[Tq, D\\]"):
        single_head(x, x[:, :4], x[:, :4])
    with pytest.raises(ValueError, match="float32 or float16 alike"):
        single_head(x, x.astype(np.float64), x.astype(np.float64))


def test_without_a_device(emulator) -> None:
    emulator()
    metal.install(None)
    if metal.missing():
        x = np.zeros((4, 8), np.float32)
        with pytest.raises(Unsupported, match="metal backend cannot compute this"):
            single_head(x, x, x)
