"""Recurrences with diagonal states: every row of their catalogue against the oracle, and what a state carries."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from saccade.testing import diagonal as catalogue
from saccade.testing import recurrent as run
from saccade.testing.compare import require
from saccade.testing.recurrent import Sizes

torch = pytest.importorskip("torch")

DTYPES = ("float32", "bfloat16", "float16", "float64")
OPS = [pytest.param(op, id=op.name) for op in catalogue.OPS]
WITH_STATE = [pytest.param(op, id=op.name) for op in catalogue.OPS if op.name != "rg_lru-documents"]
SCAN, GATED = (next(op for op in catalogue.OPS if op.name == name) for name in ("selective_scan", "rg_lru"))
# what has one row a token
ROWS = ("u", "delta", "z", "x", "r", "i", "B", "C")


def tokens(arrays, first, last):
    """The arrays of tokens first to last - 1, without a state."""
    cut = {n: x[:, first:last] if n in ROWS and x.ndim > 2 else x for n, x in arrays.items()}
    return {n: x for n, x in cut.items() if n not in ("initial_state", "cu_seqlens")}


@pytest.mark.sample(40)
@pytest.mark.parametrize("T", [1, 7, 64, 65, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_lengths(backend, op, dtype, T, seed) -> None:
    require(run.verify(op, Sizes(T=T), dtype, backend, seed), f"{op} {dtype} T {T}")


@pytest.mark.parametrize("op", OPS)
def test_many_tokens(backend, op, seed) -> None:
    require(run.verify(op, Sizes(B=1, T=4096, V=2), "float32", backend, seed), f"{op} T 4096")


@pytest.mark.sample(12)
@pytest.mark.parametrize("H, Hk, V", [(1, 1, 1), (3, 1, 5), (6, 3, 7), (4, 4, 16), (2, 2, 33), (5, 1, 13)])
@pytest.mark.parametrize("N", [1, 3, 16, 17, 64])
@pytest.mark.parametrize("op", OPS)
def test_sizes(backend, op, N, H, Hk, V, seed) -> None:
    """Channels that fill no vector, groups, states of any width; what the arrays' strides are."""
    require(run.verify(op, Sizes(T=9, H=H, Hk=Hk, K=N, V=V), "float32", backend, seed), f"{op} N {N} D {H * V} G {Hk}")


@pytest.mark.parametrize("chunk", [1, 16, 64, 1000])
@pytest.mark.parametrize("op", OPS)
def test_chunks(backend, op, chunk, seed) -> None:
    """Results have the same bits for any number of stored states, and gradients are within the rule."""
    require(run.verify(op, Sizes(T=150), "float32", backend, seed, chunk=chunk), f"{op} chunk {chunk}")
    arrays = run.make(op, Sizes(T=150), "float32", seed)
    got, same = (run.computed(op, arrays, backend, chunk=n) for n in (chunk, None))
    for name in got:
        np.testing.assert_array_equal(got[name], same[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", WITH_STATE)
def test_a_state_carries_on(backend, op, dtype, seed, rng) -> None:
    """Cut anywhere, also into single tokens: the same bits, and a gradient that flows through the states."""
    arrays = run.make(op, Sizes(T=70), dtype, seed)
    given = {n: run.put(x) for n, x in arrays.items()}
    whole, last = op.call(**given, **op.options, return_state=True, backend=backend)
    for cuts in ([0, 70], [1, 1, 30], [64], rng.integers(0, 71, 5), range(70)):
        pieces, state = [], given["initial_state"]
        for first, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 70], strict=True):
            part = tokens(given, first, stop)
            y, state = op.call(**part, **op.options, initial_state=state, return_state=True, backend=backend)
            pieces.append(y)
        assert torch.equal(torch.cat(pieces, 1), whole)
        assert torch.equal(state, last)


@pytest.mark.parametrize("op", WITH_STATE)
def test_gradients_flow_through_states(backend, op, seed) -> None:
    arrays = run.make(op, Sizes(T=50), "float64", seed)
    weights = np.random.default_rng(seed).standard_normal((2, 50, 48))

    def gradients(cuts):
        given = {n: run.put(x.copy()).requires_grad_() for n, x in arrays.items()}
        state, total = given["initial_state"], 0
        for first, stop in zip([0, *cuts], [*cuts, 50], strict=True):
            part = tokens(given, first, stop)
            y, state = op.call(**part, **op.options, initial_state=state, return_state=True, backend=backend)
            total = total + (y * run.put(weights[:, first:stop].copy())).sum()
        (total + state.square().sum()).backward()
        return {n: x.grad.numpy() for n, x in given.items()}

    whole, parts = gradients([]), gradients([1, 17, 49])
    for name, x in whole.items():
        np.testing.assert_allclose(parts[name], x, rtol=1e-12, atol=1e-13 * abs(x).max(initial=0))


@pytest.mark.parametrize("borders", [(0, 65), (0, 1, 1, 30, 65), (0, 0, 64, 65, 65)])
@pytest.mark.parametrize("op", OPS)
def test_packed_documents(backend, op, borders, seed) -> None:
    """Packed sequences are as if each were alone, gradients too; some are empty."""
    sizes = Sizes(B=1, T=65, borders=borders)
    require(run.verify(op, sizes, "float32", backend, seed), f"{op} {borders}")
    arrays = run.make(op, sizes, "float32", seed)
    got = run.computed(op, arrays, backend)
    for s, (first, stop) in enumerate(pairwise(borders)):
        part = tokens(arrays, first, stop)
        if "initial_state" in arrays:
            part["initial_state"] = arrays["initial_state"][s : s + 1]
        alone = run.computed(op, part, backend)
        np.testing.assert_array_equal(got["o"][:, first:stop], alone["o"])
        np.testing.assert_array_equal(got["state"][s : s + 1], alone["state"])


@pytest.mark.parametrize("strength", [50.0, 1e4, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strong_decays(backend, dtype, strength, seed) -> None:
    """Some slots forget all at once, and nothing overflows."""

    def make(rng, sizes):
        arrays = SCAN.make(rng, sizes)
        return {**arrays, "A": np.where(rng.random(arrays["A"].shape) < 0.5, -strength, arrays["A"])}

    op = replace(SCAN, make=make)
    arrays = run.make(op, Sizes(T=80), dtype, seed)
    if strength == np.inf:
        # a gradient of what is infinite is not asked for
        got, ref = run.computed(op, arrays, backend), run.expected(op, arrays)
        np.testing.assert_allclose(got["o"], ref["o"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got["state"], ref["state"], rtol=1e-4, atol=1e-4)
    else:
        require(run.verify(op, Sizes(T=80), dtype, backend, seed), f"{strength} {dtype}")


@pytest.mark.parametrize("far", [-60.0, 60.0])
def test_far_steps_and_gates(backend, far, seed) -> None:
    """Softplus and SiLU far from zero: no overflow, and digits that the plain functions keep."""

    def make(rng, sizes):
        arrays = SCAN.make(rng, sizes)
        return {**arrays, "delta_bias": arrays["delta_bias"] + far, "z": arrays["z"] * 60}

    op = replace(SCAN, make=make)
    require(run.verify(op, Sizes(T=40), "float32", backend, seed), f"softplus at {far}")


@pytest.mark.parametrize("shift", [-30.0, 30.0])
def test_far_gates_of_the_unit(backend, shift, seed) -> None:
    """A decay within a rounding of 1, or far from it: 1 - a² keeps its digits."""

    def make(rng, sizes):
        arrays = GATED.make(rng, sizes)
        return {**arrays, "r": arrays["r"] + shift, "i": arrays["i"] * 20}

    op = replace(GATED, make=make)
    require(run.verify(op, Sizes(T=40), "float32", backend, seed), f"gates at {shift}")


@pytest.mark.parametrize("op", OPS)
def test_a_nan_stays_where_it_is(backend, op, seed) -> None:
    """NaN stays in its channel and sequence, from its token on."""
    arrays = run.make(op, Sizes(T=70), "float32", seed)
    clean = run.computed(op, arrays, backend)["o"]
    first = "u" if "u" in arrays else "x"
    arrays[first][1, 33, 5] = np.nan
    got = run.computed(op, arrays, backend)["o"]
    touched = np.isnan(got)
    assert touched[1, 33, 5]
    touched[1, 33:, 5] = False
    assert not touched.any()
    elsewhere = np.ones(got.shape, bool)
    elsewhere[1, 33:, 5] = False
    np.testing.assert_array_equal(got[elsewhere], clean[elsewhere])


@pytest.mark.parametrize("op", OPS)
def test_the_same_bits_each_time(backend, op, seed) -> None:
    sizes = Sizes(T=130, V=33, K=16)
    arrays = run.make(op, sizes, "float32", seed)
    given = run.cotangents(run.expected(op, arrays), "float32")
    # torch's number is followed where there is a number to follow
    before = torch.get_num_threads()
    try:
        first = None
        for n in range(50):
            torch.set_num_threads(1 + n % 3)
            got = run.computed(op, arrays, backend, given)
            first = first or got
            for name, x in got.items():
                assert x.tobytes() == first[name].tobytes(), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_numpy_arrays(backend, op, dtype, seed) -> None:
    """The same bits as tensors give; strides of any kind."""
    arrays = run.make(op, Sizes(), dtype, seed)
    want = run.computed(op, arrays, backend)
    strided = {n: np.repeat(x, 2, 1)[:, ::2] if x.ndim > 2 else x for n, x in arrays.items()}
    for given in (arrays, strided):
        y, state = op.call(**given, **op.options, return_state=True, backend=backend)
        assert y.dtype == want["o"].dtype
        assert y.tobytes() == want["o"].tobytes()
        assert state.tobytes() == want["state"].tobytes()


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(backend, op) -> None:
    """The state passes through, and its gradient back."""
    arrays = run.make(op, Sizes(T=0), "float32")
    got = run.computed(op, arrays, backend, run.cotangents(run.expected(op, arrays), "float32"))
    assert got["o"].shape == (2, 0, 48)
    np.testing.assert_array_equal(got["state"], arrays.get("initial_state", np.zeros_like(got["state"])))


def test_the_slope_of_the_root_is_bounded(backend, seed) -> None:
    """A decay of 1 to the last bit has no infinite gradient."""
    arrays = run.make(GATED, Sizes(T=20), "float32", seed)
    arrays["a_param"][:] = -100
    got = run.computed(GATED, arrays, backend, run.cotangents(run.expected(GATED, arrays), "float32"))
    assert all(np.isfinite(x).all() for x in got.values())
