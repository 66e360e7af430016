"""Memory of a rank, measured: it falls as ranks are added, and nothing of the whole sequence's size is there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from world import World

from saccade import mask as sm
from saccade.distributed import peers_of, ring_attention

T, H, D = 1 << 15, 2, 64
M_MMAP_THRESHOLD = -3


def status(field: str) -> float:
    """A field of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak() -> float:
    """MB that a forward and backward takes besides its inputs; every rank sees keys of every other."""
    # memory goes back at once, and is counted when it is touched
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    peers_of(limit=200.0)
    n = T // peers_of().world
    x = [torch.ones(1, n, H, D, requires_grad=True) for _ in range(3)]
    mask = sm.causal() & sm.window(15, 0)
    found = 0.0
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        ring_attention(*x, mask, layout="striped").sum().backward()
        found = status("VmHWM") - before
        for a in x:
            a.grad = None
    return found


@pytest.mark.timeout(600)
def test_memory_of_a_rank(record_property: Callable[[str, object], None]):
    most: dict[int, float] = {}
    for size in (1, 2, 4):
        made = World(size)
        most[size] = max(made.run(peak))
        made.close()
    one = T * H * D * 4 / 2**20
    record_property("MB a rank at 1, 2, 4 ranks", [round(m) for m in most.values()])
    # besides o and gradients a rank stores keys in three buffers, its own keys, and those of gradients
    assert most[4] < 0.65 * most[2]
    assert all(m < 40 * one / size for size, m in most.items()), (most, one)
