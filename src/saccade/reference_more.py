"""The float64 oracle, by dense formulas, of further results: maximum and entropy of rows, and tangents of o and lse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reference import OracleOptions, Pair, by_head, product, weights_of
from .reference_softmax import logs_of_weights
from .reference_terms import terms_by_position

Array = NDArray[Any]


def max_and_entropy(q: Array, k: Array, mask: Any = None, **options: Any) -> Pair:
    """The largest score of the allowed keys, and the entropy of all weights, [B, Tq, Hq]."""
    q, k, _, r = by_head(q, k, k, options)
    rows = weights_of(q, k, mask, OracleOptions(**options), r)
    entropy = r(logs_of_weights(rows.s, rows.sink, rows.lse)[1][..., 0])
    return rows.s.max(-1, initial=-np.inf).swapaxes(1, 2), entropy.swapaxes(1, 2)


def tangents(moved: Mapping[str, Array], q: Array, k: Array, v: Array, mask: Any = None, **options: Any) -> Pair:
    """(do [B, Tq, Hq, Dv], dlse [B, Tq, Hq]) of `reference.forward`, each step rounded to `dtype`.

    moved: the tangents by name, of q, k, v, bias, slopes, sinks, table and log_f; zero where missing.
    """
    opt = OracleOptions(**options)
    dq, dk, dv = (moved.get(name, np.zeros_like(x)) for name, x in (("q", q), ("k", k), ("v", v)))
    dq, dk, dv, _ = by_head(dq, dk, dv, options)
    q, k, v, r = by_head(q, k, v, options)
    rows = weights_of(q, k, mask, opt, r)
    terms = opt._replace(**{name: moved.get(name) for name in ("bias", "slopes", "table", "log_f")})
    with np.errstate(invalid="ignore", over="ignore"):
        ds = r(np.where(rows.allowed, dq @ k.swapaxes(-1, -2) + q @ dk.swapaxes(-1, -2), 0) * rows.slope)
        if terms.bias is not None:
            ds = r(ds + np.where(rows.allowed, r(terms.bias), 0))
        if terms.slopes is not None:
            ds = r(ds - np.atleast_2d(r(terms.slopes))[..., None, None] * abs(rows.distance))
        for term in terms_by_position(rows.distance, terms, r):
            ds = r(ds + np.where(rows.allowed, term, 0))
    ds = np.where(rows.allowed, ds, 0)
    mean = (rows.p * ds).sum(-1, keepdims=True)
    if "sinks" in moved:
        with np.errstate(invalid="ignore"):
            share = np.exp(r(opt.sinks).reshape(-1, 1, 1) - rows.lse)
        mean = mean + r(share) * r(moved["sinks"]).reshape(-1, 1, 1)
    mean = r(mean)
    o = product(r(rows.p * rows.keep * (ds - mean)), v, rows.allowed) + product(r(rows.p * rows.keep), dv, rows.allowed)
    return r(o).swapaxes(1, 2), mean[..., 0].swapaxes(1, 2)
