"""FlashAttention-4's module `flash_attn.cute.interface`, on CPUs and GPUs, in every dtype that Saccade computes.

Signatures are those of flash-attn's main branch of August 2026. Functions return (out, lse). Arguments that tune its
kernels (`flash_arguments.HINTS`) are accepted and ignored; functions in its kernel language are refused
(`flash_arguments.REFUSED`). Differences: lse of a row without keys is -inf; 8-bit floats have no factors here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from .flash_arguments import check_integers, check_numbers, check_tensor, needs_gradient, refuse, signed_mask_of
from .flash_combine import flash_attn_combine as combined
from .flash_packed import JOIN, Scores, Sequences, attend, attend_pages

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]
# if k is v and has this head size, flash-attn treats q as qv
SHARED = 512


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """FlashAttention-4's `flash_attn_func`; causal masks are bottom-right: the last query is aligned with the last key.

    Args:
        q: [B, Sq, Hq, D].
        k: [B, Sk, Hk, D]; Hk divides Hq.
        v: [B, Sk, Hk, Dv].
        qv: [B, Sq, Hq, Dv]; the scores are softmax_scale (q · k + qv · v). Not with k that is v and has 512 columns.
        softmax_scale: factor of q · k; None for 1/sqrt(D), with qv 1/sqrt(D + Dv).
        causal: hide keys after a query's own position.
        window_size: (left, right), how many keys before and after its position a query sees; None for no bound.
        learnable_sink: [Hq], one logit per head that takes part in the softmax.
        softcap, deterministic: as in `saccade.attention`; softcap 0 for none.
        return_lse: return a differentiable lse.

    Returns:
        (out, lse): out [B, Sq, Hq, Dv]; lse [B, Hq, Sq], with qv [B, Sq, Hq]. Without return_lse lse is None, or a
        constant if an argument requires grad.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the call cannot be computed.

    Examples:
        >>> from saccade.integrations.flash_attn_4 import flash_attn_func
        >>> q = k = v = torch.randn(2, 1024, 8, 64)
        >>> out, lse = flash_attn_func(q, k, v, causal=True, learnable_sink=torch.zeros(8), return_lse=True)
    """
    refuse(gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    refuse(aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    refuse(block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    mask = signed_mask_of(causal, window_size)
    _check_sink(q, learnable_sink)
    _check_shared(k, v, qv)
    scores = Scores(mask, softmax_scale, softcap, deterministic, qv, learnable_sink)
    return _result(q, k, v, scores, attend(q, k, v, Sequences(), scores), return_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`flash_attn_func` of sequences, packed or in rows of a batch.

    Args:
        q: [B, Sq, Hq, D]; or, with cu_seqlens_q, packed [total, Hq, D].
        k, v: likewise, packed with cu_seqlens_k; or, with page_table, pages [pages, page_size, Hk, D], which have no
            gradient.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1]; sequence r has rows cu_seqlens[r] to cu_seqlens[r + 1].
        seqused_q, seqused_k: int32 [B], how many tokens of each sequence, from the first on, are in use; None for all.
            Other rows of out are 0.
        page_table: int32 [B, n], the pages of each sequence; it needs seqused_k.

    Returns:
        (out, lse): out like q with the head size of v; lse of packed q [Hq, total], with qv [total, Hq]. The other
        arguments, results and errors are those of `flash_attn_func`.

    Examples:
        >>> from saccade.integrations.flash_attn_4 import flash_attn_varlen_func
        >>> q = k = v = torch.randn(1024, 8, 64)  # sequences of 300 and 724 tokens
        >>> cu_seqlens = torch.tensor([0, 300, 1024], dtype=torch.int32)
        >>> out, _ = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)
    """
    refuse(gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    refuse(aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    mask = signed_mask_of(causal, window_size)
    _check_sink(q, learnable_sink)
    _check_shared(k, v, qv)
    scores = Scores(mask, softmax_scale, softcap, deterministic, qv, learnable_sink)
    at = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    pair = attend(q, k, v, at, scores) if page_table is None else _over_pages(q, k, v, at, page_table, scores)
    return _result(q, k, v, scores, pair, return_lse)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`flash_attn_3.flash_attn_combine` in FlashAttention-4's signature; cu_seqlens has no effect.

    Returns:
        (out, lse); lse is None without return_lse.

    Examples:
        >>> from saccade.integrations.flash_attn_4 import flash_attn_combine
        >>> out_partial, lse_partial = torch.randn(4, 2, 16, 8, 64), torch.randn(4, 2, 16, 8)  # 4 splits
        >>> out, _ = flash_attn_combine(out_partial, lse_partial, return_lse=False)
    """
    refuse(seqused=seqused)
    if cu_seqlens is not None:
        check_integers("cu_seqlens", cu_seqlens, (None,), "[sequences + 1]")
    o, lse = combined(out_partial, lse_partial, out, out_dtype)
    return o, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> None:
    """None, which is a valid scheduler_metadata, because Saccade makes and caches plans itself."""


def _check_sink(q: Tensor, sink: Any) -> None:
    check_tensor("q", q)
    if sink is None:
        return
    check_tensor("learnable_sink", sink)
    if sink.shape != q.shape[-2:-1]:
        raise ValueError(f"learnable_sink has shape {list(sink.shape)}; expected {list(q.shape[-2:-1])}, one per head")


def _check_shared(k: Tensor, v: Tensor, qv: Any) -> None:
    if qv is not None and _shared(k, v):
        reason = f"k is v and has {SHARED} columns, where FlashAttention-4 drops q: give qv as q, or v.clone() as v"
        raise Unsupported("flash_attn", [reason])


def _shared(k: Any, v: Any) -> bool:
    return k is v and isinstance(v, Tensor) and v.shape[-1] == SHARED


def _over_pages(q: Tensor, k: Tensor, v: Tensor, at: Sequences, table: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    check_numbers(scores.softmax_scale, scores.softcap)
    if at.used_k is None or at.cu_k is not None:
        raise ValueError("page_table needs seqused_k, the keys of each sequence, and no cu_seqlens_k")
    reasons = [
        f"{name} with page_table is not computed: {instead}"
        for name, x, instead in (
            ("seqused_q", at.used_q, "give the queries in use, packed by cu_seqlens_q"),
            ("qv", scores.qv, JOIN),
        )
        if x is not None
    ]
    if reasons:
        raise Unsupported("flash_attn", reasons)
    check_integers("seqused_k", at.used_k, (None,), "[B]")
    rows, cu_q = q, at.cu_q
    if cu_q is None:
        if q.dim() != 4:
            raise ValueError(f"q has shape {list(q.shape)}; expected [B, Sq, Hq, D], or cu_seqlens_q")
        rows, cu_q = q.flatten(0, 1), torch.arange(len(q) + 1) * q.shape[1]
    if len(at.used_k) != len(cu_q) - 1:
        raise ValueError(f"seqused_k has {len(at.used_k)} entries; expected {len(cu_q) - 1}, one per sequence")
    options: dict[str, Any] = {"scale": scores.softmax_scale, "softcap": scores.softcap or None, "sinks": scores.sinks}
    o, lse = attend_pages(rows, k, v, cu_q, at.used_k, ("page_table", table), mask=scores.mask, **options)
    return (o, lse) if at.cu_q is not None else (o.unflatten(0, q.shape[:2]), lse.mT.unflatten(0, q.shape[:2]).mT)


def _result(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, pair: tuple[Tensor, Tensor], return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    o, lse = pair
    if scores.qv is not None or _shared(k, v):
        lse = lse.mT
    if return_lse:
        return o, lse
    return o, lse.detach() if needs_gradient(q, k, v, scores.qv, scores.sinks) else None
