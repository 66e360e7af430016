"""flash-attn's attention over a cache: new tokens are checked, rotated and written, then queries attend to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import decode
from ..caches.ragged import attend_ragged
from ..caches.sequences import bounds_of
from ..errors import Unsupported
from ..mask import Mask, full
from .flash_arguments import (
    check_bounds,
    check_integers,
    check_numbers,
    check_tensor,
    looked_at,
    needs_gradient,
    outside_graphs,
)
from .flash_packed import JOIN, check_qv, from_first, joined
from .flash_places import CacheArguments, NewTokens, append, entries, rotated_both


def attend_cache(call: CacheArguments) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]; for packed q out [total, Hq, Dv] and lse [Hq, total]."""
    _refuse(call)
    by_host = (call.table, call.cache_batch_idx, call.cu_q, call.cu_new)
    if torch.compiler.is_compiling() and any(x is not None for x in by_host):
        return _outside_graphs(call)
    with torch.no_grad():
        B = _check_arrays(call)
        check_numbers(call.softmax_scale, call.softcap)
        new = _new_tokens(call, B)
        at = entries(call, B, new)
        q, k = call.q, new.k
        if call.cos is not None and call.sin is not None and k is not None:
            q, k = rotated_both(call, at, new)
        if call.cache_leftpad is not None:
            _check_padding(call.cache_leftpad, B, at.capacity)

        def mask(Tq: int) -> Mask | None:
            if call.cache_leftpad is None:
                return call.mask
            first = call.cache_leftpad.to(call.q.device).int()
            return from_first(call.mask, first, at.after.int(), (Tq, at.capacity))

        if k is not None:
            if not torch.compiler.is_compiling():
                # a call without queries, which raises any error of attention before anything is written
                nothing = call.q.new_empty(B, 0, *call.q.shape[-2:])
                _attend(call._replace(cu_q=None), nothing, at.cache(call.k_cache, call.v_cache), mask(0))
            append(call, at, new._replace(k=k))
        k_cache, v_cache = call.k_cache, call.v_cache
        if call.qv is not None:
            v_cache = v_cache[:B]
            q, k_cache = joined(q, k_cache[:B], v_cache, call.qv)
        o, lse = _attend(call, q, at.cache(k_cache, v_cache, call.cu_q is not None), mask(q.shape[1]))
    return o, lse.mT


_outside_graphs = outside_graphs(attend_cache, "a table of pages, cache_batch_idx and cu_seqlens")


def _refuse(call: CacheArguments) -> None:
    names = "q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "alibi_slopes"
    arrays = call.q, call.k_cache, call.v_cache, call.k, call.v, call.qv, call.cos, call.sin, call.alibi_slopes
    for name, x in zip(names, arrays, strict=True):
        if needs_gradient(x):
            reason = f"{name} requires grad, and a cache has no gradient: give {name}.detach(), or call under "
            raise Unsupported("flash_attn", [reason + "torch.no_grad()"])
    reasons = [
        f"{name} with a cache is not computed: saccade.PagedKVCache(quantised=) and saccade.paged_attention hold codes"
        for name, x in (call.descale or {}).items()
        if x is not None
    ]
    if call.qv is not None and not (call.table is call.cache_batch_idx is None):
        other = call.table_name if call.table is not None else "cache_batch_idx"
        reasons.append(f"qv with {other} is not computed, because it would copy every page: {JOIN}")
    if call.cache_leftpad is not None and call.cu_q is not None:
        reasons.append(
            "cache_leftpad with cu_seqlens_q is not computed: give q as [B, Sq, Hq, D], without cu_seqlens_q"
        )
    if reasons:
        raise Unsupported("flash_attn", reasons)


def _attend(call: CacheArguments, q: Tensor, cache: Any, mask: Mask | None) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"scale": call.softmax_scale, "softcap": call.softcap or None}
    if call.cu_q is not None:
        bounds = bounds_of("q", "cu_seqlens_q", call.cu_q, len(cache.lengths), len(q))
        return attend_ragged(q, cache, bounds, full() if mask is None else mask, **options)
    return decode(q, cache, mask=mask, causal=False, bias=call.bias, return_lse=True, **options)


def _check_padding(leftpad: Any, B: int, capacity: int) -> None:
    check_integers("cache_leftpad", leftpad, (B,), f"[{B}], one per entry")
    listed: list[int] = leftpad.tolist() if looked_at(leftpad) else []
    if listed and not 0 <= min(listed) <= max(listed) <= capacity:
        raise ValueError(f"cache_leftpad is {listed}; expected 0 to {capacity}, the capacity of an entry")


def _check_arrays(call: CacheArguments) -> int:
    """Raise unless the shapes of the arrays fit; return the number of entries."""
    q, k_cache, v_cache, cos, sin = call.q, call.k_cache, call.v_cache, call.cos, call.sin
    shape = "[B, Sq, Hq, D]" if call.cu_q is None else "[total, Hq, D], packed by cu_seqlens_q"
    for name, x, dims in (("q", q, shape), ("k_cache", k_cache, "4-D"), ("v_cache", v_cache, "4-D")):
        check_tensor(name, x)
        if x.dim() != (3 if name == "q" and call.cu_q is not None else 4):
            raise ValueError(f"{name} has shape {list(x.shape)}; expected {dims}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        wanted = [*k_cache.shape[:3], "Dv"]
        raise ValueError(f"v_cache has shape {list(v_cache.shape)}; expected {wanted}, like k_cache")
    if (call.k is None) != (call.v is None):
        names = ("v", "k") if call.k is None else ("k", "v")
        raise ValueError(f"{names[0]} is given without {names[1]}; expected both or neither")
    if (cos is None) != (sin is None) or (cos is not None and call.k is None):
        raise ValueError("rotary_cos needs rotary_sin and new keys k, and rotary_sin needs rotary_cos")
    if cos is not None and sin is not None:
        fits = cos.dim() == 2 and cos.shape == sin.shape and 2 * cos.shape[1] <= q.shape[-1]
        if not fits:
            shapes = [list(x.shape) for x in (cos, sin)]
            raise ValueError(f"rotary_cos, rotary_sin have shapes {shapes}; expected [positions, at most D / 2] twice")
    if call.qv is not None:
        check_qv(q, v_cache, call.qv)
    if call.cu_q is None:
        return len(q)
    check_bounds("cu_seqlens_q", call.cu_q, len(q))
    bounds_of("q", "cu_seqlens_q", call.cu_q, len(call.cu_q) - 1, len(q))
    return len(call.cu_q) - 1


def _new_tokens(call: CacheArguments, B: int) -> NewTokens:
    k, v, cu = call.k, call.v, call.cu_new
    if k is None or v is None:
        return NewTokens(None, None, 0)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x)
    lead: list[Any] = (
        [len(k) if k.dim() == 3 else "tokens"] if cu is not None else [B, k.shape[1] if k.dim() == 4 else "T"]
    )
    for name, x, cache in (("k", k, call.k_cache), ("v", v, call.v_cache)):
        wanted = [*lead, *cache.shape[2:]]
        if list(x.shape) != wanted:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected {wanted}, to fit q, k and {name}_cache")
        if (x.dtype, x.device, x.layout) != (cache.dtype, cache.device, cache.layout):
            kinds = [f"{y.dtype} on {y.device}" for y in (x, cache)]
            raise TypeError(f"{name} is {kinds[0]}; expected {kinds[1]}, like {name}_cache")
        if any(n > 1 and step == 0 for n, step in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(f"{name}_cache is expanded: several tokens share one place; expected a place for each")
    same = not torch.compiler.is_compiling() and call.k_cache.data_ptr() == call.v_cache.data_ptr()
    if same and call.k_cache.shape == call.v_cache.shape and k.data_ptr() != v.data_ptr():
        raise ValueError("k_cache and v_cache share their memory; expected an array for each")
    if cu is None:
        return NewTokens(k, v, k.shape[1])
    bounds = torch.as_tensor(bounds_of("k", "cu_seqlens_k_new", cu, B, len(k)))
    counts = bounds.diff()
    T = int(counts.max()) if B else 0
    # rows beyond the count of a sequence contain tokens of other sequences; they are not written
    at = (bounds[:-1, None] + torch.arange(T)).clamp(max=max(len(k) - 1, 0)).to(k.device)
    return NewTokens(k[at], v[at], T, counts)
