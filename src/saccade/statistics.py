"""The statistics [..., 4] of each query that a backward reads: lse in units of log 2, in two parts, Δ, and dO · O.

The gradients of sinks, slopes and gates are computed here from these statistics or from sums of dS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import namespace

Float32 = NDArray[np.float32]


def statistics_of(lse: Any, delta: Any) -> Float32:
    """The statistics [..., 4] from lse [...] and delta [...]."""
    whole = np.asarray(lse, np.float64) / np.log(2)
    high = whole.astype(np.float32)
    low = np.subtract(whole, high, out=np.zeros_like(whole), where=np.isfinite(high))
    return np.stack([high, low, delta, delta], -1, dtype=np.float32)


def sinks_gradient(sinks: Any, lse: Any, delta: Any, *, log2: bool = False) -> Any:
    """The gradient [Hq] of the sinks: minus the sum over all rows of the sink's weight times Δ.

    lse and delta: [..., Hq]. All are NumPy arrays, or all are torch tensors. log2: lse is in units of log 2.
    """
    of = namespace(lse)
    share = of.exp2(sinks * np.log2(np.e) - lse) if log2 else of.exp(sinks - lse)
    # a sink of -inf has no weight, also in rows whose lse is -inf
    return -of.where(sinks == -np.inf, 0.0, share * delta).sum(tuple(range(lse.ndim - 1)))


def sink_delta(delta: Any, sinks: Any, lse: Any, dentropy: Any) -> Any:
    """The Δ [..., Hq] of sinks, whose logarithms of weights also enter the entropy; dentropy: its gradient, or None."""
    if dentropy is None:
        return delta
    # a sink of -inf has no weight
    return delta + dentropy * namespace(lse).where(sinks == -np.inf, 0.0, sinks - lse)


def sinks_gradient_of(stats: Any, sinks: Any) -> Float32:
    """The gradient [Hq] of the sinks from stats [rows, Hq, 4]."""
    wide = np.asarray(stats, np.float64)
    lse = (wide[..., 0] + wide[..., 1]) * np.log(2)
    return sinks_gradient(np.asarray(sinks, np.float64), lse, wide[..., 2]).astype(np.float32)


def slopes_gradient(sums: Sequence[Any], shape: tuple[int, int], B: int) -> Float32:
    """The gradient [1 | B, Hq] of the slopes from sums [B * Hq, ...] of each part."""
    per_part = [np.reshape(x, (B * shape[1], -1) if B else (0, 1)) for x in sums]
    per_head = np.concatenate(per_part, -1).sum(-1, dtype=np.float64).reshape(B, shape[1])
    return np.asarray(per_head.sum(0, keepdims=True) if shape[0] == 1 else per_head, np.float32)


def gates_gradient(rows: Any, keys: Any, positions: Sequence[int]) -> Any:
    """The gradient of the running sums of gates, float64 [B, Tk, Hq]: dS of each row at its position, minus dS per key.

    rows: [B, Hq, Tq], dS summed over keys. keys: [B, Hq, Tk], dS summed over rows. Both are NumPy arrays or
    both torch tensors. positions: the position of row 0, one number or one per batch entry.
    """
    rows, keys = (x.astype(np.float64) if isinstance(x, np.ndarray) else x.double() for x in (rows, keys))
    gradient = -keys.swapaxes(1, 2)
    for b, entry in enumerate(gradient):
        start = int(positions[b % len(positions)])
        first = max(0, -start)
        entry[start + first : start + rows.shape[2]] += rows[b].swapaxes(0, 1)[first:]
    return gradient
