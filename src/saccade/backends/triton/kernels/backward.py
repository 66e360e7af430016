"""Backward by owners: each result has one owner, which adds its terms in an order that follows from the shape alone.

P = e^(S - lse)   dP = dO Vᵀ - dentropy (S - lse)   dS = P (dP - delta)   dQ = dS K   dK = dSᵀ Q   dV = Pᵀ dO
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

import triton

from .common import (
    Attention,
    Drop,
    Pairs,
    distance,
    dscore,
    inner,
    keep_mask,
    key_tile,
    only,
    plain_end,
    power,
    product,
    row_tile,
    score,
    visible,
)
from .masks import list_of, place_of, seen_by_all, segment, tile_of
from .rows import load_rows, rows_of, store_rows
from .selected import keys_at, list_at, plain_at, plain_keys, row_block


class Products(NamedTuple):
    """Inputs of `delta`: do and o as Array; dlse, entropy and dentropy float32 [B, Tq, Hq] or None."""

    do: Any
    o: Any
    dlse: Any
    entropy: Any
    dentropy: Any


class Queries(NamedTuple):
    """Rows of q and do, and their `sums_of` as columns; the other fields are those of `forward.Queries`."""

    rows: Any
    do: Any
    sums: Any
    b: Any
    h: Any
    t: Any
    hk: Any
    start: Any
    record: Any


class Keys(NamedTuple):
    """Rows of k and v and their keys j [BN]; the batch entry, the query head or one head per row, and the record of the
    mask of a step."""

    k: Any
    v: Any
    j: Any
    b: Any
    h: Any
    record: Any


class RowGradients(NamedTuple):
    """dq as Array; float32 or None: dslopes [B, Hq, classes, tiles], and dscores [B, Hq, Tq], dS summed over keys."""

    dq: Any
    dslopes: Any
    dscores: Any


class KeyGradients(NamedTuple):
    """dk and dv as Array; dscores, dS summed over rows, float32 [B, Hq, Tk], or None."""

    dk: Any
    dv: Any
    dscores: Any


@triton.jit(do_not_specialize=["rows", "Tq", "Hq"])
def delta(products, out, rows, Tq, Hq, blocks: tl.constexpr):
    """delta = Σ do o - dlse + dentropy entropy [B, Tq, Hq]. Grid: blocks of the flat (b, t, h)."""
    do, o, dlse, entropy, dentropy = products
    i = tl.program_id(0).to(tl.int64) * blocks.ROWS + tl.arange(0, blocks.ROWS)
    ok = i < rows
    h, bt = i % Hq, i // Hq
    t, b = bt % Tq, bt // Tq
    d = tl.arange(0, blocks.BLOCK)
    inside = ok[:, None] & (d < blocks.n)[None, :]
    b_do = tl.load((do.p + b * do.b + t * do.t + h * do.h)[:, None] + d[None, :], mask=inside, other=0.0)
    b_o = tl.load((o.p + b * o.b + t * o.t + h * o.h)[:, None] + d[None, :], mask=inside, other=0.0)
    # a row that sees no key has o = 0, and its do may have any value
    x = tl.sum(tl.where(b_o == 0.0, 0.0, b_do.to(tl.float32) * b_o.to(tl.float32)), 1)
    if dlse is not None:
        x = x - tl.load(dlse + i, mask=ok, other=0.0)
    if dentropy is not None:
        b_h = tl.load(entropy + i, mask=ok, other=0.0)
        # a row that sees no key has an entropy of 0, whose gradient may have any value
        x = x + tl.where(b_h == 0.0, 0.0, b_h * tl.load(dentropy + i, mask=ok, other=0.0))
    tl.store(out + i, x, mask=ok)


@triton.jit
def sums_of(arrays, place, b, h, t, ok):
    """(lse, share, delta, dentropy) of rows t; share is 1 if None, and dentropy unused. Rows that see no key get an lse
    that makes every weight 0."""
    at = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    x = tl.load(arrays.lse + at, mask=ok, other=float("-inf"))
    x = tl.where(x == float("-inf"), float("inf"), x)
    y = tl.full(x.shape, 1.0, tl.float32)
    if arrays.share is not None:
        y = tl.load(arrays.share + at, mask=ok, other=1.0)
    z = tl.load(arrays.delta + at, mask=ok, other=0.0)
    dentropy = z
    if arrays.dentropy is not None:
        dentropy = tl.load(arrays.dentropy + at, mask=ok, other=0.0)
    return x, y, z, dentropy


@triton.jit
def weights(s, x, dp, sums, seen, pairs, attention):
    """(P, P after dropout, gradient of the scores s, gradient of scale q . k) from x = q . k and dp = do . v.

    sums: `sums_of` the rows. All broadcast to the tile. seen: the visible pairs, None for all.
    """
    lse, share, delta, dentropy = sums
    p = power(s, lse, attention.config.EXACT) * share
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    used = p
    if attention.drop.below is not None:
        keep = keep_mask(attention.drop, attention.place, pairs)
        used = tl.where(keep, p * attention.scores.keep, 0.0)
        dp = tl.where(keep, dp * attention.scores.keep, 0.0)
    if attention.arrays.dentropy is not None:
        # the entropy is that of weights before dropout
        dp = dp - tl.where(p == 0.0, 0.0, dentropy * (s - lse))
    raw = p * (dp - delta)
    ds = dscore(raw, x, attention.scores)
    if seen is not None:
        raw, ds = tl.where(seen, raw, 0.0), tl.where(seen, ds, 0.0)
    return p, used, raw, ds


@triton.jit
def tall(sums):
    """Numbers per row, shaped as a column of a tile."""
    return sums[0][:, None], sums[1][:, None], sums[2][:, None], sums[3][:, None]


@triton.jit
def wide(sums):
    """Numbers per row, shaped as a row of a tile."""
    return sums[0][None, :], sums[1][None, :], sums[2][None, :], sums[3][None, :]


@triton.jit
def in_class(place, start, first, end, BLOCK: tl.constexpr):
    """The keys or rows first <= a < min(first + BLOCK, end) of a class that starts at `start`, and which exist."""
    a = first + tl.arange(0, BLOCK)
    return start + place.step * a, a < end


@triton.jit
def owned_rows(attention):
    """What a program owns: (number of its tile or group, batch entry, heads, key head, rows t [BM], which exist, first
    key of the class, first segment, end of the segments, record of the mask). Selected keys have no segments."""
    BM: tl.constexpr = attention.config.BM
    place = attention.place
    if attention.arrays.lists is None:
        cls, n, b, h, hk, tile = row_tile(place, BM)
        first, last, record = list_of(place, cls, b, h, n)
        owned = cls * place.n_tiles + n, b, h, hk, tile.at, tile.ok, tile.start, first, last, record
    else:
        n, b, h, hk, t, ok = row_block(place, attention.arrays.lists, BM)
        first, _last, record = list_of(place, 0, b, hk * place.G, 0)
        owned = n, b, h, hk, t, ok, 0, first, first, record
    return owned


@triton.jit
def of_keys(queries, attention, j, ok, MASKED: tl.constexpr):
    """(rows of k, P, raw, dS) of the queries and the keys j [BN] that are ok; raw is dS of the scores."""
    config: tl.constexpr = attention.config
    at = queries.b, queries.hk, j
    key = rows_of(attention.arrays.k, at, ok, config.D, config.BLOCK_D, MASKED)
    x = inner(queries.rows, key, config.D, config.BLOCK_D, config.EXACT)
    value = rows_of(attention.arrays.v, at, ok, config.DV, config.BLOCK_DV, MASKED)
    dp = inner(queries.do, value, config.DV, config.BLOCK_DV, config.EXACT)
    pairs = Pairs(queries.b, queries.h, queries.t[:, None], j[None, :], queries.record)
    s = score(x, attention.scores, attention.place, pairs)
    seen = None
    if MASKED:
        seen = visible(s, attention, pairs, ok[None, :])
    p, _, raw, ds = weights(s, x, dp, queries.sums, seen, pairs, attention)
    return key.tile, p, raw, ds


@triton.jit(do_not_specialize=["below", "seed_low", "seed_high"])
def refine(arrays, weighed, scores, below, seed_low, seed_high, config: tl.constexpr):
    """Write Σ P of one part to share, Σ P dP to weighed; ADD: add to them; LAST: write 1 / Σ P and a new delta instead.

    The rounding of neither lse nor o then enters the gradients. This applies to rows that see no other keys, whose
    weights with the sink's add up to 1 within lse's tolerance; other rows get 1 and keep their delta. Grid: as `dq`.
    """
    drop = Drop(below, seed_low, seed_high)
    _refine(weighed, Attention(arrays, scores, drop, place_of(arrays.words), config))


@triton.jit
def _refine(weighed, attention):
    config: tl.constexpr = attention.config
    D: tl.constexpr = config.D
    DV: tl.constexpr = config.DV
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    place = attention.place
    lists = attention.arrays.lists
    n, b, h, hk, t, ok, start, first, last, record = owned_rows(attention)
    at = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    b_q = rows_of(attention.arrays.q, (b, h, t), ok, D, config.BLOCK_D, True)
    b_do = rows_of(attention.arrays.do, (b, h, t), ok, DV, config.BLOCK_DV, True)
    b_lse = tl.load(attention.arrays.lse + at, mask=ok, other=float("-inf"))
    top = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
    total, sum_dp = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    if config.ADD:
        total = tl.load(attention.arrays.share + at, mask=ok, other=0.0)
        sum_dp = tl.load(weighed + at, mask=ok, other=0.0)
    dentropy = tl.zeros([BM], tl.float32)
    if attention.arrays.dentropy is not None:
        dentropy = tl.load(attention.arrays.dentropy + at, mask=ok, other=0.0)
    sums = tall((top, tl.full([BM], 1.0, tl.float32), tl.zeros([BM], tl.float32), dentropy))
    queries = Queries(b_q, b_do, sums, b, h, t, hk, start, record)
    if lists is not None:
        entries, stop = list_at(lists, b, hk, n)
        for k0 in range(0, stop, BN):
            j, inside = keys_at(place, lists, entries, k0, stop, BN)
            _k, p, raw, _ds = of_keys(queries, attention, j, inside, True)
            total += tl.sum(p, 1)
            sum_dp += tl.sum(raw, 1)
    for m in range(first, last):
        begin, end, _kind = segment(place, m)
        for k0 in range(begin, end, BN):
            j, inside = in_class(place, start, k0, end, BN)
            _k, p, raw, _ds = of_keys(queries, attention, j, inside, True)
            total += tl.sum(p, 1)
            sum_dp += tl.sum(raw, 1)
    if config.LAST:
        whole = total
        if attention.scores.sinks is not None:
            log_sink = tl.load(attention.scores.sinks + h) - b_lse
            sink = tl.where(b_lse == float("-inf"), 0.0, tl.exp(log_sink))
            whole += sink
            if attention.arrays.dentropy is not None:
                # the sink's part of Σ P dP
                sum_dp -= tl.where(sink == 0.0, 0.0, sink * dentropy * log_sink)
        # by how much lse is too small: all of the logarithm of the sum if a score is as low as -1e9
        apart = tl.abs(whole - 1.0)
        apart = tl.where(apart < 0.001, apart, tl.abs(tl.log(tl.maximum(whole, 1e-38))))
        own = (whole > 0.0) & (apart <= 9.5367431640625e-07 * tl.maximum(tl.abs(b_lse), 1.0))
        total = 1.0 / tl.where(own, whole, 1.0)
        x = sum_dp * total
        if attention.arrays.dlse is not None:
            x = x - tl.load(attention.arrays.dlse + at, mask=ok, other=0.0)
        tl.store(attention.arrays.delta + at, x, mask=ok & own)
    else:
        tl.store(weighed + at, sum_dp, mask=ok)
    tl.store(attention.arrays.share + at, total, mask=ok)


@triton.jit
def dq_step(state, queries, attention, grads, j, ok, MASKED: tl.constexpr):
    """Add dS K of the keys j [BN] that are ok to acc [BM, BLOCK_D].

    Where grads ask for them, dS times its distance is added to slopes and dS to sums, [BM] both.
    """
    acc, slopes, sums = state
    b_k, p, raw, ds = of_keys(queries, attention, j, ok, MASKED)
    if MASKED:
        b_k = only(b_k, tl.max(p, 0) > 0.0)
    if grads.dslopes is not None:
        pairs = Pairs(queries.b, queries.h, queries.t[:, None], j[None, :], queries.record)
        slopes -= tl.sum(raw * distance(attention.scores, pairs), 1)
    if grads.dscores is not None:
        sums += tl.sum(raw, 1)
    acc = product(ds.to(b_k.dtype), b_k, acc, attention.config.EXACT)
    return acc, slopes, sums


@triton.jit(do_not_specialize=["below", "seed_low", "seed_high"])
def dq(arrays, grads, scores, below, seed_low, seed_high, config: tl.constexpr):
    """The gradients of the rows of one part; with ADD they are added to the stored dq.

    Grid: as `forward`; with selected keys that of `selected.row_block`.
    """
    drop = Drop(below, seed_low, seed_high)
    _dq(grads, Attention(arrays, scores, drop, place_of(arrays.words), config))


@triton.jit
def _dq(grads, attention):
    config: tl.constexpr = attention.config
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    BLOCK_D: tl.constexpr = config.BLOCK_D
    place = attention.place
    lists = attention.arrays.lists
    n, b, h, hk, t, ok, start, first, last, record = owned_rows(attention)
    b_q = rows_of(attention.arrays.q, (b, h, t), ok, config.D, config.BLOCK_D, True)
    b_do = rows_of(attention.arrays.do, (b, h, t), ok, config.DV, config.BLOCK_DV, True)
    of_rows = tall(sums_of(attention.arrays, place, b, h, t, ok))
    queries = Queries(b_q, b_do, of_rows, b, h, t, hk, start, record)
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    slopes, sums = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    if lists is not None:
        entries, stop = list_at(lists, b, hk, n)
        plain = plain_keys(attention, entries, stop, seen_by_all(place, record, b, t, config.MASK))
        for k0 in range(0, plain, BN):
            j = plain_at(lists, entries, k0, BN)
            acc, slopes, sums = dq_step((acc, slopes, sums), queries, attention, grads, j, j >= 0, False)
        for k0 in range(plain, stop, BN):
            j, inside = keys_at(place, lists, entries, k0, stop, BN)
            acc, slopes, sums = dq_step((acc, slopes, sums), queries, attention, grads, j, inside, True)
    for m in range(first, last):
        begin, end, kind = segment(place, m)
        edge = plain_end(begin, end, kind, attention.scores, BN)
        for k0 in range(begin, edge, BN):
            j, inside = in_class(place, start, k0, end, BN)
            acc, slopes, sums = dq_step((acc, slopes, sums), queries, attention, grads, j, inside, False)
        # an empty loop would still fill its pipeline
        if edge < end:
            for k0 in range(edge, end, BN):
                j, inside = in_class(place, start, k0, end, BN)
                acc, slopes, sums = dq_step((acc, slopes, sums), queries, attention, grads, j, inside, True)
    acc = acc * attention.scores.scale
    if config.ADD:
        acc += load_rows(grads.dq, (b, h, t), ok, config.D, config.BLOCK_D).to(tl.float32)
    store_rows(grads.dq, (b, h, t), ok, acc, config.D, config.BLOCK_D)
    if grads.dslopes is not None:
        at = (b * place.Hq + h) * place.n_classes * place.n_tiles + n
        tl.store(grads.dslopes + at, tl.sum(tl.where(ok, slopes, 0.0), 0))
    if grads.dscores is not None:
        add_sums(grads.dscores, (b * place.Hq + h).to(tl.int64) * place.Tq, t, ok, sums)


@triton.jit
def add_sums(p, first, at, ok, sums):
    """Add sums to the stored numbers first + at."""
    p = p + first + at
    tl.store(p, tl.load(p, mask=ok, other=0.0) + sums, mask=ok)


@triton.jit
def dkdv_step(state, keys, attention, t, rows, inside, SUMS: tl.constexpr):
    """Add dSᵀ Q and Pᵀ dO of the rows t [BM] that exist to dk and dv, and with SUMS dS to sums [BN].

    inside: the pairs [BN, BM] that the mask is tested for, others are not visible; None if all of them are.
    """
    config: tl.constexpr = attention.config
    MASKED: tl.constexpr = inside is not None
    dk, dv, total = state
    at = keys.b, keys.h, t
    query = rows_of(attention.arrays.q, at, rows, config.D, config.BLOCK_D, MASKED)
    grad = rows_of(attention.arrays.do, at, rows, config.DV, config.BLOCK_DV, MASKED)
    sums = wide(sums_of(attention.arrays, attention.place, keys.b, keys.h, t, rows))
    x = inner(keys.k, query, config.D, config.BLOCK_D, config.EXACT)
    dp = inner(keys.v, grad, config.DV, config.BLOCK_DV, config.EXACT)
    b_q, b_do = query.tile, grad.tile
    pairs = Pairs(keys.b, keys.h, t[None, :], keys.j[:, None], keys.record)
    s = score(x, attention.scores, attention.place, pairs)
    seen = None
    if MASKED:
        seen = visible(s, attention, pairs, inside)
    p, used, raw, ds = weights(s, x, dp, sums, seen, pairs, attention)
    if MASKED:
        some = tl.max(p, 0) > 0.0
        b_q, b_do = only(b_q, some), only(b_do, some)
    if SUMS:
        total += tl.sum(raw, 1)
    dv = product(used.to(b_do.dtype), b_do, dv, config.EXACT)
    dk = product(ds.to(b_q.dtype), b_q, dk, config.EXACT)
    return dk, dv, total


@triton.jit(do_not_specialize=["below", "seed_low", "seed_high"])
def dkdv(arrays, grads, scores, below, seed_low, seed_high, config: tl.constexpr):
    """dk and dv of one part; the query heads of a group are added in order. The lists are those of key tiles of BN.

    Grid: key tiles x classes x B x Hk; programs take tiles in the order of the group's first head.
    """
    drop = Drop(below, seed_low, seed_high)
    _dkdv(grads, Attention(arrays, scores, drop, place_of(arrays.words), config))


@triton.jit
def _dkdv(grads, attention):
    config: tl.constexpr = attention.config
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    BLOCK_D: tl.constexpr = config.BLOCK_D
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    SUMS: tl.constexpr = grads.dscores is not None
    place = attention.place
    i = tl.program_id(0)
    Hk = place.Hq // place.G
    hk, i = i % Hk, i // Hk
    b, i = i % place.B, i // place.B
    cls = i % place.n_classes
    n = tile_of(place, cls, b, hk * place.G, i // place.n_classes)
    tile = key_tile(place, cls, n, BN)
    j, ok = tile.at, tile.ok
    b_k = rows_of(attention.arrays.k, (b, hk, j), ok, config.D, config.BLOCK_D, True)
    b_v = rows_of(attention.arrays.v, (b, hk, j), ok, config.DV, config.BLOCK_DV, True)
    acc_k = tl.zeros([BN, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BN, BLOCK_DV], tl.float32)
    for g in range(place.G):
        h = hk * place.G + g
        first, last, record = list_of(place, cls, b, h, n)
        keys = Keys(b_k, b_v, j, b, h, record)
        sums = tl.zeros([BN], tl.float32)
        for m in range(first, last):
            begin, end, kind = segment(place, m)
            edge = plain_end(begin, end, kind, attention.scores, BM)
            for q0 in range(begin, edge, BM):
                t, rows = in_class(place, tile.start, q0, end, BM)
                acc_k, acc_v, sums = dkdv_step((acc_k, acc_v, sums), keys, attention, t, rows, None, SUMS)
            # an empty loop would still fill its pipeline
            if edge < end:
                for q0 in range(edge, end, BM):
                    t, rows = in_class(place, tile.start, q0, end, BM)
                    inside = rows[None, :] & ok[:, None]
                    acc_k, acc_v, sums = dkdv_step((acc_k, acc_v, sums), keys, attention, t, rows, inside, SUMS)
        if grads.dscores is not None:
            add_sums(grads.dscores, (b * place.Hq + h).to(tl.int64) * place.Tk, j, ok, sums)
    acc_k = acc_k * attention.scores.scale
    if config.ADD:
        acc_k += load_rows(grads.dk, (b, hk, j), ok, config.D, config.BLOCK_D).to(tl.float32)
        acc_v += load_rows(grads.dv, (b, hk, j), ok, config.DV, config.BLOCK_DV).to(tl.float32)
    store_rows(grads.dk, (b, hk, j), ok, acc_k, config.D, config.BLOCK_D)
    store_rows(grads.dv, (b, hk, j), ok, acc_v, config.DV, config.BLOCK_DV)
