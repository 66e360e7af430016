"""Rows of heads that lie far apart in memory, in Triton's interpreter, compared with the same rows side by side.

Each stride fits into 32 bits, but the offsets of the last heads do not.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMMON = """
import torch
from torch.nn.functional import normalize, softplus
from saccade import recurrent
from saccade.backends.triton import append, append_rows
from saccade.quantised import quantised
torch.manual_seed(0)
B, T, H, D = 1, 20, 4, 16

def drawn(*shape):
    return torch.randn(shape).half()

def apart(x):
    # the same numbers with 2**30 between the heads [B, T, H, ...]; memory that is not written takes no space
    flat = torch.empty(x.shape[2] << 30, dtype=x.dtype)
    return flat.as_strided(x.shape, (T * x.shape[3], x.shape[3], 1 << 30, 1)).copy_(x)

def same(call, far, near):
    # far: arrays whose heads are moved apart; near: others
    results = []
    for move in (torch.clone, apart):
        leaves = [move(x).requires_grad_() for x in far] + [x.clone().requires_grad_() for x in near]
        o = call(*leaves)
        results.append([o, *torch.autograd.grad(o.float().sin().sum(), leaves)])
    for one, other in zip(*results):
        assert torch.equal(one, other)
        assert one.isfinite().all()

q, k, v = drawn(B, T, H, D), normalize(drawn(B, T, H, D).float(), dim=-1).half(), drawn(B, T, H, D)
g, beta = -drawn(B, T, H).abs(), drawn(B, T, H).sigmoid()
"""

CODES = {
    "sums": "same(lambda *x: recurrent.linear_attention(*x, backend='triton'), [q, k, v], [])",
    "decays": "same(lambda *x: recurrent.scalar_decay(*x, backend='triton'), [q, k, v], [g])",
    "one token": """
T = 1
first = [x[:, :1].contiguous() for x in (q, k, v, beta, g)]
def step(q, k, v, beta, g):
    return recurrent.gated_delta_rule(q, k, v, beta=beta, g=g, backend="triton")
same(step, first[:3], first[3:])
""",
    "groups of a scan": """
u, delta, A = drawn(B, T, 8), softplus(drawn(B, T, 8)), -torch.rand(8, 4)
def scan(B, C, u, delta):
    return recurrent.selective_scan(u, delta, A, B, C, backend="triton")
same(scan, [drawn(B, T, 4, 4), drawn(B, T, 4, 4)], [u, delta])
""",
    "rows of a cache": """
held = [torch.zeros(B, T, H, D).half() for _ in range(2)]
far = [apart(x) for x in held]
assert append_rows(apart(k), apart(v), held, torch.tensor([0])) and append_rows(k, v, far, torch.tensor([0]))
for x, one, other in zip((k, v), held, far):
    assert torch.equal(x, one) and torch.equal(x, other)
""",
    "codes of a cache": """
how = quantised("int8", None, D)
codes, scales = torch.zeros(B, T, H, D, dtype=torch.int8), torch.zeros(B, T, H, 1, dtype=torch.bfloat16)
at = torch.zeros(T, dtype=torch.int64), torch.arange(T)
found = []
for x in (k[0], apart(k)[0]):
    codes.zero_()
    scales.zero_()
    assert append(x, codes, scales, *at, None, None, False, how)
    found.append((codes.clone(), scales.clone()))
assert all(torch.equal(one, other) for one, other in zip(*found)) and codes.any()
""",
}


@pytest.mark.parametrize("name", CODES)
def test_heads_far_apart(name) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-c", COMMON + CODES[name]]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or done.returncode
