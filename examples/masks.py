"""Masks are values: compose them, look at them, attend through them. NumPy alone."""

import numpy as np

import saccade
from saccade import mask

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 12, 6, 32), dtype=np.float32)  # [B, T, Hq, D]
k = rng.standard_normal((1, 12, 2, 32), dtype=np.float32)  # [B, T, Hk, D], three query heads to each
v = rng.standard_normal((1, 12, 2, 32), dtype=np.float32)

ids = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
packed = mask.causal() & mask.documents(np.array(ids)) & (mask.window(2, 0) | mask.keys(1))
print(packed)
print(packed.draw(12, 12))

o, lse = saccade.attention(q, k, v, packed, return_lse=True)
print("o", o.shape, "lse", lse.shape)

# one document alone gives what it gave in the pack
alone = saccade.attention(q[:, 5:], k[:, 5:], v[:, 5:], mask.causal() & mask.window(2, 0))
print("largest difference", abs(o[:, 5:] - alone).max())
