"""flash-attn's attention over a cache that the call appends to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .flash_append import attend_cache
from .flash_arguments import bias_of, check_tensor, mask_of
from .flash_places import CacheArguments


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append k, v [B, T, Hk, D] in place at cache_seqlens, and attend q [B, Sq, Hq, D] over what is there then.

    k_cache, v_cache: [Bc, capacity, Hk, D], entry b in row cache_batch_idx[b] (b, if None); or with block_table int32
    [B, n] pages [pages, page, Hk, D]. cache_seqlens: int or int [B]; None means full. cache_leftpad: int [B], the first
    key of each entry. rotary_cos, rotary_sin: [positions, rotary_dim / 2], applied to k at its place in the cache, to q
    at its own under causal or a window, else at cache_seqlens. num_splits is chosen by the plan.

    On the host every length and page is checked before anything is written. On a GPU, and in a graph of torch.compile,
    contents are not waited for: an entry ends before its first page that is out of range (-1, say) and at the capacity,
    tokens beyond are not written, and nothing beyond is read. What is refused leaves the cache as it was.

    Returns out [B, Sq, Hq, D], with return_softmax_lse also lse [B, Hq, Sq]. There is no gradient.

    Raises:
        TypeError, ValueError: shapes, dtypes, lengths or pages that do not fit. Unsupported: an argument requires grad.
    """
    check_tensor("q", q)
    mask, slopes = mask_of(causal, window_size), alibi_slopes
    bias = bias_of(slopes, len(q), q.shape[2]) if q.dim() == 4 else None
    where: Any = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    rotary: Any = {"cos": rotary_cos, "sin": rotary_sin, "first": None, "interleaved": rotary_interleaved}
    call = CacheArguments(q, k_cache, v_cache, k, v, mask, softmax_scale, softcap, **where, **rotary)
    o, lse = attend_cache(call._replace(table=block_table, bias=bias, alibi_slopes=slopes))
    return (o, lse) if return_softmax_lse else o
