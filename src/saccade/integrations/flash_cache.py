"""flash-attn's attention over a cache that the call appends to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..api import decode
from ..caches.paged import PagedKeys
from ..caches.torch import TorchArrays
from ..errors import Unsupported
from ..mask import keys
from ..rope import rotated
from .flash_arguments import (
    bias_of,
    check_integers,
    check_numbers,
    check_tensor,
    looked_at,
    mask_of,
    needs_gradient,
    outside_graphs,
)


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
    names = "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "alibi_slopes"
    arrays = q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes
    for name, x in zip(names, arrays, strict=True):
        if needs_gradient(x):
            reason = f"{name} requires grad, and no gradient runs through a cache: give {name}.detach(), or call under "
            raise Unsupported("flash_attn", [reason + "torch.no_grad()"])
    paged = block_table is not None or cache_batch_idx is not None
    if paged and torch.compiler.is_compiling():
        rotary, where = (rotary_cos, rotary_sin), (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
        rest = softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits
        return _outside_graphs(q, k_cache, v_cache, k, v, *rotary, *where, *rest, return_softmax_lse)
    with torch.no_grad():
        _check_arrays(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin)
        check_numbers(softmax_scale, softcap)
        mask, bias = mask_of(causal, window_size), bias_of(alibi_slopes, len(q), q.shape[2])
        scores = softmax_scale, softcap or None, bias
        T = 0 if k is None else k.shape[1]
        at = _entries(q, k_cache, T, cache_seqlens, cache_batch_idx, block_table)
        if rotary_cos is not None and rotary_sin is not None and k is not None:
            spread = mask is not None
            q, k = _rotated_both(q, k, rotary_cos, rotary_sin, at, spread, rotary_interleaved)
        if cache_leftpad is not None:
            _check_padding(cache_leftpad, len(q), at.capacity)
            real = keys(cache_leftpad.to(q.device).int(), at.after.int())
            mask = real if mask is None else mask & real
        cache = at.cache(k_cache, v_cache)
        if k is not None and v is not None:
            if not torch.compiler.is_compiling():
                # without queries: what attention refuses, it refuses before anything is written
                _attend(q[:, :0], cache, mask, *scores)
            _append(k_cache, v_cache, k, v, at)
        o, lse = _attend(q, cache, mask, *scores)
    return (o, lse.transpose(1, 2)) if return_softmax_lse else o


_outside_graphs = outside_graphs(flash_attn_with_kvcache, "block_table and cache_batch_idx")


class _CacheRows(NamedTuple):
    # keys and values of entry b in row b
    k: Tensor
    v: Tensor
    lengths: Tensor


class _Entries(NamedTuple):
    """Where entries lie: table int32 [B, n] or None for row b; int64 [B] how many tokens before and after the append.

    reach: int [B] or one int, the tokens before the first page that is out of range.
    """

    table: Tensor | None
    lengths: Tensor
    after: Tensor
    reach: Any
    capacity: int

    def cache(self, k_cache: Tensor, v_cache: Tensor) -> Any:
        """The cache that `decode` reads once the new tokens are there."""
        lengths = self.after.int()
        if self.table is not None:
            return PagedKeys(k_cache, v_cache, self.table, lengths)
        return _CacheRows(k_cache[: len(lengths)], v_cache[: len(lengths)], lengths)


def _attend(q: Tensor, cache: Any, mask: Any, scale: float | None, softcap: float | None, bias: Any) -> Any:
    return decode(q, cache, mask=mask, causal=False, scale=scale, softcap=softcap, bias=bias, return_lse=True)


def _check_arrays(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> None:
    for name, x, dims in (("q", q, "[B, Sq, Hq, D]"), ("k_cache", k_cache, "4-D"), ("v_cache", v_cache, "4-D")):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected {dims}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        wanted = [*k_cache.shape[:3], "Dv"]
        raise ValueError(f"v_cache has shape {list(v_cache.shape)}; expected {wanted}, as k_cache")
    if (k is None) != (v is None):
        names = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{names[0]} is given without {names[1]}; expected both or neither")
    if (cos is None) != (sin is None) or (cos is not None and k is None):
        raise ValueError("rotary_cos needs rotary_sin and new keys k, and rotary_sin needs rotary_cos")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is None or k is None:
            continue
        check_tensor(name, x)
        wanted = [len(q), k.shape[1] if k.dim() == 4 else "T", *cache.shape[2:]]
        if list(x.shape) != wanted:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected {wanted}, as q, k and {name}_cache have it")
        if (x.dtype, x.device, x.layout) != (cache.dtype, cache.device, cache.layout):
            kinds = [f"{y.dtype} on {y.device}" for y in (x, cache)]
            raise TypeError(f"{name} is {kinds[0]}; expected {kinds[1]}, as {name}_cache")
    if cos is not None and sin is not None:
        fits = cos.dim() == 2 and cos.shape == sin.shape and 2 * cos.shape[1] <= q.shape[-1]
        if not fits:
            shapes = [list(x.shape) for x in (cos, sin)]
            raise ValueError(f"rotary_cos, rotary_sin have shapes {shapes}; expected [positions, at most D / 2] twice")


def _entries(
    q: Tensor, k_cache: Tensor, T: int, cache_seqlens: Any, cache_batch_idx: Any, block_table: Any
) -> _Entries:
    B, (rows, page) = len(q), k_cache.shape[:2]
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("block_table is given with cache_batch_idx; expected one of them")
    index: Any = block_table if cache_batch_idx is None else cache_batch_idx
    whose = f"the {page} tokens of a row"
    if index is None:
        if rows < B:
            raise ValueError(f"k_cache has {rows} rows; expected at least {B}, the entries of q")
        lengths = _lengths(cache_seqlens, B, T, page, whose, q.device).to(q.device)
        return _Entries(None, lengths, (lengths + T).clamp(0, page), page, page)
    if cache_batch_idx is not None:
        check_integers("cache_batch_idx", index, (B,), f"[{B}], one an entry")
        # a row is one page
        name, table = "cache_batch_idx", index[:, None]
    else:
        check_integers("block_table", index, (B, None), f"[{B}, n]")
        name, table, whose = "block_table", index, f"{index.shape[1]} pages of {page} in block_table"
    capacity = table.shape[1] * page
    lengths = _lengths(cache_seqlens, B, T, capacity, whose, table.device)
    good = (table >= 0) & (table < rows)
    reach = good.long().cumprod(1).sum(1) * page
    if looked_at(lengths, table):
        _check_pages(name, table, lengths, reach, T, page, rows)
    lengths, reach = lengths.to(q.device), reach.to(q.device)
    table = torch.where(good, table, 0).int().to(q.device)
    return _Entries(table, lengths, torch.minimum((lengths + T).clamp(min=0), reach), reach, capacity)


def _lengths(seqlens: Any, B: int, T: int, capacity: int, whose: str, device: torch.device) -> Tensor:
    """int64 [B] of cache_seqlens, where it lies if it is a tensor; whose: what the capacity is of."""
    if seqlens is None:
        seqlens = capacity
    if isinstance(seqlens, Tensor):
        check_integers("cache_seqlens", seqlens, (B,), f"[{B}], one an entry")
        listed: list[int] = seqlens.tolist() if looked_at(seqlens) else []
    elif isinstance(seqlens, (int, np.integer)) and not isinstance(seqlens, bool):
        seqlens = int(seqlens)
        listed = [seqlens]
    else:
        raise TypeError(f"cache_seqlens is {type(seqlens).__name__}; expected an int, or a tensor of integers [{B}]")
    for b, n in enumerate(listed):
        if not 0 <= n <= capacity - T:
            name = f"cache_seqlens[{b}]" if isinstance(seqlens, Tensor) else "cache_seqlens"
            if n < 0:
                raise ValueError(f"{name} is {n}; expected at least 0")
            more = f", and k brings {T} more" if T else ""
            raise ValueError(
                f"{name} is {n}{more}: the cache would hold {n + T} tokens; expected at most {capacity}, {whose}"
            )
    if capacity < T:
        raise ValueError(f"k has {T} tokens; expected at most {capacity}, {whose}")
    return seqlens.long() if isinstance(seqlens, Tensor) else torch.full((B,), seqlens, device=device)


def _check_pages(name: str, table: Tensor, lengths: Tensor, reach: Tensor, T: int, page: int, rows: int) -> None:
    short = (lengths + T > reach).nonzero()
    if len(short):
        b = int(short[0])
        n = int(reach[b]) // page
        at, what = (f"[{b}, {n}]", "pages of k_cache") if name == "block_table" else (f"[{b}]", "rows of k_cache")
        raise ValueError(f"{name}{at} is {int(table[b, n])}; expected 0 <= number < {rows}, the {what}")
    places = lengths[:, None] + torch.arange(T)
    slots = table.long().gather(1, places // page) * page + places % page
    if slots.unique().numel() < slots.numel():
        raise ValueError(f"{name} gives two tokens of k one place; expected places of its own for each entry")


def _check_padding(leftpad: Any, B: int, capacity: int) -> None:
    check_integers("cache_leftpad", leftpad, (B,), f"[{B}], one an entry")
    listed: list[int] = leftpad.tolist() if looked_at(leftpad) else []
    if listed and not 0 <= min(listed) <= max(listed) <= capacity:
        raise ValueError(f"cache_leftpad is {listed}; expected 0 to {capacity}, the tokens that an entry may hold")


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, at: _Entries) -> None:
    T, page = k.shape[1], k_cache.shape[1]
    if not k_cache.shape[0] * page * T:
        return
    places = at.lengths[:, None] + torch.arange(T, device=k.device)
    reach = at.reach if at.table is None else at.reach[:, None]
    inside = (places >= 0) & (places < reach)
    if at.table is None:
        first, second = torch.arange(len(k), device=k.device)[:, None].expand_as(places), places
    else:
        first = at.table.long().gather(1, (places // page).clamp(0, at.table.shape[1] - 1))
        second = places % page
    first, second = first.reshape(-1).contiguous(), torch.where(inside, second, -1).reshape(-1)
    targets = [(x.reshape(-1, *x.shape[2:]), array, None, None) for x, array in ((k, k_cache), (v, v_cache))]
    TorchArrays.write(targets, first, second, None)


def _rotated_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, at: _Entries, spread: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    # spread: whether each query has a position of its own
    (T, Sq), rows = (k.shape[1], q.shape[1]), len(cos)
    steps = torch.arange(max(T, Sq), device=q.device)
    of_q = at.lengths[:, None] + (steps[:Sq] if spread else steps[:Sq] * 0)
    of_k = at.lengths[:, None] + steps[:T]
    used = max(T, Sq if spread else 1)
    needed = at.capacity + max(0, used - T)
    if looked_at(at.lengths):
        needed = int(at.lengths.max()) + used if at.lengths.numel() else 0
    if rows < needed:
        raise ValueError(f"rotary_cos has {rows} rows; expected at least {needed}, the positions of k and q")
    of_q, of_k = of_q.clamp(0, max(0, rows - 1)), of_k.clamp(0, max(0, rows - 1))
    return _rotated(q, cos, sin, of_q, interleaved), _rotated(k, cos, sin, of_k, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    # x [B, T, H, D]: its first 2 · cos.shape[1] elements turned by the rows `positions` [B, T] of the tables
    cos, sin = (table[positions][:, :, None].float() for table in (cos, sin))
    n = 2 * cos.shape[-1]
    return torch.cat([rotated(x[..., :n].float(), cos, sin, interleaved).to(x.dtype), x[..., n:]], -1)
