"""Second derivatives: the backward formula in torch ops, differentiated by hand, one block of queries at a time.

    x = scale q kᵀ    s = c tanh(x / c) + bias    f = ds/dx    p = softmax(s), the sink's share z
    dP = dO vᵀ ∘ κ    U = dP − Δ + dlse, Δ = Σ p dP    dS = p U    A = dS f scale, κ = 0 or 1 / (1 − dropout)
    dQ = A k    dK = Aᵀ q    dV = (p κ)ᵀ dO    dbias = dS    dslope = −Σ dS distance    dsink = Σ z (dlse − Δ)

Below, g_x is the cotangent of x. lse is recomputed inside a block, so gradients through it and through o are included.
A block has [G, rows, Tk] scores of one key head: O(T · block) memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..mask.lowering import lower
from ..operands import Side
from ..problem import OPTIONS, Problem
from .torch_pairs import Pairs, Where, pairs_of, views

# the most scores in a block, unless one query row has more
BLOCK = 1 << 20
TAKES = {"softcap", "sinks", "bias", "alibi", "dropout"}


def second_derivative(problem: Problem, cotangents: Sequence[Any], inputs: Sequence[Any], seed: int) -> list[Any]:
    """`_second_derivative` with products in at least float32, also under autocast."""
    with torch.autocast(inputs[2].device.type, enabled=False):
        return _second_derivative(problem, cotangents, inputs, seed)


def _second_derivative(problem: Problem, cotangents: Sequence[Any], inputs: Sequence[Any], seed: int) -> list[Any]:
    """The gradient of Σ cotangent · first derivative.

    cotangents: of (dq, dk, dv, dbias, dslopes, dsinks), None for zero. inputs: (do, dlse, q, k, v, bias, slopes,
    sinks), None if missing. Returns a gradient for each input, in its shape and dtype.

    A NaN or an infinity in a key that no row of a block may see has no effect. If some row sees it, it may affect other
    rows of the same block.
    """
    if unknown := sorted(problem.uses - TAKES):
        names = ", ".join(OPTIONS.get(name, name) for name in unknown)
        raise Unsupported("torch", [f"second derivatives with {names} are not computed: detach one of the two"])
    wide = torch.float64 if problem.dtype == "float64" else torch.float32
    results = [None if x is None else torch.zeros_like(x, dtype=wide) for x in inputs]
    if all(c is None for c in cotangents):
        return [None if x is None else torch.zeros_like(x) for x in inputs]
    side = Side(*inputs[-len(Side._fields) :])
    G, rows = problem.G, min(problem.Tq, max(8, BLOCK // max(1, problem.G * problem.Tk)))
    lowered = None if problem.mask is None else lower(problem.mask, problem.B, problem.Hq, problem.Tq, problem.Tk)
    for b in range(problem.B):
        for h in range(problem.Hk):
            for t in range(0, problem.Tq, max(1, rows)):
                at = Where(b, h, slice(h * G, (h + 1) * G), slice(t, min(t + rows, problem.Tq)), slice(0, problem.Tk))
                at, pairs = pairs_of(problem, lowered, at, side.bias, seed, wide)
                if pairs is not None:
                    _add_block(problem, at, pairs, cotangents, inputs, results, wide)
    return [None if x is None or r is None else r.to(x.dtype) for x, r in zip(inputs, results, strict=True)]


def _add_block(
    problem: Problem,
    at: Where,
    pairs: Pairs,
    cotangents: Sequence[Any],
    inputs: Sequence[Any],
    results: Sequence[Any],
    wide: torch.dtype,
) -> None:
    parts = [None if x is None else x.to(wide) for x in views(inputs, at)]
    second = [None if x is None else x.to(wide) for x in views([None, None, *cotangents], at)[2:]]
    gradients = _block(problem, _without_unseen(parts, pairs.allowed), second, pairs)
    for x, part in zip(views(results, at), gradients, strict=True):
        if x is not None:
            x += part


def _block(problem: Problem, parts: list[Any], cotangents: list[Any], pairs: Pairs) -> list[Any]:
    # gradients of (do, dlse, q, k, v, bias, slopes, sinks); pair arrays are [G, rows, n], row sums [G, rows, 1]
    do, dlse, q, k, v, bias, slopes, sinks = parts
    g_dq, g_dk, g_dv, g_bias, g_slopes, g_sinks = cotangents
    allowed, keep, distance = pairs
    scale = problem.scores.scale
    s, f, curve = scores_of(problem, q, k, bias, slopes, distance)
    p, z = _softmax(s, allowed, sinks)
    dp = _times(do @ v.T, keep)
    lam = 0 if dlse is None else dlse[..., None]
    delta = (p * dp).sum(-1, keepdim=True)
    u = dp - delta + lam
    ds = p * u
    a = ds * f * scale

    # through dq, dk and the sums of dS
    g_a = torch.zeros_like(p)
    r_q, r_k = torch.zeros_like(q), torch.zeros_like(k)
    if g_dq is not None:
        g_a += g_dq @ k.T
        r_k += (a.mT @ g_dq).sum(0)
    if g_dk is not None:
        g_a += q @ g_dk.T
        r_q += a @ g_dk
    g_ds = g_a * f * scale
    if g_bias is not None:
        g_ds += g_bias
    if g_slopes is not None:
        g_ds -= g_slopes[:, None, None] * distance

    # through dv, Δ and dsink
    r_do, g_p = torch.zeros_like(do), g_ds * u
    if g_dv is not None:
        g_p += _times(do @ g_dv.T, keep)
        r_do += _times(p, keep) @ g_dv
    g_u = g_ds * p
    r_lam, g_z = g_u.sum(-1, keepdim=True), 0
    if g_sinks is not None:
        r_lam = r_lam + g_sinks[:, None, None] * z
        g_z = g_sinks[:, None, None] * (lam - delta)
    g_p -= r_lam * dp
    g_dp = _times(g_u - r_lam * p, keep)
    r_do += g_dp @ v

    # through the softmax to the scores
    mean = (p * g_p).sum(-1, keepdim=True) + (0 if z is None else z * g_z)
    g_s = p * (g_p - mean)
    g_x = scale * (g_s * f if curve is None else g_s * f + g_a * ds * scale * curve)
    return [
        r_do,
        r_lam[..., 0],
        r_q + g_x @ k,
        r_k + (g_x.mT @ q).sum(0),
        (g_dp.mT @ do).sum(0),
        None if bias is None else g_s.sum_to_size(bias.shape),
        None if slopes is None else -(g_s * distance).sum((1, 2)),
        None if sinks is None else (z * (g_z - mean)).sum((1, 2)),
    ]


def scores_of(problem: Problem, q: Tensor, k: Tensor, bias: Any, slopes: Any, distance: Any) -> tuple[Tensor, Any, Any]:
    """(s, f = ds/dx, df/dx) of q [G, rows, D] and k [n, D]; the last is None without a softcap."""
    s, f, curve = problem.scores.scale * (q @ k.T), 1.0, None
    if problem.scores.softcap:
        t = torch.tanh(s / problem.scores.softcap)
        s, f = problem.scores.softcap * t, 1 - t * t
        curve = -2 / problem.scores.softcap * t * f
    if bias is not None:
        s = s + torch.where(bias == -torch.inf, 0, bias)
    if slopes is not None:
        s = s - slopes[:, None, None] * distance
    return s, f, curve


def _times(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x * keep


def _softmax(s: Tensor, allowed: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    # weights of the allowed keys [G, rows, n] and of the sink [G, rows, 1]; all exponents are finite
    m = torch.where(allowed, s, -torch.inf).amax(-1, keepdim=True)
    if sinks is not None:
        m = torch.maximum(m, sinks[:, None, None])
    m = torch.where(torch.isfinite(m), m, 0)
    e = torch.where(allowed, torch.exp(torch.where(allowed, s, m) - m), 0)
    total = e.sum(-1, keepdim=True)
    e_sink = None
    if sinks is not None:
        e_sink = torch.exp(sinks[:, None, None] - m)
        total = total + e_sink
    total = torch.where(total == 0, 1, total)
    return e / total, None if e_sink is None else e_sink / total


def _without_unseen(parts: list[Any], allowed: Tensor) -> list[Any]:
    # zeros for keys that no row sees and for rows that see no key, which may contain NaN
    do, dlse, q, k, v, *rest = parts
    seen = allowed.any(0).any(0)[:, None]
    return [do, dlse, q, torch.where(seen, k, 0), torch.where(seen, v, 0), *rest]
