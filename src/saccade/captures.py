"""What CUDA graphs read: it must live as long as the graph, also after plans and recordings are forgotten."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


class _Holders(threading.local):
    # the lists of the graphs that this thread captures
    def __init__(self) -> None:
        self.lists: list[list[Any]] = []


_holders = _Holders()
# what graphs read that callers of Saccade capture, for good: their end is not known here
_forever: dict[int, Any] = {}


@contextmanager
def holding() -> Generator[list[Any]]:
    """While it is open, `keep_captured` appends to this list in this thread; its owner keeps it with the graph."""
    read: list[Any] = []
    _holders.lists.append(read)
    try:
        yield read
    finally:
        _holders.lists.pop()


def keep_captured(x: Any, device: torch.device) -> Any:
    """x, whose arrays on this device kernels read; referenced while a CUDA graph is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if _holders.lists:
            _holders.lists[-1].append(x)
        else:
            _forever[id(x)] = x
    return x
