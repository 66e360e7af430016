"""NaN in inputs: it reaches the same rows of results and gradients as in the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade import recurrent, reference

if TYPE_CHECKING:
    from saccade.backends.webgpu.device import Gpu

T = 40
SLOPES = np.array([0.5, 0.25], np.float32)
ZEROS = np.zeros((1, 1, 1, T), np.float32)
SCORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softcap": ({"softcap": 5.0}, {"softcap": 5.0}),
    "alibi": ({"bias": saccade.alibi(SLOPES)}, {"slopes": SLOPES}),
    "bias": ({"bias": ZEROS}, {"bias": ZEROS}),
    "sinks": ({"sinks": SLOPES}, {"sinks": SLOPES}),
}


def same_places(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, x in found.items():
        np.testing.assert_array_equal(np.isnan(x), np.isnan(wanted[name]), err_msg=name)


@pytest.mark.parametrize("where", ["q", "k", "do"])
def test_gradients_under_a_mask(gpu: Gpu, where: str, rng: np.random.Generator) -> None:
    x = {name: rng.standard_normal((1, T, 1, 8), np.float32) for name in ("q", "k", "v", "do")}
    x[where][0, 25, 0, 1] = np.nan
    q, k, v, do = x.values()
    mask = masks.documents(np.arange(T) // 22) & masks.causal()
    o, lse = saccade.attention(q, k, v, mask, return_lse=True, backend="webgpu")
    dq, dk, dv, _ = saccade.attention_backward(do, q, k, v, o, lse, mask, backend="webgpu")
    expected = reference.backward(do, q, k, v, mask)
    same_places({"dq": dq, "dk": dk, "dv": dv}, dict(zip(("dq", "dk", "dv"), expected, strict=False)))


@pytest.mark.parametrize("rows", [T, 1])
@pytest.mark.parametrize("name", SCORES)
def test_scores_with_other_terms(gpu: Gpu, name: str, rows: int, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, n, 2, 8), np.float32) for n in (rows, T, T))
    ours, theirs = SCORES[name]
    k[0, 7, 0, 2] = np.nan
    o, lse = saccade.attention(q, k, v, return_lse=True, backend="webgpu", **ours)
    expected = reference.forward(q, k, v, **theirs)
    same_places({"o": o, "lse": lse}, dict(zip(("o", "lse"), expected, strict=True)))
    assert np.isnan(o[:, :, 0]).all()
    assert not np.isnan(o[:, :, 1]).any()


@pytest.mark.parametrize("where", ["q", "k"])
def test_linear_attention_with_a_feature_map(gpu: Gpu, where: str, rng: np.random.Generator) -> None:
    x = {name: rng.standard_normal((1, 70, 1, 8), np.float32) for name in ("q", "k", "v")}
    x[where][0, 66, 0, 3] = np.nan
    o, expected = (
        recurrent.linear_attention(*(y.astype(kind) for y in x.values()), feature_map="elu+1", backend=backend)
        for backend, kind in (("webgpu", np.float32), ("cpu", np.float64))
    )
    assert np.isnan(expected).any()
    same_places({"o": o}, {"o": expected})
