"""Gradients of rows whose lse has lost the logarithm of its sum, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# a bias of -1e9 on every key, as in the padding masks of other libraries, makes all scores equal
CODE = """
import torch, saccade
torch.manual_seed(0)
q, do, k, v = (torch.randn(1, n, 1, 16) for n in (5, 5, 1100, 1100))
bias = torch.full((1, 1, 1, 1100), -1e9)
for backend in ("triton", "cpu"):
    o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    dq, _, dv, _ = saccade.attention_backward(do, q, k, v, o, lse, bias=bias, backend=backend)
    torch.testing.assert_close(dv, (do.mean(1, keepdim=True) * 5 / 1100).expand_as(dv))
    ds = (do[:, :, 0] @ v[0, :, 0].T - (do * o)[:, :, 0].sum(-1, keepdim=True)) / 1100
    torch.testing.assert_close(dq[:, :, 0], ds @ k[0, :, 0] / 4, rtol=0, atol=2e-6)
"""


def test_weights_add_up_to_one():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
