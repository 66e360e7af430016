"""torch's MPS device replaced: the emulator is its compiler, and its tensors are on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade.backends import Inputs, Outputs, metal
from saccade.plan import make_plan
from saccade.problem import Problem, Scores
from saccade.testing import cases
from saccade.testing.inputs import make
from saccade.testing.metal import Launch, emulate


class Shader:
    """Replaces the result of `torch.mps.compile_shader` by the emulator."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __getattr__(self, name: str):
        import torch

        from saccade.backends.metal.texts import signature

        found = signature(self.text)
        assert found.name == name

        def run(*arrays, threads, group_size) -> None:
            buffers = [p for p in found.parameters if p.buffer]
            arrays = [x.view(torch.uint16) if x.dtype is torch.bfloat16 else x for x in arrays]
            given = dict(zip((p.name for p in buffers), (x.numpy() for x in arrays), strict=True))
            made = {p.name: (given[p.name].shape, given[p.name].dtype) for p in buffers if p.written}
            inputs = {n: x for n, x in given.items() if n not in made}
            for n, x in emulate(self.text, inputs, Launch(tuple(threads), tuple(group_size), made)).items():
                given[n][...] = x

        return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_as_numpy(emulator, monkeypatch, dtype) -> None:
    torch = pytest.importorskip("torch")
    from saccade.backends.metal.mps import Mps

    monkeypatch.setattr(torch.mps, "compile_shader", Shader)
    x = make(cases.by_name("mask-strided-window"), dtype)
    emulator()
    o, lse = saccade.attention(x.q, x.k, x.v, x.mask, return_lse=True, backend="metal")
    grads = saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, x.mask, backend="metal")[:3]
    metal.install(Mps("cpu"))
    (B, Tq, Hq, D), (_, Tk, Hk, _) = x.q.shape, x.k.shape
    p = Problem(B, Tq, Tk, Hq, Hk, D, D, dtype=dtype, mask=x.mask, scores=Scores(scale=D**-0.5), device="mps")
    plan = make_plan(p, metal.limits(p))
    bits = [np.ascontiguousarray(a.view(np.uint16) if dtype == "bfloat16" else a) for a in (x.q, x.k, x.v, x.do)]
    q, k, v, do = (torch.from_numpy(a).view(getattr(torch, dtype)) for a in bits)
    got = metal.forward(p, plan, Inputs(q, k, v))
    got += metal.backward(p, plan, Inputs(q, k, v), Outputs(*got, do))[:3]
    for a, b in zip(got, (o, lse, *grads), strict=True):
        same = a.view(torch.uint16).numpy() if a.dtype is torch.bfloat16 else a.numpy()
        np.testing.assert_array_equal(same, b.view(np.uint16) if b.dtype.name == "bfloat16" else b)


def test_tensors_on_mps_go_there() -> None:
    p = Problem(1, 2, 2, 1, 1, 8, 8, dtype="float32", device="mps:0")
    assert metal.unsupported(p) == []
    assert "move them to the CPU" in metal.unsupported(Problem(1, 2, 2, 1, 1, 8, 8, device="cuda:0"))[0]
