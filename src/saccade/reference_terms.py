"""Terms that the oracle adds to the scores (a bias, slopes, a table by distance, forget gates) and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def terms_by_position(distance: Array, opt: Any, r: Callable[[Any], Array]) -> Iterator[Array]:
    """The terms [1 | B, Hq, Tq, Tk] of the table and of the gates.

    distance: i - j, [1 | B, 1, Tq, Tk]. opt: `saccade.reference.OracleOptions`. r rounds to the dtype.
    """
    Tq, Tk = distance.shape[2:]
    if opt.table is not None and Tq * Tk:
        table, entries = r(opt.table), _entries(distance, opt)
        table = np.broadcast_to(table, (len(entries), *table.shape[-2:]) if table.ndim == 2 else table.shape)
        entries = np.broadcast_to(entries, (len(table), *entries.shape[1:]))
        yield np.take_along_axis(table[:, :, None], entries, 3)
    if opt.log_f is not None and Tq * Tk:
        # the sum of log_f after a key, up to and including the row's own position; float64, because the sums are long
        sums = np.cumsum(np.asarray(opt.log_f, np.float64), 1).swapaxes(1, 2)[:, :, None]
        position = np.broadcast_to(np.maximum(distance[..., :1], 0), (len(sums), *distance.shape[1:3], 1))
        yield np.take_along_axis(sums, position, 3) - sums


def gradients_of_terms(ds: Array, distance: Array, opt: Any) -> dict[str, Array]:
    """Gradients by name of bias, slopes, table and log_f, from the gradient ds [B, Hq, Tq, Tk] of the scores."""
    gradients: dict[str, Array] = {}
    if opt.bias is not None:
        gradients["bias"] = _sum_to(ds, np.shape(opt.bias))
    if opt.slopes is not None:
        gradients["slopes"] = _sum_to(-(ds * abs(distance)).sum((2, 3)), np.shape(opt.slopes))
    if opt.table is not None:
        R, entries = np.shape(opt.table)[-1], np.broadcast_to(_entries(distance, opt), ds.shape)
        each = np.stack([np.where(entries == r, ds, 0).sum((2, 3)) for r in range(R)], -1)
        gradients["table"] = _sum_to(each, np.shape(opt.table))
    if opt.log_f is not None:
        # the gradient of the running sums: ds of the rows at position i, minus ds of key i
        of_rows, at = ds.sum(3), np.broadcast_to(distance[..., :1], (*ds.shape[:3], 1))[..., 0]
        sums = np.stack([np.where(at == i, of_rows, 0).sum(2) for i in range(ds.shape[3])], -1) - ds.sum(2)
        gradients["log_f"] = np.cumsum(sums[..., ::-1], -1)[..., ::-1].swapaxes(1, 2)
    return gradients


def _entries(distance: Array, opt: Any) -> Array:
    # the index in the table of each pair
    return np.clip(distance + opt.origin, 0, np.shape(opt.table)[-1] - 1)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    x = x.sum(tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    return x.sum(tuple(n for n, size in enumerate(shape) if size == 1 and x.shape[n] != 1), keepdims=True)
