"""MLX's arrays: values, gradients and errors on its CPU device, and the texts that MLX composes."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import pytest

import saccade
from saccade import Unsupported
from saccade import mask as masks
from saccade.backends.metal import device, texts
from saccade.testing import cases
from saccade.testing.inputs import make
from saccade.testing.metal.spaces import diagnostics

mx = pytest.importorskip("mlx.core")

DTYPES = ("float32", "float16", "bfloat16")
MASK = masks.causal() & masks.window(9, 0)


def some(dtype: str = "float32", Tq: int = 20, Tk: int = 30):
    rng = np.random.default_rng(0)
    shapes = ((2, Tq, 4, 32), (2, Tk, 2, 32), (2, Tk, 2, 32))
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(getattr(mx, dtype)) for s in shapes]


def dense(Tq: int, Tk: int):
    away = np.arange(Tq)[:, None] + Tk - Tq - np.arange(Tk)
    return mx.array((away >= 0) & (away <= 9))


def wide(x):
    return np.array(x.astype(mx.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(dtype) -> None:
    arrays = some(dtype)
    o, lse = saccade.attention(*arrays, MASK, return_lse=True)
    assert (o.dtype, lse.dtype) == (arrays[0].dtype, mx.float32)

    def ours(q, k, v):
        o, lse = saccade.attention(q, k, v, MASK, return_lse=True)
        return (o.astype(mx.float32) ** 2).sum() + mx.sin(lse).sum()

    def plain(q, k, v):
        q, k, v = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v))
        k, v = (mx.repeat(x, 2, axis=1) for x in (k, v))
        s = mx.where(dense(20, 30), q @ k.swapaxes(2, 3) * 32**-0.5, -mx.inf)
        return ((mx.softmax(s, axis=-1) @ v) ** 2).sum() + mx.sin(mx.logsumexp(s, axis=-1)).sum()

    bound = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 2e-1}[dtype]
    assert abs(ours(*arrays).item() - plain(*arrays).item()) < 100 * bound
    for a, b in zip(*(mx.grad(f, argnums=(0, 1, 2))(*arrays) for f in (ours, plain)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(wide(a), wide(b), atol=bound)


def test_three_axes_and_no_queries() -> None:
    q, k, v = some()
    one = saccade.attention(q[0], k[0], v[0], MASK)
    np.testing.assert_array_equal(np.array(one), np.array(saccade.attention(q, k, v, MASK)[0]))
    assert saccade.attention(q[:, :0], k, v).shape == (2, 0, 4, 32)


def test_decode_from_a_cache() -> None:
    class Cache:
        def __init__(self, k, v) -> None:
            self.k, self.v, self.lengths = k, v, np.array([30, 17])

    q, k, v = some(Tq=1)
    o = saccade.decode(q, Cache(k, v))
    for b, n in enumerate((30, 17)):
        alone = saccade.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
        np.testing.assert_allclose(np.array(o[b]), np.array(alone[0]), atol=1e-6)


@pytest.mark.parametrize("put", [np.asarray, mx.array])
def test_decode_from_pages(put, rng) -> None:
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((3, 1, 4, 8), (4, 8, 2, 8), (4, 8, 2, 6)))
    table, lengths = np.array([[2, 3], [0, -1], [1, -1]], np.int32), np.array([11, 5, 3], np.int32)
    expected = saccade.decode(q, saccade.PagedKeys(k, v, table, lengths))
    there = saccade.PagedKeys(mx.array(k), mx.array(v), put(table), put(lengths))
    np.testing.assert_allclose(np.array(saccade.decode(mx.array(q), there)), expected, atol=1e-6)
    slope = mx.grad(lambda keys: saccade.decode(mx.array(q), there._replace(k=keys)).sum())(there.k)
    assert np.abs(np.array(slope)[[0, 1, 2, 3], [0, 0, 0, 0]]).min() > 0
    assert not np.array(slope)[0, 5:].any()


def test_caches_of_codes_are_refused() -> None:
    cache = saccade.KVCache(2, 8, 2, 8, quantised="int8")
    with pytest.raises(Unsupported, match="caches of codes are for NumPy and torch"):
        saccade.decode(mx.zeros((2, 1, 4, 8)), cache)


def test_the_signature_of_mlx() -> None:
    from saccade.integrations.mlx import route, scaled_dot_product_attention

    q, k, v = (x.swapaxes(1, 2) for x in some())
    assert route(MASK).startswith("saccade")
    assert route("causal").startswith("mlx")
    theirs = scaled_dot_product_attention(q, k, v, scale=0.2, mask=dense(20, 30))
    ours = scaled_dot_product_attention(q, k, v, scale=0.2, mask=MASK)
    np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=2e-6)
    sinks = mx.array(np.arange(4, dtype=np.float32))
    theirs = scaled_dot_product_attention(q, k, v, scale=0.2, mask="causal", sinks=sinks)
    ours = scaled_dot_product_attention(q, k, v, scale=0.2, mask=masks.causal(), sinks=sinks)
    np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=2e-6)


@pytest.mark.parametrize("mask", ["causal", MASK])
@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")])
def test_sinks_wider_than_q_are_refused_with_every_mask(mask, dtypes) -> None:
    from saccade.integrations.mlx import scaled_dot_product_attention

    q, k, v = (x.swapaxes(1, 2).astype(getattr(mx, dtypes[0])) for x in some())
    with pytest.raises(ValueError, match="sinks"):
        mx.eval(scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask, sinks=mx.zeros(4, getattr(mx, dtypes[1]))))


@pytest.mark.parametrize("axes", [0, (1, 0, None)])
def test_vmap_folds_into_the_batch(axes) -> None:
    from saccade.integrations.mlx import vmap

    many = [mx.stack([x, 2 * x]) for x in some()]
    given = [x if a == 0 else mx.moveaxis(x, 0, 1) if a else x[0] for x, a in zip(many, axes or (0, 0, 0), strict=True)]

    def attend(q, k, v):
        return saccade.attention(q, k, v, MASK, return_lse=True)

    o, lse = vmap(attend, axes)(*given)
    for n in range(2):
        alone = attend(*(x[0] if axes and axes[i] is None else x[n] for i, x in enumerate(many)))
        np.testing.assert_array_equal(np.array(o[n]), np.array(alone[0]))
        np.testing.assert_array_equal(np.array(lse[n]), np.array(alone[1]))
    total = mx.grad(lambda q: (vmap(attend, axes)(q, *given[1:])[0] ** 2).sum())(given[0])
    assert total.shape == given[0].shape
    assert abs(total).max() > 0
    three = vmap(lambda q, k, v: saccade.attention(q, k, v, MASK))(*(x[0] for x in many))
    np.testing.assert_array_equal(np.array(three), np.array(saccade.attention(*(x[0] for x in many), MASK)))
    with pytest.raises(ValueError, match=r"sizes \[1, 2\]; expected one size"):
        vmap(attend)(many[0], many[1][:1], many[2])


def test_streams() -> None:
    from saccade.integrations.mlx import scaled_dot_product_attention

    q, k, v = (x.swapaxes(1, 2) for x in some())
    plain = scaled_dot_product_attention(q, k, v, scale=0.2, mask=MASK)
    stream = mx.new_stream(mx.cpu)
    for mask in (MASK, dense(20, 30)):
        there = scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask, stream=stream)
        np.testing.assert_allclose(np.array(there), np.array(plain), atol=2e-6)


def test_mlx_is_not_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    before = device.install(None)
    try:
        assert device.missing() == ["it needs the package mlx.core: run pip install '.[metal]' in a clone of Saccade"]
        with pytest.raises(Unsupported, match="it needs the package mlx"):
            saccade.attention(*(np.zeros((1, 4, 1, 8), np.float32) for _ in range(3)), backend="metal")
    finally:
        device.install(before)


def test_errors() -> None:
    q, k, v = some()
    with pytest.raises(TypeError, match="expected an array of MLX"):
        saccade.attention(q, np.array(k), v)
    with pytest.raises(ValueError, match=r"outside mx\.compile"):
        mx.compile(lambda q, k, v: saccade.attention(q, k, v))(q, k, v)
    with pytest.raises(TypeError, match="expected float32, float16 or bfloat16"):
        saccade.attention(q.astype(mx.int32), k, v)
    if device.missing():
        with pytest.raises(Unsupported, match="no Metal device"):
            saccade.attention(q, k, v, backend="metal")


def composed(run: Callable[[], object]) -> list[str]:
    """The texts that MLX composes for the launches of a function, without a device."""
    from saccade.backends.metal.mlx import Mlx

    class Printing(Mlx):
        def run(self, kernel, inputs, outputs, grid, threadgroup, verbose=True):
            return super().run(kernel, inputs, outputs, grid, threadgroup, verbose=True)

    def traced(x):
        before = device.install(Printing())
        try:
            found = run()
        finally:
            device.install(before)
        return tuple(y for y in found if isinstance(y, mx.array))

    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        # MLX prints from C++
        kept = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            mx.export_function(f"{folder}/f.mlxfn", traced, mx.zeros(8))
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
        printed.seek(0)
        return re.findall(r"```\n(.*?)```", printed.read().decode(), re.S)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["heads-gqa", "T1", "all-alibi", "mask-strided-window"])
def test_mlx_composes_what_the_emulator_runs(name, dtype) -> None:
    """The signature of every launch has the names, types, buffers and attributes of the .metal files."""
    from saccade.backends import Extras, Inputs, Outputs, metal
    from saccade.plan import make_plan
    from saccade.problem import Problem, Scores

    x = make(cases.by_name(name), dtype)
    (B, Tq, Hq, D), (_, Tk, Hk, _) = x.q.shape, x.k.shape
    alibi = None if x.slopes is None else (1, *x.slopes.shape)[-2:]
    scores = Scores(sinks=x.sinks is not None, alibi=alibi)
    p = Problem(B, Tq, Tk, Hq, Hk, D, D, dtype=dtype, mask=x.mask, scores=scores, device="mlx")
    plan = make_plan(p, metal.limits(p))
    q, k, v, do = (mx.zeros(a.shape, getattr(mx, dtype)) for a in (x.q, x.k, x.v, x.do))
    slopes = None if x.slopes is None else x.slopes.reshape(alibi)
    inputs = Inputs(q, k, v, Extras(slopes=slopes, sinks=x.sinks))

    def launches():
        o, lse = metal.forward(p, plan, inputs)
        split = metal.decode(p, plan, inputs)
        grads = metal.backward(p, plan, inputs, Outputs(o, lse, do))
        return [o, lse, *split, *grads[:3]]

    found = composed(launches)
    assert len(found) >= 4
    # mx.compile traces the same launches
    assert composed(lambda: mx.compile(lambda: tuple(launches()))()) == found
    compare_signatures(found, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlx_composes_linear_attention(dtype) -> None:
    """The signatures of every launch of a recurrence."""
    from saccade.backends.metal import recurrent
    from saccade.operands import Spec
    from saccade.recurrent.problem import MATRIX, MatrixOptions

    shapes = {"q": (2, 40, 1, 8), "k": (2, 40, 1, 8), "v": (2, 40, 2, 12), "initial_state": (2, 2, 8, 13)}
    kinds = dict.fromkeys(shapes, dtype) | {"initial_state": "float32"}
    specs = {n: Spec(shapes[n], kinds[n], "mlx") if n in shapes else None for n in MATRIX.names}
    p = MATRIX.describe(specs, MatrixOptions("add", "elu+1", True))
    arrays = {n: mx.zeros(shapes[n], getattr(mx, kinds[n])) if n in shapes else None for n in MATRIX.names}

    def launches():
        o, last = recurrent.forward(p, arrays)
        return [o, last, *recurrent.backward(p, arrays, (o, last), frozenset(shapes)).values()]

    found = composed(launches)
    assert len(found) == 9
    compare_signatures(found, dtype)


def compare_signatures(found: list[str], dtype: str) -> None:
    """Compares MLX's texts with the .metal files: names, types, buffers, attributes, address spaces of pointers."""
    for text in found:
        assert diagnostics(text) == []
        theirs = texts.signature(text)
        name = re.match("custom_kernel_([a-z_]*[a-z])_", theirs.name)
        assert name is not None
        # the longest of our kernel names that is a prefix of MLX's
        ours = texts.signature(texts.source(max((n for n in texts.NAMES if name[1].startswith(n)), key=len)))
        # arrays in their order; attributes sorted, as MLX does
        both = [sorted(x.parameters, key=lambda p: "" if p.buffer else p.name) for x in (ours, theirs)]
        for a, b in zip(*both, strict=True):
            assert (a.name, a.attribute) == (b.name, b.attribute)
            found_type = b.type.replace("const device", "device const")
            for long, short in (
                ("bfloat16_t", "bfloat"),
                ("float16_t", "half"),
                ("int32_t", "int"),
                ("uint16_t", "ushort"),
            ):
                found_type = re.sub(rf"\b{long}\b", short, found_type)
            kinds = {texts.TYPES[dtype], "float"} if re.search(r"\b[STU]\b", a.type) else {""}
            assert found_type in {re.sub(r"\b[STU]\b", kind, a.type) for kind in kinds}, (a, b)
