"""`torch.export` and AOTInductor of models that call Saccade, with every way in which a mask reaches the operator."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")
# registers masks as inputs of programs
pytest.importorskip("saccade.frameworks.torch_op")

import saccade  # noqa: E402
from saccade import mask as masks  # noqa: E402

B, T, HQ, HK, D = 2, 10, 4, 2, 8
IDS = np.array([0] * 4 + [1] * 6)


class Model(torch.nn.Module):
    """A projection of q, and a call of attention with arrays besides q, k and v as inputs."""

    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.projection, self.call = torch.nn.Linear(D, D), call

    def forward(self, q, k, v, *more):
        return self.call(self.projection(q), k, v, *more)


def rows(batch: int = B, length: int = T):
    generator = torch.Generator().manual_seed(batch * length)
    return tuple(torch.randn(batch, length, heads, D, generator=generator) for heads in (HQ, HK, HK))


def calling(mask=None, **options) -> Callable:
    return lambda q, k, v: saccade.attention(q, k, v, mask, **options)


# (call, inputs besides q, k and v, whether batch and length may be dynamic)
CALLS: dict[str, tuple[Callable, Callable[[int, int], tuple], bool]] = {
    "plain": (calling(), lambda b, t: (), True),
    "causal": (calling(masks.causal()), lambda b, t: (), True),
    "window": (calling(masks.causal() & masks.window(4, 0), softcap=5.0, scale=0.3), lambda b, t: (), True),
    "strided": (calling(masks.strided(3) | masks.window(2, 0)), lambda b, t: (), True),
    "lse": (calling(masks.causal(), return_lse=True), lambda b, t: (), True),
    "constant documents": (calling(masks.documents(IDS) & masks.causal()), lambda b, t: (), False),
    "constant blocks": (calling(masks.tiles([[1, 0], [1, 1]], 5)), lambda b, t: (), False),
    "documents": (
        lambda q, k, v, ids: saccade.attention(q, k, v, masks.documents(ids) & masks.causal()),
        lambda b, t: (torch.arange(t) // 4,), True,
    ),
    "lengths": (
        lambda q, k, v, lengths: saccade.attention(q, k, v, masks.keys(lengths) & masks.causal()),
        lambda b, t: (torch.arange(1, b + 1) * t // b,), True,
    ),
    "padding": (
        lambda q, k, v, tokens: saccade.attention(q, k, v, masks.padding(tokens)),
        lambda b, t: (torch.arange(t) < torch.arange(1, b + 1)[:, None] * t // b,), True,
    ),
    "tensors": (calling(masks.documents(torch.from_numpy(IDS)) & masks.causal()), lambda b, t: (), False),
    "mask as input": (
        saccade.attention, lambda b, t: (masks.documents(torch.arange(t) // 4) & masks.causal(),), False,
    ),
    "bias": (
        lambda q, k, v, bias: saccade.attention(q, k, v, bias=bias),
        lambda b, t: (torch.linspace(-1, 1, b * t).view(b, 1, 1, t),), True,
    ),
    "side arrays": (
        lambda q, k, v, slopes, log_f: saccade.attention(
            q, k, v, masks.causal(), sinks=slopes, bias=saccade.alibi(slopes) + saccade.gates(log_f)
        ),
        lambda b, t: (torch.linspace(0.1, 1, HQ), -torch.linspace(0.1, 2, b * t * HQ).view(b, t, HQ)), True,
    ),
    "dropout": (calling(masks.causal(), dropout=0.3, seed=5), lambda b, t: (), True),
    "layout": (
        lambda q, k, v: saccade.attention(*(x.transpose(1, 2) for x in (q, k, v)), masks.causal(), layout="bhtd"),
        lambda b, t: (), True,
    ),
}  # fmt: skip


def dynamic(inputs):
    """The dynamic shapes of q, k, v and other inputs: every dimension of size B or T."""
    dims = {B: torch.export.Dim("batch"), T: torch.export.Dim("length", min=2)}
    shapes = {name: {n: dims[m] for n, m in enumerate(x.shape[:2])} for name, x in zip("qkv", inputs, strict=False)}
    more = tuple({n: dims[m] for n, m in enumerate(x.shape) if m in dims} for x in inputs[3:])
    return {**shapes, "more": more} if more else shapes


def same(first, second) -> None:
    first, second = ((x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (first, second))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


# strict export refuses NumPy arrays
EXPORTED = [
    (name, strict) for name in CALLS for strict in (False, True) if not (strict and name.startswith("constant"))
]


@pytest.mark.parametrize("name, strict", EXPORTED)
@torch.no_grad()
def test_an_exported_program_equals_the_model(name: str, strict: bool, tmp_path) -> None:
    call, more, lengths = CALLS[name]
    model, inputs = Model(call).eval(), (*rows(), *more(B, T))
    if len(inputs) > len(rows()) and torch.__version__ < "2.10":
        pytest.skip("programs of torch 2.9 do not find the arguments that *args collects")
    shapes = dynamic(inputs) if lengths else None
    program = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=strict)
    assert "saccade.forward" in str(program.graph)
    same(program.module()(*inputs), model(*inputs))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    same(loaded(*inputs), model(*inputs))
    if lengths:
        other = (*rows(3, 17), *more(3, 17))
        same(loaded(*other), model(*other))


LOAD = "import sys, torch, saccade.frameworks.torch_op; inputs, expected = torch.load(sys.argv[2]); run = "
SAME = "; got = run(*inputs); assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(got, expected, strict=True))"
LOAD_EXPORTED = f"{LOAD} torch.export.load(sys.argv[1]).module(){SAME}"
# what torch 2.10 does not import itself
CACHE = "import torch._inductor.codecache; "
LOAD_COMPILED = f"{CACHE}{LOAD} torch._inductor.aoti_load_package(sys.argv[1]){SAME}"


def assert_in_a_new_process(code: str, *files: str) -> None:
    subprocess.run([sys.executable, "-c", code, *files], check=True)


def test_a_stored_program_runs_in_another_process(tmp_path) -> None:
    call, more, _ = CALLS["constant documents"]
    model, inputs = Model(call).eval(), (*rows(), *more(B, T))
    torch.export.save(torch.export.export(model, inputs), tmp_path / "program.pt2")
    torch.save((inputs, model(*inputs).detach()), tmp_path / "results.pt")
    assert_in_a_new_process(LOAD_EXPORTED, str(tmp_path / "program.pt2"), str(tmp_path / "results.pt"))


class Several(torch.nn.Module):
    """All calls in one model, because each compilation takes long."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList(Model(CALLS[name][0]) for name in names)

    def forward(self, q, k, v, more):
        results = [model(q, k, v, *inputs) for model, inputs in zip(self.models, more, strict=True)]
        return [y for x in results for y in (x if isinstance(x, tuple) else (x,))]


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "lengths", [pytest.param(True, id="dynamic", marks=pytest.mark.slow), pytest.param(False, id="static")]
)
@torch.no_grad()
def test_a_compiled_program_equals_the_model(lengths: bool, tmp_path) -> None:
    names = [name for name, call in CALLS.items() if call[2] == lengths and name != "mask as input"]
    model = Several(names).eval()

    def inputs(batch: int, length: int):
        return (*rows(batch, length), [CALLS[name][1](batch, length) for name in names])

    shapes = None
    if lengths:
        first = dynamic(rows())
        # one Dim per name, in all inputs
        dims = {B: first["q"][0], T: first["q"][1]}
        more = [tuple({n: dims[s] for n, s in enumerate(x.shape) if s in dims} for x in xs) for xs in inputs(B, T)[3]]
        shapes = {**{name: first[name] for name in "qkv"}, "more": more}
    program = torch.export.export(model, inputs(B, T), dynamic_shapes=shapes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    if not lengths:
        torch.save((inputs(B, T), model(*inputs(B, T))), tmp_path / "results.pt")
        assert_in_a_new_process(LOAD_COMPILED, str(path), str(tmp_path / "results.pt"))
    for sizes in ((B, T), (3, 17)) if lengths else ((B, T),):
        for x, y in zip(compiled(*inputs(*sizes)), model(*inputs(*sizes)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def export(call: Callable, *more, **options):
    return torch.export.export(Model(call), (*rows(), *more), **options)


def test_strict_export_refuses_constants_of_numpy() -> None:
    with pytest.raises(Exception, match="make the mask of tensors"):
        export(CALLS["constant documents"][0], strict=True)


def test_pruning_is_refused() -> None:
    prune = lambda q, k, v, f: saccade.attention(q, k, v, masks.causal(), bias=saccade.gates(f, prune=0.1))  # noqa: E731
    with pytest.raises(saccade.Unsupported, match="prune"):
        export(prune, -torch.rand(B, T, HQ))


def test_caches_are_refused() -> None:
    cache = saccade.KVCache(B, T, HK, D, dtype=torch.float32)

    def step(q, k, v):
        cache.append(k, v)
        return saccade.decode(q, cache)

    with torch.no_grad(), pytest.raises(saccade.Unsupported, match=r"torch\.export does not keep"):
        export(step)
    with pytest.raises(saccade.Unsupported, match="store the cache as a constant"):
        export(lambda q, k, v: saccade.decode(q, cache))


def test_wrong_calls_are_refused_while_exporting() -> None:
    with pytest.raises(ValueError, match="sinks has shape"):
        export(calling(sinks=torch.zeros(HQ + 1)))
