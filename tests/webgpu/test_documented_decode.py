"""The documented kernels of generation: rotations and their inverses, one query over a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from saccade import reference, rope
from saccade.backends.webgpu import documented
from saccade.backends.webgpu.device import Gpu
from saccade.backends.webgpu.documented import run
from saccade.testing.compare import eps, measure, require

F32 = np.float32


@pytest.mark.parametrize("length, Hq, Hk, D", [(1, 2, 1, 64), (255, 3, 1, 7), (256, 4, 2, 48), (257, 1, 1, 256),
                                               (700, 12, 4, 16)])  # fmt: skip
def test_decode(rng: np.random.Generator, length: int, Hq: int, Hk: int, D: int):
    q = rng.standard_normal((Hq, D)).astype(F32)
    k, v = rng.standard_normal((2, length + 9, Hk, D)).astype(F32)
    k[length:], v[length:] = np.nan, np.inf
    given = (q[None, None], k[None, :length], v[None, :length])
    ref, plain = reference.forward(*given)[0][0, 0], reference.forward(*given, dtype=F32)[0][0, 0]
    for subgroups in (False, None):
        o = run("attention_decode", Q_one=q, K_cache=k, V_cache=v, cache_len=length, subgroups=subgroups)
        require([measure("o", o, ref, plain, F32)])
    assert (run("attention_decode", Q_one=q, K_cache=k, V_cache=v, cache_len=0) == 0).all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "T, H, D, offset, base",
    [(50, 3, 64, 0, 1e4), (30, 2, 80, 60000, 5e5), (5, 1, 2, 3, 1e4), (9, 1, 256, 12345, 10.0), (3, 2, 6, 7, 0.5)],
)
def test_rope_there_and_back(
    rng: np.random.Generator, T: int, H: int, D: int, offset: int, base: float, interleaved: bool
):
    x = rng.standard_normal((T, H, D)).astype(F32)
    how: dict[str, Any] = {"pos_offset": offset, "rope_base": base, "interleaved": interleaved}
    want = rope(x.astype(np.float64), np.arange(T) + offset, base=float(F32(base)), interleaved=interleaved)
    band = 4 * eps(F32) * abs(x).max()
    for name, there, back in (("rope_q", "Q", "dQ"), ("rope_k", "K", "dK")):
        y = run(name, **{there: x}, **how)
        assert abs(y - want).max() <= band
        assert abs(run(f"{name}_backward", **{back: y}, **how) - x).max() <= band


def test_rope_folds_its_grid(gpu: Gpu, rng: np.random.Generator):
    x = rng.standard_normal((40, 3, 64)).astype(F32)
    call = documented.prepare("rope_q", Q=x)
    assert call.step.grid == (15, 1, 1)
    call.step.grid = (4, 4, 1)
    gpu.run([call.step])
    np.testing.assert_array_equal(call.arrays["Q"].numpy(), run("rope_q", Q=x))
    assert documented._grid("rope_k", {"T": 65535, "Hk": 9, "D": 64}) == (65535, 2, 1)
