"""Keys in pages on the CPU core: the same bits as contiguous keys for any page size, order and unused slots."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.backends import Extras, Inputs, Outputs, cpu
from saccade.plan import make_plan
from saccade.problem import Problem, Scores

B, TK, HQ, HK, D, DV = 2, 150, 4, 2, 24, 40


def paged(x: np.ndarray, page: int, table: np.ndarray) -> np.ndarray:
    """Pages [n, page, H, D] with x [B, Tk, H, D] in the places of the table, and NaN elsewhere."""
    pages = np.full((table.max() + 3, page, *x.shape[2:]), np.nan, x.dtype)
    for b, j in np.ndindex(*x.shape[:2]):
        pages[table[b, j // page], j % page] = x[b, j]
    return pages


@pytest.mark.parametrize("page", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("Tq", [1, 5, 100])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_pages_give_the_bits_of_contiguous_keys(page, Tq, dtype):
    rng = np.random.default_rng(page + Tq)
    q, k, v, do = (
        rng.standard_normal(s).astype(dtype) for s in ((B, Tq, HQ, D), (B, TK, HK, D), (B, TK, HK, DV), (B, Tq, HQ, DV))
    )
    per = -(-TK // page)
    table = rng.permutation(B * per).astype(np.int32).reshape(B, per)
    mask = masks.causal() & masks.keys(np.array([TK, TK - 37]))
    plain = Problem(B, Tq, TK, HQ, HK, D, DV, dtype=dtype, mask=mask, scores=Scores(scale=D**-0.5))
    plan = make_plan(plain, cpu.limits(plain))
    o, lse = cpu.forward(plain, plan, Inputs(q, k, v))
    extras = Extras(block_table=table, page_size=page)
    pages = Inputs(q, paged(k, page, table), paged(v, page, table), extras)
    o2, lse2 = cpu.forward(plain, plan, pages)
    assert np.array_equal(o, o2)
    assert np.array_equal(lse, lse2)
    expected = cpu.backward(plain, plan, Inputs(q, k, v), Outputs(o, lse, do))
    got = cpu.backward(plain, plan, pages, Outputs(o, lse, do))
    assert all(np.array_equal(a, b) for a, b in zip(expected[:3], got[:3], strict=True))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(TK,), (1, TK), (3, TK), (1, 3, TK), (HQ, 3, TK), (1, 1, 3, TK)])
def test_a_bias_of_fewer_dimensions(shape, framework):
    put = np.asarray if framework == "numpy" else pytest.importorskip("torch").from_numpy
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, t, h, D), dtype=np.float32) for t, h in ((3, HQ), (TK, HK), (TK, HK)))
    bias = rng.standard_normal(shape, dtype=np.float32)
    whole = np.ascontiguousarray(np.broadcast_to(bias, (B, HQ, 3, TK)))
    options = {"dtype": put(np.zeros(0, np.float32)).dtype}
    pages = saccade.PagedKVCache(24, 16, HK, D, **options)
    sequences = [pages.add() for _ in range(B)]
    for s, *rows in zip(sequences, put(k), put(v), strict=True):
        pages.append([s], *rows)
    codes = saccade.KVCache(B, TK, HK, D, quantised="int8", **options)
    codes.append(put(k), put(v))
    for cache in (pages.view(sequences), codes):
        found, want = (np.asarray(saccade.decode(put(q), cache, bias=put(x))) for x in (bias, whole))
        np.testing.assert_array_equal(found, want)
    want = saccade.attention(q, k, v, masks.causal(), bias=bias)
    found = np.asarray(saccade.decode(put(q), pages.view(sequences), bias=put(bias)))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
