"""Merge partial results of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arrays import Array, ArrayT, cast, is_torch, namespace


def merge(
    parts: Sequence[tuple[ArrayT, ...]],
    *,
    sinks: Array | None = None,
    return_max: bool = False,
    return_entropy: bool = False,
) -> tuple[ArrayT, ...]:
    """Attention over the union of the keys of several partial results.

    It applies the correction of online softmax (Milakov and Gimelshein, 2018) between parts. Parts are added in their
    order, so the same parts give the same bits. torch differentiates through o and lse.

    Args:
        parts: pairs (o [..., H, Dv], lse [..., H]) of the same queries over disjoint keys, NumPy arrays or torch
            tensors. lse is a natural logarithm; where it is -inf the part has no key, and its o is not read. With
            return_max or return_entropy the parts also have these results, as `attention` returns them.
        sinks: [H], one logit per query head, for parts that were computed without sinks.
        return_max, return_entropy: also return the maximum and the entropy of each row, [..., H].

    Returns:
        (o, lse), and then max and entropy if asked for, with the shapes and dtypes of the first part. Sums are float32
        (float64 for float64 inputs).

    Raises:
        ValueError: there are no parts, they lack a result, or their shapes differ.
        TypeError: parts mix NumPy and torch.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 1024, 8, 64)
        >>> parts = [saccade.attention(q, k[:, i], v[:, i], return_lse=True) for i in (slice(512), slice(512, 1024))]
        >>> o, lse = saccade.merge(parts)
        >>> torch.allclose(o, saccade.attention(q, k, v), atol=1e-5)
        True
    """
    parts = list(parts)
    _check(parts, sinks, 2 + return_max + return_entropy)
    xp, dtype = namespace(parts[0][0]), parts[0][0].dtype
    work = xp.float64 if dtype == xp.float64 else xp.float32
    lses = [cast(part[1], work) for part in parts]
    if sinks is not None:
        lses.append(xp.broadcast_to(cast(sinks, work), lses[0].shape))
    # the maximum cancels, so it needs no gradient
    m = _largest([lse.detach() if is_torch(lse) else lse for lse in lses], xp)
    m = xp.where(m == -xp.inf, xp.zeros_like(m), m)
    weights = [xp.exp(lse - m) for lse in lses]
    total = weights[0]
    for w in weights[1:]:
        total = total + w
    # a row without any key keeps o = 0 and lse = -inf
    empty = total == 0
    floor = xp.where(empty, xp.ones_like(total), total)
    out = xp.zeros_like(parts[0][0], dtype=work)
    for (o, *_), w in zip(parts, weights, strict=False):
        unread = (w == 0)[..., None]
        out = out + xp.where(unread, xp.zeros_like(o, dtype=work), cast(o, work)) * (w / floor)[..., None]
    lse = xp.where(empty, xp.full_like(total, -xp.inf), m + xp.log(floor))
    more: list[Any] = []
    if return_max:
        more.append(_largest([part[2] for part in parts], xp))
    if return_entropy:
        none = xp.zeros_like(lse)
        entropies = [cast(part[-1], work) for part in parts] + [none] * (sinks is not None)
        whole = none
        for entropy, of_part, w in zip(entropies, lses, weights, strict=True):
            # the entropy of one part relative to all weights
            log = xp.where(w == 0, none, of_part - xp.where(w == 0, none, lse))
            whole = whole + w / floor * (entropy - log)
        more.append(cast(whole, parts[0][-1].dtype))
    return cast(out, dtype), cast(lse, parts[0][1].dtype), *more


def _largest(lses: list[Any], xp: Any) -> Any:
    m = lses[0]
    for lse in lses[1:]:
        m = xp.maximum(m, lse)
    return m


def _check(parts: list[tuple[Any, ...]], sinks: Any, results: int) -> None:
    if not parts:
        raise ValueError("merge got no parts; expected at least one pair (o, lse)")
    for n, part in enumerate(parts):
        if len(part) != results:
            raise ValueError(
                f"part {n} has {len(part)} results; expected {results}: o, lse, and what return_max and return_entropy "
                f"name"
            )
    o_shape, lse_shape = tuple(parts[0][0].shape), tuple(parts[0][1].shape)
    for n, (o, lse, *_) in enumerate(parts):
        if tuple(o.shape) != o_shape or tuple(lse.shape) != lse_shape or o_shape[:-1] != lse_shape:
            raise ValueError(
                f"part {n} has o {list(o.shape)} and lse {list(lse.shape)}; expected o [..., H, Dv] and lse [..., H] "
                f"as in part 0: {list(o_shape)} and {list(lse_shape)}"
            )
        if is_torch(o) != is_torch(parts[0][0]) or is_torch(lse) != is_torch(o):
            raise TypeError(f"part {n} mixes NumPy arrays and torch tensors; convert one to the other")
    if sinks is not None and tuple(sinks.shape) != lse_shape[-1:]:
        raise ValueError(f"sinks has shape {list(sinks.shape)}; expected [{lse_shape[-1]}], one logit per query head")
