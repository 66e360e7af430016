"""The cost on the host of a step with a cache: few Python calls, few changes of file, no waiting for a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saccade

PACKAGE = str(Path(saccade.__file__).parent)


def files(call: Callable[[], object]) -> list[str]:
    """The file of every Python function that this call runs, in the order of their calls."""
    entered: list[str] = []

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    # the call itself is not in Saccade
    return entered[1:]


def ones(kind: str, *shape: int) -> Any:
    x = np.ones(shape, np.float32)
    return x if kind == "numpy" else pytest.importorskip("torch").from_numpy(x)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_append_makes_few_calls(kind: str) -> None:
    token = ones(kind, 2, 1, 2, 16)
    cache = saccade.KVCache(2, 8, 2, 16, dtype=token.dtype)
    cache.append(token, token)
    assert len(files(lambda: cache.append(token, token))) <= 20


# NumPy's arrays take the straight way; tensors also ask torch for its modes and threads, and are lent to the CPU core
@pytest.mark.parametrize("kind, most", [("numpy", 26), ("torch", 41)])
def test_a_paged_call_seldom_changes_file(kind: str, most: int) -> None:
    q, kv = ones(kind, 1, 4, 16), ones(kind, 5, 2, 16)

    def step() -> None:
        cache = saccade.PagedKVCache(4, 4, 2, 16, dtype=kv.dtype)
        sequence = cache.add()
        cache.append([sequence], kv, kv)
        saccade.paged_attention(q, cache.view([sequence]))

    # imports and plans are made once
    step()
    ours = [name for name in files(step) if name.startswith(PACKAGE)]
    assert sum(a != b for a, b in pairwise(ours)) <= most


@pytest.mark.parametrize("rotation", [None, {"base": 100.0}])
@pytest.mark.parametrize("quantised", [None, "int4"])
def test_an_append_on_a_device_waits_for_nothing(quantised: str | None, rotation: dict[str, float] | None) -> None:
    torch = pytest.importorskip("torch")
    cache = saccade.KVCache(3, 8, 1, 4, dtype=torch.float32, device="meta", quantised=quantised)
    tokens = torch.ones(3, 2, 1, 4, device="meta")
    # a look at a number there would raise
    cache.append(tokens, tokens, rotation=rotation)
    cache.append(tokens, tokens, torch.ones(3, dtype=torch.int32, device="meta"), rotation=rotation)
    assert cache.positions.device.type == "meta"
    assert repr(cache).startswith("KVCache(batch=3, capacity=8, kv_heads=1")
