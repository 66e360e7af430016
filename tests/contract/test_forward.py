"""Forward: the catalogue compared with the oracle, worked examples, layouts, leaks, offsets beyond 32 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade import reference, reference_softmax
from saccade.testing import cases, run
from saccade.testing.compare import measure, measure_all, require
from saccade.testing.inputs import LAYOUTS, lay, make

DTYPES = ("float32", "bfloat16", "float16", "float64")
CATALOGUE = [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * ("slow" in c.tags)) for c in cases.CASES]


@pytest.mark.sample(150)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CATALOGUE)
def test_case(backend, case, dtype, seed, kinds) -> None:
    for kind in kinds:
        x = make(case, dtype, seed=seed, kind=kind)
        require(run.verify(x, backend, backward=False), f"{case} {dtype} {kind} seed {seed}")


def test_a_key_that_a_bias_excludes_stays_excluded_by_other_terms(backend) -> None:
    x = make(cases.by_name("by-position"), poison=False)
    k, v, bias = x.k.copy(), x.v.copy(), x.bias.copy()
    bias[..., 3::7] = -np.inf
    k[:, 3::7] = v[:, 3::7] = np.nan
    require(run.verify(replace(x, k=k, v=v, bias=bias), backend), "by-position")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["heads-gqa", "mask-documents-causal", "D7-Dv13", "llama"])
def test_layouts(backend, name, dtype, layout) -> None:
    x = make(cases.by_name(name), dtype)
    x = replace(x, q=lay(x.q, layout), k=lay(x.k, layout), v=lay(x.v, layout))
    require(run.verify(x, backend, backward=False), f"{name} {dtype} {layout}")


def test_inputs_may_be_read_only_and_broadcast(backend) -> None:
    x = make(cases.by_name("heads-gqa"))
    k, v = (np.broadcast_to(a[:1], a.shape) for a in (x.k, x.v))
    q = x.q.copy()
    q.flags.writeable = False
    o = saccade.attention(q, k, v, x.mask, backend=backend)
    same = saccade.attention(x.q, k.copy(), v.copy(), x.mask, backend=backend)
    np.testing.assert_array_equal(o, same)


def test_inputs_may_be_fields_of_records(backend) -> None:
    """Their strides are no multiples of the size of a number."""

    def field(x: np.ndarray) -> np.ndarray:
        records = np.zeros(x.shape, [("mark", np.uint8), ("number", x.dtype)])
        records["number"] = x
        return records["number"]

    x = make(cases.by_name("all"))
    arrays = (x.q, x.k, x.v, x.bias, x.sinks)
    results = []
    for q, k, v, bias, sinks in (arrays, map(field, arrays)):
        results.append(saccade.attention(q, k, v, x.mask, bias=bias, sinks=sinks, backend=backend))
    np.testing.assert_array_equal(*results)


def test_inputs_stay_as_they_are(backend) -> None:
    x = make(cases.by_name("all"))
    before = [a.tobytes() for a in (x.q, x.k, x.v, x.bias, x.sinks)]
    saccade.attention(x.q, x.k, x.v, x.mask, bias=x.bias, sinks=x.sinks, backend=backend)
    assert before == [a.tobytes() for a in (x.q, x.k, x.v, x.bias, x.sinks)]


def test_three_axes_are_a_batch_of_one(backend) -> None:
    x = make(cases.by_name("heads-gqa"))
    o, lse = saccade.attention(x.q, x.k, x.v, x.mask, return_lse=True, backend=backend)
    one, lse_one = saccade.attention(x.q[0], x.k[0], x.v[0], x.mask, return_lse=True, backend=backend)
    np.testing.assert_array_equal(one, o[0])
    np.testing.assert_array_equal(lse_one, lse[0])


def test_dtypes_of_the_results(backend) -> None:
    for dtype in DTYPES:
        x = make(cases.by_name("T17"), dtype)
        o, lse = saccade.attention(x.q, x.k, x.v, return_lse=True, backend=backend)
        assert o.dtype == x.q.dtype
        assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_four_causal_tokens_of_the_seeds(backend) -> None:
    """Rows [1], [.6405 .3595], ... from their logarithms as scores."""
    rows = [[1], [0.6405, 0.3595], [0.3258, 0.3123, 0.3619], [0.0247, 0.0236, 0.0253, 0.9264]]
    weights = np.zeros((4, 4))
    for t, row in enumerate(rows):
        weights[t, : len(row)] = row
    # q picks a row of scores, v a column of weights
    q = np.eye(4)[None, :, None]
    k = np.log(np.where(weights > 0, weights, 1)).T[None, :, None].copy()
    o, lse = saccade.attention(q, k, q, masks.causal(), scale=1.0, return_lse=True, backend=backend)
    np.testing.assert_allclose(o[0, :, 0], weights / weights.sum(-1, keepdims=True), atol=1e-12)
    np.testing.assert_allclose(lse[0, :, 0], np.log(weights.sum(-1)), atol=1e-12)


def test_eight_tokens_in_blocks_of_two(backend, rng) -> None:
    """8 tokens, D = 128, a 4 x 4 grid of 2 x 2 score blocks, output blocks 2 x 128, normalised once at the end."""
    q, k, v = rng.standard_normal((3, 1, 8, 1, 128))
    whole, lse = saccade.attention(q, k, v, return_lse=True, backend=backend)
    grid = [
        [
            saccade.attention(q[:, t : t + 2], k[:, j : j + 2], v[:, j : j + 2], return_lse=True, backend=backend)
            for j in range(0, 8, 2)
        ]
        for t in range(0, 8, 2)
    ]
    assert [[part[0].shape for part in row] for row in grid] == [[(1, 2, 1, 128)] * 4] * 4
    merged = [saccade.merge(row) for row in grid]
    np.testing.assert_allclose(np.concatenate([o for o, _ in merged], 1), whole, atol=1e-13)
    np.testing.assert_allclose(np.concatenate([part for _, part in merged], 1), lse, atol=1e-13)
    s = (q[0, :, 0] @ k[0, :, 0].T) / np.sqrt(128)
    np.testing.assert_allclose(reference_softmax.attend_one_pass(s, v[0, :, 0], block=2)[0], whole[0, :, 0], atol=1e-13)


def test_rows_of_weights_sum_to_one(backend, rng) -> None:
    q, k = rng.standard_normal((2, 1, 33, 2, 16), np.float32)
    v = np.ones((1, 33, 2, 5), np.float32)
    o, lse = saccade.attention(q, k, v, masks.causal(), return_lse=True, backend=backend)
    np.testing.assert_allclose(o, 1, atol=1e-6)
    s = np.einsum("bthd,bjhd->bthj", q, k) / 4
    s[np.broadcast_to(~np.tri(33, dtype=bool)[None, :, None], s.shape)] = -np.inf
    np.testing.assert_allclose(np.exp(s - lse[..., None]).sum(-1), 1, atol=1e-5)


def test_query_0_of_a_causal_square_sees_itself_alone(backend, rng) -> None:
    for T in (1, 2, 17, 200):
        q, k, v = rng.standard_normal((3, 2, T, 2, 8), np.float32)
        o, lse = saccade.attention(q, k, v, masks.causal(), return_lse=True, backend=backend)
        np.testing.assert_array_equal(o[:, 0], v[:, 0])
        np.testing.assert_allclose(lse[:, 0], (q[:, 0] * k[:, 0]).sum(-1) / np.sqrt(8), atol=1e-6)


@pytest.mark.parametrize(("Hq", "Hk"), [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_query_head_h_reads_key_head_h_div_g(backend, Hq, Hk, rng) -> None:
    q, k = (rng.standard_normal((1, 20, h, 8), np.float32) for h in (Hq, Hk))
    v = np.broadcast_to(np.arange(Hk, dtype=np.float32)[:, None], (1, 20, Hk, 4))
    o = saccade.attention(q, k, v, masks.causal(), backend=backend)
    np.testing.assert_allclose(o, np.broadcast_to(np.arange(Hq)[:, None] // (Hq // Hk), o.shape), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_neither_overflow_nor_vanish(backend, dtype, rng) -> None:
    case = replace(cases.by_name("heads-gqa"), name="large", scale=40.0)
    if dtype == "float64":
        # no order of summation in float64 is exact to 64 eps of these scores
        case = replace(case, scale=4.0)
    require(run.verify(make(case, dtype), backend, backward=False), dtype)
    q, k, v = (np.ones((1, 9, 1, 8), np.float32) * n for n in (1e4, 1e4, 3))
    o, lse = saccade.attention(q, k, v, return_lse=True, scale=1.0, backend=backend)
    np.testing.assert_allclose(o, 3, rtol=1e-6)
    np.testing.assert_allclose(lse, 8e8 + np.log(9), rtol=1e-6)
    o, lse = saccade.attention(q, -k, v, return_lse=True, scale=1.0, backend=backend)
    np.testing.assert_allclose(o, 3, rtol=1e-6)
    np.testing.assert_allclose(lse, -8e8 + np.log(9), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", cases.MASKS)
def test_a_key_reaches_only_the_rows_that_see_it(backend, name, bad) -> None:
    case = cases.by_name(f"mask-{name}")
    x = make(case, poison=False)
    ref, plain = run.expected(x, backward=False), run.plain(x, backward=False)
    allowed = np.broadcast_to(x.mask.evaluate(2, 4, case.Tq, case.Tk), (2, 4, case.Tq, case.Tk))
    for j in (0, 37, case.Tk - 1):
        k, v = x.k.copy(), x.v.copy()
        k[:, j] = v[:, j] = bad
        o, lse = saccade.attention(x.q, k, v, x.mask, return_lse=True, backend=backend)
        sees = allowed[..., j].swapaxes(1, 2)
        assert not np.isfinite(o[sees]).any()
        clean = [np.where(sees[..., None], ref["o"], o), np.where(sees, ref["lse"], lse)]
        mets = [measure(n, a, ref[n], plain[n], np.float32) for n, a in zip(("o", "lse"), clean, strict=True)]
        require(mets, f"{case.mask[:80]} key {j} holds {bad}")


def sparse(path: Path, shape: tuple[int, ...], steps: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """A writable view with the given strides, in elements, over a file of holes."""
    item = np.dtype(dtype).itemsize
    size = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
    with path.open("wb") as file:
        file.truncate(size * item)
    flat = np.memmap(path, dtype, "r+", shape=(size,))
    return np.lib.stride_tricks.as_strided(np.asarray(flat), shape, [n * item for n in steps])


# steps of [B, T, H, D] in elements, each beyond what 32 bits hold in elements or in bytes
STEPS = {
    "tokens": (10, 1 << 31, 1 << 20, 1),
    "heads": (1 << 12, 1 << 8, (1 << 32) + 64, 1),
    "batch": ((1 << 32) + 4096, 64, 32, 1),
    "bytes": (1 << 29, 1 << 28, 16, 1),
}


@pytest.mark.parametrize("steps", STEPS)
def test_offsets_beyond_32_bits(backend, steps, tmp_path, rng) -> None:
    shape = (2, 6, 2, 8)
    whole = {}
    for n, name in enumerate("qkv"):
        whole[name] = sparse(
            tmp_path / name, shape, (1 << 13, *STEPS[steps][1:]) if steps == "tokens" else STEPS[steps]
        )
        whole[name][...] = rng.standard_normal(shape) + n
    dense = [x.copy() for x in whole.values()]
    got = saccade.attention(*whole.values(), masks.causal(), return_lse=True, backend=backend)
    ref, plain = (reference.forward(*dense, masks.causal(), dtype=d) for d in (np.float64, np.float32))
    named = [dict(zip(("o", "lse"), pair, strict=True)) for pair in (got, ref, plain)]
    require(measure_all(*named, np.float32), steps)
