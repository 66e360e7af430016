"""Attention of flash-attn's functions over sequences in rows of a batch, packed, partly in use, or in pages."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention
from ..caches.ragged import attend_ragged
from ..caches.sequences import PagedKeys, bounds_of
from ..errors import Unsupported
from ..mask import Mask, documents, full, keys
from ..mask.algebra import contains
from ..operands import FP8
from .flash_arguments import (
    Forward,
    check_bounds,
    check_integers,
    check_numbers,
    check_tensor,
    looked_at,
    needs_gradient,
    outside_graphs,
)

# how to avoid qv where the call cannot join keys and values
JOIN = "hold torch.cat([k, v], -1) as keys, and give torch.cat([q, qv], -1) as q"


class Sequences(NamedTuple):
    """The bounds, int [B + 1], of sequences in packed q and k; None for rows of a batch.

    used_q, used_k: int [B], tokens of each sequence that are in use; None for all. first_k: int [B], the first key of
    each sequence. The last query in use is aligned with the last key in use.
    """

    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    first_k: Tensor | None = None


class Scores(NamedTuple):
    """The options of scores and weights. qv: [..., Hq, Dv]; qv · v is added to q · k.

    descale: the factors of 8-bit q, k and v, each [B, Hk] or None.
    """

    mask: Mask | None
    softmax_scale: float | None
    softcap: float | None
    deterministic: bool
    qv: Tensor | None = None
    sinks: Tensor | None = None
    descale: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)


# not a property, which Dynamo of torch 2.9 does not read from a tuple
def packed(at: Sequences) -> bool:
    """Whether the sequences become one packed row: with bounds, or if some rows of q are not in use."""
    return not (at.cu_q is at.cu_k is at.used_q is None)


def attend(q: Tensor, k: Tensor, v: Tensor, at: Sequences, scores: Scores) -> tuple[Tensor, Tensor]:
    """(o, lse): lse is [B, Hq, Sq] for q [B, Sq, Hq, D], and [Hq, total] for packed q [total, Hq, D].

    Rows that are not in use have o = 0 and lse = -inf, or the sink of their head.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    check_numbers(scores.softmax_scale, scores.softcap)
    options: dict[str, Any] = {
        "scale": scores.softmax_scale,
        "softcap": scores.softcap or None,
        "sinks": scores.sinks,
        "deterministic": scores.deterministic,
        "descale": _factors(q, k, packed(at), scores),
        "return_lse": True,
    }
    if scores.qv is not None:
        q, k = joined(q, k, v, scores.qv)
    rows, tokens, values, mask = laid_out(q, k, v, at, scores.mask)
    o, lse = attention(rows, tokens, values, mask, **options)
    if packed(at) and at.cu_q is None:
        o, lse = (x.unflatten(0, q.shape[:2]) for x in (o, lse))
    return o, lse.mT


def laid_out(q: Tensor, k: Tensor, v: Tensor, at: Sequences, mask: Mask | None) -> tuple[Tensor, Tensor, Tensor, Any]:
    """q, k, v and the mask for `attention`: rows of a batch, or one row of packed sequences."""
    if not packed(at):
        return q, k, v, _used_keys(mask, at, q, k)
    rows, cu_q = _flat("q", q, at.cu_q)
    tokens, cu_k = _flat("k", k, at.cu_k)
    values, _ = _flat("v", v, at.cu_k)
    check_sequences(cu_q, cu_k, len(rows), len(tokens))
    return rows, tokens, values, packed_mask(mask, at._replace(cu_q=cu_q, cu_k=cu_k), len(rows) == len(tokens))


def joined(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> tuple[Tensor, Tensor]:
    """q followed by qv, and k followed by v, whose product is q · k + qv · v."""
    check_qv(q, v, qv)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v has shape {list(v.shape)}; expected {[*k.shape[:-1], 'Dv']}, like k")
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def check_qv(q: Tensor, v: Tensor, qv: Any) -> None:
    """Raise unless qv has rows like q with the head size of v."""
    check_tensor("qv", qv)
    wanted = [*q.shape[:-1], v.shape[-1]]
    if list(qv.shape) != wanted or qv.dtype != q.dtype:
        raise ValueError(f"qv is {qv.dtype} {list(qv.shape)}; expected {q.dtype} {wanted}, rows of q, head size of v")


def check_sequences(cu_q: Any, cu_k: Any, rows: int, tokens: int | None) -> None:
    """Raise unless both are bounds of the same number of sequences."""
    check_bounds("cu_seqlens_q", cu_q, rows)
    check_bounds("cu_seqlens_k", cu_k, tokens)
    if len(cu_k) != len(cu_q):
        wanted = f"expected {len(cu_q) - 1}, as cu_seqlens_q"
        raise ValueError(f"cu_seqlens_k describes {len(cu_k) - 1} sequences; {wanted}")


def check_rows(q: Tensor, k: Tensor, v: Tensor, pages: bool = False) -> None:
    """Raise unless q, k and v are packed, [total, heads, D]; pages: k and v are pages, which are not checked."""
    for name, x in (("q", q),) if pages else (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        _check_dims(name, x, True)


def packed_mask(mask: Mask | None, at: Sequences, equal: bool) -> Mask:
    """The mask of packed sequences, with `mask` inside each; equal: whether q is as long as k."""
    cu_q, cu_k = at.cu_q, at.cu_k
    assert cu_q is not None
    assert cu_k is not None
    if at.used_q is at.used_k is at.first_k is None:
        # chunks count from the start of each sequence, the other masks along the diagonal, which starts at the first
        # pair if q is as long as k
        if cu_q is cu_k and equal and (mask is None or not contains(mask, "chunked")):
            inside = documents(cu_seqlens=cu_q)
            return inside if mask is None else inside & mask
        return documents(cu_q=cu_q, cu_k=cu_k, each=full() if mask is None else mask)
    (start, end_q), (first, end_k) = _ends("q", cu_q, at.used_q), _ends("k", cu_k, at.used_k)
    # for each sequence: the queries and keys in use, the unused queries, the unused keys
    of_q, of_k = [start, end_q, cu_q[1:]], [first, end_k, end_k]
    if at.first_k is not None:
        _check_used("leftpad_k", at.first_k, end_k - first)
        of_q, of_k = [start, *of_q], [first, first + at.first_k.to(first.device), end_k, end_k]
    bounds = [torch.cat([torch.stack(parts, 1).flatten(), cu[-1:]]).int() for parts, cu in ((of_q, cu_q), (of_k, cu_k))]
    return documents(cu_q=bounds[0], cu_k=bounds[1], each=full() if mask is None else mask)


def from_first(mask: Mask | None, first: Tensor, stop: Tensor, sizes: tuple[int, int]) -> Mask:
    """`mask` over the keys from `first` to `stop`, int [B]; chunks count from the first key. sizes: Tq and Tk."""
    members = [keys(first, stop)]
    for member in () if mask is None else mask.children if mask.kind == "and" else (mask,):
        if member.kind == "chunked":
            size: Any = member.args[0]
            # the positions of row 0 and of key 0, counted from the first key
            starts = zip(sizes, (stop - sizes[0] - first, -first), strict=True)
            ids = [(torch.arange(n, device=x.device) + x[:, None]) // size for n, x in starts]
            member = documents(*(x.int() for x in ids))
        members.append(member)
    return reduce(and_, members)


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    lengths: Tensor,
    table: tuple[str, Tensor],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(o, lse [Hq, total]) of packed q over pages [pages, page, Hk, D]; options: mask, and those of `decode`.

    table: its name and int [B, n]. There is no gradient, and a backward through the result raises.
    """
    if torch.compiler.is_compiling():
        return _pages_outside_graphs(q, k, v, cu_q, lengths, table, **options)
    name, entries = table
    sequences = len(cu_q) - 1
    check_integers(name, entries, (sequences, None), f"[{sequences}, n]")
    # lengths are needed on the host in any case, so the table is checked as well
    cu_q, lengths, entries = (x.cpu() for x in (cu_q, lengths, entries))
    if (lengths < 0).any():
        raise ValueError(f"the lengths of keys are {lengths.tolist()}; expected at least 0")
    bounds = bounds_of("q", "cu_seqlens_q", cu_q, len(entries), len(q))
    mask = options.pop("mask")
    pages = PagedKeys(k, v, entries, lengths.int())

    def compute() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return attend_ragged(q, pages, bounds, mask=full() if mask is None else mask, **options)

    reason = f"keys in pages of {name} have no gradient: call it under torch.no_grad(), or gather the keys first"
    inputs = [x for x in (q, k, v, *options.values()) if isinstance(x, Tensor)]
    o, lse = Forward.apply(compute, reason, *inputs) if needs_gradient(*inputs) else compute()
    return o, lse.mT


_pages_outside_graphs = outside_graphs(attend_pages, "calls over pages")


def _check_dims(name: str, x: Tensor, packed: bool) -> None:
    shape = "[total, heads, D], packed by cu_seqlens" if packed else "[B, S, heads, D]"
    if x.dim() != (3 if packed else 4):
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {shape}")


def _flat(name: str, x: Tensor, cu: Any) -> tuple[Tensor, Tensor]:
    # x as [total, H, D] with its bounds, also for rows of a batch
    _check_dims(name, x, cu is not None)
    if cu is not None:
        return x, cu
    B, S = x.shape[:2]
    return x.flatten(0, 1), torch.arange(B + 1, dtype=torch.int32, device=x.device) * S


def _used_keys(mask: Mask | None, at: Sequences, q: Tensor, k: Tensor) -> Mask | None:
    # the mask of rows of a batch: `mask`, bottom-right in the keys in use
    if at.used_k is None and at.first_k is None:
        return mask
    lengths = torch.full((len(k),), k.shape[1] if k.dim() == 4 else 0, dtype=torch.int32, device=k.device)
    if at.used_k is not None:
        _check_used("seqused_k", at.used_k, lengths)
        lengths = at.used_k
    if at.first_k is not None:
        _check_used("leftpad_k", at.first_k, lengths)
    if at.first_k is None:
        return keys(lengths) if mask is None else mask & keys(lengths)
    Tq, Tk = (x.shape[1] if x.dim() == 4 else 0 for x in (q, k))
    return from_first(mask, at.first_k.to(lengths.device), lengths, (Tq, Tk))


def _ends(side: str, cu: Tensor, used: Any) -> tuple[Tensor, Tensor]:
    if used is None:
        return cu[:-1], cu[1:]
    _check_used(f"seqused_{side}", used, cu.diff())
    return cu[:-1], cu[:-1] + used.to(cu.device)


def _check_used(name: str, used: Any, most: Tensor) -> None:
    check_integers(name, used, (len(most),), f"[{len(most)}], one per sequence")
    if looked_at(used, most) and not ((used >= 0) & (used <= most)).all():
        raise ValueError(f"{name} is {used.tolist()}; expected 0 to {most.tolist()}, the tokens of each sequence")


def _factors(q: Tensor, k: Tensor, packed: bool, scores: Scores) -> Any:
    # descale of `attention`, which has factors of q per query head
    asked = [f"{name}_descale" for name, x in zip("qkv", scores.descale, strict=True) if x is not None]
    if str(q.dtype)[6:] not in FP8:
        if asked:
            raise ValueError(f"{asked[0]} is given for {q.dtype} tensors; it belongs to 8-bit floats: leave it out")
        return None
    if scores.qv is not None:
        reason = "qv of 8-bit floats is not computed, because k and v have different factors: give bfloat16"
        raise Unsupported("flash_attn", [reason])
    if asked and packed:
        reason = f"{asked[0]} of packed sequences is not computed: call it for each sequence, or give bfloat16"
        raise Unsupported("flash_attn", [reason])
    heads, B = k.shape[-2], len(q)
    for name, x in zip("qkv", scores.descale, strict=True):
        if x is not None and tuple(x.shape) != (B, heads):
            raise ValueError(
                f"{name}_descale has shape {list(x.shape)}; expected [{B}, {heads}], sequences and key heads"
            )
    ones = torch.ones(heads, dtype=torch.float32, device=q.device)
    of_q, of_k, of_v = (ones if x is None else x for x in scores.descale)
    return of_q.repeat_interleave(q.shape[-2] // max(heads, 1), -1), of_k, of_v
