"""Softmax in three passes, two passes and one pass over the scores, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Pair = tuple[Array, Array]


def softmax(s: Array) -> Pair:
    """(p, lse) of scores [..., Tk] in three passes: maximum, sum, quotient. A row of -inf has p = 0 and lse = -inf."""
    m = s.max(-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isfinite(m), m, 0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        e = np.exp(s - m)
        total = e.sum(-1, keepdims=True)
        return e / np.where(total == 0, 1, total), m + np.log(total)


def logs_of_weights(s: Array, sink: Array, lse: Array) -> Pair:
    """(log p of scores and sink [..., Tk + 1], the entropy [..., 1]); the logarithm of a weight of 0 is 0.

    s: [..., Tk], -inf where not allowed. sink, lse: [..., 1].
    """
    s = np.concatenate([s, sink], -1)
    with np.errstate(invalid="ignore"):
        logs = np.where(s == -np.inf, 0, s - lse)
        return logs, -(np.where(s == -np.inf, 0, np.exp(logs)) * logs).sum(-1, keepdims=True)


def softmax_two_pass(s: Array) -> Array:
    """The weights of finite scores [..., Tk] in two passes, the first for maximum and sum together."""
    m, total = np.full(s.shape[:-1], -np.inf), np.zeros(s.shape[:-1])
    for x in np.moveaxis(s, -1, 0):
        m, total = np.maximum(m, x), total * np.exp(np.minimum(m - x, 0)) + np.exp(np.minimum(x - m, 0))
    return np.exp(s - m[..., None]) / total[..., None]


def attend_one_pass(s: Array, v: Array, block: int = 1) -> Pair:
    """o, lse of finite scores [..., Tk] and values [Tk, Dv], `block` keys at a time (Milakov and Gimelshein, 2018)."""
    m, total, acc = np.full(s.shape[:-1], -np.inf), np.zeros(s.shape[:-1]), np.zeros((*s.shape[:-1], v.shape[-1]))
    for j in range(0, s.shape[-1], block):
        m_old, m = m, np.maximum(m, s[..., j : j + block].max(-1))
        correction, e = np.exp(m_old - m), np.exp(s[..., j : j + block] - m[..., None])
        total, acc = total * correction + e.sum(-1), acc * correction[..., None] + e @ v[j : j + block]
    return acc / total[..., None], m + np.log(total)
