"""The slots of new tokens in flash-attn's caches: find and check them, rotate the tokens, and write them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..caches.sequences import PagedKeys
from ..caches.torch import TorchArrays
from ..mask import Mask
from ..rope import rotated
from .flash_arguments import check_integers, looked_at


class CacheArguments(NamedTuple):
    """The arguments of `flash_attn_with_kvcache` of FlashAttention-2 (which describes the arrays) and -3.

    cos, sin, interleaved: rotary tables and the layout of pairs. first: int [B], the positions of the first new tokens;
    None for the lengths. table, table_name: the block table and the caller's name for it. cu_q, cu_new: int [B + 1],
    bounds of packed q, and of packed k and v. qv: as in `flash_packed.Scores`. It is made with all arguments at once,
    because Dynamo of torch 2.11 cannot break a graph where `_replace` made it.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    mask: Mask | None
    softmax_scale: float | None
    softcap: float | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    first: Tensor | None
    interleaved: bool
    cu_q: Tensor | None = None
    cu_new: Tensor | None = None
    qv: Tensor | None = None
    table: Tensor | None = None
    table_name: str = "block_table"
    bias: Any = None
    alibi_slopes: Tensor | None = None
    descale: dict[str, Tensor | None] | None = None


class _CacheRows(NamedTuple):
    # keys and values of entry b in row b
    k: Tensor
    v: Tensor
    lengths: Tensor


class NewTokens(NamedTuple):
    """New tokens k [B, T, Hk, D] and v [B, T, Hk, Dv], or None; counts: int [B], how many of T exist, None for all."""

    k: Tensor | None
    v: Tensor | None
    T: int
    counts: Tensor | None = None

    def number(self, device: torch.device) -> Any:
        """The number of new tokens of each entry, int [B] on this device or one int."""
        return self.T if self.counts is None else self.counts.to(device)

    def inside(self, places: Tensor) -> Tensor:
        """bool [B, T], which of the tokens at these places exist."""
        if self.counts is None:
            return places == places
        return torch.arange(self.T, device=places.device) < self.counts.to(places.device)[:, None]


class Entries(NamedTuple):
    """The pages of entries, int32 [B, n] or None for row b, and their lengths before and after the append, int64 [B].

    reach: int [B] or one int, the number of tokens before the first page that is out of range.
    """

    table: Tensor | None
    lengths: Tensor
    after: Tensor
    reach: Any
    capacity: int

    def cache(self, k_cache: Tensor, v_cache: Tensor, ragged: bool = False) -> Any:
        """The cache with the new tokens for `decode`; in pages if ragged."""
        lengths, B = self.after.int(), len(self.after)
        if self.table is not None:
            return PagedKeys(k_cache, v_cache, self.table, lengths)
        if ragged:
            rows = torch.arange(B, dtype=torch.int32, device=lengths.device)[:, None]
            return PagedKeys(k_cache, v_cache, rows, lengths)
        return _CacheRows(k_cache[:B], v_cache[:B], lengths)


def entries(call: CacheArguments, B: int, new: NewTokens) -> Entries:
    """Find the slots of B entries and their new tokens, and check them."""
    table, rows, page, device = call.table, *call.k_cache.shape[:2], call.q.device
    if table is not None and call.cache_batch_idx is not None:
        raise ValueError(f"{call.table_name} is given with cache_batch_idx; expected one of them")
    whose = f"the {page} tokens of a row"
    if call.cache_batch_idx is not None:
        check_integers("cache_batch_idx", call.cache_batch_idx, (B,), f"[{B}], one per entry")
        # a row is one page
        name, table = "cache_batch_idx", call.cache_batch_idx[:, None]
    elif table is not None:
        name = call.table_name
        check_integers(name, table, (B, None), f"[{B}, n]")
        whose = f"{table.shape[1]} pages of {page} in {name}"
    else:
        if rows < B:
            raise ValueError(f"k_cache has {rows} rows; expected at least {B}, the entries of q")
        lengths = _lengths(call.cache_seqlens, B, new, page, whose, device).to(device)
        return Entries(None, lengths, (lengths + new.number(device)).clamp(0, page), page, page)
    capacity = table.shape[1] * page
    lengths = _lengths(call.cache_seqlens, B, new, capacity, whose, table.device)
    good = (table >= 0) & (table < rows)
    reach = good.long().cumprod(1).sum(1) * page
    if looked_at(lengths, table):
        _check_pages(name, table, lengths, reach, new, (page, rows))
    lengths, reach = lengths.to(device), reach.to(device)
    table = torch.where(good, table, 0).int().to(device)
    after = torch.minimum((lengths + new.number(device)).clamp(min=0), reach)
    return Entries(table, lengths, after, reach, capacity)


def _lengths(seqlens: Any, B: int, new: NewTokens, capacity: int, whose: str, device: torch.device) -> Tensor:
    """cache_seqlens as int64 [B], on its own device if it is a tensor; whose: what has this capacity, for messages."""
    if seqlens is None:
        seqlens = capacity
    if isinstance(seqlens, Tensor):
        check_integers("cache_seqlens", seqlens, (B,), f"[{B}], one per entry")
        listed: list[int] = seqlens.tolist() if looked_at(seqlens) else []
    elif isinstance(seqlens, (int, np.integer)) and not isinstance(seqlens, bool):
        seqlens = int(seqlens)
        listed = [seqlens] * (1 if new.counts is None else B)
    else:
        raise TypeError(f"cache_seqlens is {type(seqlens).__name__}; expected an int, or a tensor of integers [{B}]")
    more = [new.T] * len(listed) if new.counts is None else new.counts.tolist()
    for b, (n, T) in enumerate(zip(listed, more, strict=False)):
        if not 0 <= n <= capacity - T:
            name = f"cache_seqlens[{b}]" if isinstance(seqlens, Tensor) else "cache_seqlens"
            if n < 0:
                raise ValueError(f"{name} is {n}; expected at least 0")
            brought = f", and k brings {T} more" if T else ""
            raise ValueError(
                f"{name} is {n}{brought}: the cache would hold {n + T} tokens; expected at most {capacity}, {whose}"
            )
    if capacity < new.T:
        raise ValueError(f"k has {new.T} tokens; expected at most {capacity}, {whose}")
    return seqlens.long() if isinstance(seqlens, Tensor) else torch.full((B,), seqlens, device=device)


def _check_pages(
    name: str, table: Tensor, lengths: Tensor, reach: Tensor, new: NewTokens, sizes: tuple[int, int]
) -> None:
    page, rows = sizes
    short = (lengths + new.number(table.device) > reach).nonzero()
    if len(short):
        b = int(short[0])
        n = int(reach[b]) // page
        at, what = (f"[{b}]", "rows of k_cache") if name == "cache_batch_idx" else (f"[{b}, {n}]", "pages of k_cache")
        raise ValueError(f"{name}{at} is {int(table[b, n])}; expected 0 <= number < {rows}, the {what}")
    places = lengths[:, None] + torch.arange(new.T)
    pages = (places // page).clamp(max=max(table.shape[1] - 1, 0))
    slots = (table.long().gather(1, pages) * page + places % page)[new.inside(places)]
    if slots.unique().numel() < slots.numel():
        raise ValueError(f"{name} gives two tokens of k the same slot; expected different slots for each entry")


def append(call: CacheArguments, at: Entries, new: NewTokens) -> None:
    """Write the new tokens, except those beyond an entry's reach."""
    k, v, k_cache, page = new.k, new.v, call.k_cache, call.k_cache.shape[1]
    if k is None or v is None or not k_cache.shape[0] * page * new.T:
        return
    places = at.lengths[:, None] + torch.arange(new.T, device=k.device)
    reach = at.reach if at.table is None else at.reach[:, None]
    inside = (places >= 0) & (places < reach)
    if new.counts is not None:
        inside = inside & new.inside(places)
    if at.table is None:
        first, second = torch.arange(len(k), device=k.device)[:, None].expand_as(places), places
    else:
        first = at.table.long().gather(1, (places // page).clamp(0, at.table.shape[1] - 1))
        second = places % page
    first, second = first.reshape(-1).contiguous(), torch.where(inside, second, -1).reshape(-1)
    targets = [(x.reshape(-1, *x.shape[2:]), array, None, None) for x, array in ((k, k_cache), (v, call.v_cache))]
    TorchArrays.write(targets, first, second, None)


def rotated_both(call: CacheArguments, at: Entries, new: NewTokens) -> tuple[Tensor, Tensor]:
    """q and the new keys, rotated to their positions; without a mask all queries have that of the first new token."""
    q, k, cos, sin, T = call.q, new.k, call.cos, call.sin, new.T
    assert k is not None
    assert cos is not None
    assert sin is not None
    base = at.lengths
    if call.first is not None:
        check_integers("rotary_seqlens", call.first, (len(base),), f"[{len(base)}], one per entry")
        base = call.first.to(q.device).long()
    of_k = base[:, None] + torch.arange(T, device=q.device)
    if call.cu_q is None:
        # [B, Sq], the entry and the index of each query
        entry, step = torch.arange(len(q), device=q.device)[:, None], torch.arange(q.shape[1], device=q.device)[None]
    else:
        bounds = call.cu_q.to(q.device).long()
        entry = torch.repeat_interleave(torch.arange(len(base), device=q.device), bounds.diff())[None]
        step = torch.arange(len(q), device=q.device) - bounds[:-1][entry]
    of_q = base[entry] + (step if call.mask is not None else step * 0)
    if looked_at(base):
        used = torch.cat([of_q.flatten(), of_k[new.inside(of_k)]])
        least, needed = (int(used.min()), int(used.max()) + 1) if used.numel() else (0, 0)
        if least < 0:
            raise ValueError(f"rotary_seqlens is {base.tolist()}; expected positions of at least 0")
    else:
        # positions up to the capacity of the cache, and of the queries after it
        spread = of_q.shape[-1] if call.mask is not None and call.cu_q is None else 1
        needed = at.capacity + max(0, spread - T) if call.first is None else 0
    rows = len(cos)
    if rows < needed:
        raise ValueError(f"rotary_cos has {rows} rows; expected at least {needed}, the positions of k and q")
    of_q, of_k = of_q.clamp(0, max(0, rows - 1)), of_k.clamp(0, max(0, rows - 1))
    flat = q if call.cu_q is None else q[None]
    turned = _rotated(flat, cos, sin, of_q, call.interleaved).reshape(q.shape)
    return turned, _rotated(k, cos, sin, of_k, call.interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    # x [B, T, H, D] with its first 2 · cos.shape[1] elements rotated by rows `positions` [B, T] of the tables
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    cos, sin = (table[positions][:, :, None].to(wide) for table in (cos, sin))
    n = 2 * cos.shape[-1]
    return torch.cat([rotated(x[..., :n].to(wide), cos, sin, interleaved).to(x.dtype), x[..., n:]], -1)
