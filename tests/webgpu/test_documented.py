"""The documented kernels on one driver, compared with the float64 oracle: values, edges, bits, accumulation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from saccade import mask, reference
from saccade.backends.webgpu.arrays import GpuArray, array
from saccade.backends.webgpu.device import Gpu
from saccade.backends.webgpu.documented import run
from saccade.testing.compare import eps, measure, measure_all, require

Array = np.ndarray[Any, Any]
F32 = np.float32
# T, Hq, Hk, D, starts of documents
SHAPES = [
    (1, 1, 1, 1, (0,)), (1, 4, 2, 64, (0,)), (2, 1, 1, 3, (0, 1)), (33, 12, 4, 8, (0, 5, 32)), (40, 3, 1, 16, (0, 17)),
    (21, 1, 1, 48, (0, 3)), (19, 2, 1, 80, (0,)), (18, 2, 2, 96, (0, 17)), (17, 1, 1, 192, (0,)), (16, 1, 1, 256, (0,)),
    (15, 1, 1, 7, (0, 14)), (15, 2, 1, 65, (0,)), (256, 1, 1, 4, (0,)), (257, 1, 1, 4, (0,)), (290, 1, 1, 5, (0, 255)),
    (290, 2, 1, 4, (0, 256)), (290, 1, 1, 4, (0, 3, 257)), (290, 1, 1, 4, tuple(range(0, 290, 29))),
]  # fmt: skip


class Given(NamedTuple):
    q: Array
    k: Array
    v: Array
    do: Array
    seg: Array

    @property
    def forward(self) -> dict[str, Array]:
        return {"Q": self.q, "K": self.k, "V": self.v, "seg": self.seg}


def make(rng: np.random.Generator, T: int, Hq: int, Hk: int, D: int, starts: tuple[int, ...] = (0,)) -> Given:
    q, k, v, do = (rng.standard_normal((T, H, D)).astype(F32) for H in (Hq, Hk, Hk, Hq))
    seg = np.array(starts, np.uint32)[np.searchsorted(starts, np.arange(T), side="right") - 1]
    return Given(q, k, v, do, seg)


def oracle(x: Given, dtype: Any = np.float64, **options: Any) -> dict[str, Array]:
    m = mask.causal() & mask.documents(x.seg.astype(np.int64))
    q, k, v, do = x.q[None], x.k[None], x.v[None], x.do[None]
    o, lse = reference.forward(q, k, v, m, dtype=dtype, **options)
    dq, dk, dv, _ = reference.backward(do, q, k, v, m, dtype=dtype, **options)
    return {"o": o[0], "lse": lse[0], "dq": dq[0], "dk": dk[0], "dv": dv[0]}


def one_by_one(x: Given) -> dict[str, Array]:
    """Standard attention in float32 that sums dK and dV over queries one after the other, as atomic adds do."""
    T, Hq, D = x.q.shape
    plain = {name: value.astype(F32) for name, value in oracle(x, F32).items()}
    dk, dv = np.zeros_like(x.k), np.zeros_like(x.v)
    for i in range(T):
        seen = slice(int(x.seg[i]), i + 1)
        for h in range(Hq):
            kv = h // (Hq // x.k.shape[1])
            p = np.exp(F32(D**-0.5) * (x.k[seen, kv] @ x.q[i, h]) - plain["lse"][i, h])
            dp = x.v[seen, kv] @ x.do[i, h]
            ds = F32(D**-0.5) * p * (dp - p @ dp)
            dk[seen, kv] += ds[:, None] * x.q[i, h]
            dv[seen, kv] += p[:, None] * x.do[i, h]
    return plain | {"dk": dk, "dv": dv}


def nan_scratch(x: Given) -> dict[str, Array]:
    T, Hq, _ = x.q.shape
    return {name: np.full((T, Hq, T), np.nan, F32) for name in ("P_scratch", "dS_scratch")}


def split(x: Given, lse: Any, **options: Any) -> dict[str, Any]:
    dq, p, ds = run("attention_backward_short", **x.forward, dO=x.do, LSE=lse, **nan_scratch(x), **options)
    scratch = {"P_scratch": p, "dS_scratch": ds}
    dk, dv = run("attention_backward_short_dKdV", Q=x.q, dO=x.do, **scratch, n_kv_heads=x.k.shape[1])
    return {"dq": dq, "dk": dk, "dv": dv}


def streaming(x: Given, lse: Any, **options: Any) -> dict[str, Any]:
    dq, dk, dv = run("attention_backward", **x.forward, dO=x.do, LSE=lse, **options)
    return {"dq": dq, "dk": dk, "dv": dv}


def shown(shape: tuple[Any, ...]) -> str:
    return "-".join(map(str, shape[:4])) + f"-documents{len(shape[4])}"


@pytest.mark.parametrize("subgroups", [False, True], ids=["plain", "subgroups"])
@pytest.mark.parametrize("shape", SHAPES, ids=shown)
def test_values(gpu: Gpu, rng: np.random.Generator, shape: tuple[Any, ...], subgroups: bool):
    if subgroups and "subgroup" not in gpu.features:
        pytest.skip("the device has no subgroups")
    x = make(rng, *shape)
    ref, plain = oracle(x), oracle(x, F32)
    o, lse = run("attention_forward", **x.forward, subgroups=subgroups)
    require(measure_all({"o": o, "lse": lse}, ref, plain, F32), shape)
    require(measure_all(split(x, lse, subgroups=subgroups), ref, plain, F32), f"split {shape}")
    require(measure_all(streaming(x, lse, subgroups=subgroups), ref, one_by_one(x), F32), f"streaming {shape}")


def test_no_seg_is_one_document_and_scale_is_given(rng: np.random.Generator):
    x = make(rng, 20, 2, 1, 6)
    given = {name: value for name, value in x.forward.items() if name != "seg"}
    o, lse = run("attention_forward", **given, scale=-0.7)
    ref, plain = oracle(x, scale=-0.7), oracle(x, F32, scale=-0.7)
    require(measure_all({"o": o, "lse": lse}, ref, plain, F32))
    require(measure_all(split(x, lse, scale=-0.7), ref, plain, F32))


@pytest.mark.parametrize("slope", [0.3, -0.3], ids=["rising", "falling"])
def test_online_softmax_equals_standard_softmax(rng: np.random.Generator, slope: float):
    # every block of a row has a new maximum, or none after the first; scores reach 90 and weights underflow
    T = 600
    s = (slope * np.arange(T)).astype(F32)
    x = make(rng, T, 1, 1, 3)
    x.q[:], x.k[:] = (1, 0, 0), 0
    x.k[:, 0, 0] = s
    o, lse = run("attention_forward", **x.forward, scale=1.0)
    rows = np.where(np.tri(T, dtype=bool), s.astype(np.float64), -np.inf)
    p, total = reference.softmax(rows)
    assert (abs(lse[:, 0] - total[:, 0]) <= 8 * eps(F32) * np.maximum(1, abs(total[:, 0]))).all()
    plain = reference.softmax(rows.astype(F32))[0].astype(F32) @ x.v[:, 0]
    require([measure("o", o[:, 0], p @ x.v[:, 0].astype(np.float64), plain, F32)])


def test_rows_of_weights_sum_to_one(rng: np.random.Generator):
    x = make(rng, 270, 2, 1, 8, (0, 100, 256))
    _, lse = run("attention_forward", **x.forward)
    _, p, _ = run("attention_backward_short", **x.forward, dO=x.do, LSE=lse, **nan_scratch(x))
    seen = (np.arange(270) >= x.seg[:, None]) & np.tri(270, dtype=bool)
    s = np.einsum("ihd,jd->ihj", x.q.astype(np.float64), x.k[:, 0]) / np.sqrt(8)
    weights = np.where(seen[:, None], np.exp(s - lse[..., None]), 0)
    band = 8 * eps(F32) * np.maximum(1, abs(lse))
    assert (abs(weights.sum(-1) - 1) <= band).all()
    # the scratch is (query, head, key): zeros before the document, unchanged after the query
    assert np.isnan(p[np.broadcast_to(~np.tri(270, dtype=bool)[:, None], p.shape)]).all()
    assert (p[np.broadcast_to((np.arange(270) < x.seg[:, None])[:, None], p.shape)] == 0).all()
    shown = np.where(seen[:, None], p, 0)
    assert (abs(shown - weights).max(-1) <= 4 * band).all()


def test_query_zero_sees_itself_alone_and_head_h_reads_kv_head_h_div_g(rng: np.random.Generator):
    x = make(rng, 9, 12, 4, 5, (0, 4))
    o, lse = run("attention_forward", **x.forward)
    np.testing.assert_array_equal(o[[0, 4]], x.v[[0, 4]].repeat(3, 1))
    s = (x.q * x.k.repeat(3, 1)).sum(-1) / np.sqrt(5)
    np.testing.assert_allclose(lse[[0, 4]], s[[0, 4]], rtol=1e-5, atol=1e-6)
    x.v[:] = np.arange(4)[:, None]
    o, _ = run("attention_forward", **x.forward)
    np.testing.assert_allclose(o, np.broadcast_to(np.arange(12)[:, None] // 3, o.shape), rtol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [
        (1025, 2, 1, 4, (0, 1024)),
        pytest.param((1500, 3, 1, 8, (0, 600, 1280)), marks=pytest.mark.slow),
        pytest.param((2048, 1, 1, 16, (0,)), marks=pytest.mark.slow),
        pytest.param((4096, 1, 1, 2, (0, 3333)), marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
    ],
    ids=shown,
)
def test_streaming_backward_beyond_1024(rng: np.random.Generator, shape: tuple[Any, ...]):
    x = make(rng, *shape)
    o, lse = run("attention_forward", **x.forward)
    got = {"o": o, "lse": lse} | streaming(x, lse)
    require(measure_all(got, oracle(x), one_by_one(x), F32), shape)


@pytest.mark.parametrize("T", [300, pytest.param(1024, marks=pytest.mark.slow)])
def test_streaming_equals_the_short_path(rng: np.random.Generator, T: int):
    x = make(rng, T, 2, 1, 4, (0, 77))
    _, lse = run("attention_forward", **x.forward)
    ref, short, long = oracle(x), split(x, lse), streaming(x, lse)
    first = measure_all(short, ref, oracle(x, F32), F32)
    second = measure_all(long, ref, one_by_one(x), F32)
    for a, b in zip(first, second, strict=True):
        assert a.ok, a
        assert abs(short[a.name] - long[a.name]).max() <= a.allowed + b.allowed, a.name


@pytest.mark.parametrize("subgroups", [False, None], ids=["plain", "as the device has"])
def test_two_runs_have_the_same_bits(rng: np.random.Generator, subgroups: bool | None):
    x = make(rng, 270, 3, 1, 20, (0, 100))
    runs: list[list[Array]] = []
    for _ in range(2):
        o, lse = run("attention_forward", **x.forward, subgroups=subgroups)
        one = run("attention_decode", Q_one=x.q[-1], K_cache=x.k, V_cache=x.v, subgroups=subgroups)
        runs.append([o, lse, one, *split(x, lse, subgroups=subgroups).values()])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_gradients_add_up_over_two_micro_steps(gpu: Gpu, rng: np.random.Generator):
    steps = [make(rng, 30, 2, 1, 6, starts) for starts in ((0, 11), (0,))]
    want: dict[str, Array] = {name: sum(oracle(x)[name] for x in steps) for name in ("dq", "dk", "dv")}
    plain: dict[str, Array] = {name: sum(one_by_one(x)[name] for x in steps) for name in ("dq", "dk", "dv")}
    for backward in ("split", "streaming"):
        dq, dk, dv = (array(np.zeros_like(a), gpu) for a in (steps[0].q, steps[0].k, steps[0].v))
        p, ds = (array(a, gpu) for a in nan_scratch(steps[0]).values())
        for x in steps:
            _, lse = run("attention_forward", **x.forward)
            if backward == "split":
                run("attention_backward_short", **x.forward, dO=x.do, LSE=lse, dQ=dq, P_scratch=p, dS_scratch=ds)
                run("attention_backward_short_dKdV", Q=x.q, dO=x.do, P_scratch=p, dS_scratch=ds, dK=dk, dV=dv)
            else:
                run("attention_backward", **x.forward, dO=x.do, LSE=lse, dQ=dq, dK=dk, dV=dv)
        got = {"dq": dq.numpy(), "dk": dk.numpy(), "dv": dv.numpy()}
        require(measure_all(got, want, plain, F32), backward)


def test_host_arrays_are_added_to_in_a_copy(rng: np.random.Generator):
    x = make(rng, 12, 1, 1, 4)
    _, lse = run("attention_forward", **x.forward)
    dq, dk, dv = streaming(x, lse).values()
    start = np.full_like(x.q, 64)
    more = run("attention_backward", **x.forward, dO=x.do, LSE=lse, dQ=start, dK=start, dV=start)
    for a, b in zip(more, (dq, dk, dv), strict=True):
        np.testing.assert_allclose(a, b + 64, atol=1e-4)
    assert (start == 64).all()


def test_nan_guard(rng: np.random.Generator):
    x = make(rng, 10, 1, 1, 5)
    clean, _ = run("attention_forward", **x.forward)
    q = x.q.copy()
    q[3, 0, 1] = np.nan
    o, _ = run("attention_forward", **x._replace(q=q).forward)
    assert (o[3] == 0).all()
    np.testing.assert_array_equal(np.delete(o, 3, 0), np.delete(clean, 3, 0))
    for bad in (np.nan, np.inf, -np.inf):
        v = x.v.copy()
        v[6, 0, 2] = bad
        o, _ = run("attention_forward", **x._replace(v=v).forward)
        assert (o[6:, 0, 2] == 0).all()
        o[6:, 0, 2] = clean[6:, 0, 2]
        np.testing.assert_array_equal(o, clean)
        one = run("attention_decode", Q_one=x.q[9], K_cache=x.k, V_cache=v)
        assert one[0, 2] == 0
        assert np.isfinite(one).all()


def test_other_documents_may_hold_anything(rng: np.random.Generator):
    x, alone = make(rng, 24, 2, 1, 6, (0, 8, 16)), slice(8, 16)
    for a in (x.q, x.k, x.v, x.do):
        a[:8], a[16:] = np.nan, np.inf
    small = Given(x.q[alone], x.k[alone], x.v[alone], x.do[alone], np.zeros(8, np.uint32))
    o, lse = run("attention_forward", **x.forward)
    got = {"o": o, "lse": lse}
    for backward in (split, streaming):
        found = {name: a[alone] for name, a in (got | backward(x, lse)).items()}
        require(measure_all(found, oracle(small), oracle(small, F32), F32), backward.__name__)


def test_arrays_stay_on_the_device(gpu: Gpu, rng: np.random.Generator):
    x = make(rng, 30, 4, 2, 8, (0, 9))
    q, k, v, do, seg = (array(a, gpu) for a in x)
    assert run("rope_q", Q=q) is q
    assert run("rope_k", K=k) is k
    o, lse = run("attention_forward", Q=q, K=k, V=v, seg=seg)
    dq, p, ds = run("attention_backward_short", Q=q, K=k, V=v, dO=do, LSE=lse, seg=seg)
    dk, dv = run("attention_backward_short_dKdV", Q=q, dO=do, P_scratch=p, dS_scratch=ds, n_kv_heads=2)
    run("rope_q_backward", dQ=dq)
    one = run("attention_decode", Q_one=x.q[0], K_cache=k, V_cache=v)
    assert all(isinstance(a, GpuArray) for a in (o, lse, dq, dk, dv, one))
    host = x._replace(q=run("rope_q", Q=x.q), k=run("rope_k", K=x.k))
    np.testing.assert_array_equal(q.numpy(), host.q)
    want_o, want_lse = run("attention_forward", **host.forward)
    np.testing.assert_array_equal(o.numpy(), want_o)
    want = split(host, want_lse)
    np.testing.assert_array_equal(dq.numpy(), run("rope_q_backward", dQ=want["dq"]))
    np.testing.assert_array_equal(dk.numpy(), want["dk"])
    np.testing.assert_array_equal(dv.numpy(), want["dv"])


def test_no_tokens():
    none = np.zeros((0, 2, 4), F32)
    o, lse = run("attention_forward", Q=none, K=none, V=none)
    assert (o.shape, lse.shape) == ((0, 2, 4), (0, 2))
    assert run("rope_q", Q=none).shape == none.shape
