"""The single-head Metal kernel compared with naive attention: through MLX on a Mac, in the emulator elsewhere."""

import numpy as np

from saccade.backends import metal
from saccade.backends.metal.single_head import single_head
from saccade.testing.metal.runtime import Emulator

if metal.missing():
    print("no Apple GPU here, so the kernel runs in the emulator:", *metal.missing())
    metal.install(Emulator())

rng = np.random.default_rng(0)
for dtype in (np.float32, np.float16):
    for causal in (False, True):
        q = rng.standard_normal((48, 64)).astype(dtype)
        k, v = rng.standard_normal((2, 60, 64)).astype(dtype)
        o, lse = single_head(q, k, v, causal=causal)

        scores = q.astype(float) @ k.astype(float).T / np.sqrt(64)
        if causal:
            scores[np.arange(60) > np.arange(48)[:, None] + 12] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        naive = weights @ v.astype(float) / weights.sum(1, keepdims=True)
        error = abs(o - naive).max()
        print(f"{np.dtype(dtype).name} causal {causal}: largest difference {error:.1e}, lse of row 0 {lse[0]:.4f}")
        assert error < (1e-6 if dtype is np.float32 else 2e-3)
