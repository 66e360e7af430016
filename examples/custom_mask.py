"""A custom mask made of constructors: packed chats, each with bidirectional attention to its own prompt."""

import numpy as np

import saccade
from saccade import mask

# two chats in a row of 12 tokens; the first tokens of each are its prompt
borders, prompts = [0, 5, 12], [2, 3]
ids = np.repeat([0, 1], np.diff(borders))
# every token of a chat sees the keys of its prompt; other keys are seen only by themselves and by later tokens
in_prompt = np.concatenate([np.arange(n) < prompt for n, prompt in zip(np.diff(borders), prompts, strict=True)])
first = np.where(in_prompt, np.repeat(borders[:-1], np.diff(borders)), np.arange(12))
seen = mask.documents(ids) & mask.columns(start=first)
print(seen.draw(12, 12))

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 12, 6, 32), dtype=np.float32)  # [B, T, Hq, D]
k, v = rng.standard_normal((2, 1, 12, 2, 32), dtype=np.float32)  # [B, T, Hk, D], three query heads per key head
o, lse = saccade.attention(q, k, v, seen, return_lse=True)
print("o", o.shape, "lse", lse.shape)

# the second chat alone gives the same result as in the pack: a prefix of 3, then causal
alone = saccade.attention(q[:, 5:], k[:, 5:], v[:, 5:], mask.causal() | mask.prefix(3))
print(f"largest difference {abs(o[:, 5:] - alone).max():.1e}")
assert np.allclose(o[:, 5:], alone, atol=1e-5)

# a mask of documents for a long row, drawn with 32 by 32 cells
ids = np.sort(rng.integers(0, 16, 4096))
long = mask.documents(ids) & mask.causal() & (mask.window(255, 0) | mask.keys(4))
print(long.draw(4096, 4096, size=32))
