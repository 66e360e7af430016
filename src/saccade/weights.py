"""The weights of some rows of attention, for inspection; kernels never store them.

The oracle computes them in float64 on the host: more slowly than attention itself, and without gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from . import reference
from .arrays import Array, ArrayT, is_torch, namespace
from .biases import Bias, check_log_f, side_of
from .frameworks.call import check_gates, check_mask, spec
from .frameworks.source import STRIDED
from .keywords import refuse
from .layout import DEFAULT, tokens_first
from .mask import Mask
from .mask.lowering import lower, offset_of
from .operands import Options, Request, Side

Floats = NDArray[np.floating[Any]]


class _Allowed(NamedTuple):
    # takes the place of a mask in the oracle
    pairs: NDArray[np.bool_]

    def evaluate(self, *_: int) -> NDArray[np.bool_]:
        return self.pairs


def attention_weights(
    q: ArrayT,
    k: ArrayT,
    mask: Mask | None = None,
    *,
    rows: int | slice | Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    bias: Array | Bias | None = None,
    layout: str = DEFAULT,
    **unknown: NoReturn,
) -> ArrayT:
    """The attention weights of some queries, softmax(scale q kᵀ) over the allowed keys, for plots and statistics.

    Args:
        q, k, mask, scale, softcap, sinks, bias, layout: as in `attention`.
        rows: which of the Tq queries: an index, a slice, or a sequence of indices; negative ones count from the end.
            None for all queries, which takes O(Tq · Tk) memory; otherwise it is O(Tk) per row.

    Returns:
        [B, Hq, n, Tk] for n rows (without B if q and k have none), float32 (float64 for float64 inputs), in the
        framework and on the device of q. The weights of a row sum to 1; with a sink to 1 minus its share; to 0 for a
        row that sees no key.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        IndexError: rows has an index that is out of range.

    Examples:
        >>> q, k = torch.randn(2, 1, 1024, 8, 64)
        >>> w = saccade.attention_weights(q, k, saccade.mask.causal(), rows=-1)  # the last query
        >>> w.shape
        torch.Size([1, 8, 1, 1024])
        >>> entropy = -torch.special.xlogy(w, w).sum(-1)  # [B, Hq, 1]
    """
    if unknown:
        refuse(attention_weights, unknown)
    if layout != DEFAULT:
        q, k = tokens_first(layout, q, k)
    if isinstance(bias, Bias) and bias.prune is not None:
        raise ValueError("gates have prune, which skips small weights; give attention_weights gates without prune")
    origin = bias.origin if isinstance(bias, Bias) else 0
    side = side_of(bias, sinks).map(_on_host)
    queries, keys = _on_host(q), _on_host(k)
    lifted = queries.ndim == keys.ndim == 3
    if lifted:
        queries, keys = queries[None], keys[None]
    request = Request(mask, side.map(_spec), Options(scale, softcap, origin=origin))
    problem = STRIDED.describe(_spec(queries), _spec(keys), _spec(keys), request, None)
    if mask is not None:
        check_mask(mask, problem)
    check_gates(problem)
    if side.log_f is not None:
        check_log_f(side.log_f)
    options = {"scale": problem.scores.scale, "softcap": softcap, "origin": origin}
    result = _weights(queries, keys, mask, _chosen(rows, problem.Tq), side, options)
    result = result.astype(problem.accumulator)
    result = result[0] if lifted else result
    return _like(q, result)


def _like(q: Any, result: Floats) -> Any:
    return namespace(q).as_tensor(result, device=q.device) if is_torch(q) else result


def _on_host(x: Any) -> Floats:
    """Floating numbers of any framework in NumPy, bfloat16 as float32."""
    if is_torch(x):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x
    if not hasattr(x, "shape"):
        raise TypeError(f"q, k, sinks or bias is {type(x).__name__}; expected an array")
    x = x.numpy() if hasattr(x, "numpy") else np.asarray(x)
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def _spec(x: Any) -> Any:
    return spec(x, "cpu")


def _chosen(rows: Any, Tq: int) -> NDArray[np.int64]:
    every = np.arange(Tq)
    if rows is None or isinstance(rows, slice):
        return every[slice(None) if rows is None else rows]
    at = np.atleast_1d(np.asarray(rows))
    if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
        raise TypeError(f"rows is {rows!r}; expected an integer, a slice, or a sequence of integers")
    wrong = (at < -Tq) | (at >= Tq)
    if wrong.any():
        raise IndexError(f"rows has {int(at[wrong][0])}; expected numbers from {-Tq} to {Tq - 1}, of {Tq} queries")
    return every[at.astype(np.int64)]


def _weights(
    q: Floats, k: Floats, mask: Mask | None, rows: NDArray[np.int64], side: Side, options: dict[str, Any]
) -> Floats:
    (B, Tq, Hq, _), (_, Tk, Hk, _) = q.shape, k.shape
    heads = lower(mask, B, Hq, Tq, Tk)
    offsets = np.broadcast_to(np.asarray(offset_of(mask, Tq, Tk)).reshape(-1), (B,))
    # the oracle needs rows at consecutive positions
    runs = np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []
    result = np.zeros((B, Hq, len(rows), Tk))
    for b, h in np.ndindex(B, Hq):
        allowed = heads.masks[heads.head[h]]
        for run in runs:
            t = rows[run]
            of_rows = _of_rows(side, b, h, t)
            seen = _Allowed(allowed.test(t[:, None], np.arange(Tk), b)[None, None])
            stop = [int(offsets[b] + t[-1] + 1)]
            own = k[b : b + 1, :, h * Hk // Hq : h * Hk // Hq + 1]
            p = reference.weights(q[b : b + 1, t, h : h + 1], own, seen, stop=stop, **of_rows, **options)
            result[b, h, run] = p[0, 0]
    return result


def _of_rows(side: Side, b: int, h: int, t: NDArray[np.int64]) -> dict[str, Any]:
    # the side arrays of rows t of head h in entry b
    bias, slopes, sinks, table, log_f = side
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        entries, heads, count = (n > 1 for n in bias.shape[:3])
        bias = bias[[b * entries]][:, [h * heads]][:, :, t if count else slice(None)]

    def own(x: Any, rank: int) -> Any:
        # the part of head h, and of entry b if x has a batch dimension
        if x is None:
            return None
        x = x if x.ndim == rank else x[b if len(x) > 1 else 0]
        return x[h : h + 1]

    log_f = None if log_f is None else log_f[b : b + 1, :, h : h + 1]
    return {"bias": bias, "slopes": own(slopes, 1), "sinks": own(sinks, 1), "table": own(table, 2), "log_f": log_f}
