"""Latent attention: one row per token is its key and, without the last numbers, its value."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade import LatentKVCache, PagedLatentKVCache
from saccade import mask as masks
from saccade.arrays import numpy_dtype
from saccade.testing.cases import Case
from saccade.testing.compare import measure_all, require
from saccade.testing.inputs import NEEDLES, make
from saccade.testing.run import expected, plain
from saccade.testing.tensors import get, put

KINDS = ("random", *NEEDLES)
# latent_dim, rope_dim and heads: of DeepSeek-V3 with fewer heads, and smaller ones
SIZES = {"deepseek": (512, 64, 16), "half": (256, 32, 8), "small": (64, 16, 6), "odd": (40, 24, 3)}


def check(case: Case, lengths: list[int], dtype: str, backend: str, kind: str, page: int, codes: str | None) -> None:
    """A cache whose unused slots hold NaN, compared with the oracle; page: 0 for a contiguous cache."""
    sizes = case.Dv, case.D - case.Dv
    # a window of a shorter sequence would meet the keys that no query of the whole case sees
    x = make(case, dtype, kind=kind, poison=False)
    options = {"dtype": dtype, "fill": np.nan, "quantised": codes}
    latent, k_rope = x.k[:, :, 0, : case.Dv], x.k[:, :, 0, case.Dv :]
    if page:
        cache = PagedLatentKVCache(sum(-(-n // page) for n in lengths) + 1, page, *sizes, **options)
        sequences = [cache.add() for _ in lengths]
        # in turn, so that pages do not lie in order
        for part in range(2):
            for s, n, a, b in zip(sequences, lengths, latent, k_rope, strict=True):
                rows = slice(n // 2 * part, n // 2 if part == 0 else n)
                cache.append([s], a[rows], b[rows])
        keys = cache.view(sequences)
    else:
        cache = keys = LatentKVCache(case.B, case.Tk, *sizes, **options)
        cache.append(latent, k_rope, np.array(lengths))
    mask, causal = (None, True) if case.mask == "causal()" else (masks.parse(case.mask), False)
    given = {"scale": case.scale, "softcap": case.softcap, "sinks": x.sinks, "backend": backend}
    o, lse = saccade.decode(x.q, keys, mask=mask, causal=causal, return_lse=True, **given)
    whole = masks.parse(case.mask) & masks.keys(np.array(lengths))
    if codes:
        whole_cache = LatentKVCache(case.B, case.Tk, *sizes, **options)
        whole_cache.append(latent, k_rope, np.array(lengths))
        k = whole_cache.numbers()[0]
    else:
        k = x.k
    # one scale multiplies a part of a row of k, which is also a row of v
    x = replace(x, k=k, v=k[..., : case.Dv], mask=whole, stop=np.array(lengths))
    rounded = replace(x, k=k.astype(x.q.dtype), v=k[..., : case.Dv].astype(x.q.dtype))
    standard = plain(rounded, backward=False)
    if codes:
        # the decoded numbers, rounded to the dtype, are keys of standard attention, too
        exact = expected(rounded, backward=False)
        standard = {name: np.concatenate([a, exact[name][None]]) for name, a in standard.items()}
    mets = measure_all({"o": o, "lse": lse}, expected(x, backward=False), standard, numpy_dtype(dtype))
    require(mets, f"{case} {lengths} {dtype} {kind} page {page} {codes}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("codes", [None, "int8", "fp8"], ids=str)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("name", SIZES)
def test_sizes(backend, name, page, codes, dtype) -> None:
    latent, rope, heads = SIZES[name]
    for Tq, lengths, kind in ((1, [130, 77], "last"), (4, [100], "random"), (40, [90], "random")):
        sizes = Tq, 131, len(lengths), heads, 1, latent + rope, latent
        case = Case(f"{name}-{Tq}", *sizes, mask="causal()", scale=0.07)
        check(case, lengths, dtype, backend, kind, page, codes)


def test_many_heads(backend) -> None:
    """128 heads as in DeepSeek-V3, whose rows take two tiles of queries, and keys in several ranges."""
    case = Case("heads", 2, 700, 1, 128, 1, 576, 512, mask="causal()", scale=0.07)
    check(case, [690], "bfloat16", backend, "random", 0, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_a_view_of_keys(backend, dtype) -> None:
    """Without a cache; 192 and 128 are a head size of the kernels for Hopper, too."""
    case = Case("view", 20, 23, 1, 3, 1, 192, 128, mask="causal()", scale=0.07)
    x = make(case, dtype)
    x = replace(x, v=x.k[..., : case.Dv])
    # the arm64 machine in software has no torch
    there, back = (np.asarray, np.asarray) if backend == "cpu" else (put, get)
    q, k, do, dlse = map(there, (x.q, x.k, x.do, x.dlse))
    given = {"mask": x.mask, "scale": case.scale, "backend": backend}
    o, lse = saccade.attention(q, k, k[..., : case.Dv], return_lse=True, **given)
    gradients = saccade.attention_backward(do, q, k, k[..., : case.Dv], o, lse, dlse=dlse, **given)
    got = {name: back(a) for name, a in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients[:3]), strict=True)}
    require(measure_all(got, expected(x), plain(x), numpy_dtype(dtype)), f"{case} {dtype}")


# the largest head sizes of backends that have smaller ones
MOST = {"webgpu": 512, "metal": 256}


def configuration(n: int, most: int = 1024):
    """Arguments of `check` from a number; most: the largest head size."""
    draw = random.Random(n)
    latent = draw.choice([size for size in (16, 24, 40, 64, 72, 128, 256, 512) if size + 64 <= most])
    rope = draw.choice([2, 8, 16, 24, 64])
    B, Tq = draw.randint(1, 3), draw.choice([1, 1, 2, 3, 4, 7, 20])
    lengths = [draw.randint(Tq, Tq + draw.choice([8, 70, 200])) for _ in range(B)]
    case = Case(
        f"latent-{n}", Tq, max(lengths) + draw.randint(0, 3), B, draw.choice([1, 2, 3, 8, 16, 20]), 1, latent + rope,
        latent, mask=draw.choice(["causal()", "causal()", "causal() & window(30, 0)", "full()"]),
        scale=draw.choice([0.02, 0.07, 0.2]), softcap=draw.choice([None, None, 5.0]), sinks=draw.random() < 0.3,
    )  # fmt: skip
    dtype, kind = draw.choice(["float32", "bfloat16", "float16"]), draw.choice(KINDS)
    return case, lengths, dtype, kind, draw.choice([0, 0, 1, 5, 16, 64]), draw.choice([None, None, "int8", "fp8"])


@pytest.mark.sample(20)
@pytest.mark.parametrize("part", range(100))
def test_random_configurations(backend, part, request) -> None:
    first = request.config.getoption("--seed") * 1_000_000 + part * 10
    # each configuration compiles kernels of its own there
    for n in range(first, first + 10, 5 if backend in MOST else 1):
        case, lengths, dtype, kind, page, codes = configuration(n, MOST.get(backend, 1024))
        check(case, lengths, dtype, backend, kind, page, codes)
