"""Peak memory of a forward and a backward: python -m saccade.cli.bench.memory TOKENS HEAD_DIM DTYPE."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def resident() -> tuple[int, int]:
    """(now, peak) bytes of this process's resident set."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
    import resource

    # macOS counts the peak in bytes here, and does not report present use
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak, peak


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
