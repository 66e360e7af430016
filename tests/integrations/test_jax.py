"""Attention on JAX arrays: against the oracle, against JAX's own attention, and under its transformations."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.biases import Bias
from saccade.testing.cases import CASES, by_name
from saccade.testing.compare import measure, require
from saccade.testing.fuzz import random_case, random_dtype
from saccade.testing.inputs import NEEDLES, CaseInputs, make
from saccade.testing.run import has_gradient, verify

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy
from saccade.integrations.jax import attention, attention_backward  # noqa: E402

B, T, HQ, HK, D = 2, 70, 4, 2, 16
PER_TEST = 10


def rows(*heads: int, batch: int = B, length: int = T, seed: int = 0):
    """A JAX array [batch, length, heads, D] for each number of heads."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((batch, length, h, D), dtype=np.float32)) for h in heads]


def computed(x: CaseInputs, backend=None, *, backward: bool = True):
    """Like `saccade.testing.run.computed`, under jit, with gradients by `jax.vjp`."""
    bias = {name: jnp.asarray(a) for name, a in x.added.items()}
    side = {**bias, **({"sinks": jnp.asarray(x.sinks)} if x.sinks is not None else {})}
    fixed = {} if has_gradient(x) or x.bias is None else {"bias": side.pop("bias")}

    def attend(q, k, v, side, return_lse=True):
        added = {**fixed, **side}
        terms = (added.get(name) for name in ("bias", "slopes", "table", "log_f"))
        bias = Bias(*terms, getattr(x.bias_argument, "origin", 0)) if x.added else None
        return attention(q, k, v, x.mask, bias=bias, sinks=added.get("sinks"), return_lse=return_lse, **x.scores)

    inputs = [*map(jnp.asarray, (x.q, x.k, x.v)), side]
    out = {"o_alone": jax.jit(partial(attend, return_lse=False))(*inputs)}

    @jax.jit
    def differentiate(inputs, cotangents):
        (o, lse), backward = jax.vjp(attend, *inputs)
        return o, lse, backward(cotangents)

    out["o"], out["lse"], gradients = differentiate(inputs, (jnp.asarray(x.do), jnp.asarray(x.dlse)))
    out.update(zip(("dq", "dk", "dv"), gradients[:3], strict=True))
    return {name: np.asarray(a) for name, a in {**out, **gradients[3]}.items()}


def wide(dtype: str):
    """JAX's 64-bit mode for float64."""
    return jax.enable_x64(True) if dtype == "float64" else nullcontext()


@pytest.mark.sample(12)
@pytest.mark.parametrize("part", range(1000 // PER_TEST))
def test_random_configurations(part: int, request: pytest.FixtureRequest) -> None:
    refused, first = 0, request.config.getoption("--seed") * 1_000_000 + part * PER_TEST
    for n in range(first, first + PER_TEST):
        case, dtype, kind = random_case(n), random_dtype(n), ("random", *NEEDLES)[n % 5]
        with wide(dtype):
            try:
                require(verify(make(case, dtype, kind=kind), compute=computed), f"{case} {dtype} {kind}")
            except ValueError as error:
                if "bands" not in str(error):
                    raise
                refused += 1
    assert refused <= 2


SCORES = [c.name for c in CASES if c.mask.startswith("causal()") and c.B == 2 and (c.Tq, c.Tk) == (50, 75)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", [*SCORES, "T0x9-sinks", "T9x0-sinks", "B0", "mask-strided", "mla"])
def test_every_option(name: str, dtype: str) -> None:
    with wide(dtype):
        require(verify(make(by_name(name), dtype), compute=computed), name)


def test_selected_keys() -> None:
    q, k, v = rows(HQ, HK, HK)
    mask = masks.select(np.random.default_rng(0).integers(0, 9, (B, HK, 9, 3)), 8, 8) & masks.causal()
    want = saccade.attention(*map(np.asarray, (q, k, v)), mask)
    np.testing.assert_array_equal(jax.jit(partial(attention, mask=mask))(q, k, v), want)


# masks and biases of JAX's own attention, and what equals them; JAX counts positions of queries from the first key
LENGTHS = np.array([T - 9, 31])


def _first(n):
    return masks.ranges(np.zeros((B, T), int), np.where(np.arange(T) < np.reshape(n, (-1, 1)), T, 0))


PAIRS = np.random.default_rng(1).random((B, 1, T, T)) < 0.4
PAIRS[..., 0] = True
OURS = {
    "none": ({}, None),
    "causal": ({"is_causal": True}, masks.causal(0)),
    "window": ({"local_window_size": (12, 3)}, masks.window(12, 3, 0)),
    "window-causal": ({"local_window_size": 9, "is_causal": True}, masks.window(9, 9, 0) & masks.causal(0)),
    "keys": ({"key_value_seq_lengths": LENGTHS}, masks.keys(LENGTHS)),
    "queries": ({"query_seq_lengths": LENGTHS}, _first(LENGTHS)),
    "both-causal": (
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS, "is_causal": True},
        masks.keys(LENGTHS) & _first(LENGTHS) & masks.causal(0),
    ),
    "mask": ({"mask": PAIRS}, masks.from_dense(PAIRS[:, 0])),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_as_attention_of_jax(name: str, bias: bool) -> None:
    q, k, v, do = rows(HQ, HK, HK, HQ)
    options, mask = OURS[name]
    options = {key: jnp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    added = jnp.asarray(np.random.default_rng(2).standard_normal((B, HQ, T, T), dtype=np.float32)) if bias else None
    # queries that JAX pads see nothing here and everything there
    lengths = np.reshape(LENGTHS if "query_seq_lengths" in options else T, (-1, 1))
    real = jnp.asarray(np.broadcast_to(np.arange(T) < lengths, (B, T)))[..., None, None]

    def run(function, q, k, v, added):
        return jnp.where(real, function(q, k, v, added), 0)

    theirs = partial(run, lambda q, k, v, added: jax.nn.dot_product_attention(q, k, v, added, **options))
    ours = partial(run, lambda q, k, v, added: attention(q, k, v, mask, bias=added))
    inputs = (q, k, v, added)
    both = []
    for function in (ours, theirs):
        o, backward = jax.vjp(function, *inputs)
        both.append([o, *(x for x in backward(do) if x is not None)])
    for mine, other in zip(*both, strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-5)


def test_causality_of_rectangles() -> None:
    """JAX aligns the first query with the first key, `mask.causal()` the last with the last."""
    (q,), (k, v) = rows(HQ, length=T), rows(HQ, HQ, length=T + 11)
    for offset, same in ((0, True), (None, False)):
        o = attention(q, k, v, masks.causal(offset))
        theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        assert np.allclose(o, theirs, atol=1e-5) == same


# masks with arrays, and side arrays, for which vmap loops; the others are folded into the batch
VMAPPED = {
    "none": (None, {}),
    "strided": (masks.strided(4) | masks.window(3, 0), {"softcap": 4.0}),
    "keys": (masks.keys([T, 20]), {}),
    "sinks": (masks.causal(), {"sinks": jnp.linspace(-1, 1, HQ)}),
    "bias": (None, {"bias": jnp.linspace(-1, 1, B * T).reshape(B, 1, 1, T)}),
    "dropout": (masks.causal(), {"dropout": 0.3, "seed": 7}),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_equals_a_loop(name: str) -> None:
    mask, options = VMAPPED[name]
    q, k, v = (jnp.stack([x, x + 1, 2 * x]) for x in rows(HQ, HK, HK))
    gradient = jax.grad(lambda *a: (attention(*a, mask, **options) ** 2).sum(), (0, 1, 2))
    mapped = jax.jit(jax.vmap(gradient, (0, 1, None)))(q, jnp.moveaxis(k, 0, 1), v[0])
    loop = [gradient(q[i], k[i], v[0]) for i in range(3)]
    for i, x in enumerate(mapped):
        require([measure("g", np.asarray(x[n]), *[np.asarray(one[i])] * 2, "float32") for n, one in enumerate(loop)])


def test_vmap_twice() -> None:
    q, k, v = (x.repeat(HQ // x.shape[2], 2) for x in rows(HQ, HK, HK))
    one_head = lambda *a: attention(*(x[:, None] for x in a), masks.causal())[:, 0]  # noqa: E731
    heads = jax.vmap(jax.vmap(one_head))(*(x.swapaxes(1, 2) for x in (q, k, v)))
    np.testing.assert_array_equal(heads.swapaxes(1, 2), attention(q, k, v, masks.causal()))


def test_vmap_over_sinks() -> None:
    q, k, v = rows(HQ, HK, HK)
    sinks = jnp.linspace(-2, 2, 3 * HQ).reshape(3, HQ)
    mapped = jax.vmap(jax.grad(lambda sinks: attention(q, k, v, sinks=sinks).sum()))(sinks)
    for got, one in zip(mapped, sinks, strict=True):
        np.testing.assert_array_equal(got, jax.grad(lambda s: attention(q, k, v, sinks=s).sum())(one))


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_over_nothing(name: str) -> None:
    mask, options = VMAPPED[name]
    q, k, v = (jnp.zeros((0, *x.shape)) for x in rows(HQ, HK, HK))
    gradient = jax.grad(lambda *a: (attention(*a, mask, **options) ** 2).sum(), (0, 1, 2))
    mapped = jax.vmap(gradient, (0, 1, None))(q, jnp.moveaxis(k, 0, 1), rows(HK)[0])
    assert [x.shape for x in mapped] == [q.shape, k.shape, v.shape]


def test_a_sum_of_two_tables() -> None:
    q, k, v = rows(HQ, HK, HK)
    tables = [jnp.linspace(-1, 1, HQ * n).reshape(HQ, n) for n in (3, 40)]

    def total(tables, arrays=(q, k, v)):
        return (attention(*arrays, bias=saccade.relative(tables[0], 1) + saccade.relative(tables[1], 30)) ** 2).sum()

    on_numpy = [np.asarray(x) for x in tables]
    bias = saccade.relative(on_numpy[0], 1) + saccade.relative(on_numpy[1], 30)
    want = (saccade.attention(*map(np.asarray, (q, k, v)), bias=bias) ** 2).sum()
    assert abs(total(tables) - want) < 1e-5 * want
    for found, x in zip(jax.jit(jax.grad(total))(tables), tables, strict=True):
        assert found.shape == x.shape
        assert abs(found).max() > 0


def test_seed_may_be_traced() -> None:
    q, k, v = rows(HQ, HK, HK)
    attend = jax.jit(lambda seed: attention(q, k, v, dropout=0.4, seed=seed))
    for seed in (3, 1 << 31):
        want = saccade.attention(*map(np.asarray, (q, k, v)), dropout=0.4, seed=seed)
        np.testing.assert_array_equal(attend(jnp.uint32(seed)), want)
    with jax.enable_x64(True):
        seed = (5 << 32) + 9
        want = saccade.attention(*map(np.asarray, (q, k, v)), dropout=0.4, seed=seed)
        np.testing.assert_array_equal(
            jax.jit(lambda s: attention(q, k, v, dropout=0.4, seed=s))(jnp.uint64(seed)), want
        )
    assert attend._cache_size() == 1


def test_backward_without_autodiff() -> None:
    q, k, v, do = rows(HQ, HK, HK, HQ)
    sinks, mask = jnp.linspace(-1, 1, HQ), masks.causal()
    o, lse = attention(q, k, v, mask, sinks=sinks, return_lse=True)
    *first, more = attention_backward(do, q, k, v, o, lse, mask, sinks=sinks)
    _, backward = jax.vjp(lambda *a: attention(*a[:3], mask, sinks=a[3]), q, k, v, sinks)
    for mine, other in zip((*first, more["sinks"]), backward(do), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_other_layouts_and_transformations() -> None:
    q, k, v = rows(HQ, HK, HK)
    want = attention(q, k, v, masks.causal())
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    np.testing.assert_array_equal(attention(*turned, masks.causal(), layout="bhtd").swapaxes(1, 2), want)
    np.testing.assert_array_equal(attention(q[0], k[0], v[0], masks.causal()), want[0])
    loss = jax.checkpoint(lambda q: attention(q, k, v, masks.causal()).sum())
    assert np.isfinite(jax.grad(loss)(q)).all()
    assert jax.jacrev(lambda q: attention(q, k, v).sum((1, 2, 3)))(q).shape == (B, *q.shape)
    carried = jax.lax.scan(lambda c, _: (attention(c, k, v, masks.causal()), None), q, length=3)[0]
    assert carried.shape == q.shape


def test_number_of_threads_never_changes_a_bit() -> None:
    q, k, v = rows(HQ, HK, HK)
    attend = jax.jit(partial(attention, mask=masks.causal()))
    before, want = saccade.backends.load("cpu").get_num_threads(), attend(q, k, v)
    try:
        saccade.backends.load("cpu").set_num_threads(1)
        np.testing.assert_array_equal(attend(q, k, v), want)
    finally:
        saccade.backends.load("cpu").set_num_threads(before)


def test_a_stored_program_runs_in_another_process(tmp_path) -> None:
    q, k, v = rows(HQ, HK, HK)
    mask = masks.documents([0] * 30 + [1] * (T - 30)) & masks.causal()
    function = jax.jit(jax.value_and_grad(lambda q: attention(q, k, v, mask).sum()))
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"saccade_{name}") for name in ("forward", "backward")]
    stored = jax.export.export(function, disabled_checks=checks)(q).serialize()
    (tmp_path / "program").write_bytes(stored)
    np.savez(tmp_path / "arrays", q=q, value=function(q)[0], gradient=function(q)[1])
    code = (
        "import sys, jax, numpy as np, saccade.integrations.jax; x = np.load(sys.argv[2]);"
        "value, gradient = jax.export.deserialize(open(sys.argv[1], 'rb').read()).call(x['q']);"
        "assert value == x['value'] and np.array_equal(gradient, x['gradient'])"
    )
    files = [str(tmp_path / "program"), str(tmp_path / "arrays.npz")]
    subprocess.run([sys.executable, "-c", code, *files], check=True)
