"""FlashAttention-3's module `flash_attn_interface`, on CPUs and GPUs, in every dtype that Saccade computes.

Signatures are those of flash-attn's main branch of August 2026. softmax_scale comes directly after v, or after the
lengths; there is no dropout. Arguments that tune its kernels (`flash_arguments.HINTS`) are accepted and ignored.

Differences: lse of a row without keys is -inf; lse is differentiable; rows beyond seqused_q are 0; attention_chunk and
qv have gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arrays import ArrayOrTuple
from ..caches.storage import whole
from .flash_append import attend_cache
from .flash_arguments import check_packed, check_tensor, chunked_mask_of
from .flash_combine import flash_attn_combine
from .flash_packed import Scores, Sequences, attend
from .flash_places import CacheArguments
from .flash_private_3 import backward as _flash_attn_backward
from .flash_private_3 import forward as _flash_attn_forward

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
__version__ = "3.0.0"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> ArrayOrTuple:
    """FlashAttention-3's `flash_attn_func`; causal masks are bottom-right: the last query is aligned with the last key.

    Args:
        q: [B, Sq, Hq, D].
        k: [B, Sk, Hk, D]; Hk divides Hq.
        v: [B, Sk, Hk, Dv].
        softmax_scale: factor of q · k; None for 1/sqrt(D), with qv 1/sqrt(D + Dv).
        causal: hide keys after a query's own position.
        qv: [B, Sq, Hq, Dv]; the scores are softmax_scale (q · k + qv · v).
        q_descale, k_descale, v_descale: float32 [B, Hk], the factors of 8-bit floats; None for 1. Forward only, on
            NVIDIA GPUs.
        window_size: (left, right), how many keys before and after its position a query sees; -1 or None for no bound.
        attention_chunk: a query sees only keys of its own chunk of this many positions; 0 for no chunks.
        softcap, deterministic: as in `saccade.attention`; softcap 0 for none.
        return_attn_probs: also return lse.

    Returns:
        out [B, Sq, Hq, Dv]; with return_attn_probs (out, lse [B, Hq, Sq]).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the call cannot be computed.

    Examples:
        >>> from saccade.integrations.flash_attn_3 import flash_attn_func
        >>> q = k = v = torch.randn(2, 1024, 8, 64)
        >>> out = flash_attn_func(q, k, v, causal=True, attention_chunk=256)
    """
    mask, descale = chunked_mask_of(causal, window_size, attention_chunk), (q_descale, k_descale, v_descale)
    scores = Scores(mask, softmax_scale, softcap, deterministic, qv, None, descale)
    o, lse = attend(q, k, v, Sequences(), scores)
    return (o, lse) if return_attn_probs else o


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> ArrayOrTuple:
    """`flash_attn_func` of q, k and v in one array.

    Args:
        qkv: [B, S, 3, H, D]; or, with num_heads_q, [B, S, Hq + 2 Hk, D].
        num_heads_q: Hq.

    Returns:
        out [B, S, Hq, D]; with return_attn_probs (out, lse [B, Hq, S]). The other arguments and errors are those of
        `flash_attn_func`.

    Examples:
        >>> from saccade.integrations.flash_attn_3 import flash_attn_qkvpacked_func
        >>> out = flash_attn_qkvpacked_func(torch.randn(2, 1024, 12, 64), num_heads_q=8)  # Hq = 8, Hk = 2
    """
    check_tensor("qkv", qkv)
    if qkv.dim() == 4:
        q, k, v = _split_heads(qkv, num_heads_q)
    else:
        check_packed("qkv", qkv, 5, 3)
        q, k, v = qkv.unbind(2)
    descale: Any = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options: Any = {"window_size": window_size, "attention_chunk": attention_chunk, "softcap": softcap}
    rest: Any = {"deterministic": deterministic, "return_attn_probs": return_attn_probs}
    return flash_attn_func(q, k, v, softmax_scale, causal, **descale, **options, **rest)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> ArrayOrTuple:
    """`flash_attn_func` of packed sequences.

    Args:
        q: [total_q, Hq, D], the queries of all sequences in order.
        k, v: [total_k, Hk, D] and [total_k, Hk, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1]; sequence r has rows cu_seqlens[r] to cu_seqlens[r + 1].
        seqused_q, seqused_k: int32 [B], how many tokens of each sequence, from the first on, are in use; None for all.
            Other rows of out are 0.

    Returns:
        out [total_q, Hq, Dv]; with return_attn_probs (out, lse [Hq, total_q]). The other arguments and errors are those
        of `flash_attn_func`, but descale factors raise Unsupported.

    Examples:
        >>> from saccade.integrations.flash_attn_3 import flash_attn_varlen_func
        >>> q = k = v = torch.randn(1024, 8, 64)  # sequences of 300 and 724 tokens
        >>> cu_seqlens = torch.tensor([0, 300, 1024], dtype=torch.int32)
        >>> out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 724, 724, causal=True)
    """
    mask, descale = chunked_mask_of(causal, window_size, attention_chunk), (q_descale, k_descale, v_descale)
    at = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    o, lse = attend(q, k, v, at, Scores(mask, softmax_scale, softcap, deterministic, qv, None, descale))
    return (o, lse) if return_attn_probs else o


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> ArrayOrTuple:
    """Append k and v to a cache in place, and attend q over it, without a gradient.

    Arguments that FlashAttention-2 also has are described in `flash_attn.flash_attn_with_kvcache`.

    Args:
        q: [B, Sq, Hq, D]; or, with cu_seqlens_q, packed [total, Hq, D].
        k, v: [B, T, Hk, D], new tokens; or, with cu_seqlens_k_new, packed [new, Hk, D].
        qv: as in `flash_attn_func`, only for a cache without page_table and cache_batch_idx. It copies the keys.
        page_table: the block_table of FlashAttention-2.
        cu_seqlens_q: int32 [B + 1], bounds of packed queries; not with cache_leftpad.
        cu_seqlens_k_new: int32 [B + 1], bounds of packed new tokens; ignored without k.
        rotary_seqlens: int [B], the position of the first new token of each entry; None for cache_seqlens.
        q_descale, k_descale, v_descale: raise Unsupported unless None.

    Returns:
        out, like q; with return_softmax_lse (out, lse, accumulated out, accumulated lse): lse is [B, Hq, Sq], or
        [Hq, total] for packed q, and the last two are empty.

    Raises:
        TypeError, ValueError: shapes, dtypes, lengths or pages do not fit.
        Unsupported: an argument requires grad or is not supported.

    Examples:
        >>> from saccade.integrations.flash_attn_3 import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 1, 4096, 8, 64)
        >>> q, k, v = torch.randn(3, 1, 1, 8, 64)  # one new token, after 100
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=100, causal=True)
    """
    where: Any = {"cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    rotary: Any = {"cos": rotary_cos, "sin": rotary_sin, "first": rotary_seqlens, "interleaved": rotary_interleaved}
    packed: Any = {"cu_q": cu_seqlens_q, "cu_new": cu_seqlens_k_new, "qv": qv}
    descale: Any = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    more: Any = {"table": page_table, "table_name": "page_table", "descale": descale}
    mask = chunked_mask_of(causal, window_size, attention_chunk)
    call = CacheArguments(q, k_cache, v_cache, k, v, mask, softmax_scale, softcap, **where, **rotary, **packed, **more)
    o, lse = attend_cache(call)
    return (o, lse, torch.tensor([]), torch.tensor([])) if return_softmax_lse else o


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> None:
    """None, which is a valid scheduler_metadata, because Saccade makes and caches plans itself."""


def _split_heads(qkv: Tensor, num_heads_q: Any) -> tuple[Tensor, ...]:
    heads = qkv.shape[2]
    if num_heads_q is None:
        raise ValueError(f"qkv has shape {list(qkv.shape)} and no num_heads_q; expected [B, S, 3, H, D], or the number")
    number = whole("num_heads_q", num_heads_q)
    if not 0 < number < heads or (heads - number) % 2:
        raise ValueError(f"num_heads_q is {number} of {heads} heads; expected the rest to be equal shares for k and v")
    return qkv.split([number, (heads - number) // 2, (heads - number) // 2], 2)
