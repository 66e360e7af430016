"""Forward-mode derivatives: the tangents of o and lse of the catalogue and of random cases against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from saccade.testing import cases, tangents
from saccade.testing.compare import measure_all, require
from saccade.testing.inputs import LAYOUTS, lay, make

torch = pytest.importorskip("torch")

DTYPES = ("float32", "bfloat16", "float16", "float64")
CATALOGUE = [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * ("slow" in c.tags)) for c in cases.CASES]
EVERYTHING = ("all", "all-alibi", "all-relative", "all-gates", "by-position")


def verify(x, backend, seed: int = 0):
    return tangents.verify(x, tangents.make_tangents(x, seed), backend)


@pytest.mark.sample(120)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CATALOGUE)
def test_case(backend, case, dtype, seed, kinds) -> None:
    for kind in kinds:
        x = make(case, dtype, seed=seed, kind=kind)
        require(verify(x, backend, seed), f"{case} {dtype} {kind} seed {seed}")


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_missing_tangent_is_zero(backend, name) -> None:
    """Products with a tangent that is missing are skipped; the results are those of a tangent of zero."""
    x = make(cases.by_name(name))
    moved = tangents.make_tangents(x)
    for only in moved:
        got, ref = (tangents.computed(x, {only: moved[only]}, backend), tangents.expected(x, {only: moved[only]}))
        require(measure_all(got, ref, tangents.plain(x, {only: moved[only]}, 3), x.q.dtype), f"{name}: d{only}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts(backend, dtype, layout) -> None:
    x = make(cases.by_name("mask-documents-causal"), dtype)
    moved = {name: lay(a, layout) for name, a in tangents.make_tangents(x).items()}
    require(tangents.verify(x, moved, backend), f"{dtype} {layout}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_tangents_that_all_scores_share_cancel(backend, dtype, rng) -> None:
    """If all keys are alike, ds is nearly the same for all of them, and only its differences reach o."""
    x = make(cases.by_name("heads-gqa"), dtype, poison=False)
    k = x.k.astype(np.float64)
    x = replace(x, k=(8 + k[:, :1] + k / 8).astype(x.k.dtype))
    moved = {"q": (16 * rng.standard_normal(x.q.shape)).astype(x.q.dtype)}
    require(tangents.verify(x, moved, backend), dtype)


@pytest.mark.parametrize("bias", [-1e9, 1e9, 3e37])
def test_scores_so_large_that_lse_loses_the_sum(backend, bias) -> None:
    x = make(replace(cases.by_name("bias-1h1k"), mask=""), poison=False)
    moved = {name: t for name, t in tangents.make_tangents(x).items() if name != "bias"}
    # every score rounds to the same number
    x = replace(x, bias=np.where(np.isfinite(x.bias), np.float32(bias), x.bias))
    require(tangents.verify(x, moved, backend), str(bias))


@pytest.mark.parametrize("name", ["causal", "documents-causal", "strided-window", "global-list", "tiles", "per-head"])
def test_a_key_reaches_only_the_rows_that_see_it(backend, name) -> None:
    x = make(cases.by_name(f"mask-{name}"), poison=False)
    allowed = np.broadcast_to(x.mask.evaluate(2, 4, x.case.Tq, x.case.Tk), (2, 4, x.case.Tq, x.case.Tk))
    for field in ("k", "v"):
        moved = tangents.make_tangents(x)
        moved[field][:, 5] = np.nan
        got = tangents.computed(x, moved, backend)
        sees = allowed[..., 5].swapaxes(1, 2)
        assert np.isfinite(got["do"][~sees]).all()
        assert np.isnan(got["do"][sees]).all()
