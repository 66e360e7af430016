"""The seven public functions of flash-attn 2, on CPUs and GPUs, in every dtype and head size that Saccade computes.

The module also has `bert_padding`, and the private functions on which implementations of ring attention are built.

Differences from flash-attn: lse of a row without keys is -inf (in flash-attn +inf or -inf, depending on the kernel);
pages may have any size; dropout follows Saccade's Philox pattern, and may be combined with `softcap`; S_dmask is not
padded to tiles of 128, and contains the exact weights (in flash-attn each row is off by a factor). With alibi_slopes
and `causal` without a left window, flash-attn's lse is larger by slope · (row + Tk - Tq); o and gradients are the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..arrays import ArrayOrTuple
from ..errors import Unsupported
from ..mask import Mask
from . import bert_padding
from .flash_arguments import check_numbers, check_packed, check_tensor, mask_of, outside_graphs
from .flash_cache import flash_attn_with_kvcache
from .flash_options import FlashOptions, attend_flash, slices_of
from .flash_packed import Sequences, attend_pages, check_rows, check_sequences, packed_mask
from .flash_private import backward as _flash_attn_backward
from .flash_private import forward as _flash_attn_forward
from .flash_private import varlen_backward as _flash_attn_varlen_backward
from .flash_private import varlen_forward as _flash_attn_varlen_forward

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
# the version of flash-attn whose signatures these are, not of this library; callers compare it
__version__ = "2.8.4"
# flash-attn's module of that name has the same functions
flash_attn_interface = sys.modules[__name__]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> ArrayOrTuple:
    """flash-attn's `flash_attn_func`; causal masks are bottom-right: the last query is aligned with the last key.

    Args:
        q: [B, Sq, Hq, D].
        k, v: [B, Sk, Hk, D]; Hk divides Hq.
        dropout_p, softmax_scale, softcap, deterministic: dropout, scale, softcap and deterministic of
            `saccade.attention`; softcap 0 for none.
        causal: hide keys after a query's own position.
        window_size: (left, right), how many keys before and after its position a query sees; -1 for no bound.
        alibi_slopes: [Hq] or [B, Hq].
        return_attn_probs: for tests only, also return lse and S_dmask. This takes O(Sq · Sk) time and memory.

    Returns:
        out [B, Sq, Hq, D]. With return_attn_probs (out, lse, S_dmask): lse float32 [B, Hq, Sq]; S_dmask
        [B, Hq, Sq, Sk] in the dtype of q without a gradient, the weights after the softmax, negative if dropout removed
        them; [0] without dropout.

    Raises:
        TypeError, ValueError, Unsupported: as in `saccade.attention`.

    Examples:
        >>> from saccade.integrations.flash_attn import flash_attn_func
        >>> q = k = v = torch.randn(2, 1024, 8, 64)
        >>> out = flash_attn_func(q, k, v, causal=True, window_size=(255, 0))
    """
    numbers = dropout_p, softmax_scale, causal, window_size, softcap
    options = FlashOptions(*numbers, alibi_slopes, deterministic, return_attn_probs)
    if return_attn_probs and dropout_p and torch.compiler.is_compiling():
        return _flash_attn_outside_graphs(q, k, v, *options)
    check_numbers(softmax_scale, softcap, dropout_p)
    return attend_flash(q, k, v, mask_of(causal, window_size), options).returned(return_attn_probs)


_flash_attn_outside_graphs = outside_graphs(flash_attn_func, "the weights that dropout removed")


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> ArrayOrTuple:
    """`flash_attn_func` of kv [B, Sk, 2, Hk, D]."""
    check_packed("kv", kv, 5, 2)
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> ArrayOrTuple:
    """`flash_attn_func` of qkv [B, S, 3, H, D]."""
    check_packed("qkv", qkv, 5, 3)
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> ArrayOrTuple:
    """flash-attn's `flash_attn_varlen_func`: attention of packed sequences.

    Args:
        q: [total_q, Hq, D], the queries of all sequences in order.
        k, v: [total_k, Hk, D]; or, with block_table, pages [pages, page_size, Hk, D], which have no gradient: a
            backward raises.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1]; sequence r has rows cu_seqlens[r] to cu_seqlens[r + 1].
        max_seqlen_q, max_seqlen_k: ignored; lengths are read from cu_seqlens.
        alibi_slopes: [Hq] or [B, Hq]. Each sequence is computed by a separate call if it has its own slopes, or if
            cu_seqlens_q and cu_seqlens_k differ.
        block_table: int32 [B, n], the pages of each sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Returns:
        out [total_q, Hq, D]. With return_attn_probs (out, lse, S_dmask): lse float32 [Hq, total_q], S_dmask
        [B, Hq, longest queries, longest keys], 0 after shorter sequences.

    Raises:
        TypeError, ValueError, Unsupported: as in `saccade.attention`.

    Examples:
        >>> from saccade.integrations.flash_attn import flash_attn_varlen_func
        >>> q = k = v = torch.randn(1024, 8, 64)  # sequences of 300 and 724 tokens
        >>> cu_seqlens = torch.tensor([0, 300, 1024], dtype=torch.int32)
        >>> out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 724, 724, causal=True)
    """
    numbers = dropout_p, softmax_scale, causal, window_size, softcap
    options = FlashOptions(*numbers, alibi_slopes, deterministic, return_attn_probs)
    check_rows(q, k, v, block_table is not None)
    cu, equal, own_slopes = (cu_seqlens_q, cu_seqlens_k), len(q) == len(k), False
    same = equal and cu_seqlens_q is cu_seqlens_k
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes)
        own_slopes = alibi_slopes.dim() == 2 or not same
    if (block_table is not None or own_slopes or (return_attn_probs and dropout_p)) and torch.compiler.is_compiling():
        return _varlen_outside_graphs(q, k, v, *cu, max_seqlen_q, max_seqlen_k, *options, block_table)
    check_numbers(softmax_scale, softcap, dropout_p)
    check_sequences(*cu, len(q), None if block_table is not None else len(k))
    mask = mask_of(causal, window_size)
    if block_table is not None:
        return _over_pages(q, k, v, cu, block_table, mask, options)
    if alibi_slopes is not None and own_slopes:
        same = same or (equal and _equal(cu_seqlens_q, cu_seqlens_k))
        if not same or alibi_slopes.dim() == 2:
            return _by_sequence(q, k, v, cu, options)
    at = Sequences(cu_seqlens_q, cu_seqlens_q if same else cu_seqlens_k)
    return attend_flash(q, k, v, packed_mask(mask, at, equal), options, cu).returned(return_attn_probs)


_varlen_outside_graphs = outside_graphs(
    flash_attn_varlen_func, "block_table, alibi_slopes of packed sequences, and the weights that dropout removed"
)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> ArrayOrTuple:
    """`flash_attn_varlen_func` of kv [total, 2, Hk, D]."""
    check_packed("kv", kv, 4, 2)
    cu = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *cu, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> ArrayOrTuple:
    """`flash_attn_varlen_func` of qkv [total, 3, H, D]."""
    check_packed("qkv", qkv, 4, 3)
    cu = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *cu, *args, **options)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, cu: tuple[Tensor, Tensor], options: FlashOptions) -> Any:
    # one call per sequence, because ALiBi distances count from each sequence's own diagonal
    slices, slopes = slices_of(cu), options.alibi_slopes
    assert slopes is not None
    if slopes.dim() == 2 and len(slopes) != len(slices):
        raise ValueError(f"alibi_slopes has shape {list(slopes.shape)}; expected [Hq] or [{len(slices)}, Hq]")
    parts: list[Any] = []
    for r, (rows, seen) in enumerate(slices):
        own = slopes if slopes.dim() == 1 else slopes[r : r + 1]
        of_sequence = options._replace(alibi_slopes=own, return_attn_probs=True)
        parts.append(flash_attn_func(q[None, rows], k[None, seen], v[None, seen], *of_sequence))
    # rows before the first and after the last sequence
    ends = int(cu[0][0]), len(q) - int(cu[0][-1])
    before, after = (q.new_zeros(n, q.shape[1], v.shape[-1]) for n in ends)
    o = torch.cat([before, *(part[0][0] for part in parts), after])
    if not options.return_attn_probs:
        return o
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    before, after = (q.new_full((q.shape[1], n), -torch.inf, dtype=wide) for n in ends)
    lse = torch.cat([before, *(part[1][0] for part in parts), after], 1)
    if not options.dropout_p:
        return o, lse, q.new_empty(0)
    most = [max((s[i].stop - s[i].start for s in slices), default=0) for i in (0, 1)]
    weights = q.new_zeros(len(slices), q.shape[1], *most)
    for own, (_, _, part) in zip(weights, parts, strict=True):
        own[:, : part.shape[2], : part.shape[3]] = part[0]
    return o, lse, weights


def _over_pages(
    q: Tensor, k: Tensor, v: Tensor, cu: tuple[Tensor, Tensor], table: Tensor, mask: Mask | None, options: FlashOptions
) -> Any:
    if options.dropout_p or options.alibi_slopes is not None:
        raise Unsupported("flash_attn", ["dropout and ALiBi are not computed over pages: gather the keys first"])
    numbers: dict[str, Any] = {"scale": options.softmax_scale, "softcap": options.softcap or None}
    o, lse = attend_pages(q, k, v, cu[0], cu[1].diff(), ("block_table", table), mask=mask, **numbers)
    return (o, lse, q.new_empty(0)) if options.return_attn_probs else o
