"""The seven public functions of flash-attn 2, on the CPU as on a GPU, in every dtype and head size that we compute.

Differences: lse of a row without keys is -inf (flash-attn says +inf or -inf, by its kernel); pages may have any size;
dropped weights are Philox's of ours, and `softcap` may stand beside dropout; S_dmask is not padded to tiles of 128, and
holds the weights as they are, where flash-attn's are off by a factor for each row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import alibi, attention, decode
from ..errors import Unsupported
from ..frameworks.call import Options
from ..frameworks.torch_run import describe_tensors
from ..frameworks.torch_weights import signed_weights
from ..mask import Mask, causal, documents, full, keys, window
from ..paged import PagedKeys
from ..ragged import paged_attention
from ..rope import rotated

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q [B, Sq, Hq, D], k, v [B, Sk, Hk, D] to out [B, Sq, Hq, D], causal bottom-right.

    window_size: keys from left before a query's position to right after it, -1 for no bound. alibi_slopes: [Hq] or
    [B, Hq]. return_attn_probs, for tests alone: (out, lse [B, Hq, Sq], S_dmask [B, Hq, Sq, Sk]), the last in the dtype
    of q and without a gradient: weights after the softmax, negative where dropout took one. It costs O(Sq·Sk) time and
    memory, in torch's own operations; without dropout it is empty, [0].
    """
    mask, seed = _mask(causal, window_size), _seed(return_attn_probs, dropout_p)
    o, lse = attention(
        q, k, v, mask, scale=softmax_scale, softcap=softcap or None, bias=_bias(alibi_slopes), dropout=dropout_p,
        seed=seed, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    if not return_attn_probs:
        return o
    if seed is None:
        return o, lse.transpose(1, 2), q.new_empty(0)
    options = Options(softmax_scale, softcap or None, dropout_p)
    blocks = [(b, slice(0, q.shape[1]), slice(0, k.shape[1])) for b in range(len(q))]
    return o, lse.transpose(1, 2), _signed(q, k, v, mask, alibi_slopes, options, lse, seed, blocks)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of kv [B, Sk, 2, Hk, D]."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of qkv [B, S, 3, H, D]."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **options)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """q [total, Hq, D], k, v [total, Hk, D] of sequences from cu_seqlens[r] to cu_seqlens[r + 1], int32 [B + 1].

    With block_table int32 [B, n] k and v are pages [pages, page, Hk, D], and there is no gradient. The lengths are
    read off cu_seqlens, not max_seqlen. return_attn_probs: (out, lse [Hq, total], S_dmask [B, Hq, longest of the
    queries, longest of the keys]), as of `flash_attn_func`, with 0 behind a shorter sequence.
    """
    mask = _mask(causal, window_size)
    if block_table is not None:
        if dropout_p or alibi_slopes is not None:
            raise Unsupported("flash_attn", ["dropout and ALiBi are not computed over pages: gather the keys first"])
        held = PagedKeys(k, v, block_table, cu_seqlens_k.diff().int())
        o, lse = paged_attention(
            q, held, cu_seqlens_q, mask=full() if mask is None else mask, scale=softmax_scale, softcap=softcap or None,
            return_lse=True,
        )  # fmt: skip
        return (o, lse.mT, q.new_empty(0)) if return_attn_probs else o
    same = cu_seqlens_q is cu_seqlens_k
    if alibi_slopes is not None and not same:
        raise Unsupported("flash_attn", ["ALiBi of packed sequences needs one cu_seqlens for queries and keys"])
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        raise Unsupported("flash_attn", ["slopes [B, Hq] of packed sequences: give [Hq], or pad to a batch"])
    inside = documents(cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, each=full() if mask is None else mask)
    if same:
        inside = documents(cu_seqlens=cu_seqlens_q)
        inside = inside if mask is None else inside & mask
    seed = _seed(return_attn_probs, dropout_p)
    o, lse = attention(
        q, k, v, inside, scale=softmax_scale, softcap=softcap or None, bias=_bias(alibi_slopes), dropout=dropout_p,
        seed=seed, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    if not return_attn_probs:
        return o
    if seed is None:
        return o, lse.mT, q.new_empty(0)
    bounds = [cu.tolist() for cu in (cu_seqlens_q, cu_seqlens_k)]
    of_q, of_k = ([slice(*pair) for pair in pairwise(cu)] for cu in bounds)
    blocks = [(0, rows, seen) for rows, seen in zip(of_q, of_k, strict=True)]
    options = Options(softmax_scale, softcap or None, dropout_p)
    return o, lse.mT, _signed(q[None], k[None], v[None], inside, alibi_slopes, options, lse[None], seed, blocks)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *args: Any,
    **options: Any,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of kv [total, 2, Hk, D]."""
    cu = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *cu, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of qkv [total, 3, H, D]."""
    cu = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *cu, *args, **options)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Append k, v [B, T, Hk, D] in place at cache_seqlens, and attend q [B, Sq, Hq, D] over what is there then.

    k_cache, v_cache: [Bc, capacity, Hk, D], entry b in row cache_batch_idx[b] (b, if None); or with block_table int32
    [B, n] pages [pages, page, Hk, D]. cache_seqlens: int or int [B]; None means full. cache_leftpad: int [B], the first
    key of each entry. rotary_cos, rotary_sin: [positions, rotary_dim / 2], applied to k at its place in the cache, to q
    at its own under causal or a window, else at cache_seqlens. num_splits is chosen by the plan. There is no gradient.

    Returns out [B, Sq, Hq, D], with return_softmax_lse also lse [B, Hq, Sq].
    """
    B, Sq = q.shape[:2]
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError("block_table is given with cache_batch_idx or cache_leftpad; expected one of them")
    table = block_table
    if table is None:
        # a row is one page
        rows = torch.arange(B, device=q.device) if cache_batch_idx is None else cache_batch_idx
        table = rows.int()[:, None]
    capacity = table.shape[1] * k_cache.shape[1]
    lengths = _lengths(cache_seqlens, B, capacity, q.device)
    mask = _mask(causal, window_size)
    if rotary_cos is not None:
        if rotary_sin is None or k is None:
            raise ValueError("rotary_cos needs rotary_sin and new keys k")
        steps = torch.arange(Sq, device=q.device) if mask is not None else torch.zeros(Sq, device=q.device).long()
        q = _rotated(q, rotary_cos, rotary_sin, lengths[:, None] + steps, rotary_interleaved)
        steps = torch.arange(k.shape[1], device=q.device)
        k = _rotated(k, rotary_cos, rotary_sin, lengths[:, None] + steps, rotary_interleaved)
    if k is not None:
        if v is None:
            raise ValueError("k is given without v; expected both or neither")
        _write(k_cache, v_cache, k, v, table, lengths, capacity)
        lengths = lengths + k.shape[1]
    if cache_leftpad is not None:
        real = keys(cache_leftpad.int(), lengths.int())
        mask = real if mask is None else mask & real
    held: Any = PagedKeys(k_cache, v_cache, table, lengths.int())
    if block_table is None and cache_batch_idx is None and len(k_cache) == B:
        held = _Cache(k_cache, v_cache, lengths.int())
    o, lse = decode(
        q, held, mask=mask, scale=softmax_scale, softcap=softcap or None, bias=_bias(alibi_slopes), return_lse=True
    )
    return (o, lse.transpose(1, 2)) if return_softmax_lse else o


class _Cache(NamedTuple):
    k: Tensor
    v: Tensor
    lengths: Tensor


def _lengths(given: int | Tensor | None, B: int, capacity: int, device: torch.device) -> Tensor:
    if isinstance(given, Tensor):
        return given.to(device).long()
    return torch.full((B,), capacity if given is None else given, device=device)


def _write(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, capacity: int
) -> None:  # fmt: skip
    at = lengths[:, None] + torch.arange(k.shape[1], device=k.device)
    if at.is_cpu and at.numel() and int(at.max()) >= capacity:
        raise ValueError(f"the cache would hold {int(at.max()) + 1} tokens; expected at most {capacity}, its capacity")
    page = k_cache.shape[1]
    pages = table.long().gather(1, at // page)
    k_cache[pages, at % page] = k
    v_cache[pages, at % page] = v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    # x [B, T, H, D]: its first 2 · cos.shape[1] elements turned by the rows `positions` [B, T] of the tables
    cos, sin = (table[positions][:, :, None].float() for table in (cos, sin))
    n = 2 * cos.shape[-1]
    return torch.cat([rotated(x[..., :n].float(), cos, sin, interleaved).to(x.dtype), x[..., n:]], -1)


def _mask(causally: bool, window_size: Any) -> Mask | None:
    left, right = (int(n) for n in window_size)
    if causally:
        right = 0
    if left < 0 and right < 0:
        return None
    if left < 0 and right == 0:
        return causal()
    return window(None if left < 0 else left, None if right < 0 else right)


def _bias(slopes: Tensor | None) -> Any:
    return None if slopes is None else alibi(slopes)


def _seed(probs: bool, dropout: float) -> int | None:
    # drawn here where the pattern is wanted once more
    return int(torch.randint(0, (1 << 63) - 1, ()).item()) if probs and dropout else None


def _signed(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, slopes: Tensor | None, options: Options, lse: Tensor, seed: int,
    blocks: list[tuple[int, slice, slice]],
) -> Tensor:  # fmt: skip
    problem = describe_tensors(q, k, v, mask, None, slopes, None, options)
    return signed_weights(problem, q, k, slopes, lse, seed, blocks)
