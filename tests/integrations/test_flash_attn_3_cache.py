"""FlashAttention-3's calls over a cache, in rows or pages, with equal or different lengths."""

from __future__ import annotations

import pytest
import torch

from saccade import Unsupported
from saccade.integrations import flash_attn_3 as ours

from .flash_reference import HK, HQ, SK, SQ, B, D, close, paged, plain, rand, sequences, wanted

DV = 8
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "causal chunks": {"attention_chunk": 4, "causal": True},
    "softcap and scale": {"softcap": 2.0, "softmax_scale": 0.4, "causal": True},
    "qv": {"qv": True, "causal": True},
}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["rows", "chosen rows", "pages"])
@pytest.mark.parametrize("ragged", [False, True])
def test_cache(name, kind, ragged) -> None:
    """New keys are written at the lengths; queries and new keys in rows of a batch, or packed."""
    options, lengths = dict(OPTIONS[name]), [6, 13]
    new, queries = ([2, 4], [5, 1]) if ragged else ([3, 3], [3, 3])
    if options.pop("qv", False):
        options["qv"] = rand(sum(queries), HQ, DV, seed=60)
        if kind != "rows":
            return
    old = [(rand(n, HK, D, seed=n), rand(n, HK, DV, seed=n + 1)) for n in lengths]
    k, v, q = rand(6, HK, D, seed=40), rand(6, HK, DV, seed=41), rand(6, HQ, D, seed=50)
    cu_new, cu_q = ints(0, new[0], 6), ints(0, queries[0], 6)
    caches = [torch.full((4 if kind != "rows" else 2, 24, HK, d), 7.0) for d in (D, DV)]
    where, table = {}, [[2], [0]] if kind == "chosen rows" else [[0], [1]]
    if kind == "chosen rows":
        where["cache_batch_idx"] = ints(2, 0)
    if kind == "pages":
        caches, table = [x.reshape(12, 8, HK, x.shape[-1]) for x in caches], [[5, 9, 1], [0, 11, 7]]
        where["page_table"] = torch.tensor(table, dtype=torch.int32)
    page = caches[0].shape[1]
    for b, pair in enumerate(old):
        for cache, x in zip(caches, pair, strict=True):
            for j in range(lengths[b]):
                cache[table[b][j // page], j % page] = x[j]
    given = {"qv": options.pop("qv", None)}
    want = sequences(
        q, torch.cat([old[0][0], k[: new[0]], old[1][0], k[new[0] :]]),
        torch.cat([old[0][1], v[: new[0]], old[1][1], v[new[0] :]]), cu_q,
        ints(0, lengths[0] + new[0], sum(lengths) + 6), **wanted(options), **given,
    )  # fmt: skip
    if ragged:
        where |= {"cu_seqlens_q": cu_q, "cu_seqlens_k_new": cu_new, "max_seqlen_q": 5}
    else:
        q, k, v = (x.unflatten(0, (2, 3)) for x in (q, k, v))
        given = {name: x if x is None else x.unflatten(0, (2, 3)) for name, x in given.items()}
    o, lse, *rest = ours.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=ints(*lengths), return_softmax_lse=True, **where, **options, **given
    )
    assert [x.numel() for x in rest] == [0, 0]
    flat = lse if ragged else lse.transpose(0, 1).flatten(1)
    close(o.reshape(6, HQ, DV), torch.cat([x for x, _ in want]))
    close(flat, torch.cat([x for _, x in want], 1))
    last = [lengths[b] + new[b] for b in range(2)]
    for b, n in enumerate(last):
        at = table[b][(n - 1) // page], (n - 1) % page
        assert torch.equal(caches[0][at], k[new[0] - 1 if b == 0 else -1] if ragged else k[b, -1])
        assert (caches[0][table[b][n // page], n % page :] == 7).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_rotary_positions_may_start_elsewhere(causal, ragged) -> None:
    """rotary_seqlens counts positions; the call equals one whose q and k were rotated by hand."""
    angle = torch.arange(40)[:, None] * 10.0 ** -torch.arange(D // 2)
    cos, sin, first, counts = angle.cos(), angle.sin(), [4, 20], [1, 3] if ragged else [2, 2]
    caches = [rand(2, 12, HK, D, seed=s) for s in (1, 2)]
    q, k, v = rand(4, HQ, D, seed=3), rand(4, HK, D, seed=4), rand(4, HK, D, seed=5)
    cu = ints(0, counts[0], 4)
    steps = torch.cat([torch.arange(n) for n in counts])
    base = torch.tensor(first).repeat_interleave(torch.tensor(counts))

    def turned(x, at):
        a, b = x.chunk(2, -1)
        c, s = cos[at][:, None], sin[at][:, None]
        return torch.cat([a * c - b * s, a * s + b * c], -1)

    by_hand = turned(q, base + steps if causal else base), turned(k, base + steps), v
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu} if ragged else {}
    given, plainly = ([x if ragged else x.unflatten(0, (2, 2)) for x in y] for y in ((q, k, v), by_hand))
    where = {"cache_seqlens": ints(5, 8), "causal": causal, **packed}
    want = ours.flash_attn_with_kvcache(plainly[0], *(x.clone() for x in caches), *plainly[1:], **where)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False, "rotary_seqlens": ints(*first)}
    found = ours.flash_attn_with_kvcache(given[0], *caches, *given[1:], **rotary, **where)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("kind", ["rows", "pages", "graph", "without a cache"])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window": (2, 1)}], ids=str)
def test_chunks_start_after_the_left_padding(kind, options) -> None:
    """As in hopper/seqlen.h and mask.h, where positions count from leftpad_k."""
    pad, lengths = [3, 1], [SK, 6]
    q, k, v = rand(B, SQ, HQ, D), rand(B, SK, HK, D, seed=1), rand(B, SK, HK, DV, seed=2)
    given = {"causal": options.get("causal", False), "attention_chunk": 4}
    left, right = options.get("window", (-1, -1))
    if kind == "without a cache":
        o = ours._flash_attn_forward(
            q, k, v, leftpad_k=ints(*pad), seqused_k=ints(*lengths), window_size_left=left, window_size_right=right,
            **given,
        )[0]  # fmt: skip
    else:
        where = {"cache_seqlens": ints(*lengths), "cache_leftpad": ints(*pad), "window_size": (left, right)}
        cache = k, v
        if kind == "pages":
            (pages, table), (values, _) = (paged(x.flatten(0, 1), ints(0, SK, 2 * SK), 4) for x in (k, v))
            cache, where = (pages, values), where | {"page_table": table}
        call = ours.flash_attn_with_kvcache
        if kind == "graph":
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        o = call(q, *cache, **where, **given)
    for b, n in enumerate(lengths):
        close(o[b], plain(q[b], k[b, :n], v[b, :n], first=pad[b], chunk=4, **options)[0], b)


X = rand(B, SQ, HQ, D)
SHORT = rand(B, SQ, HK, D)
CACHE = rand(B, SK, HK, D)
REFUSED = {
    "cache descale": (
        lambda: ours.flash_attn_with_kvcache(X, CACHE, CACHE, k_descale=rand(B, HK)), Unsupported, "PagedKVCache",
    ),
    "qv of pages": (
        lambda: ours.flash_attn_with_kvcache(X, CACHE, CACHE, qv=X, page_table=ints(0, 1)[:, None]), Unsupported,
        r"qv with page_table is not computed.*torch.cat\(\[k, v\], -1\)",
    ),
    "padding of ragged": (
        lambda: ours.flash_attn_with_kvcache(X[0], CACHE, CACHE, cache_leftpad=ints(0, 0), cu_seqlens_q=ints(0, 3, 7)),
        Unsupported, "cache_leftpad with cu_seqlens_q",
    ),
    "ragged": (
        lambda: ours.flash_attn_with_kvcache(X[0], CACHE, CACHE, cu_seqlens_q=ints(0, 3, 6)), ValueError,
        r"cu_seqlens_q is \[0, 3, 6\]; expected numbers from 0 to 7",
    ),
    "new": (
        lambda: ours.flash_attn_with_kvcache(
            X, CACHE, CACHE, SHORT[0], SHORT[0], cache_seqlens=0, cu_seqlens_k_new=ints(0, 7)
        ), ValueError, r"cu_seqlens_k_new is int32 \[2\]; expected integers \[3\]",
    ),
    "too many": (
        lambda: ours.flash_attn_with_kvcache(
            X, CACHE, CACHE, SHORT[0], SHORT[0], cache_seqlens=ints(8, 6), cu_seqlens_k_new=ints(0, 1, 7)
        ), ValueError, r"cache_seqlens\[1\] is 6, and k brings 6 more",
    ),
    "first position": (
        lambda: ours.flash_attn_with_kvcache(
            X, CACHE, CACHE, SHORT, SHORT, rotary_cos=rand(30, 8), rotary_sin=rand(30, 8), cache_seqlens=0,
            rotary_seqlens=ints(-3, 0),
        ), ValueError, r"rotary_seqlens is \[-3, 0\]; expected positions of at least 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_leaves_the_cache_as_it_was(name) -> None:
    call, kind, words = REFUSED[name]
    before = CACHE.clone()
    with pytest.raises(kind, match=words):
        call()
    assert torch.equal(CACHE, before)


def test_qv_with_packed_queries_and_more_rows_than_sequences() -> None:
    q, qv, k, v = rand(4, HQ, D, seed=1), rand(4, HQ, DV, seed=2), rand(2, 2, HK, D, seed=3), rand(2, 2, HK, DV, seed=4)
    caches = [(rand(n, 16, HK, D, seed=5), rand(n, 16, HK, DV, seed=6)) for n in (2, 3)]
    caches[1][0][:2], caches[1][1][:2] = caches[0]
    results = [
        ours.flash_attn_with_kvcache(
            q, *cache, k, v, qv=qv, cache_seqlens=ints(3, 5), cu_seqlens_q=ints(0, 2, 4), causal=True
        )
        for cache in caches
    ]
    torch.testing.assert_close(*results)
    for few, more in zip(*caches, strict=True):
        assert torch.equal(few, more[:2])
