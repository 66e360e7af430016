"""Attention of ragged queries, those of many sequences in one call, over keys in pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import mask as masks
from ..api import decode
from ..arrays import is_torch, namespace
from ..frameworks.source import check_pages, check_table
from ..mask import Mask
from ..mask.text import brief
from ..merge import merge
from .paged import Ints, PagedKeys
from .storage import bounds_of

# keys that a cascade spares, from which it is worth a second call and a merge
WORTH = 1024
CAUSAL, FULL = masks.causal(), masks.full()


def paged_attention(
    q: Any, keys: PagedKeys, cu_q: Any = None, *, mask: Mask | None = None, causal: bool = True,
    scale: float | None = None, softcap: float | None = None, sinks: Any = None, cascade: bool = True,
    return_lse: bool = False, backend: str | None = None,
) -> Any:  # fmt: skip
    """Attention of the newest tokens of many sequences, prefill and decode in one call, over keys in pages (S26).

    Args:
        q: [n, Hq, D], the queries of one sequence after the other, those of sequence r from cu_q[r] to cu_q[r + 1]; the
            last of them is the sequence's last token, at position lengths[r] - 1.
        keys: of R sequences, `PagedKVCache.view(sequences)` or a `PagedKeys` of arrays of your own.
        cu_q: int [R + 1]; None where every sequence has as many queries.
        mask: as in `attention`, with i and j counted in each sequence, on top of `causal`. It may hold no arrays.
        causal: each query sees no key behind its own position, whatever the mask; as in `decode`.
        cascade: where sequences begin with the same pages, read those once for all of them and merge the two results
            by their lse. For causal attention without another mask, and where it pays; the bits differ from those of
            False.
        scale, softcap, sinks, return_lse, backend: as in `attention`.

    Returns:
        o [n, Hq, Dv], with `return_lse` also lse [n, Hq].

    Raises:
        TypeError, ValueError, Unsupported: as `attention`; ValueError for a table that leads out of the pages.
    """
    if type(causal) is not bool:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    if mask is None:
        mask = CAUSAL if causal else FULL
    elif causal and mask != CAUSAL:
        mask = mask & CAUSAL
    o, lse = attend_ragged(
        q, keys, cu_q, mask=mask, scale=scale, softcap=softcap, sinks=sinks, cascade=cascade, backend=backend,
        appended=True,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def attend_ragged(
    q: Any, keys: PagedKeys, cu_q: Any, *, mask: Mask, scale: float | None = None, softcap: float | None = None,
    sinks: Any = None, cascade: bool = True, backend: str | None = None, appended: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """(o, lse) of `paged_attention`; a sequence may have more queries than keys, unless all are `appended`.

    The last query stands at the last key, so queries before the first key see none under a causal mask.
    """
    lengths = _host(keys.lengths)
    check_table(keys.block_table, lengths)
    if len(q.shape) != 3:
        raise ValueError(f"q has shape {list(q.shape)}; expected [tokens, Hq, D]")
    bounds = bounds_of("q", "cu_q", cu_q, len(lengths), int(q.shape[0]))
    if mask.has_data:
        raise ValueError(f"mask is {brief(mask)}; expected one without arrays: they would have to fit every sequence")
    counts = np.diff(bounds)
    if appended and (counts > lengths).any():
        r = int((counts > lengths).argmax())
        raise ValueError(
            f"sequence {r} has {counts[r]} queries and {lengths[r]} tokens; expected at least as many tokens: append "
            f"the keys of new tokens first"
        )
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "backend": backend}
    # results on a WebGPU device stay there, where nothing merges them
    share = cascade and mask == CAUSAL and not hasattr(q, "gpu")
    if not len(counts) or (counts == counts[0]).all():
        n = int(counts[0]) if len(counts) else 0
        o, lse = _attend(q.reshape(len(counts), n, *q.shape[1:]), keys, lengths, mask, share, options)
    else:
        if not getattr(keys.block_table, "is_cuda", False):
            # by the numbers of all sequences, for they are taken apart
            check_pages(_host(keys.block_table), lengths, *keys.k.shape[:2])
        # sequences with as many queries each are one problem
        parts: list[tuple[Ints, Any, Any]] = []
        for n in np.unique(counts[counts > 0]):
            rows = np.flatnonzero(counts == n)
            at = (bounds[rows][:, None] + np.arange(n)).reshape(-1)
            some, used = _rows_of(keys, rows, lengths), lengths[rows]
            grouped = _take([q], at).reshape(len(rows), int(n), *q.shape[1:])
            parts.append((at, *_attend(grouped, some, used, mask, share, options)))
        order = np.argsort(np.concatenate([at for at, _, _ in parts]))
        o, lse = (_take([part[i] for part in parts], order) for i in (1, 2))
    return o, lse


def _attend(
    q: Any, keys: PagedKeys, lengths: Any, mask: Mask, share: bool, options: dict[str, Any]
) -> tuple[Any, Any]:  # fmt: skip
    """(o, lse) of q [R, n, Hq, D], flat; share: whether pages that all sequences begin with may be read once."""
    R, n, *rest = q.shape
    shared = _shared(keys, lengths, n) if share and R > 1 else 0
    if not shared:
        o, lse = decode(q, keys, mask=mask, causal=False, return_lse=True, **options)
        return o.reshape(R * n, *o.shape[2:]), lse.reshape(R * n, *lse.shape[2:])
    # every query sees the shared pages whole, so they are one problem of all queries
    tokens = shared * int(keys.k.shape[1])
    first = keys._replace(block_table=keys.block_table[:1, :shared], lengths=keys.lengths[:1] * 0 + tokens)
    left = keys._replace(block_table=keys.block_table[:, shared:], lengths=keys.lengths - tokens)
    o, lse = decode(q.reshape(1, R * n, *rest), first, causal=False, return_lse=True, **options | {"sinks": None})
    own = _attend(q, left, lengths, mask, False, options)
    return merge([(o[0], lse[0]), own])


def _shared(keys: PagedKeys, lengths: Any, n: int) -> int:
    """Leading pages that all sequences have in common, where reading them once is worth a second call; else 0."""
    table, page = _host(keys.block_table), int(keys.k.shape[1])
    most = int((lengths - n).min()) // page
    if most * page * (len(lengths) - 1) < WORTH:
        return 0
    same = (table[:, :most] == table[:1, :most]).all(0)
    found = most if same.all() else int(same.argmin())
    return found if found * page * (len(lengths) - 1) >= WORTH else 0


def _rows_of(keys: PagedKeys, rows: Ints, lengths: Any) -> PagedKeys:
    used = -(-int(lengths[rows].max(initial=0)) // int(keys.k.shape[1]))
    return keys._replace(block_table=_take([keys.block_table], rows)[:, :used], lengths=_take([keys.lengths], rows))


def _host(x: Any) -> Any:
    return np.asarray(x.cpu() if is_torch(x) else x)


def _take(parts: Sequence[Any], at: Ints) -> Any:
    # rows `at` of arrays that count as one after the other, in place where they follow one another
    if hasattr(parts[0], "gpu"):
        from ..backends.webgpu.arrays import take_rows

        return take_rows(parts, at)
    x = parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts)
    if len(at) and at[-1] - at[0] + 1 == len(at) and (np.diff(at) == 1).all():
        return x[int(at[0]) : int(at[-1]) + 1]
    return x[sys.modules["torch"].from_numpy(at).to(x.device)] if is_torch(x) else x[at]
