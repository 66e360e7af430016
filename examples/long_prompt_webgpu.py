"""A long prompt on a laptop's GPU, through WebGPU: chunks are read into a cache on the device, then tokens are decoded.

    python examples/long_prompt_webgpu.py 65536

One attention layer with random inputs represents a model. Without a GPU, a software driver runs it on 1024 tokens.
"""

import sys
import time

import numpy as np

import saccade
from saccade.backends import webgpu
from saccade.mask import causal

here = webgpu.describe()
lengths = [word for word in sys.argv[1:] if word.isdigit()]
T = int(lengths[0]) if lengths else 1024 if here["software"] else 32768
chunk, new, (Hq, Hk, D) = T // 4, 4, (8, 2, 64)
print(f"{here['name']}: {T} tokens, scores of {Hq * T * T * 4 / 2**30:.3g} GiB that are never stored")

rng = np.random.default_rng(0)
cache = saccade.KVCache(batch=1, capacity=T + new, kv_heads=Hk, head_dim=D, device="webgpu")


def random(tokens: int, heads: int) -> np.ndarray:
    return rng.standard_normal((1, tokens, heads, D), dtype=np.float32)


host = []
for step in [chunk] * 4 + [1] * new:
    q, k, v = random(step, Hq), random(step, Hk), random(step, Hk)
    host.append((k, v))
    start = time.perf_counter()
    cache.append(webgpu.array(k), webgpu.array(v))
    last = saccade.decode(webgpu.array(q), cache).numpy()
    seconds = time.perf_counter() - start
    print(f"{step:6} tokens before {int(cache.lengths[0]):6}: {step / seconds:8.0f} tokens per second")

# the last token again, on the CPU
k, v = (np.concatenate(x, 1) for x in zip(*host, strict=True))
difference = abs(saccade.attention(q, k, v, causal()) - last).max()
print(f"largest difference from the CPU {difference:.1e}")
assert difference < 1e-5
