"""A ragged batch through the KV cache: prompts of 5 and 3 tokens, then one new token of each at a time."""

import torch

import saccade
from saccade import mask

torch.manual_seed(0)
B, Hq, Hk, D = 2, 6, 2, 32
cache = saccade.KVCache(B, capacity=16, kv_heads=Hk, head_dim=D, dtype=torch.float32, device="cpu")


def some(tokens: int, heads: int, first: int) -> torch.Tensor:
    return saccade.rope(torch.randn(B, tokens, heads, D), torch.arange(first, first + tokens))


cache.append(some(5, Hk, 0), torch.randn(B, 5, Hk, D), lengths=[5, 3])
for step in range(4):
    cache.append(some(1, Hk, 5 + step), torch.randn(B, 1, Hk, D))
    o = saccade.decode(some(1, Hq, 5 + step), cache, mask=mask.window(3, 0))
    print("lengths", cache.lengths.tolist(), "o", list(o.shape), "norms", o.flatten(1).norm(dim=1).tolist())
