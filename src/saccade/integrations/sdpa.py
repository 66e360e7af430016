"""torch's scaled_dot_product_attention with its signature and semantics, on every backend."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.functional import dropout, pad

from ..api import attention
from ..errors import Unsupported
from ..mask import Mask, causal, dense
from ..operands import number
from .flash_arguments import check_tensor


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, in O(T) memory unless attn_mask takes more.

    Args:
        query: [..., Hq, L, E] or [N, L, E].
        key: [..., H, S, E] or [N, S, E]. Leading dimensions and heads broadcast; with enable_gqa the numbers of heads
            of key and value divide Hq.
        value: [..., H, S, Ev] or [N, S, Ev].
        attn_mask: broadcasts to [..., Hq, L, S]: booleans, True where a query sees a key, or numbers added to the
            scores, with gradients as for `bias` in `saccade.attention`.
        dropout_p: the probability of dropping a weight, with Saccade's Philox pattern instead of torch's.
        is_causal: query i sees keys j <= i, both counted from the first.
        scale: factor of the products; None for 1/sqrt(E).
        enable_gqa: allow fewer heads of key and value than of query.
        backend: as in `saccade.attention`.

    Returns:
        [..., Hq, L, Ev]. A row that sees no key is 0.

    Raises:
        ValueError: shapes do not fit, or attn_mask is given with is_causal.
        TypeError, Unsupported: as in `saccade.attention`; Unsupported also for nested tensors and `torch.jit.trace`.

    Examples:
        >>> from saccade.integrations.sdpa import scaled_dot_product_attention
        >>> query = key = value = torch.randn(2, 8, 1024, 64)  # heads before tokens
        >>> o = scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    _check_kind(query, key, value, attn_mask)
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask is given with is_causal=True; expected one of them")
    if min(query.dim(), key.dim(), value.dim()) < 3:
        raise _misshaped("at least [N, L, E]", query, key, value)
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = [list(x.shape) for x in (query, key, value)]
        raise ValueError(
            f"query, key, value have shapes {shapes}; expected one E in query and key, one S in key and value"
        )
    if dropout_p != 1 and not 0 <= number("dropout_p", dropout_p, "a probability") < 1:
        raise ValueError(f"dropout_p is {dropout_p!r}; expected 0 <= dropout_p <= 1")
    # without a dimension of heads
    lone = query.dim() == key.dim() == value.dim() == 3 and not enable_gqa
    q, k, v = (x.unsqueeze(-3) if lone else x for x in (query, key, value))
    q, k, v = _with_heads(q, k, v, enable_gqa)
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    except RuntimeError:
        shapes = [list(x.shape) for x in (query, key, value)]
        raise ValueError(
            f"query, key, value have shapes {shapes}; expected leading dimensions that broadcast"
        ) from None
    q, k, v = (
        x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:]).transpose(1, 2) for x in (q, k, v)
    )
    if not query.shape[-1]:
        # with E = 0 all scores are 0, for any scale
        q, k, scale = pad(q, (0, 1)), pad(k, (0, 1)), 1.0
    mask, bias = (causal(0) if is_causal else None), None
    if attn_mask is not None:
        mask, bias = _of_mask(attn_mask.unsqueeze(-3) if lone and attn_mask.dim() == 3 else attn_mask, batch, q, k)
    # `attention` cannot drop all weights
    share = 0.0 if dropout_p == 1 else dropout_p
    if not q.shape[2] * k.shape[2] * v.shape[3]:
        # the result is empty or 0, but must have a gradient, as in torch
        o = (q.sum() + k.sum() + v.sum()) * q.new_zeros(*q.shape[:3], v.shape[3])
    else:
        o = attention(q, k, v, mask, scale=scale, bias=bias, dropout=share, backend=backend)
    o = dropout(o, 1.0) if dropout_p == 1 else o
    o = o.transpose(1, 2).reshape(*batch, o.shape[2], o.shape[1], o.shape[3])
    return o.squeeze(-3) if lone else o


def _check_kind(query: Any, key: Any, value: Any, attn_mask: Any) -> None:
    arrays = query, key, value
    for name, x in zip(("query", "key", "value"), arrays, strict=True):
        check_tensor(name, x)
    if isinstance(attn_mask, Mask):
        raise TypeError(f"attn_mask is the expression {attn_mask}; it belongs to saccade.attention(q, k, v, mask)")
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask)
    if any(x.is_nested for x in arrays):
        reason = "nested tensors have no common length: pack them and call saccade.attention with mask.documents"
        raise Unsupported("torch", [reason])
    if is_tracing():
        raise Unsupported("torch", ["torch.jit.trace would store results as constants: use torch.compile or export"])


def _misshaped(expected: str, *arrays: Tensor) -> ValueError:
    return ValueError(f"query, key, value have shapes {[list(x.shape) for x in arrays]}; expected {expected}")


def _with_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[..., heads, T, size] with the same number of key and value heads, which divides that of query."""
    heads = [x.shape[-3] for x in (q, k, v)]
    if grouped:
        if any(n == 0 or heads[0] % n for n in heads[1:]):
            raise ValueError(f"query, key, value have {heads} heads; expected those of key and value to divide query's")
        shared = math.lcm(*heads[1:])
        k, v = (x if x.shape[-3] == shared else x.repeat_interleave(shared // x.shape[-3], -3) for x in (k, v))
        return q, k, v
    try:
        (most,) = torch.broadcast_shapes(*((n,) for n in heads))
    except RuntimeError:
        raise ValueError(f"query, key, value have {heads} heads; expected the same, or enable_gqa=True") from None
    shared = 1 if heads[1] == heads[2] == 1 else most
    q, k, v = (x.expand(*x.shape[:-3], n, *x.shape[-2:]) for x, n in ((q, most), (k, shared), (v, shared)))
    return q, k, v


def _of_mask(x: Tensor, batch: torch.Size, q: Tensor, k: Tensor) -> tuple[Mask | None, Tensor | None]:
    # (mask, None) for booleans that all heads share, else (None, numbers to add)
    full = (*batch, q.shape[2], q.shape[1], k.shape[1])
    x = x[(None,) * (len(full) - x.dim())]
    if x.dim() != len(full) or any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
        raise ValueError(f"attn_mask has shape {list(x.shape)}; expected one that broadcasts to {list(full)}")
    if any(n > 1 for n in x.shape[:-3]):
        x = x.expand(*batch, *x.shape[-3:])
    x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    if x.dtype is not torch.bool:
        if x.requires_grad and x.shape[-1] == 1:
            # only whole rows have a gradient
            x = x.expand(*x.shape[:2], q.shape[1], k.shape[1])
        return None, x
    if x.shape[1] == 1 and x.shape[2] > 1 and x.shape[3] > 1:
        return dense(x[0, 0] if len(x) == 1 else x[:, 0]), None
    return None, torch.zeros(x.shape, device=x.device).masked_fill_(~x, float("-inf"))
