"""A long prompt on a laptop's GPU, through WebGPU: read in chunks into a cache that stays on the device, then decoded.

    python examples/long_prompt_webgpu.py 65536

One attention layer of random numbers stands for a model. Without a GPU, software does the work, on 1024 tokens.
"""

import sys
import time

import numpy as np

import saccade
from saccade.backends import webgpu
from saccade.mask import causal

here = webgpu.describe()
given = [word for word in sys.argv[1:] if word.isdigit()]
T = int(given[0]) if given else 1024 if here["software"] else 32768
chunk, new, (Hq, Hk, D) = T // 4, 4, (8, 2, 64)
print(f"{here['name']}: {T} tokens, scores of {Hq * T * T * 4 / 2**30:.3g} GiB that are never stored")

rng = np.random.default_rng(0)
cache = saccade.KVCache(batch=1, capacity=T + new, kv_heads=Hk, head_dim=D, device="webgpu")


def some(tokens: int, heads: int) -> np.ndarray:
    return rng.standard_normal((1, tokens, heads, D), dtype=np.float32)


host = []
for step in [chunk] * 4 + [1] * new:
    q, k, v = some(step, Hq), some(step, Hk), some(step, Hk)
    host.append((k, v))
    begin = time.perf_counter()
    cache.append(webgpu.array(k), webgpu.array(v))
    last = saccade.decode(webgpu.array(q), cache).numpy()
    seconds = time.perf_counter() - begin
    print(f"{step:6} tokens before {int(cache.lengths[0]):6}: {step / seconds:8.0f} tokens a second")

# the last token once more, on the CPU
k, v = (np.concatenate(x, 1) for x in zip(*host, strict=True))
apart = abs(saccade.attention(q, k, v, causal()) - last).max()
print(f"largest difference from the CPU {apart:.1e}")
assert apart < 1e-5
