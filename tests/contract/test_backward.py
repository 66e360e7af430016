"""Backward: every gradient of the catalogue against the oracle, layouts, leaks, partial sums over keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.testing import cases, run
from saccade.testing.compare import measure, require
from saccade.testing.inputs import LAYOUTS, lay, make

DTYPES = ("float32", "bfloat16", "float16", "float64")
CATALOGUE = [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * ("slow" in c.tags)) for c in cases.CASES]
ANY_ORDER = ["gpt2", "llama", "packed", "mla", "gemma", "cut-documents", "cut-documents-64", "cut-blocks", "cut-global"]
OPTIONS = {"softcap", "sinks", "bias-bhqk", "bias-1h1k", "alibi", "alibi-batch", "dropout", "all", "all-alibi"}


@pytest.mark.sample(200)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CATALOGUE)
def test_case(backend, case, dtype, seed, kinds) -> None:
    for kind in kinds:
        x = make(case, dtype, seed=seed, kind=kind)
        require(run.verify(x, backend), f"{case} {dtype} {kind} seed {seed}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["heads-gqa", "mask-documents-causal", "D7-Dv13", "llama"])
def test_layouts(backend, name, dtype, layout) -> None:
    x = make(cases.by_name(name), dtype)
    rows = {key: lay(getattr(x, key), layout) for key in ("q", "k", "v", "do")}
    x = replace(x, dlse=lay(x.dlse[..., None], layout)[..., 0], **rows)
    require(run.verify(x, backend), f"{name} {dtype} {layout}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ANY_ORDER)
def test_sums_in_any_order(backend, name) -> None:
    mets = run.verify(
        make(cases.by_name(name), "bfloat16"), backend, compute=partial(run.computed, deterministic=False)
    )
    require(mets, f"{name}, deterministic=False")


def gradients(x, backend, **changes):
    x = replace(x, **changes)
    options = {**x.scores, "bias": x.bias_argument, "sinks": x.sinks, "backend": backend}
    o, lse = saccade.attention(x.q, x.k, x.v, x.mask, return_lse=True, **options)
    return saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, x.mask, dlse=x.dlse, **options)


def test_no_dlse_is_a_dlse_of_zero(backend) -> None:
    x = make(cases.by_name("heads-gqa"))
    none, zero = gradients(x, backend, dlse=None), gradients(x, backend, dlse=np.zeros_like(x.dlse))
    for a, b in zip(none[:3], zero[:3], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_extras_are_those_asked_for(backend, name) -> None:
    x = make(cases.by_name(name))
    extras = gradients(x, backend)[3]
    arrays = x.added | ({} if x.sinks is None else {"sinks": x.sinks})
    assert {n: a.shape for n, a in extras.items()} == {n: a.shape for n, a in arrays.items()}
    options = {**x.scores, "bias": x.bias_argument, "sinks": x.sinks, "backend": backend}
    o, lse = saccade.attention(x.q, x.k, x.v, x.mask, return_lse=True, **options)
    assert saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, x.mask, grads=(), **options)[3] == {}


@pytest.mark.parametrize("least", [-1e9, -65504.0, 1e5])
@pytest.mark.parametrize("Tq, Tk, mask", [(5, 30, None), (5, 1100, None), (90, 90, "parts")])
def test_the_same_bias_on_every_key(backend, rng, Tq, Tk, mask, least) -> None:
    """As in padding masks of other libraries: a rounded lse has lost the logarithm of its sum, or part of it."""
    mask = mask and masks.window(15, 0) | (masks.causal() & masks.strided(16))
    # all products are 0, so that no score is rounded; a forward of several parts may merge them by their rounded lse
    q = np.zeros((1, Tq, 1, 16), np.float32)
    k, v, do = (rng.standard_normal((1, T, 1, 16), np.float32) for T in (Tk, Tk, Tq))
    sums = []
    for bias in (np.full((1, 1, Tq, Tk), x, np.float32) for x in (0, least)):
        o, lse = saccade.attention(q, k, v, mask, bias=bias, return_lse=True, backend="cpu")
        dq, _, dv, more = saccade.attention_backward(do, q, k, v, o, lse, mask, bias=bias, backend=backend)
        sums.append((dq, dv, more["bias"]))
    for expected, x in zip(*sums, strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["causal", "documents-causal", "strided-window", "global-list", "tiles", "per-head"])
def test_a_key_reaches_only_the_rows_that_see_it(backend, name) -> None:
    """A bad key or value affects dq of the rows that see it and the keys that those rows see, and nothing else."""
    case = cases.by_name(f"mask-{name}")
    x = make(case, poison=False)
    allowed = np.broadcast_to(x.mask.evaluate(2, 4, case.Tq, case.Tk), (2, 4, case.Tq, case.Tk))
    for field in ("k", "v"):
        for j in (5, case.Tk - 1):
            bad = getattr(x, field).copy()
            bad[:, j] = np.nan
            spoiled = replace(x, **{field: bad})
            got = dict(zip(("dq", "dk", "dv"), gradients(spoiled, backend)[:3], strict=True))
            ref, plain = run.expected(spoiled), run.plain(spoiled)
            sees = allowed[..., j].swapaxes(1, 2)
            assert np.isfinite(got["dq"][~sees]).all()
            mets = [measure(n, np.where(np.isnan(ref[n]), np.nan, got[n]), ref[n], plain[n], np.float32) for n in got]
            require(mets, f"{case.mask[:80]} {field}[{j}] is NaN")


@pytest.mark.parametrize("name", ["heads-gqa", "mask-window-causal", "softcap"])
def test_parts_of_the_keys_add_up(backend, name) -> None:
    """With lse and o of the whole, the backward over some keys is their contribution to the whole, as rings require."""
    case = replace(cases.by_name(name), mask="")
    x = make(case, "float64")
    options = {**x.scores, "backend": backend}
    o, lse = saccade.attention(x.q, x.k, x.v, return_lse=True, **options)
    whole = saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, dlse=x.dlse, **options)
    parts = []
    for a, b in ((0, 20), (20, 21), (21, case.Tk)):
        k, v = x.k[:, a:b], x.v[:, a:b]
        parts.append(saccade.attention_backward(x.do, x.q, k, v, o, lse, dlse=x.dlse, **options))
    np.testing.assert_allclose(sum(part[0] for part in parts), whole[0], atol=1e-12)
    for n in (1, 2):
        np.testing.assert_allclose(np.concatenate([part[n] for part in parts], 1), whole[n], atol=1e-12)


@pytest.mark.parametrize("name", ["all-alibi", "all-relative", "all-gates", "by-position"])
def test_gradient_by_finite_differences(backend, name, rng) -> None:
    case = replace(cases.by_name(name), dropout=0.0, Tq=9, Tk=11)
    x = make(case, "float64", poison=False)

    def loss(**changes):
        y = replace(x, **changes)
        options = {**y.scores, "bias": y.bias_argument, "sinks": y.sinks, "backend": backend}
        o, lse = saccade.attention(y.q, y.k, y.v, y.mask, return_lse=True, **options)
        return float((o * y.do).sum() + (lse * y.dlse).sum())

    dq, dk, dv, extras = gradients(x, backend)
    for field, grad in {"q": dq, "k": dk, "v": dv, **extras}.items():
        step = rng.standard_normal(grad.shape)
        ends = [loss(**{field: getattr(x, field) + sign * 1e-6 * step}) for sign in (1, -1)]
        np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, (grad * step).sum(), rtol=1e-7, atol=1e-7)


def test_large_scores(backend) -> None:
    case = replace(cases.by_name("heads-gqa"), name="large", scale=40.0)
    for dtype in DTYPES:
        x = make(replace(case, scale=4.0) if dtype == "float64" else case, dtype)
        require(run.verify(x, backend), dtype)


def test_wide_batches_of_short_problems(backend) -> None:
    case = cases.Case("wide", 5, 7, B=40, Hq=6, Hk=3, D=16, Dv=8, mask=str(masks.causal()))
    for dtype in DTYPES:
        require(run.verify(make(case, dtype), backend), dtype)
