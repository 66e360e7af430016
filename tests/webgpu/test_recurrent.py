"""Recurrences on WebGPU, in addition to the contract suite: NumPy arrays, refusals, buffers after a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from saccade import Unsupported, recurrent

if TYPE_CHECKING:
    from saccade.backends.webgpu.device import Gpu


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy_arrays_give_the_bits_of_tensors(gpu: Gpu, dtype: str, rng: np.random.Generator):
    torch = pytest.importorskip("torch")
    q, k, v = (rng.standard_normal((2, 70, 2, 6)).astype(dtype) for _ in range(3))
    o, (S, z) = recurrent.linear_attention(q, k, v, return_state=True, backend="webgpu")
    tensors = (torch.from_numpy(x) for x in (q, k, v))
    want, (S_want, z_want) = recurrent.linear_attention(*tensors, return_state=True, backend="webgpu")
    assert o.dtype == q.dtype
    for got, expected in ((o, want), (S, S_want), (z, z_want)):
        assert got.tobytes() == expected.numpy().tobytes()


def test_refusals_say_what_to_do(gpu: Gpu):
    q = np.ones((1, 4, 2, 8), np.float32)
    x, row = np.ones((1, 4, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(Unsupported, match="a decay per channel is not computed on WebGPU: use another backend"):
        recurrent.gated_linear(q, q, q, -q, backend="webgpu")
    with pytest.raises(Unsupported, match="the delta rule is not computed here: leave backend out"):
        recurrent.gated_delta_rule(q, q, q, q[..., 0], backend="webgpu")
    with pytest.raises(Unsupported, match="the Taylor map is computed only on the CPU"):
        recurrent.linear_attention(q, q, q, feature_map="taylor", backend="webgpu")
    with pytest.raises(Unsupported, match="float64 is not computed on WebGPU: cast to float32"):
        recurrent.linear_attention(*[q.astype(np.float64)] * 3, backend="webgpu")
    with pytest.raises(Unsupported, match="only one recurrence over channels, the selective scan: use another backend"):
        recurrent.rg_lru(x, x, x, row, backend="webgpu")
    with pytest.raises(Unsupported, match="N = 300 numbers of state: at most 256"):
        recurrent.selective_scan(
            x, x, -np.ones((8, 300), np.float32), *[np.ones((1, 4, 300), np.float32)] * 2, backend="webgpu"
        )


def test_no_text_depends_on_a_shape(gpu: Gpu, rng: np.random.Generator):
    def call(T: int, H: int, n: int, D: int) -> None:
        q, k, v = (rng.standard_normal((1, T, H, n), np.float32) for _ in range(3))
        recurrent.linear_attention(q, k, v, backend="webgpu")
        u, delta = (rng.standard_normal((1, T, D), np.float32) for _ in range(2))
        B, C = (rng.standard_normal((1, T, n), np.float32) for _ in range(2))
        recurrent.selective_scan(u, delta, -np.ones((D, n), np.float32), B, C, backend="webgpu")

    call(70, 2, 16, 24)
    before = len(gpu._pipelines)
    call(5, 3, 9, 70)
    assert len(gpu._pipelines) == before
