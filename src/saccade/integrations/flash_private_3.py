"""The private functions of FlashAttention-3 that Megatron, Transformer Engine and yunchang call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from .flash_append import attend_cache
from .flash_arguments import check_numbers, check_tensor, chunked_mask_of, mask_of
from .flash_backward import Backward, write_gradients
from .flash_packed import Scores, Sequences, attend
from .flash_places import CacheArguments


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, accumulated out, accumulated lse) of every call of FlashAttention-3; the last two are empty.

    With k_new, page_table, kv_batch_idx or rotary_cos it is `flash_attn_with_kvcache` with lengths seqused_k; otherwise
    it is `flash_attn_varlen_func`, and rows of a batch need no cu_seqlens. leftpad_k: int [B], the first key of each
    sequence. out_: a tensor to which out is written as well.
    """
    mask = chunked_mask_of(causal, (window_size_left, window_size_right), attention_chunk)
    descale = q_descale, k_descale, v_descale
    if all(x is None for x in (k_new, page_table, kv_batch_idx, rotary_cos)):
        at = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k)
        o, lse = attend(q, k, v, at, Scores(mask, softmax_scale, softcap, True, qv, None, descale))
    else:
        if seqused_q is not None or cu_seqlens_k is not None:
            reason = "seqused_q and cu_seqlens_k with a cache are not computed: give cu_seqlens_q of the queries in use"
            raise Unsupported("flash_attn", [reason])
        where: Any = {"cache_seqlens": seqused_k, "cache_batch_idx": kv_batch_idx, "cache_leftpad": leftpad_k}
        rotary: Any = {"cos": rotary_cos, "sin": rotary_sin, "first": seqlens_rotary, "interleaved": rotary_interleaved}
        packed: Any = {"cu_q": cu_seqlens_q, "cu_new": cu_seqlens_k_new, "qv": qv}
        factors = dict(zip(("q_descale", "k_descale", "v_descale"), descale, strict=True))
        more: Any = {"table": page_table, "table_name": "page_table", "descale": factors}
        call = CacheArguments(q, k, v, k_new, v_new, mask, softmax_scale, softcap, **where, **rotary, **packed, **more)
        o, lse = attend_cache(call)
    if out_ is not None:
        o = written(out_, o, "out_")
    return o, lse.contiguous(), torch.tensor([]), torch.tensor([])


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Write the gradients into dq, dk and dv, and return the sums of dout · out, [B, Hq, Sq] or [Hq, total].

    out and softmax_lse may belong to more keys than k, as in a ring. sequed_q, sequed_k: seqused_q, seqused_k.
    """
    check_numbers(softmax_scale, softcap)
    call = Backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv))
    at = Sequences(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)
    numbers: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap or None, "deterministic": deterministic}
    return write_gradients(call, at, mask_of(is_causal, (window_size_left, window_size_right)), **numbers)


def written(out: Tensor, o: Tensor, name: str = "out") -> Tensor:
    """Write the result o to the caller's tensor and return that; raises ValueError unless it is like o."""
    check_tensor(name, out)
    if out.shape != o.shape or out.dtype != o.dtype:
        raise ValueError(f"{name} is {out.dtype} {list(out.shape)}; expected {o.dtype} {list(o.shape)}")
    return out.copy_(o)
