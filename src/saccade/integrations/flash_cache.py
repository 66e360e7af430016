"""flash-attn's attention over a cache, to which the call appends."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..arrays import ArrayOrTuple
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
) -> ArrayOrTuple:
    """Append k and v to a cache in place, and attend q over it, without a gradient.

    On the host every length and page is checked before anything is written. On a GPU, and in a graph of torch.compile,
    contents are not read: an entry ends at the capacity and before its first page that is out of range (such as -1);
    tokens beyond that are neither written nor read. A call that raises leaves the cache unchanged.

    Args:
        q: [B, Sq, Hq, D].
        k_cache, v_cache: [Bc, capacity, Hk, D]; or, with block_table, pages [pages, page_size, Hk, D].
        k, v: [B, T, Hk, D], new tokens, written at cache_seqlens.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]; k is rotated to its positions in the cache, q to its own
            with causal or a window, otherwise to cache_seqlens.
        cache_seqlens: int or int [B], tokens of each entry before the call; None for a full cache.
        cache_batch_idx: int [B], the row of each entry in the cache; None for row b.
        cache_leftpad: int [B], the first key of each entry.
        block_table: int32 [B, n], the pages of each entry.
        rotary_interleaved: rotary pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        num_splits: ignored; the plan chooses how keys are split.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.

    Returns:
        out [B, Sq, Hq, D], with return_softmax_lse also lse [B, Hq, Sq].

    Raises:
        TypeError, ValueError: shapes, dtypes, lengths or pages do not fit.
        Unsupported: an argument requires grad.

    Examples:
        >>> from saccade.integrations.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 1, 4096, 8, 64)
        >>> q, k, v = torch.randn(3, 1, 1, 8, 64)  # one new token, after 100
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=100, causal=True)
    """
    check_tensor("q", q)
    mask, slopes = mask_of(causal, window_size), alibi_slopes
    bias = bias_of(slopes, len(q), q.shape[2]) if q.dim() == 4 else None
    where: Any = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    rotary: Any = {"cos": rotary_cos, "sin": rotary_sin, "first": None, "interleaved": rotary_interleaved}
    more: Any = {"table": block_table, "bias": bias, "alibi_slopes": slopes}
    call = CacheArguments(q, k_cache, v_cache, k, v, mask, softmax_scale, softcap, **where, **rotary, **more)
    o, lse = attend_cache(call)
    return (o, lse) if return_softmax_lse else o
