"""Maximum and entropy of each row: the catalogue and random cases against the oracle, exact and empty rows, merging."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade import reference
from saccade.arrays import numpy_dtype
from saccade.reference_more import max_and_entropy
from saccade.testing import cases, run
from saccade.testing.compare import measure, require
from saccade.testing.fuzz import random_case, random_dtype
from saccade.testing.inputs import NEEDLES, make

DTYPES = ("float32", "bfloat16", "float16", "float64")
CATALOGUE = [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * ("slow" in c.tags)) for c in cases.CASES]
BOTH = {"return_max": True, "return_entropy": True}
# random configurations in a test
PER_TEST = 10


@pytest.mark.sample(40)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CATALOGUE)
def test_case(backend, near_misses, case, dtype, seed, kinds) -> None:
    for kind in kinds:
        if f"test_outputs.py::{case.name}-{dtype}-{kind}-{seed}" in near_misses:
            continue
        x = make(case, dtype, seed=seed, kind=kind)
        require(run.verify(x, backend, more=True), f"{case} {dtype} {kind} seed {seed}")


@pytest.mark.sample(20)
@pytest.mark.parametrize("part", range(1000 // PER_TEST))
def test_random_configurations(backend, near_misses, part) -> None:
    wrong, refused = [], 0
    for n in range(part * PER_TEST, (part + 1) * PER_TEST):
        case, dtype, kind = random_case(n), random_dtype(n), ("random", *NEEDLES)[n % 5]
        if dtype == "float64" and "test_fuzz.py::float64" in near_misses:
            continue
        try:
            require(run.verify(make(case, dtype, kind=kind), backend, more=True), f"{case} {dtype} {kind}")
        except ValueError as error:
            refused += 1
            if "bands" not in str(error):
                raise
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    assert refused <= PER_TEST // 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_only_the_results_that_are_asked_for(backend, layout, lse, grad) -> None:
    x = make(cases.by_name("heads-gqa"))
    q, k, v = (a.swapaxes(1, 2) if layout == "bhtd" else a for a in (x.q, x.k, x.v))
    options = {"return_lse": lse, "layout": layout, "backend": backend}
    top, entropy = max_and_entropy(x.q, x.k, x.mask)
    for names in (("max",), ("entropy",), ("max", "entropy")):
        o, *rows = saccade.attention(q, k, v, x.mask, **{f"return_{name}": True for name in names}, **options)
        assert len(rows) == lse + len(names)
        for name, row in zip(names, rows[lse:], strict=True):
            ref = {"max": top, "entropy": entropy}[name]
            row = row.swapaxes(1, 2) if layout == "bhtd" else row
            require([measure(name, row, ref, ref, np.float32)] if grad else [], name)
            assert row.shape == ref.shape
            assert row.dtype == np.float32
        assert o.shape == q.shape


def test_three_axes_are_a_batch_of_one(backend) -> None:
    x = make(cases.by_name("heads-gqa"))
    whole = saccade.attention(x.q, x.k, x.v, x.mask, **BOTH, backend=backend)
    one = saccade.attention(x.q[0], x.k[0], x.v[0], x.mask, **BOTH, backend=backend)
    for a, b in zip(whole, one, strict=True):
        np.testing.assert_array_equal(a[0], b)


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0], np.float32)])
@pytest.mark.parametrize("Tk", [0, 7])
def test_rows_without_keys(backend, sinks, Tk, rng) -> None:
    q, k, v = (rng.standard_normal((1, T, 2, 8), np.float32) for T in (9, Tk, Tk))
    mask = masks.causal() & masks.keys([0])
    o, lse, top, entropy = saccade.attention(q, k, v, mask, sinks=sinks, return_lse=True, **BOTH, backend=backend)
    assert (o == 0).all()
    assert (top == -np.inf).all()
    assert (entropy == 0).all()
    np.testing.assert_allclose(lse, np.broadcast_to(-np.inf if sinks is None else sinks, lse.shape))
    do, ones = np.ones_like(o), np.ones_like(lse)
    of = {"entropy": entropy, "dentropy": ones, "sinks": sinks, "backend": backend}
    dq, dk, dv, more = saccade.attention_backward(do, q, k, v, o, lse, mask, **of)
    assert all((x == 0).all() for x in (dq, dk, dv, *more.values()))


def test_equal_scores_and_one_key(backend) -> None:
    """n equal scores have an entropy of log n, however large they are; one key has 0."""
    for n in (1, 2, 33, 300):
        for size in (0.0, 1e4, -1e4):
            q = np.full((1, 5, 1, 8), size, np.float32)
            k = np.full((1, n, 1, 8), 1e4, np.float32)
            _, top, entropy = saccade.attention(q, k, k, scale=1.0, **BOTH, backend=backend)
            np.testing.assert_allclose(top, 8e4 * size, rtol=1e-6)
            np.testing.assert_allclose(entropy, np.log(n), atol=2e-6)


def test_a_bias_that_is_almost_minus_infinity(backend, rng) -> None:
    """Every key has a bias of -1e9, as padding masks of other libraries: lse has lost the logarithm of the sum."""
    q, k, v = rng.standard_normal((3, 1, 6, 1, 8), np.float32)
    bias = np.full((1, 1, 1, 6), -1e9, np.float32)
    _, top, entropy = saccade.attention(q, k, v, bias=bias, scale=1e-3, **BOTH, backend=backend)
    np.testing.assert_allclose(top, -1e9)
    np.testing.assert_allclose(entropy, np.log(6), atol=1e-6)


def test_nan_and_infinity_reach_the_rows_that_see_them(backend, rng) -> None:
    q, k, v = rng.standard_normal((3, 1, 40, 1, 8), np.float32)
    k[:, 20] = np.nan
    _, top, entropy = saccade.attention(q, k, v, masks.causal(), **BOTH, backend=backend)
    assert np.isnan(top[:, 20:]).all()
    assert np.isnan(entropy[:, 20:]).all()
    assert np.isfinite(top[:, :20]).all()
    assert np.isfinite(entropy[:, :20]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Tq", [1, 4])
@pytest.mark.parametrize("name", ["plain", "sinks", "softcap"])
def test_decode_over_splits(backend, name, Tq, dtype) -> None:
    lengths = [5000, 4097, 0, 3]
    case = cases.Case(name, Tq, 6000, 4, 4, 2, 32, 32, mask=f"keys({lengths}) & causal()", sinks=name == "sinks")
    x = make(replace(case, softcap=2.0 if name == "softcap" else None), dtype)
    cache = saccade.KVCache(4, 6000, 2, 32, dtype=dtype, fill=np.nan)
    cache.append(x.k, x.v, np.array(lengths))
    options = {"softcap": x.case.softcap, "sinks": x.sinks, "backend": backend}
    got = saccade.decode(x.q, cache, return_lse=True, **BOTH, **options)
    ref, plain = (f(x, backward=False, more=True) for f in (run.expected, run.plain))
    for row, a in zip(("o", "lse", "max", "entropy"), got, strict=True):
        require([measure(row, a, ref[row], plain[row], numpy_dtype(dtype))], f"{name} {dtype}")


def test_pages_and_codes(backend, rng) -> None:
    k, v = rng.standard_normal((2, 1, 90, 2, 32), np.float32)
    q = rng.standard_normal((1, 2, 4, 32), np.float32)
    for how in (None, "int8"):
        cache = saccade.KVCache(1, 90, 2, 32, quantised=how)
        cache.append(k, v)
        got = saccade.decode(q, cache, **BOTH, backend=backend)
        top, entropy = max_and_entropy(q, cache.numbers()[0], masks.causal())
        np.testing.assert_allclose(got[1], top, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[2], entropy, rtol=1e-5, atol=1e-5)
    paged = saccade.PagedKVCache(8, 16, 2, 32)
    sequence = paged.add()
    paged.append([sequence], k[0], v[0])
    got = saccade.decode(q, paged.view([sequence]), **BOTH, backend=backend)
    top, entropy = max_and_entropy(q, k, masks.causal())
    np.testing.assert_allclose(got[1], top, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[2], entropy, rtol=1e-5, atol=1e-5)


def test_selected_keys(backend, rng) -> None:
    q, k, v, do = rng.standard_normal((4, 1, 40, 4, 16), np.float32)
    k, v = k[:, :, :2], v[:, :, :2]
    mask = masks.causal() & masks.select(rng.integers(-1, 5, (1, 2, 40, 3)).astype(np.int32), 8)
    o, lse, *of_rows = saccade.attention(q, k, v, mask, return_lse=True, **BOTH, backend=backend)
    ref = max_and_entropy(q, k, mask)
    for name, a, b in zip(("max", "entropy"), of_rows, ref, strict=True):
        require([measure(name, a, b, b, np.float32)], name)
    of = {"entropy": of_rows[1], "dentropy": np.ones_like(lse)}
    *got, _ = saccade.attention_backward(do, q, k, v, o, lse, mask, **of, backend=backend)
    wanted, plain = (
        reference.backward(do, q, k, v, mask, dentropy=of["dentropy"], dtype=dtype)
        for dtype in (np.float64, np.float32)
    )
    for name, a, b, c in zip(("dq", "dk", "dv"), got, wanted, plain, strict=False):
        require([measure(name, a, b, c, np.float32)], name)


@pytest.mark.parametrize("name", ["all", "all-alibi", "all-gates", "softcap", "sinks"])
def test_gradient_by_finite_differences_in_float64(backend, name, rng) -> None:
    """Of the entropy alone, and with those of o and lse."""
    x = make(replace(cases.by_name(name), dropout=0.0, Tq=9, Tk=11), "float64", poison=False)
    dentropy = run.dentropy_of(x)

    def results(**changes):
        y = replace(x, **changes)
        options = {**y.scores, "bias": y.bias_argument, "sinks": y.sinks, "backend": backend}
        return saccade.attention(y.q, y.k, y.v, y.mask, return_lse=True, return_entropy=True, **options), options

    for weight in (0.0, 1.0):
        do, dlse = weight * x.do, weight * x.dlse
        (o, lse, entropy), options = results()
        of = {"dlse": dlse, "entropy": entropy, "dentropy": dentropy}
        dq, dk, dv, extras = saccade.attention_backward(do, x.q, x.k, x.v, o, lse, x.mask, **of, **options)
        for field, grad in {"q": dq, "k": dk, "v": dv, **extras}.items():
            step, ends = rng.standard_normal(grad.shape), []
            for sign in (1, -1):
                o, lse, entropy = results(**{field: getattr(x, field) + sign * 1e-6 * step})[0]
                ends.append(float((o * do).sum() + (lse * dlse).sum() + (entropy * dentropy).sum()))
            np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, (grad * step).sum(), rtol=1e-7, atol=1e-7)


def test_merging_partial_results(backend, rng) -> None:
    q, k, v = rng.standard_normal((3, 2, 30, 2, 16), np.float32)
    sinks = rng.standard_normal(2, np.float32)
    options = {"return_lse": True, **BOTH, "backend": backend}
    whole = saccade.attention(q, k, v, sinks=sinks, **options)
    # the second part has no keys
    mask = masks.keys([0, 0])
    parts = [saccade.attention(q, k[:, :13], v[:, :13], **options)]
    parts += [saccade.attention(q, k[:, :5], v[:, :5], mask, **options)]
    parts += [saccade.attention(q, k[:, 13:], v[:, 13:], **options)]
    merged = saccade.merge(parts, sinks=sinks, **BOTH)
    for a, b in zip(merged, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_one_of_entropy_and_its_gradient_is_refused(backend) -> None:
    x = make(cases.by_name("heads-gqa"))
    o, lse, *_ = saccade.attention(x.q, x.k, x.v, x.mask, return_lse=True, **BOTH, backend=backend)
    with pytest.raises(ValueError, match="one of entropy and dentropy is None; expected both"):
        saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, x.mask, dentropy=lse, backend=backend)
    with pytest.raises(ValueError, match=r"entropy has shape \[1, 97, 4\]; expected"):
        saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, x.mask, entropy=lse[:1], dentropy=lse, backend=backend)
