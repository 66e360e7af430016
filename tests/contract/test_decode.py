"""Decode: ragged caches whose unused slots hold NaN, splits over many keys, and the loop from prefill on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade import KVCache, reference
from saccade import mask as masks
from saccade.arrays import numpy_dtype
from saccade.testing.cases import Case
from saccade.testing.compare import measure_all, require
from saccade.testing.inputs import make
from saccade.testing.run import expected, plain

DTYPES = ("float32", "bfloat16", "float16", "float64")

# lengths of the sequences and the capacity of the cache; the new queries are the last ones
RAGGED = {
    "one": ([40], 64),
    "full": ([64, 64], 64),
    "ragged": ([1, 130, 77], 131),
    "empty": ([0, 9, 0], 16),
    "long": ([5000, 4097], 6000),
    "longer": ([20000], 20001),
}


def filled(x, lengths: list[int], dtype: str, **codes) -> KVCache:
    """A cache of the case's capacity with NaN in its unused slots."""
    case = x.case
    cache = KVCache(case.B, case.Tk, case.Hk, case.D, v_dim=case.Dv, dtype=dtype, fill=np.nan, **codes)
    cache.append(x.k, x.v, np.array(lengths))
    return cache


def decoded(x, lengths: list[int], dtype: str, mask: str, backend: str, causal: bool = False, **codes):
    """(computed, oracle, standard attention) of a case, each o and lse; the mask is in addition to the lengths.

    For codes the oracle uses the decoded numbers, and standard attention these numbers in its dtype.
    """
    cache = filled(x, lengths, dtype, **codes)
    given = {"scale": x.case.scale, "softcap": x.case.softcap, "sinks": x.sinks, "bias": x.bias_argument}
    part = masks.parse(mask) if mask else None
    got = saccade.decode(x.q, cache, mask=part, causal=causal, return_lse=True, backend=backend, **given)
    whole = masks.keys(np.array(lengths)) if part is None else part & masks.keys(np.array(lengths))
    whole = whole & masks.causal() if causal else whole
    k, v = cache.numbers()
    x = replace(x, k=k, v=v, mask=whole, stop=np.array(lengths))
    rounded = replace(x, **{name: a.astype(x.q.dtype) for name, a in (("k", k), ("v", v))})
    wanted, standard = expected(x, backward=False), plain(rounded, backward=False)
    return dict(zip(("o", "lse"), got, strict=True)), wanted, standard


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Tq", [1, 4])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("name", RAGGED)
def test_lengths(backend, name, heads, Tq, dtype, kinds) -> None:
    lengths, capacity = RAGGED[name]
    case = Case(name, Tq, capacity, len(lengths), *heads, 32, 32, mask=f"keys({lengths}) & causal()")
    for kind in kinds if capacity < 2000 else ("random", "last"):
        x = make(case, dtype, kind=kind)
        require(measure_all(*decoded(x, lengths, dtype, "causal()", backend), numpy_dtype(dtype)), f"{case} {kind}")


CODES = {
    "int8": {"quantised": "int8"},
    "int8-groups": {"quantised": "int8", "group": 16},
    "fp8": {"quantised": "fp8"},
    "fp8-groups": {"quantised": "fp8", "group": 24},
    "int4": {"quantised": "int4"},
    "int4-head": {"quantised": "int4", "group": 200},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, Dv", [(32, 32), (80, 40), (128, 128), (6, 7)])
@pytest.mark.parametrize("codes", CODES)
def test_codes(backend, codes, D, Dv, dtype) -> None:
    """Keys and values as codes, read by one query, by a few queries, and by tiles of queries."""
    if codes.startswith("int4"):
        Dv += Dv % 2
    for Tq, (lengths, capacity), kind in (
        (1, RAGGED["ragged"], "last"),
        (3, ([300], 310), "random"),
        (3, ([11, 6], 14), "random"),
        (70, ([90], 99), "random"),
    ):
        case = Case(codes, Tq, capacity, len(lengths), 4, 2, D, Dv, mask=f"keys({lengths}) & causal()")
        x = make(case, dtype, kind=kind)
        got = decoded(x, lengths, dtype, "causal()", backend, **CODES[codes])
        require(measure_all(*got, numpy_dtype(dtype)), f"{case} {kind}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows_with_values_of_their_own(backend, dtype) -> None:
    for Tq, lengths in ((1, [130, 77]), (4, [100]), (40, [90])):
        mask = f"keys({lengths}) & causal()"
        x = make(Case("apart", Tq, 131, len(lengths), 16, 1, 576, 512, mask=mask, scale=0.07), dtype)
        require(measure_all(*decoded(x, lengths, dtype, "causal()", backend), numpy_dtype(dtype)), f"{lengths} {Tq}")


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.4},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "bias": {"bias": "bhqk"},
    "bias-key": {"bias": "1h1k"},
    "alibi": {"alibi": "h"},
    "alibi-batch": {"alibi": "bh", "sinks": True},
}


@pytest.mark.parametrize("lengths", [[300, 300], [300, 45]], ids=["same", "ragged"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(backend, option, lengths) -> None:
    for tq, mask in ((1, ""), (3, "causal()")):
        case = Case(option, tq, 310, 2, 8, 2, 24, 40, mask=f"keys({lengths}) & ({mask or 'full()'})", **OPTIONS[option])
        x = make(case)
        require(measure_all(*decoded(x, lengths, "float32", mask, backend), np.float32), f"{case}")


@pytest.mark.parametrize("D", [1, 7, 8, 40, 80, 96, 128, 192, 256, 320, 512])
def test_head_sizes(backend, D) -> None:
    for dtype in DTYPES:
        case = Case(f"D{D}", 1, 600, 1, 4, 1, D, D, mask="keys([597])")
        x = make(case, dtype)
        require(measure_all(*decoded(x, [597], dtype, "", backend), numpy_dtype(dtype)), f"{case} {dtype}")


@pytest.mark.parametrize(
    "mask",
    [
        "window(63, 0)",
        "window(10, 0) | keys(4)",
        "strided(16)",
        "strided(16) | window(15, 0)",
        "causal() & ~window(100, 0)",
        "chunked(128)",
        "prefix(70)",
        "keys(100, 1900)",
        "global_tokens(2) | window(30, 0)",
        "per_head([window(31, 0), full(), strided(5), keys(0)])",
    ],
)
def test_masks(backend, mask) -> None:
    for lengths in ([2000, 2000], [2000, 131]):
        text = f"keys({lengths}) & ({mask})"
        case = Case("masks", 1, 2048, 2, 4, 2, 16, 16, mask=text)
        for kind in ("random", "before", "after", "last"):
            x = make(case, kind=kind)
            require(measure_all(*decoded(x, lengths, "float32", mask, backend), np.float32), f"{case} {kind}")


@pytest.mark.parametrize("Tq", [1, 5])
@pytest.mark.parametrize(
    "mask", ["", "causal()", "window(31)", "full()", "global_tokens(2) | window(30, 3)", "~strided(7)"]
)
def test_new_tokens_do_not_see_those_behind_them(backend, mask, Tq) -> None:
    for lengths in ([300, 300], [300, 41]):
        text = f"keys({lengths}) & causal()" + (f" & ({mask})" if mask else "")
        x = make(Case("causal", Tq, 300, 2, 4, 2, 16, 16, mask=text), kind="last")
        require(measure_all(*decoded(x, lengths, "float32", mask, backend, causal=True), np.float32), f"{text} {Tq}")


def test_a_loop_of_steps_is_one_causal_pass(backend, rng) -> None:
    """Prefill by chunks, then token by token, through one cache; each row as in the whole causal problem."""
    B, T, Hq, Hk, D = 2, 45, 6, 2, 16
    q, k, v = (rng.standard_normal((B, T, h, D)) for h in (Hq, Hk, Hk))
    turned = [saccade.rope(x, np.arange(T)) for x in (q, k)]
    whole, _ = reference.forward(*turned, v, masks.causal())
    cache = KVCache(B, T, Hk, D, dtype="float64", fill=np.nan)
    for a, b in [(0, 20), (20, 33), *((t, t + 1) for t in range(33, T))]:
        positions = np.arange(a, b)
        cache.append(saccade.rope(k[:, a:b], positions), v[:, a:b])
        o = saccade.decode(saccade.rope(q[:, a:b], positions), cache, backend=backend)
        np.testing.assert_allclose(o, whole[:, a:b], atol=1e-12)


def test_decode_is_attention_over_what_is_there(backend) -> None:
    x = make(Case("slice", 2, 500, 1, 4, 2, 32, 32, mask="causal()"))
    cache = KVCache(1, 700, 2, 32, fill=np.nan)
    cache.append(x.k, x.v)
    o, lse = saccade.decode(x.q, cache, mask=masks.causal(), return_lse=True, backend=backend)
    same, lse_same = saccade.attention(x.q, x.k, x.v, masks.causal(), return_lse=True, backend=backend)
    np.testing.assert_allclose(o, same, atol=1e-6)
    np.testing.assert_allclose(lse, lse_same, atol=1e-6)


def test_no_batch_no_capacity(backend) -> None:
    for B, capacity in ((0, 8), (2, 0)):
        cache = KVCache(B, capacity, 2, 8)
        o, lse = saccade.decode(np.ones((B, 1, 4, 8), np.float32), cache, return_lse=True, backend=backend)
        assert [o.shape, lse.shape] == [(B, 1, 4, 8), (B, 1, 4)]
        assert not o.any()
        assert (lse == -np.inf).all()


def test_a_cache_beyond_32_bits(backend, tmp_path, rng) -> None:
    steps = ((1 << 32) + (1 << 16), 1 << 29, 16, 1)
    shape = (2, 9, 2, 8)
    size = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
    cache = KVCache(2, 9, 2, 8)
    for name in "kv":
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(size * 4)
        flat = np.asarray(np.memmap(path, np.float32, "r+", shape=(size,)))
        setattr(cache, name, np.lib.stride_tricks.as_strided(flat, shape, [4 * n for n in steps]))
    k, v = rng.standard_normal((2, 2, 9, 2, 8), np.float32)
    cache.append(k, v, np.array([9, 4]))
    q = rng.standard_normal((2, 1, 4, 8), np.float32)
    got = saccade.decode(q, cache, return_lse=True, backend=backend)
    ref, plain = (reference.forward(q, k, v, masks.keys(np.array([9, 4])), dtype=d) for d in (np.float64, np.float32))
    require(measure_all(*[dict(zip(("o", "lse"), pair, strict=True)) for pair in (got, ref, plain)], np.float32))
