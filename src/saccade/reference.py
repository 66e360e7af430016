"""Naive attention (Vaswani et al., 2017): the float64 oracle of all tests, and plain attention in other dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .philox import dropout_kept
from .reference_softmax import logs_of_weights, softmax
from .reference_terms import gradients_of_terms, terms_by_position

Array = NDArray[Any]
Pair = tuple[Array, Array]


class OracleOptions(NamedTuple):
    """The options of a call. stop: [B], the position of the last query plus 1; None for Tk. dentropy: [B, Tq, Hq].

    bias broadcasts to [B, Hq, Tq, Tk]. slopes: [Hq] or [B, Hq]. table: [Hq, R] or [B, Hq, R]. log_f: [B, Tk, Hq].
    dentropy: [B, Tq, Hq], the gradient of the entropy, None for zero.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Any = None
    bias: Any = None
    slopes: Any = None
    table: Any = None
    origin: int = 0
    log_f: Any = None
    stop: Any = None
    dropout: float = 0.0
    seed: int = 0
    dtype: Any = np.float64
    dentropy: Any = None


class Weights(NamedTuple):
    allowed: Array  # bool [B, Hq, Tq, Tk], as are the shapes of s and of the four after sink
    s: Array  # -inf where not allowed
    sink: Array  # [B, Hq, Tq, 1]
    p: Array  # weights before dropout
    keep: Array  # 0 or 1 / (1 - dropout)
    slope: Array  # derivative of the score with respect to q . k
    distance: Array  # i - j
    lse: Array  # [B, Hq, Tq, 1]


def forward(q: Array, k: Array, v: Array, mask: Any = None, **options: Any) -> Pair:
    """o [B, Tq, Hq, Dv] and lse [B, Tq, Hq] of q [B, Tq, Hq, D], k [B, Tk, Hk, D], v, each step rounded to `dtype`."""
    q, k, v, r = by_head(q, k, v, options)
    rows = weights_of(q, k, mask, OracleOptions(**options), r)
    return _outputs(rows, r(product(r(rows.p * rows.keep), v, rows.allowed)))


def backward(
    do: Array, q: Array, k: Array, v: Array, mask: Any = None, *, dlse: Any = None, **options: Any
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Gradients (dq, dk, dv, those of side arrays by name) of the sum of do * o, dlse * lse and dentropy * entropy."""
    return both(do, q, k, v, mask, dlse=dlse, **options)[1]


def both(
    do: Array, q: Array, k: Array, v: Array, mask: Any = None, *, dlse: Any = None, **options: Any
) -> tuple[Pair, tuple[Array, Array, Array, dict[str, Array]]]:
    """The results of `forward` and of `backward`, which share the weights."""
    opt, Hk = OracleOptions(**options), k.shape[2]
    q, k, v, r = by_head(q, k, v, options)
    rows = weights_of(q, k, mask, opt, r)
    do, (dl, dh) = (
        r(do).swapaxes(1, 2),
        (0 if x is None else r(x).swapaxes(1, 2)[..., None] for x in (dlse, opt.dentropy)),
    )
    o = r(product(r(rows.p * rows.keep), v, rows.allowed))
    with np.errstate(invalid="ignore", over="ignore"):
        p = r(np.where(rows.allowed, np.exp(rows.s - np.where(rows.lse == -np.inf, 0, rows.lse)), 0))
        dp = r(np.where(rows.allowed, do @ v.swapaxes(-1, -2), 0) * rows.keep)
        delta = np.where(rows.allowed.any(-1), (do * o).sum(-1), 0)[..., None]
        logs, entropy = logs_of_weights(rows.s, rows.sink, rows.lse)
        ds = r(np.where(rows.allowed, p * (dp - delta + dl - dh * (logs[..., :-1] + entropy)), 0))
        draw = r(ds * rows.slope)
    extras = gradients_of_terms(ds, rows.distance, opt)
    if opt.sinks is not None:
        p_sink = np.exp(r(opt.sinks).reshape(-1, 1, 1) - rows.lse)
        more = dl - delta - dh * (logs[..., -1:] + entropy)
        extras["sinks"] = np.where(p_sink > 0, p_sink * more, 0).sum((0, 2, 3))
    dq = r(product(draw, k, rows.allowed)).swapaxes(1, 2)
    across = (x.swapaxes(-1, -2) for x in (draw, r(p * rows.keep)))
    dk, dv = (product(w, x, rows.allowed.swapaxes(-1, -2)) for w, x in zip(across, (q, do), strict=True))
    dk, dv = (r(x.reshape(len(x), Hk, -1, *x.shape[2:]).sum(2)) if x.size else x[:, :Hk] for x in (dk, dv))
    return _outputs(rows, o), (dq, dk.swapaxes(1, 2), dv.swapaxes(1, 2), extras)


def _outputs(rows: Weights, o: Array) -> Pair:
    return o.swapaxes(1, 2), rows.lse[..., 0].swapaxes(1, 2)


def weights(q: Array, k: Array, mask: Any = None, **options: Any) -> Array:
    """The weights [B, Hq, Tq, Tk] of attention, before dropout."""
    q, k, _, r = by_head(q, k, k, options)
    return weights_of(q, k, mask, OracleOptions(**options), r).p


def weights_of(q: Array, k: Array, mask: Any, opt: OracleOptions, r: Any) -> Weights:
    B, Hq, Tq, Tk = shape = (*q.shape[:3], k.shape[2])
    scale = 1 / np.sqrt(q.shape[-1]) if opt.scale is None else opt.scale
    bias = np.zeros(()) if opt.bias is None else r(opt.bias)
    allowed = np.broadcast_to(True if mask is None else mask.evaluate(*shape), shape) & (bias != -np.inf)
    slopes = np.zeros((1, Hq)) if opt.slopes is None else np.atleast_2d(r(opt.slopes))
    stop = np.full(B, Tk) if opt.stop is None else np.asarray(opt.stop)
    distance = np.arange(Tq)[:, None] + (stop - Tq).reshape(-1, 1, 1, 1) - np.arange(Tk)
    terms = list(terms_by_position(distance, opt, r))
    if opt.table is not None and terms:
        # like a bias, an entry of -inf excludes
        allowed = allowed & (terms[0] != -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        s = r(np.where(allowed, q @ k.swapaxes(-1, -2) * scale, 0))
        slope = scale / np.cosh(s / opt.softcap) ** 2 if opt.softcap else scale * np.ones(())
        s = r((opt.softcap * np.tanh(s / opt.softcap) if opt.softcap else s) + np.where(allowed, bias, 0))
        s = r(s - slopes[..., None, None] * abs(distance))
        for term in terms:
            s = r(s + np.where(allowed, term, 0))
    sink = np.full(Hq, -np.inf) if opt.sinks is None else r(opt.sinks)
    sink = np.broadcast_to(sink.reshape(-1, 1, 1), (B, Hq, Tq, 1)).astype(s.dtype)
    s = np.where(allowed, s, -np.inf)
    p, lse = softmax(np.concatenate([s, sink], -1))
    keep = dropout_kept(shape, opt.dropout, opt.seed) / (1 - opt.dropout) if opt.dropout else np.ones(shape)
    return Weights(allowed, s, sink, r(p[..., :-1]), keep, slope, distance, lse)


def by_head(q: Array, k: Array, v: Array, options: dict[str, Any]) -> tuple[Array, Array, Array, Any]:
    # [B, T, H, D] -> [B, Hq, T, D], with kv heads repeated for the query heads of a group, and a function that rounds
    G, dtype = q.shape[2] // k.shape[2], np.dtype(options.get("dtype", np.float64))
    work = np.float64 if dtype == np.float64 else np.float32
    r = lambda x: np.asarray(x).astype(work, copy=False).astype(dtype, copy=False).astype(work, copy=False)  # noqa: E731
    return r(q).swapaxes(1, 2), r(k).swapaxes(1, 2).repeat(G, 1), r(v).swapaxes(1, 2).repeat(G, 1), r


def product(w: Array, x: Array, allowed: Array) -> Array:
    # w @ x over only the allowed pairs: w is 0 elsewhere, but 0 * NaN of an excluded row of x must not count
    finite = np.isfinite(x)
    y = w @ np.where(finite, x, 0)
    for j in np.unique(np.nonzero(~finite.all(3) & allowed.any(2))[2]):
        odd = np.where(finite[:, :, j], 0, x[:, :, j])[:, :, None]
        with np.errstate(invalid="ignore"):
            y += np.where(allowed[..., j, None] & (odd != 0), w[..., j, None] * odd, 0)
    return y
