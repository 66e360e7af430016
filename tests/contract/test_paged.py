"""Keys in pages: prefill and decode of many sequences in one call, each compared with the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade import PagedKeys, PagedKVCache, reference
from saccade import mask as masks
from saccade.arrays import numpy_dtype
from saccade.quantised import decode as decoded
from saccade.quantised import encode
from saccade.testing.cases import Case
from saccade.testing.compare import measure_all, require
from saccade.testing.inputs import make
from saccade.testing.run import expected, plain

# tokens of each sequence, and how many of them are new
MIXES = {
    "decode": ([33, 1, 130, 64], [1, 1, 1, 1]),
    "mixed": ([33, 1, 130, 64, 70], [1, 1, 40, 64, 3]),
    "one": ([77], [5]),
    "idle": ([20, 41, 8], [2, 0, 8]),
}
OPTIONS = {
    "plain": ({}, "causal()"),
    "window": ({}, "causal() & window(15, 0)"),
    "sinks": ({"sinks": True}, "causal()"),
    "softcap": ({"softcap": 2.0, "scale": 0.4}, "causal()"),
    "all": ({"softcap": 2.0, "sinks": True}, "causal() & window(40, 0)"),
    "full": ({}, "full()"),
}


def check(
    backend: str, lengths, new, page: int, dtype: str, options, mask: str, shared: int = 0, D: int = 32, codes=None
) -> None:  # fmt: skip
    heads, bounds = (6, 2), np.cumsum([0, *new])
    alone = [
        Case(f"sequence {r}", n, t, 1, *heads, D, D, mask=mask, **options)
        for r, (t, n) in enumerate(zip(lengths, new, strict=True))
    ]
    made = [make(case, dtype, seed=r, poison=False) for r, case in enumerate(alone)]
    sinks = made[0].sinks
    for x in made:
        x.k[:, :shared], x.v[:, :shared] = made[0].k[:, :shared], made[0].v[:, :shared]
        object.__setattr__(x, "sinks", sinks)
    pages = sum(-(-t // page) for t in lengths) + 2
    cache = PagedKVCache(pages, page, 2, D, dtype=dtype, fill=np.nan, quantised=codes)
    # taken and given back, so that pages do not lie in order
    first, second = cache.add(), cache.add()
    for _ in range(2):
        for s in (first, second):
            cache.append([s], *[np.full((page, 2, D), np.nan, numpy_dtype(dtype))] * 2)
    cache.remove(first)
    root = cache.add()
    cache.append([root], made[0].k[0, :shared], made[0].v[0, :shared])
    cache.remove(second)
    sequences = [cache.fork(root) for _ in lengths]
    for s, x in zip(sequences, made, strict=True):
        cache.append([s], x.k[0, shared:], x.v[0, shared:])
    q = np.concatenate([x.q[0] for x in made])
    given = {"scale": options.get("scale"), "softcap": options.get("softcap"), "sinks": sinks, "backend": backend}
    for cascade in (True, False):
        o, lse = saccade.paged_attention(
            q, cache.view(sequences), bounds, mask=masks.parse(mask), causal=False, cascade=cascade, return_lse=True,
            **given,
        )  # fmt: skip
        for r, x in enumerate(made):
            got = {"o": o[None, bounds[r] : bounds[r + 1]], "lse": lse[None, bounds[r] : bounds[r + 1]]}
            if codes:
                # what codes stand for, in standard attention as its dtype holds them
                k, v = (decoded(*encode(a, cache.quantised), cache.quantised) for a in (x.k, x.v))
                x = replace(x, k=k, v=v)
            rounded = replace(x, k=x.k.astype(x.q.dtype), v=x.v.astype(x.q.dtype))
            wanted, standard = expected(x, backward=False), plain(rounded, backward=False)
            require(measure_all(got, wanted, standard, numpy_dtype(dtype)), f"{alone[r]} cascade {cascade}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_mixes(backend, mix, page, dtype) -> None:
    check(backend, *MIXES[mix], page, dtype, {}, "causal()")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("codes", ["int8", "int4", "fp8"])
def test_codes(backend, codes, page, dtype) -> None:
    check(backend, *MIXES["mixed"], page, dtype, {}, "causal()", shared=1, codes=codes)


@pytest.mark.parametrize("option", OPTIONS)
def test_options(backend, option) -> None:
    for page in (5, 16):
        check(backend, *MIXES["mixed"], page, "float32", *OPTIONS[option])


@pytest.mark.parametrize("D", [7, 64, 80, 128])
def test_head_sizes(backend, D) -> None:
    check(backend, *MIXES["mixed"], 16, "bfloat16", {}, "causal()", D=D)


@pytest.mark.parametrize("option", ["plain", "sinks", "window"])
def test_a_shared_prefix(backend, option) -> None:
    """1030 common tokens of 4 sequences: pages shared, read once where the mask allows."""
    options, mask = OPTIONS[option]
    check(backend, [1030, 1036, 1100, 1041], [1, 4, 1, 1], 16, "float32", options, mask, shared=1030 - 4)


def test_decode_takes_pages(backend, rng) -> None:
    q, k, v = (rng.standard_normal((2, t, h, 16)).astype(np.float32) for t, h in ((1, 4), (50, 2), (50, 2)))
    table = rng.permutation(14).astype(np.int32).reshape(2, 7)
    pages = [np.full((14, 8, 2, 16), np.nan, np.float32) for _ in range(2)]
    for held, x in zip(pages, (k, v), strict=True):
        for b, j in np.ndindex(2, 50):
            held[table[b, j // 8], j % 8] = x[b, j]
    lengths = np.array([50, 31], np.int32)
    o = saccade.decode(q, PagedKeys(*pages, table, lengths), backend=backend)
    want, _ = reference.forward(q, k, v, masks.keys(lengths), scale=0.25)
    np.testing.assert_allclose(o, want, atol=1e-6)


def test_no_sequences(backend) -> None:
    cache = PagedKVCache(2, 4, 1, 8)
    o = saccade.paged_attention(np.zeros((0, 2, 8), np.float32), cache.view([]), backend=backend)
    assert o.shape == (0, 2, 8)


@pytest.mark.parametrize("mask", [None, "full()", "window(9)", "causal()"])
def test_new_tokens_do_not_see_those_behind_them(backend, mask) -> None:
    rng = np.random.default_rng(0)
    cache = saccade.PagedKVCache(8, 16, 2, 8)
    sequences = [cache.add(), cache.add()]
    q, k, v = (rng.standard_normal((50, h, 8), dtype=np.float32) for h in (4, 2, 2))
    for s, rows in zip(sequences, (slice(0, 30), slice(30, 50)), strict=True):
        cache.append([s], k[rows], v[rows])
    new, bounds = np.r_[25:30, 47:50], [0, 5, 8]
    given = None if mask is None else masks.parse(mask)
    o = saccade.paged_attention(q[new], cache.view(sequences), bounds, mask=given, backend=backend)
    causal = masks.causal() if given is None else given & masks.causal()
    for rows, mine in ((slice(0, 30), slice(0, 5)), (slice(30, 50), slice(5, 8))):
        want = saccade.attention(q[new][mine], k[rows], v[rows], causal, backend=backend)
        np.testing.assert_allclose(o[mine], want, atol=1e-5)
