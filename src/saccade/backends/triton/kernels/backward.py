"""Backward by owners, each result written once, in an order that follows from the shape alone.

P = e^(S - lse)   dP = dO Vᵀ   dS = P (dP - delta)   dQ = dS K   dK = dSᵀ Q   dV = Pᵀ dO
"""

from __future__ import annotations

import triton.language as tl

import triton

from .common import Drop, distance, dscore, inner, kept, only, pairs, power, product, score
from .masks import FULL, class_of, list_of, place_of, segment, tile_of
from .rows import load_rows, rows_of, store_rows


@triton.jit(do_not_specialize=["rows", "Tq", "Hq"])
def delta(do, o, dlse, out, rows, Tq, Hq, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr):
    """delta = Σ do o - dlse [B, Tq, Hq], dlse or None. Grid: blocks of BM of the flat (b, t, h)."""
    i = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    ok = i < rows
    h, bt = i % Hq, i // Hq
    t, b = bt % Tq, bt // Tq
    d = tl.arange(0, BLOCK_DV)
    inside = ok[:, None] & (d < DV)[None, :]
    b_do = tl.load((do.p + b * do.b + t * do.t + h * do.h)[:, None] + d[None, :], mask=inside, other=0.0)
    b_o = tl.load((o.p + b * o.b + t * o.t + h * o.h)[:, None] + d[None, :], mask=inside, other=0.0)
    # a row that sees nothing has o = 0, and a do that may hold anything
    x = tl.sum(tl.where(b_o == 0.0, 0.0, b_do.to(tl.float32) * b_o.to(tl.float32)), 1)
    if dlse is not None:
        x = x - tl.load(dlse + i, mask=ok, other=0.0)
    tl.store(out + i, x, mask=ok)


@triton.jit
def sums_of(lse, share, delta, b, h, t, rows, place):
    """(lse, share, delta) of rows t, share None for 1; one that sees nothing has an lse that makes every weight 0."""
    at = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    x = tl.load(lse + at, mask=rows, other=float("-inf"))
    x = tl.where(x == float("-inf"), float("inf"), x)
    y = tl.full(x.shape, 1.0, tl.float32)
    if share is not None:
        y = tl.load(share + at, mask=rows, other=1.0)
    return x, y, tl.load(delta + at, mask=rows, other=0.0)


@triton.jit
def weights(
    s, x, dp, sums, seen, scores, place, drop, b, h, t, j, MASKED: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """(P, P after dropout, the gradient of the scores s, that of scale q . k) from x = q . k and dp = do . v.

    sums: (lse, share, delta) of the rows. All broadcast to the tile; seen is None unless MASKED.
    """
    lse, share, delta = sums
    p = power(s, lse, EXACT) * share
    if MASKED:
        p = tl.where(seen, p, 0.0)
    used = p
    if drop.below is not None:
        keep = kept(drop, place, b, h, t, j)
        used = tl.where(keep, p * drop.scale, 0.0)
        dp = tl.where(keep, dp * drop.scale, 0.0)
    raw = p * (dp - delta)
    ds = dscore(raw, x, scores)
    if MASKED:
        raw, ds = tl.where(seen, raw, 0.0), tl.where(seen, ds, 0.0)
    return p, used, raw, ds


@triton.jit
def tall(sums):
    """Numbers of rows as columns of a tile."""
    return sums[0][:, None], sums[1][:, None], sums[2][:, None]


@triton.jit
def wide(sums):
    """Numbers of rows as rows of a tile."""
    return sums[0][None, :], sums[1][None, :], sums[2][None, :]


@triton.jit(do_not_specialize=["drop_below", "seed_low", "seed_high"])
def refine(
    q, k, v, do, lse, share, weighed, delta, dlse, sinks, scores, words, drop_below, seed_low, seed_high, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Σ P and Σ P dP of one part, added to what share and weighed hold with ADD; with LAST 1 / Σ P and a new delta.

    Neither the rounding of lse nor that of o then enters the gradients. Only for rows that see these keys alone, whose
    weights with the sink's add up to 1 within lse's own tolerance; others get 1 and keep their delta. Grid: `forward`.
    """
    place = place_of(words)
    drop = Drop(drop_below, seed_low, seed_high, keep_scale)
    i = tl.program_id(0)
    h, i = i % place.Hq, i // place.Hq
    b, i = i % place.B, i // place.B
    cls = i % place.n_classes
    tile = tile_of(place, cls, b, h, i // place.n_classes)
    q_start, k_start, nq, _ = class_of(place, cls)
    hk = h // place.G
    a = tile * BM + tl.arange(0, BM)
    rows = a < nq
    t = q_start + place.step * a
    at = (b.to(tl.int64) * place.Tq + t) * place.Hq + h
    first, last, record = list_of(place, cls, b, h, tile)
    b_q = rows_of(q, b, h, t, rows, D, BLOCK_D, True)
    b_do = rows_of(do, b, h, t, rows, DV, BLOCK_DV, True)
    b_lse = tl.load(lse + at, mask=rows, other=float("-inf"))
    top = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
    total, sum_dp = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    if ADD:
        total, sum_dp = tl.load(share + at, mask=rows, other=0.0), tl.load(weighed + at, mask=rows, other=0.0)
    sums = top[:, None], tl.full([BM, 1], 1.0, tl.float32), tl.zeros([BM, 1], tl.float32)
    for n in range(first, last):
        begin, end, _kind = segment(place, n)
        for k0 in range(begin, end, BN):
            c = k0 + tl.arange(0, BN)
            keys = c < end
            j = k_start + place.step * c
            x = inner(b_q, rows_of(k, b, hk, j, keys, D, BLOCK_D, True), D, BLOCK_D, EXACT)
            dp = inner(b_do, rows_of(v, b, hk, j, keys, DV, BLOCK_DV, True), DV, BLOCK_DV, EXACT)
            s = score(x, scores, place, b, h, t[:, None], j[None, :])
            seen = pairs(s, place, record, scores, b, t[:, None], j[None, :], keys[None, :], MASK)
            p, _used, raw, _ds = weights(
                s, x, dp, sums, seen, scores, place, drop, b, h, t[:, None], j[None, :], True, EXACT
            )
            total += tl.sum(p, 1)
            sum_dp += tl.sum(raw, 1)
    if LAST:
        whole = total
        if sinks is not None:
            whole += tl.where(b_lse == float("-inf"), 0.0, tl.exp(tl.load(sinks + h) - b_lse))
        own = tl.abs(whole - 1.0) <= 9.5367431640625e-07 * tl.maximum(tl.abs(b_lse), 1.0)
        total = tl.where(own, 1.0 / whole, 1.0)
        x = sum_dp * total
        if dlse is not None:
            x = x - tl.load(dlse + at, mask=rows, other=0.0)
        tl.store(delta + at, x, mask=rows & own)
    else:
        tl.store(weighed + at, sum_dp, mask=rows)
    tl.store(share + at, total, mask=rows)


@triton.jit
def dq_step(
    acc, slopes, q, do, sums, k, v, scores, place, drop, record, b, h, hk, t, k0, end, k_start,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Add dS K of the class keys k0 <= a < min(k0 + BN, end) to acc [BM, BLOCK_D]; t and sums are [BM, 1]."""
    a = k0 + tl.arange(0, BN)
    j = k_start + place.step * a
    ok = a < end
    key = rows_of(k, b, hk, j, ok, D, BLOCK_D, MASKED)
    x = inner(q, key, D, BLOCK_D, EXACT)
    dp = inner(do, rows_of(v, b, hk, j, ok, DV, BLOCK_DV, MASKED), DV, BLOCK_DV, EXACT)
    b_k, j = key.tile, j[None, :]
    s = score(x, scores, place, b, h, t, j)
    seen = None
    if MASKED:
        seen = pairs(s, place, record, scores, b, t, j, ok[None, :], MASK)
    p, _, raw, ds = weights(s, x, dp, sums, seen, scores, place, drop, b, h, t, j, MASKED, EXACT)
    if MASKED:
        b_k = only(b_k, tl.max(p, 0) > 0.0)
    if SLOPES:
        slopes -= tl.sum(raw * distance(scores, b, t, j), 1)
    acc = product(ds.to(b_k.dtype), b_k, acc, EXACT)
    return acc, slopes


@triton.jit(do_not_specialize=["drop_below", "seed_low", "seed_high"])
def dq(
    q, k, v, do, dq, lse, share, delta, dslopes, scores, words, drop_below, seed_low, seed_high, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq of one part, added to what it holds with ADD; dslopes [B, Hq, classes, tiles] or None. Grid as `forward`."""
    place = place_of(words)
    drop = Drop(drop_below, seed_low, seed_high, keep_scale)
    i = tl.program_id(0)
    h, i = i % place.Hq, i // place.Hq
    b, i = i % place.B, i // place.B
    cls = i % place.n_classes
    tile = tile_of(place, cls, b, h, i // place.n_classes)
    q_start, k_start, nq, _ = class_of(place, cls)
    hk = h // place.G
    a = tile * BM + tl.arange(0, BM)
    rows = a < nq
    t = q_start + place.step * a
    first, last, record = list_of(place, cls, b, h, tile)
    b_q = rows_of(q, b, h, t, rows, D, BLOCK_D, True)
    b_do = rows_of(do, b, h, t, rows, DV, BLOCK_DV, True)
    sums = tall(sums_of(lse, share, delta, b, h, t, rows, place))
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    slopes = tl.zeros([BM], tl.float32)
    for n in range(first, last):
        begin, end, kind = segment(place, n)
        edge = begin
        if scores.bias is None:
            edge = tl.where(kind == FULL, begin + (end - begin) // BN * BN, begin)
        for k0 in range(begin, edge, BN):
            acc, slopes = dq_step(
                acc, slopes, b_q, b_do, sums, k, v, scores, place, drop, record, b, h, hk,
                t[:, None], k0, end, k_start, D, DV, BLOCK_D, BLOCK_DV, BN, False, MASK, EXACT,
                dslopes is not None,
            )  # fmt: skip
        # its pipeline would be filled for no key, too
        if edge < end:
            for k0 in range(edge, end, BN):
                acc, slopes = dq_step(
                    acc, slopes, b_q, b_do, sums, k, v, scores, place, drop, record, b, h, hk,
                    t[:, None], k0, end, k_start, D, DV, BLOCK_D, BLOCK_DV, BN, True, MASK, EXACT,
                    dslopes is not None,
                )  # fmt: skip
    acc = acc * scores.scale
    if ADD:
        acc += load_rows(dq, b, h, t, rows, D, BLOCK_D).to(tl.float32)
    store_rows(dq, b, h, t, rows, acc, D, BLOCK_D)
    if dslopes is not None:
        at = ((b * place.Hq + h) * place.n_classes + cls) * place.n_tiles + tile
        tl.store(dslopes + at, tl.sum(tl.where(rows, slopes, 0.0), 0))


@triton.jit
def dkdv_step(
    dk, dv, k, v, q, do, lse, share, delta, scores, place, drop, record, b, h, j, keys, q0, end, q_start,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    MASKED: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add dSᵀ Q and Pᵀ dO of the class rows q0 <= a < min(q0 + BM, end); j [BN, 1] are the keys, there where `keys`."""
    a = q0 + tl.arange(0, BM)
    t = q_start + place.step * a
    rows = a < end
    query = rows_of(q, b, h, t, rows, D, BLOCK_D, MASKED)
    grad = rows_of(do, b, h, t, rows, DV, BLOCK_DV, MASKED)
    sums = wide(sums_of(lse, share, delta, b, h, t, rows, place))
    x = inner(k, query, D, BLOCK_D, EXACT)
    dp = inner(v, grad, DV, BLOCK_DV, EXACT)
    b_q, b_do, t = query.tile, grad.tile, t[None, :]
    s = score(x, scores, place, b, h, t, j)
    seen = None
    if MASKED:
        seen = pairs(s, place, record, scores, b, t, j, rows[None, :] & keys, MASK)
    p, used, _, ds = weights(s, x, dp, sums, seen, scores, place, drop, b, h, t, j, MASKED, EXACT)
    if MASKED:
        some = tl.max(p, 0) > 0.0
        b_q, b_do = only(b_q, some), only(b_do, some)
    dv = product(used.to(b_do.dtype), b_do, dv, EXACT)
    dk = product(ds.to(b_q.dtype), b_q, dk, EXACT)
    return dk, dv


@triton.jit(do_not_specialize=["drop_below", "seed_low", "seed_high"])
def dkdv(
    q, k, v, do, dk, dv, lse, share, delta, scores, words, drop_below, seed_low, seed_high, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dk and dv of one part, its query heads added in their order. words holds the lists of key tiles of BN.

    Grid: key tiles x classes x B x Hk, in the order of the first head's.
    """
    place = place_of(words)
    drop = Drop(drop_below, seed_low, seed_high, keep_scale)
    i = tl.program_id(0)
    Hk = place.Hq // place.G
    hk, i = i % Hk, i // Hk
    b, i = i % place.B, i // place.B
    cls = i % place.n_classes
    tile = tile_of(place, cls, b, hk * place.G, i // place.n_classes)
    q_start, k_start, _, nk = class_of(place, cls)
    c = tile * BN + tl.arange(0, BN)
    keys = c < nk
    j = k_start + place.step * c
    b_k = rows_of(k, b, hk, j, keys, D, BLOCK_D, True)
    b_v = rows_of(v, b, hk, j, keys, DV, BLOCK_DV, True)
    acc_k = tl.zeros([BN, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BN, BLOCK_DV], tl.float32)
    for g in range(place.G):
        h = hk * place.G + g
        first, last, record = list_of(place, cls, b, h, tile)
        for n in range(first, last):
            begin, end, kind = segment(place, n)
            edge = begin
            if scores.bias is None:
                edge = tl.where(kind == FULL, begin + (end - begin) // BM * BM, begin)
            for q0 in range(begin, edge, BM):
                acc_k, acc_v = dkdv_step(
                    acc_k, acc_v, b_k, b_v, q, do, lse, share, delta, scores, place, drop, record, b, h, j[:, None],
                    keys[:, None], q0, end, q_start, D, DV, BLOCK_D, BLOCK_DV, BM, False, MASK, EXACT,
                )  # fmt: skip
            # its pipeline would be filled for no key, too
            if edge < end:
                for q0 in range(edge, end, BM):
                    acc_k, acc_v = dkdv_step(
                        acc_k, acc_v, b_k, b_v, q, do, lse, share, delta, scores, place, drop, record, b, h, j[:, None],
                        keys[:, None], q0, end, q_start, D, DV, BLOCK_D, BLOCK_DV, BM, True, MASK, EXACT,
                    )  # fmt: skip
    acc_k = acc_k * scores.scale
    if ADD:
        acc_k += load_rows(dk, b, hk, j, keys, D, BLOCK_D).to(tl.float32)
        acc_v += load_rows(dv, b, hk, j, keys, DV, BLOCK_DV).to(tl.float32)
    store_rows(dk, b, hk, j, keys, acc_k, D, BLOCK_D)
    store_rows(dv, b, hk, j, keys, acc_v, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["drop_below", "seed_low", "seed_high", "shape"])
def dbias(
    q, k, v, do, dbias, lse, share, delta, scores, words, shape, drop_below, seed_low, seed_high, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, MASK: tl.constexpr, EXACT: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Add dS of one part to dbias, contiguous of shape (batches, heads, Tq or 1, Tk); BY_ROW where it has Tq rows.

    Each element has one owner, which adds the batch entries, heads and rows that share it, in their order.
    Grid: key tiles x classes x blocks of BM class rows (1 unless BY_ROW) x batches x heads of dbias.
    """
    place = place_of(words)
    drop = Drop(drop_below, seed_low, seed_high, keep_scale)
    i = tl.program_id(0)
    n_tiles = place.n_tiles
    tile, i = i % n_tiles, i // n_tiles
    cls, i = i % place.n_classes, i // place.n_classes
    hb, i = i % shape.h, i // shape.h
    bb, block = i % shape.b, i // shape.b
    q_start, k_start, nq, nk = class_of(place, cls)
    c = tile * BN + tl.arange(0, BN)
    keys = c < nk
    j = k_start + place.step * c
    acc = tl.zeros([BN, BM], tl.float32)
    # what rounding left out of it so far
    lost = tl.zeros([BN, BM], tl.float32)
    for i_b in range(bb, tl.where(shape.b > 1, bb + 1, place.B)):
        b = i_b + 0 * tile
        for i_h in range(hb, tl.where(shape.h > 1, hb + 1, place.Hq)):
            h = i_h + 0 * tile
            b_k = rows_of(k, b, h // place.G, j, keys, D, BLOCK_D, True)
            b_v = rows_of(v, b, h // place.G, j, keys, DV, BLOCK_DV, True)
            first, last, record = list_of(place, cls, b, h, tile)
            for n in range(first, last):
                begin, end, _kind = segment(place, n)
                if BY_ROW:
                    # the block's rows stay where they are in acc
                    lo, hi = tl.maximum(begin, block * BM), tl.minimum(end, block * BM + BM)
                    begin, end = tl.where(lo < hi, block * BM, 0), tl.where(lo < hi, hi, 0)
                else:
                    lo = begin
                for q0 in range(begin, end, BM):
                    a = q0 + tl.arange(0, BM)
                    rows = (a < end) & (a >= lo)
                    t = q_start + place.step * a
                    sums = wide(sums_of(lse, share, delta, b, h, t, rows, place))
                    x = inner(b_k, rows_of(q, b, h, t, rows, D, BLOCK_D, True), D, BLOCK_D, EXACT)
                    dp = inner(b_v, rows_of(do, b, h, t, rows, DV, BLOCK_DV, True), DV, BLOCK_DV, EXACT)
                    t, there = t[None, :], rows[None, :] & keys[:, None]
                    s = score(x, scores, place, b, h, t, j[:, None])
                    seen = pairs(s, place, record, scores, b, t, j[:, None], there, MASK)
                    _p, _used, raw, _ds = weights(
                        s, x, dp, sums, seen, scores, place, drop, b, h, t, j[:, None], True, EXACT
                    )
                    more = raw - lost
                    total = acc + more
                    lost = (total - acc) - more
                    acc = total
    at = dbias + (bb * shape.h + hb).to(tl.int64) * shape.t * place.Tk
    if BY_ROW:
        a = block * BM + tl.arange(0, BM)
        t = q_start + place.step * a
        p = at + t.to(tl.int64)[None, :] * place.Tk + j[:, None]
        inside = keys[:, None] & (a < nq)[None, :]
        tl.store(p, tl.load(p, mask=inside, other=0.0) + acc, mask=inside)
    else:
        p = at + j
        tl.store(p, tl.load(p, mask=keys, other=0.0) + tl.sum(acc, 1), mask=keys)
