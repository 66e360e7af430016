"""Attention in one call for the queries of many sequences of different lengths, over keys in pages."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from .. import mask as masks
from ..api import decode
from ..arrays import Array, ArrayOrList, ArrayOrTuple
from ..frameworks.source import check_pages, check_table, host
from ..keywords import refuse
from ..mask import Mask
from ..mask.text import brief
from ..merge import merge
from ..problem import check_kind
from .choice import kind_of
from .sequences import Ints, PagedKeys, bounds_of
from .storage import Arrays

# a cascade saves more than its second call and merge cost if it reads at least this many fewer keys
WORTH = 1024
CAUSAL, FULL = masks.causal(), masks.full()


def paged_attention(
    q: Array,
    keys: PagedKeys,
    cu_q: ArrayOrList | None = None,
    *,
    mask: Mask | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    cascade: bool = True,
    deterministic: bool | str = True,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> ArrayOrTuple:
    """Attention of the newest tokens of many sequences, prefill and decode in one call, over keys in pages.

    Args:
        q: [n, Hq, D], the queries of all sequences in order, those of sequence r from cu_q[r] to cu_q[r + 1]. The last
            query of a sequence is its last token, at position lengths[r] - 1.
        keys: `PagedKVCache.view(sequences)` of R sequences, or a `PagedKeys` of your own arrays.
        cu_q: int [R + 1]; None if every sequence has the same number of queries.
        mask: as in `attention`, with i and j counted in each sequence, in addition to `causal`. It must not contain
            arrays.
        causal: True hides keys after a query's own position, with any mask; as in `decode`.
        cascade: read the pages of a common prefix once for all sequences, and merge the two results by lse. This is
            done only for causal attention without another mask, and only if it saves enough reads. It changes rounding,
            so it is not done with deterministic="batch".
        scale, softcap, sinks, deterministic, return_lse, backend: as in `attention`.

    Returns:
        o [n, Hq, Dv], with `return_lse` also lse [n, Hq].

    Raises:
        TypeError, ValueError, Unsupported: as in `attention`; ValueError for a block table with pages out of range.

    Examples:
        >>> cache = saccade.PagedKVCache(256, 16, 8, 64, dtype=torch.float32)
        >>> cu_q, sequences = [0, 100, 101], [cache.add(), cache.add()]  # 100 tokens and 1 token
        >>> q, k, v = torch.randn(3, 101, 8, 64)
        >>> cache.append(sequences, k, v, cu_q)
        >>> o = saccade.paged_attention(q, cache.view(sequences), cu_q)
    """
    if unknown:
        refuse(paged_attention, unknown)
    if type(causal) is not bool:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    if not hasattr(keys, "block_table"):
        raise TypeError(f"keys is {type(keys).__name__}; expected PagedKeys, as cache.view(sequences) returns them")
    if mask is None:
        mask = CAUSAL if causal else FULL
    else:
        check_kind(mask)
        if causal and mask != CAUSAL:
            mask = mask & CAUSAL
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "backend": backend}
    options["deterministic"], cascade = deterministic, cascade and deterministic != "batch"
    o, lse = attend_ragged(q, keys, cu_q, mask, cascade=cascade, appended=True, **options)
    return (o, lse) if return_lse else o


def attend_ragged(
    q: Any, keys: PagedKeys, cu_q: Any, mask: Mask, *, cascade: bool = True, appended: bool = False, **options: Any
) -> tuple[Any, Any]:
    """(o, lse) of `paged_attention`; a sequence may have more queries than keys, unless all are `appended`.

    The last query is at the position of the last key, so with a causal mask, queries before the first key see no key.
    options: those of `decode`.
    """
    lengths = host(keys.lengths)
    check_table(keys.block_table, lengths)
    if len(q.shape) != 3:
        raise ValueError(f"q has shape {list(q.shape)}; expected [tokens, Hq, D]")
    bounds = bounds_of("q", "cu_q", cu_q, len(lengths), int(q.shape[0]))
    if mask not in (CAUSAL, FULL) and mask.has_data:
        raise ValueError(f"mask is {brief(mask)}; expected one without arrays: they would have to fit every sequence")
    counts = np.diff(bounds)
    if appended and (counts > lengths).any():
        r = int((counts > lengths).argmax())
        raise ValueError(
            f"sequence {r} has {counts[r]} queries and {lengths[r]} tokens; expected at least as many tokens: append "
            f"the keys of new tokens first"
        )
    # results on a WebGPU device cannot be merged, and the gates of a query come after the shared pages
    share = cascade and mask in (CAUSAL,) and not hasattr(q, "gpu") and keys.gates is None
    if not len(counts) or (counts == counts[0]).all():
        n = int(counts[0]) if len(counts) else 0
        return _attend(q.reshape(len(counts), n, *q.shape[1:]), keys, lengths, mask, share, options)
    if not getattr(keys.block_table, "is_cuda", False):
        # check here, where errors can still name the rows of the whole table
        check_pages(host(keys.block_table), lengths, *keys.k.shape[:2])
    # sequences with the same number of queries are one problem
    take, parts = kind_of(q).take, list[tuple[Ints, Any, Any]]()
    for n in np.unique(counts[counts > 0]):
        rows = np.flatnonzero(counts == n)
        at = (bounds[rows][:, None] + np.arange(n)).reshape(-1)
        grouped = take([q], at).reshape(len(rows), int(n), *q.shape[1:])
        used = -(-int(lengths[rows].max()) // int(keys.k.shape[1]))
        table, stops = Arrays.take([keys.block_table], rows)[:, :used], Arrays.take([keys.lengths], rows)
        some = keys._replace(block_table=table, lengths=stops)
        parts.append((at, *_attend(grouped, some, lengths[rows], mask, share, options)))
    order = np.argsort(np.concatenate([at for at, _, _ in parts]))
    return take([o for _, o, _ in parts], order), take([lse for _, _, lse in parts], order)


def _attend(q: Any, keys: PagedKeys, lengths: Any, mask: Mask, share: bool, options: dict[str, Any]) -> tuple[Any, Any]:
    """(o, lse) of q [R, n, Hq, D], as [R * n, ...]; share: pages of a common prefix may be read once for all."""
    R, n, *rest = q.shape
    shared = _shared(keys, lengths, n) if share and R > 1 else 0
    if not shared:
        o, lse = decode(q, keys, mask=mask, causal=False, return_lse=True, **options)
        return o.reshape(R * n, *o.shape[2:]), lse.reshape(R * n, *lse.shape[2:])
    # every query sees all shared pages, so they are one problem with all queries
    tokens = shared * int(keys.k.shape[1])
    first = keys._replace(block_table=keys.block_table[:1, :shared], lengths=keys.lengths[:1] * 0 + tokens)
    left = keys._replace(block_table=keys.block_table[:, shared:], lengths=keys.lengths - tokens)
    without_sinks: dict[str, Any] = options | {"sinks": None}
    o, lse = decode(q.reshape(1, R * n, *rest), first, causal=False, return_lse=True, **without_sinks)
    return merge([(o[0], lse[0]), _attend(q, left, lengths, mask, False, options)])


def _shared(keys: PagedKeys, lengths: Any, n: int) -> int:
    """The number of leading pages that all sequences share, if reading them once is worth a second call; else 0."""
    table, page = host(keys.block_table), int(keys.k.shape[1])
    pages = int((lengths - n).min()) // page
    spared = page * (len(lengths) - 1)
    if pages * spared < WORTH:
        return 0
    same = (table[:, :pages] == table[:1, :pages]).all(0)
    pages = pages if same.all() else int(same.argmin())
    return pages if pages * spared >= WORTH else 0
