"""Recurrences: every row of the catalogue against the oracle, in every chunk, and what a state carries."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.arrays import numpy_dtype
from saccade.testing import recurrent as run
from saccade.testing.compare import require
from saccade.testing.recurrent import Sizes

torch = pytest.importorskip("torch")

DTYPES = ("float32", "bfloat16", "float16", "float64")
OPS = [pytest.param(op, id=op.name) for op in run.OPS]
CAUSAL = [pytest.param(op, id=op.name) for op in run.OPS if op.options.get("causal", True)]
DECAYING = ["scalar_decay", "gated_linear", "gated_delta_rule", "gated_delta_rule-channels"]
LENGTHS = (1, 7, 64, 65, 200)
SHAPES = {
    "small": Sizes(1, 12, 1, 1, 4, 3),
    "odd": Sizes(2, 33, 3, 1, 5, 19),
    "narrow keys": Sizes(1, 70, 2, 2, 3, 40),
    "wide keys": Sizes(1, 70, 2, 2, 40, 3),
    "shared columns": Sizes(1, 50, 1, 1, 16, 130),
    "heads": Sizes(1, 40, 6, 2, 16, 16),
    "D64": Sizes(1, 130, 2, 2, 64, 64),
}


@pytest.mark.sample(60)
@pytest.mark.parametrize("chunk", [None, 1, 16, 64])
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_lengths_and_chunks(backend, op, dtype, T, chunk, seed) -> None:
    require(run.verify(op, Sizes(T=T), dtype, backend, seed, chunk=chunk), f"{op} {dtype} T {T} chunk {chunk}")


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_shapes(backend, op, dtype, name, seed) -> None:
    if "taylor" in op.name and SHAPES[name].K > 20:
        name = "odd"
    require(run.verify(op, SHAPES[name], dtype, backend, seed), f"{op} {dtype} {name}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_many_tokens(backend, op, dtype, seed) -> None:
    require(run.verify(op, Sizes(1, 4096, 2, 1, 8, 8), dtype, backend, seed), f"{op} {dtype} T 4096")


@pytest.mark.parametrize("op", OPS)
def test_chunks_agree(backend, op) -> None:
    arrays = run.make(op, Sizes(T=150), "float64")
    given = run.cotangents(run.expected(op, arrays), "float64")
    first, *others = (run.computed(op, arrays, backend, given, chunk=chunk) for chunk in (1, 16, 64, 100))
    for other in others:
        for name, x in first.items():
            np.testing.assert_allclose(other[name], x, rtol=1e-10, atol=1e-10 * abs(x).max(), err_msg=name)


@settings(max_examples=8)
@pytest.mark.parametrize("op", CAUSAL)
@given(cuts=st.lists(st.integers(0, 60), max_size=3), chunk=st.sampled_from([None, 1, 5, 16]))
def test_a_carried_state_is_one_call(backend, op, cuts, chunk) -> None:
    arrays = run.make(op, Sizes(T=60), "float64")
    whole = run.computed(op, arrays, backend, chunk=16)
    state, pieces = arrays["initial_state"], []
    for first, stop in pairwise([0, *sorted(cuts), 60]):
        part = {n: x[:, first:stop] if x.ndim > 2 and n != "initial_state" else x for n, x in arrays.items()}
        found = run.computed(op, {**part, "initial_state": state}, backend, chunk=chunk)
        state = found["state"]
        pieces.append(found["o"])
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole["o"], rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(state, whole["state"], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("borders", [(0, 50), (0, 7, 7, 40, 50), (0, 1, 17, 33, 50)])
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_are_those_alone(backend, op, borders) -> None:
    sizes = Sizes(1, 50, borders=borders)
    arrays = run.make(op, sizes, "float64")
    given = run.cotangents(run.expected(op, arrays), "float64")
    packed = run.computed(op, arrays, backend, given)
    for n, (first, stop) in enumerate(pairwise(borders)):
        cut = lambda x, n=n, first=first, stop=stop: x[:, first:stop] if x.shape[:2] == (1, 50) else x[n : n + 1]  # noqa: E731
        kept = {name: x for name, x in arrays.items() if name != "cu_seqlens"}
        alone = {name: cut(x) if x.ndim > 2 else x for name, x in kept.items()}
        found = run.computed(op, alone, backend, tuple(cut(x) for x in given))
        for name, x in found.items():
            if packed[name].ndim > 2:
                np.testing.assert_allclose(cut(packed[name]), x, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("borders", [(0, 50), (0, 7, 7, 40, 50), (0, 1, 17, 33, 50)])
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences(backend, op, borders) -> None:
    require(run.verify(op, Sizes(1, 50, borders=borders), "float32", backend), f"{op} packed at {borders}")


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DECAYING)
def test_strong_decays(backend, name, dtype, chunk, seed) -> None:
    op, sizes = run.by_name(name), Sizes(T=90)
    arrays = run.make(op, sizes, dtype, seed)
    draw = np.random.default_rng(seed).choice([0, -1e-6, -1, -50, -1e4, -np.inf], arrays["g"].shape)
    arrays["g"] = draw.astype(arrays["g"].dtype)
    given = run.cotangents(run.expected(op, arrays), dtype)
    got = run.computed(op, arrays, backend, given, chunk=chunk)
    assert all(np.isfinite(x).all() for x in got.values())
    require(run.compare(op, arrays, got, dtype, given), f"{name} {dtype} chunk {chunk}")


@pytest.mark.parametrize("name", DECAYING)
def test_a_decay_to_nothing_is_a_border(backend, name) -> None:
    op, borders = run.by_name(name), (0, 13, 50)
    arrays = run.make(op, Sizes(1, 50, borders=borders), "float64")
    packed = run.computed(op, {**arrays, "initial_state": 0 * arrays["initial_state"]}, backend)
    g = arrays["g"].copy()
    g[:, 13] = -np.inf
    whole = {n: x for n, x in arrays.items() if n not in ("cu_seqlens", "initial_state")}
    reset = run.computed(op, {**whole, "g": g}, backend)
    np.testing.assert_allclose(reset["o"], packed["o"], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(reset["state"], packed["state"][1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_states_are_single_precision(backend, op, dtype) -> None:
    arrays = run.make(op, Sizes(T=200), dtype)
    got = run.computed(op, arrays, backend)
    assert got["state"].dtype == np.float32
    assert got["o"].dtype == numpy_dtype(dtype)
    require(run.compare(op, arrays, {"state": got["state"]}, dtype, plain_dtype="float32"), str(op))


@pytest.mark.parametrize("T", [1, 37])
@pytest.mark.parametrize(("dtype", "stored"), [("float32", "float16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("op", OPS)
def test_states_stored_in_16_bits(backend, op, dtype, stored, T) -> None:
    """Everything is as with a float32 state of the same numbers, and the returned state is rounded once."""
    arrays, kind = run.make(op, Sizes(T=T), dtype), numpy_dtype(stored)
    initial = arrays["initial_state"].astype(kind)
    do, dstate = run.cotangents(run.expected(op, arrays), dtype)
    dstate = dstate.astype(kind)
    got = run.computed(op, {**arrays, "initial_state": initial}, backend, (do, dstate), state=stored)
    wide, given = {**arrays, "initial_state": initial.astype(np.float32)}, (do, dstate.astype(np.float32))
    want = run.computed(op, wide, backend, given)
    require(run.compare(op, wide, want, dtype, given), f"{op} {dtype} {stored}")
    for name, x in want.items():
        rounded = x.astype(kind) if name in ("state", "dinitial_state") else x
        assert got[name].dtype == rounded.dtype, name
        np.testing.assert_array_equal(got[name], rounded, err_msg=name)


@pytest.mark.parametrize("T", [37, 200])
@pytest.mark.parametrize("op", OPS)
def test_without_the_state(backend, op, T) -> None:
    """A backend may compute a state that is not returned with less precision."""
    arrays = run.make(op, Sizes(T=T), "bfloat16")
    do, dstate = run.cotangents(run.expected(op, arrays), "bfloat16")
    given = do, np.zeros_like(dstate)
    got = run.computed(op, arrays, backend, given, state=False)
    require(run.compare(op, arrays, got, "bfloat16", given), str(op))


@pytest.mark.parametrize("op", CAUSAL)
def test_what_is_no_number_stays_after_its_token(backend, op) -> None:
    name = "x" if "ssd" in op.name else "v"
    arrays = run.make(op, Sizes(T=40), "float32")
    clean = run.computed(op, arrays, backend)["o"]
    arrays[name][:, 21] = np.nan
    got = run.computed(op, arrays, backend)["o"]
    np.testing.assert_allclose(got[:, :21], clean[:, :21], rtol=1e-4, atol=1e-5)
    assert np.isnan(got[:, 21]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_change(backend, op, dtype) -> None:
    arrays = run.make(op, Sizes(1, 70, 3, 1, 16, 70), dtype)
    given = run.cotangents(run.expected(op, arrays), dtype)
    threads = torch.get_num_threads()
    first = run.computed(op, arrays, backend, given)
    try:
        for n in range(50):
            torch.set_num_threads(1 + n % 2)
            for name, x in run.computed(op, arrays, backend, given).items():
                np.testing.assert_array_equal(x, first[name], err_msg=name)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(backend, op) -> None:
    arrays = run.make(op, Sizes(T=0), "float32")
    got = run.computed(op, arrays, backend, (np.zeros((2, 0, 4, 12), np.float32), arrays["initial_state"]))
    assert got["o"].shape == (2, 0, 4, 12)
    np.testing.assert_array_equal(got["state"], arrays["initial_state"])
    np.testing.assert_array_equal(got["dinitial_state"], arrays["initial_state"])


@pytest.mark.parametrize("op", OPS)
def test_strides(backend, op) -> None:
    arrays = run.make(op, Sizes(T=37), "float32")
    # torch's own elementwise functions around the state space give other bits for other strides
    mine = [n for n, x in arrays.items() if x.ndim > 2 and n not in ("dt", "z")]
    spread = {**arrays, **{n: np.repeat(arrays[n], 2, -1)[..., ::2] for n in mine}}
    turned = {**arrays, **{n: np.asfortranarray(arrays[n]) for n in mine}}
    given = run.cotangents(run.expected(op, arrays), "float32")
    first = run.computed(op, arrays, backend, given)
    for other in (spread, turned):
        for name, x in run.computed(op, other, backend, given).items():
            np.testing.assert_array_equal(x, first[name], err_msg=name)
