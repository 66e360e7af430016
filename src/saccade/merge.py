"""Partial results of attention over disjoint sets of keys, folded into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arrays import cast, is_torch, namespace


def merge(parts: Sequence[tuple[Any, Any]], *, sinks: Any = None) -> tuple[Any, Any]:
    """Attention over the union of the keys that the parts attended.

    parts: pairs (o [..., H, Dv], lse [..., H]) of the same queries, NumPy arrays or torch tensors, over disjoint keys;
    lse is a natural logarithm, -inf where a part has no key (its o is then not read). sinks: [H], one logit per query
    head, added once, for parts computed without it.

    Returns (o, lse) in the dtypes of the first part; sums run in float32, in float64 for float64. Parts are folded in
    their order, so the same parts give the same bits. torch tensors are differentiated through, o and lse both.
    Raises ValueError for no parts or for shapes that differ, TypeError where NumPy and torch are mixed.
    Source: the correction exp(m_old - m_new) of online softmax (Milakov and Gimelshein, 2018), applied between parts.
    """
    parts = list(parts)
    _check(parts, sinks)
    xp, dtype = namespace(parts[0][0]), parts[0][0].dtype
    work = xp.float64 if dtype == xp.float64 else xp.float32
    lses = [cast(lse, work) for _, lse in parts]
    if sinks is not None:
        lses.append(xp.broadcast_to(cast(sinks, work), lses[0].shape))
    # the maximum cancels, so no gradient runs through it
    m = _largest([lse.detach() if is_torch(lse) else lse for lse in lses], xp)
    weights = [xp.exp(lse - m) for lse in lses]
    total = weights[0]
    for w in weights[1:]:
        total = total + w
    # a row without any key keeps o = 0 and lse = -inf
    empty = total == 0
    floor = xp.where(empty, xp.ones_like(total), total)
    out = xp.zeros_like(parts[0][0], dtype=work)
    for (o, _), w in zip(parts, weights, strict=False):
        unread = (w == 0)[..., None]
        out = out + xp.where(unread, xp.zeros_like(o, dtype=work), cast(o, work)) * (w / floor)[..., None]
    lse = xp.where(empty, xp.full_like(total, -xp.inf), m + xp.log(floor))
    return cast(out, dtype), cast(lse, parts[0][1].dtype)


def _largest(lses: list[Any], xp: Any) -> Any:
    m = lses[0]
    for lse in lses[1:]:
        m = xp.maximum(m, lse)
    return xp.where(m == -xp.inf, xp.zeros_like(m), m)


def _check(parts: list[tuple[Any, Any]], sinks: Any) -> None:
    if not parts:
        raise ValueError("merge got no parts; expected at least one pair (o, lse)")
    o_shape, lse_shape = tuple(parts[0][0].shape), tuple(parts[0][1].shape)
    for n, (o, lse) in enumerate(parts):
        if tuple(o.shape) != o_shape or tuple(lse.shape) != lse_shape or o_shape[:-1] != lse_shape:
            raise ValueError(
                f"part {n} has o {list(o.shape)} and lse {list(lse.shape)}; expected o [..., H, Dv] and lse [..., H] "
                f"as in part 0: {list(o_shape)} and {list(lse_shape)}"
            )
        if is_torch(o) != is_torch(parts[0][0]) or is_torch(lse) != is_torch(o):
            raise TypeError(f"part {n} mixes NumPy arrays and torch tensors; convert one to the other")
    if sinks is not None and tuple(sinks.shape) != lse_shape[-1:]:
        raise ValueError(f"sinks has shape {list(sinks.shape)}; expected [{lse_shape[-1]}], one logit per query head")
