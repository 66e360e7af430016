"""Memory grows with the sequence, not with its square: T = 131072, forward and backward, in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

GROWTH = """
import numpy as np, saccade
from saccade import mask
from saccade.memory import resident
T, D = 131072, 64
rng = np.random.default_rng(0)
warm = [np.ones((1, 64, 1, D), np.float32)] * 3
saccade.attention(*warm)
before = resident()[1]
q, k, v, do = (rng.standard_normal((1, T, 1, D), dtype=np.float32) for _ in range(4))
m = {mask}
o, lse = saccade.attention(q, k, v, m, return_lse=True)
dq, dk, dv, _ = saccade.attention_backward(do, q, k, v, o, lse, m)
assert all(np.isfinite(x).all() for x in (o, dq, dk, dv))
print(resident()[1] - before)
"""


def printed(program: str) -> int:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)


def growth(mask: str) -> float:
    return printed(GROWTH.format(mask=mask)) / 2**30


@pytest.mark.parametrize("mask", ["mask.causal() & mask.window(1024, 0)", "mask.strided(512)"])
def test_sparse_at_131072_stays_under_a_gibibyte(mask):
    assert growth(mask) < 1.0


MILLION = """
import ml_dtypes, numpy as np, saccade
from saccade import mask
from saccade.memory import resident
T = 1_000_000
q, k, v, do = (np.ones((1, T, 1, 64), ml_dtypes.bfloat16) for _ in range(4))
m = mask.causal() & mask.window(255, 0)
o, lse = saccade.attention(q, k, v, m, return_lse=True)
saccade.attention_backward(do, q, k, v, o, lse, m)
print(resident()[1])
"""
DENSE = """
import numpy as np, saccade, torch
from saccade import mask
from saccade.memory import resident
allowed = np.random.default_rng(0).integers(0, 2, (8192, 8192), dtype=np.uint8).view(bool)
q = {make}(np.ones((1, 8192, 1, 16), np.float32))
saccade.attention(*[q[:, :64]] * 3)
before = resident()[0]
m = mask.dense({make}(allowed))
saccade.attention(q, q, q, m)
print(resident()[0] - before)
"""


def test_a_million_tokens_with_a_window():
    # 1.02 GB of it are q, k, v, o and their gradients
    assert printed(MILLION) < 1.2e9


@pytest.mark.parametrize("make", ["np.asarray", "torch.from_numpy"])
def test_a_dense_mask_stores_bits(make):
    # the array has 67 MB; the mask and the kernels have its bits, 8.4 MB each
    assert printed(DENSE.format(make=make)) < 30e6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_causal_at_131072_stays_under_a_gibibyte():
    assert growth("mask.causal()") < 1.0
