"""Peak memory of a forward and a backward: python -m saccade.cli.bench.memory TOKENS HEAD_DIM DTYPE."""

from __future__ import annotations

import sys
import time

from saccade.memory import resident


def growth(tokens: int, head_dim: int, dtype: str) -> tuple[int, float]:
    """(bytes, seconds): growth of the peak over what was resident before the inputs were made, and the time taken."""
    import torch

    import saccade
    from saccade.mask import causal

    def once(t: int) -> None:
        q, k, v, do = (torch.randn(1, t, 1, head_dim, dtype=getattr(torch, dtype)) for _ in range(4))
        for leaf in (q, k, v):
            leaf.requires_grad_()
        saccade.attention(q, k, v, causal()).backward(do)

    # worker threads and their stacks belong to the process, not to the call
    once(256)
    before, _ = resident()
    start = time.perf_counter()
    once(tokens)
    return resident()[1] - before, time.perf_counter() - start


if __name__ == "__main__":
    print(*growth(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
