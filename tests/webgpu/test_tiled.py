"""The tiled kernels' hosts: the uniform block, arrays in pieces, the tile of real devices."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade.backends import Extras, Inputs, Outputs, plan_encoding, webgpu
from saccade.backends.webgpu import gradients, shapes, texts, tiled
from saccade.plan import make_plan
from saccade.problem import FEW_PAIRS, Problem, Scores
from saccade.testing import cases, run
from saccade.testing.compare import measure_all, require
from saccade.testing.inputs import make

LIMIT = "max-storage-buffer-binding-size"


def test_fields_of_dims_match_the_text() -> None:
    body = re.search(r"struct Dims \{(.*?)\n\}", texts.render("dims", kind="f32"), re.S)
    assert body is not None
    fields = re.findall(r"(\w+): (\w+),", re.sub("//.*", "", body[1]))
    assert [name for name, _ in fields] == [*plan_encoding.INTEGERS, *plan_encoding.FLOATS]
    assert {kind for name, kind in fields if name in plan_encoding.FLOATS} == {"f32"}
    assert {kind for name, kind in fields if name in plan_encoding.INTEGERS} == {"u32"}


@pytest.mark.parametrize("D", [1, 8, 24, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("Dv", [4, 64, 256])
def test_tiles_fit_what_they_are_made_for(D, Dv) -> None:
    for memory in (shapes.PORTABLE_MEMORY, 2 * shapes.PORTABLE_MEMORY):
        s = shapes.shape(D, Dv, memory, False)
        assert memory >= 16 * s.SHARED + 4 * (s.WG + 2 * s.ROWS + 1)
        assert s.WG <= 256
        assert s.ROWS * s.CG == s.WG * s.RT
        assert s.D4 % (s.DC // 4) == s.DV4 % (s.DC // 4) == 0


@pytest.mark.parametrize("limit", [1 << 10, 1 << 14, 1 << 20])
def test_pieces_cover_an_array_once(limit) -> None:
    for B, T, width in ((1, 1000, 16), (3, 700, 24), (2, 64, 128)):
        if limit < width * (shapes.ROWS + 32):
            continue
        seen = np.zeros((B, T), int)
        for s in shapes.spans(limit, B, T, width):
            seen[s.b0 : s.b1, s.t0 : s.t1] += 1
            assert s.t0 % shapes.ROWS == 0
        assert (seen == 1).all()


@pytest.mark.parametrize("name", ["heads-gqa", "mask-window-causal", "mask-documents-batch", "sinks"])
def test_arrays_longer_than_a_binding(gpu, monkeypatch, name) -> None:
    x = make(replace(cases.by_name(name), Tq=230, Tk=270, D=16, Dv=16, mask="causal() & window(90, 0)"))
    whole = run.computed(x, "webgpu")
    monkeypatch.setitem(gpu.limits, LIMIT, 128 * x.q.shape[2] * 64)
    steps: list[int] = []
    call = type(gpu).call
    monkeypatch.setattr(type(gpu), "call", lambda g, s, *a, **k: steps.append(len(s)) or call(g, s, *a, **k))
    require(run.verify(x, "webgpu"), name)
    assert max(steps) > 6
    for key, a in run.computed(x, "webgpu").items():
        np.testing.assert_allclose(a, whole[key], rtol=0, atol=3e-6 * max(1, np.abs(whole[key]).max()), err_msg=key)


def test_decode_over_keys_longer_than_a_binding(gpu, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, T, H, 16), np.float32) for T, H in ((1, 4), (1500, 2), (1500, 2)))
    whole = saccade.attention(q, k, v, backend="webgpu")
    monkeypatch.setitem(gpu.limits, LIMIT, 128 * 600)
    np.testing.assert_allclose(saccade.attention(q, k, v, backend="webgpu"), whole, atol=2e-7)


@pytest.mark.parametrize("Tq", [1, 20])
def test_a_cache_longer_than_a_binding_with_few_keys(gpu, monkeypatch, rng, Tq) -> None:
    q, k, v = (webgpu.array(rng.standard_normal((1, T, H, 8), np.float32), gpu) for T, H in ((Tq, 4), (40, 2), (40, 2)))
    whole = saccade.attention(q, k, v, saccade.mask.causal()).numpy()
    monkeypatch.setitem(gpu.limits, LIMIT, 1 << 14)
    cache = saccade.KVCache(1, 1000, 2, 8, device="webgpu")
    assert cache.k.nbytes > 1 << 14
    assert np.array_equal(saccade.decode(q, cache).numpy(), np.zeros_like(whole))
    cache.append(k, v)
    np.testing.assert_array_equal(saccade.decode(q, cache).numpy(), whole)


@pytest.mark.parametrize("dtype, D, Dv, heads", [("float32", 16, 24, (4, 2)), ("float16", 80, 8, (3, 1))])
def test_decode_with_and_without_shuffles(gpu, monkeypatch, dtype, D, Dv, heads) -> None:
    assert gpu.shuffle >= 4
    case = cases.Case("decode", 1, 700, 2, *heads, D, Dv, mask="keys([700, 300])", softcap=5.0, sinks=True)
    x = make(case, dtype)
    wanted, plain = run.expected(x, backward=False), run.plain(x, backward=False)
    for width in (gpu.shuffle, 1):
        monkeypatch.setattr(gpu, "shuffle", width)
        p, plan, inputs = _described(x)
        o, lse = webgpu.decode(p, plan, inputs._replace(extras=Extras(sinks=x.sinks)))
        require(measure_all({"o": o, "lse": lse}, wanted, plain, dtype))


def _described(x):
    c = x.case
    p = Problem(
        c.B, c.Tq, c.Tk, c.Hq, c.Hk, c.D, c.Dv, dtype=x.q.dtype.name, mask=x.mask,
        scores=Scores(scale=c.D**-0.5, softcap=c.softcap or 0.0, sinks=c.sinks),
    )  # fmt: skip
    return p, make_plan(p, webgpu.limits(p)), Inputs(x.q, x.k, x.v)


@pytest.mark.parametrize("page, Tq", [(1, 70), (16, 1)])
def test_pages_give_the_bits_of_contiguous_keys(gpu, rng, page, Tq) -> None:
    B, Tk, Hq, Hk, D, Dv = 2, 150, 4, 2, 24, 40
    q, k, v, do = (
        rng.standard_normal(s, np.float32) for s in ((B, Tq, Hq, D), (B, Tk, Hk, D), (B, Tk, Hk, Dv), (B, Tq, Hq, Dv))
    )
    mask = saccade.mask.causal() & saccade.mask.keys(np.array([Tk, Tk - 37]))
    p = Problem(B, Tq, Tk, Hq, Hk, D, Dv, mask=mask, scores=Scores(scale=D**-0.5))
    table = rng.permutation(B * -(-Tk // page)).astype(np.int32).reshape(B, -1)
    pages = [np.full((table.size + 1, page, *x.shape[2:]), np.nan, np.float32) for x in (k, v)]
    for b, j in np.ndindex(B, Tk):
        for paged, x in zip(pages, (k, v), strict=True):
            paged[table[b, j // page], j % page] = x[b, j]
    plan, inputs = make_plan(p, webgpu.limits(p)), Inputs(q, k, v)
    in_pages = Inputs(q, *pages, Extras(block_table=table, page_size=page))
    for verb in (webgpu.forward, webgpu.decode):
        o, lse = verb(p, plan, inputs)
        same = verb(p, plan, in_pages)
        np.testing.assert_array_equal(same[0], o)
        np.testing.assert_array_equal(same[1], lse)
    expected = webgpu.backward(p, plan, inputs, Outputs(o, lse, do))
    got = webgpu.backward(p, plan, in_pages, Outputs(o, lse, do))
    for a, b in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(a, b)


def test_key_gradients_by_head_and_by_group(gpu, monkeypatch) -> None:
    x = make(cases.Case("groups", 70, 70, 1, 6, 2, 8, 8, mask="causal()"))
    spread = run.computed(x, "webgpu")
    monkeypatch.setattr(gradients, "FEW", 0)
    for key, a in run.computed(x, "webgpu").items():
        np.testing.assert_allclose(a, spread[key], rtol=0, atol=3e-6 * max(1, np.abs(a).max()), err_msg=key)


@pytest.mark.parametrize("name, Tk", [("all", 50), ("all-alibi", 50), ("all-strided", 50), ("heads-gqa", 130)])
def test_few_pairs_feel_no_rounding_of_lse_and_o(gpu, monkeypatch, name, Tk) -> None:
    x = make(replace(cases.by_name(name), Tq=31, Tk=Tk, D=16, Dv=8), kind="last", poison=False)
    assert 31 * Tk <= FEW_PAIRS
    if Tk > 64:
        # keys in three pieces
        monkeypatch.setitem(gpu.limits, LIMIT, 1 << 14)
    o, lse = saccade.attention(x.q, x.k, x.v, x.mask, return_lse=True, **_options(x))
    exact = _gradients(x, o, lse)
    rounded = lse + np.where(np.isfinite(lse), 4e-7 * np.maximum(np.abs(lse), 1), 0)
    for key, a in _gradients(x, o * np.float32(1 + 1e-4), rounded.astype(np.float32)).items():
        np.testing.assert_allclose(a, exact[key], rtol=0, atol=6e-7 * np.abs(exact[key]).max(), err_msg=key)


@pytest.mark.parametrize("name", ["heads-gqa", "sinks"])
def test_few_pairs_of_more_keys_keep_their_lse(gpu, name) -> None:
    x = make(replace(cases.by_name(name), Tq=30, Tk=40, D=16, Dv=8, mask=""))
    o, lse = saccade.attention(x.q, x.k, x.v, return_lse=True, **_options(x))
    whole = _gradients(x, o, lse)
    parts = [_gradients(replace(x, k=x.k[:, a:b], v=x.v[:, a:b]), o, lse) for a, b in ((0, 9), (9, 40))]
    for key, join in {"dq": sum, "dk": lambda a: np.concatenate(a, 1), "dv": lambda a: np.concatenate(a, 1)}.items():
        found = join([part[key] for part in parts])
        np.testing.assert_allclose(found, whole[key], rtol=0, atol=2e-6 * np.abs(whole[key]).max(), err_msg=key)


def test_delta_may_be_given(gpu) -> None:
    x = make(replace(cases.by_name("heads-gqa"), Tq=30, Tk=40, mask="causal() & keys(15, 40)"))
    p, plan, inputs = _described(x)
    o, lse = webgpu.forward(p, plan, inputs)
    blind = np.isneginf(lse)
    assert blind.any()
    delta = np.where(blind, 0, (np.where(blind[..., None], 0, x.do) * o).sum(-1))
    outputs = Outputs(o, lse, x.do)
    got = webgpu.backward(p, plan, inputs, outputs._replace(delta=delta))
    for a, b in zip(got[:3], webgpu.backward(p, plan, inputs, outputs)[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())


def _options(x):
    return {**x.scores, "sinks": x.sinks, "bias": x.bias_argument, "backend": "webgpu"}


def _gradients(x, o, lse):
    found = saccade.attention_backward(x.do, x.q, x.k, x.v, o, lse, x.mask, dlse=x.dlse, **_options(x))
    return dict(zip(("dq", "dk", "dv"), found, strict=False)) | found[3]


def test_few_queries_drop_the_weights_that_others_drop(gpu) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, T, 2, 16), np.float32) for T in (2, 200, 200))
    ours, cpu = (saccade.attention(q, k, v, dropout=0.5, seed=3, backend=name) for name in ("webgpu", "cpu"))
    np.testing.assert_allclose(ours, cpu, atol=1e-6)
    assert np.abs(ours - saccade.attention(q, k, v, backend="webgpu")).max() > 1e-2


def test_a_strided_mask_wants_arrays_whole(gpu, monkeypatch) -> None:
    x = np.ones((1, 900, 2, 16), np.float32)
    monkeypatch.setitem(gpu.limits, LIMIT, 128 * 400)
    with pytest.raises(saccade.Unsupported, match="strided masks need each array in one binding"):
        saccade.attention(x, x, x, saccade.mask.strided(3), backend="webgpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads-gqa", "mask-documents-causal", "softcap"])
def test_the_tile_of_a_real_device(gpu, monkeypatch, name) -> None:
    monkeypatch.setattr(tiled, "shape", lambda D, Dv, memory, software: shapes.shape(D, Dv, 1 << 15, False))
    require(run.verify(make(cases.by_name(name)), "webgpu"), name)
