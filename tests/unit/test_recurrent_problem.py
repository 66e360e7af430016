"""Recurrences: each bad input raises one clear error, and the description of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from saccade import Unsupported, recurrent
from saccade.operands import Spec
from saccade.recurrent.problem import MATRIX, MatrixOptions

Q, V = np.ones((2, 5, 2, 8), np.float32), np.ones((2, 5, 4, 6), np.float32)
G, CHANNELS = np.zeros((2, 5, 4), np.float32), np.zeros((2, 5, 4, 8), np.float32)
STATE = np.zeros((2, 4, 8, 6), np.float32)
# three steps per token
KEYS, VALUES, BETAS = (np.repeat(x[:, :, None], 3, 2) for x in (Q, V, G))
half = Q.astype(np.float16)


def decay(q: Any = Q, k: Any = Q, v: Any = V, g: Any = G, **options: Any) -> Callable[[], Any]:
    return lambda: recurrent.scalar_decay(q, k, v, g, **options)


def linear(**options: Any) -> Callable[[], Any]:
    return lambda: recurrent.linear_attention(Q, Q, V, **options)


def gated(g: Any) -> Callable[[], Any]:
    return lambda: recurrent.gated_linear(Q, Q, V, g)


def delta(beta: Any = G, g: Any = None) -> Callable[[], Any]:
    return lambda: recurrent.gated_delta_rule(Q, Q, V, beta, g)


def product(**changes: Any) -> Callable[[], Any]:
    given = {"q": Q, "k": KEYS, "v": VALUES, "beta": BETAS, "g": G, **changes}
    return lambda: recurrent.gated_delta_rule(**given)


def space(**changes: Any) -> Callable[[], Any]:
    given = {"x": V, "dt": G, "A": np.zeros(4, np.float32), "B": Q, "C": Q, **changes}
    return lambda: recurrent.ssd(**given)


def packed(borders: Any, **options: Any) -> Callable[[], Any]:
    return decay(Q[:1], Q[:1], V[:1], G[:1], cu_seqlens=borders, **options)


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "q is a list": (decay(q=[[1.0]]), TypeError, r"q is list; expected a torch tensor or a NumPy array"),
    "k is a list": (decay(k=[[1.0]]), TypeError, r"k is list; expected a NumPy array"),
    "q of rank 3": (decay(q=Q[0]), ValueError, r"q has shape \[5, 2, 8\]; expected \[B, T, H, K\]"),
    "v of rank 3": (decay(v=V[0]), ValueError, r"v has shape \[5, 4, 6\]; expected \[B, T, H, V\]"),
    "no channels": (decay(q=Q[..., :0], k=Q[..., :0]), ValueError, r"q has shape \[2, 5, 2, 0\]"),
    "k unlike q": (decay(k=Q[..., :7]), ValueError, r"k has shape \[2, 5, 2, 7\]; expected that of q"),
    "v of other length": (
        decay(v=V[:, :4]),
        ValueError,
        r"v has shape \[2, 4, 4, 6\]; expected \[B, T, H, V\] with the",
    ),
    "heads": (decay(v=V[:, :, :3], g=G[..., :3]), ValueError, r"q and k have 2 heads and v has 3"),
    "integers": (decay(q=Q.astype(int)), TypeError, r"q has dtype int64; expected one of float32"),
    "k of another dtype": (decay(k=half), TypeError, r"k has dtype float16; expected float32: cast it first"),
    "no g": (decay(g=None), ValueError, r"g is NoneType; expected \[B, T, H\]"),
    "g of channels": (
        decay(g=CHANNELS),
        ValueError,
        r"g is of shape .*; expected \[B, T, H\], one decay per head: gated",
    ),
    "g of other heads": (decay(g=G[..., :3]), ValueError, r"g has shape \[2, 5, 3\]; expected \[B, T, H\]"),
    "g of doubles": (decay(g=G.astype(float)), TypeError, r"g has dtype float64; expected float32"),
    "scale": (decay(scale="2"), TypeError, r"scale is '2' \(str\); expected a finite number"),
    "scale is not finite": (decay(scale=float("nan")), ValueError, r"scale is nan"),
    "scale is not a float32": (decay(scale=1e39), ValueError, r"expected at most 3.403e\+38 in size"),
    "chunk of 0": (decay(chunk=0), ValueError, r"chunk is 0; expected 1 to 128"),
    "chunk of 129": (decay(chunk=129), ValueError, r"chunk is 129; expected 1 to 128"),
    "causal is None": (linear(causal=None), TypeError, "causal is None; expected True or False"),
    "normalize is a text": (linear(normalize="no"), TypeError, "normalize is 'no'; expected True or False"),
    "dt_softplus is a text": (space(dt_softplus="no"), TypeError, "dt_softplus is 'no'; expected True or False"),
    "chunk of 1.5": (decay(chunk=1.5), TypeError, r"chunk is 1.5; expected None or an integer"),
    "state's shape": (
        decay(initial_state=STATE[:1]),
        ValueError,
        r"initial_state has shape .*; expected \[N, H, K, V\]",
    ),
    "state's dtype": (decay(initial_state=STATE.astype(np.float64)), TypeError, r"initial_state has dtype float64"),
    "returned state's dtype": (decay(return_state="float32"), ValueError, "return_state is 'float32'; expected True"),
    "16 bits of a scan": (
        lambda: recurrent.causal_conv1d(Q[:, :, 0], Q[:, 0, 0].T, return_state="bfloat16"),
        ValueError,
        "return_state is 'bfloat16'; expected True or False: only matrices",
    ),
    "states of a pair": (linear(initial_state=STATE), TypeError, r"initial_state is of shape .*; expected \(S"),
    "a pair that does not fit": (linear(initial_state=(STATE, STATE)), ValueError, r"expected S \[B, H, K, V\] and z"),
    "feature map": (
        linear(feature_map="gelu"),
        ValueError,
        r"feature_map is 'gelu'; expected None or one of elu\+1, relu",
    ),
    "signed weights": (linear(feature_map=None), ValueError, r"normalize without a feature map divides by sums"),
    "scale of 0": (linear(feature_map="relu", scale=0), ValueError, "scale is 0 and normalize divides by sums"),
    "scale of the Taylor map": (
        linear(feature_map="taylor", scale=-1.0),
        ValueError,
        r"scale is -1.0 in the Taylor map",
    ),
    "one decay per head": (
        gated(G),
        ValueError,
        r"expected \[B, T, H, K\], one decay per channel: scalar_decay takes",
    ),
    "no decays": (gated(None), ValueError, r"g is NoneType"),
    "no beta": (delta(beta=None), TypeError, r"beta is None; expected an array \[B, T, H\]"),
    "beta of heads": (delta(beta=G[..., :2]), ValueError, r"beta has shape \[2, 5, 2\]; expected \[B, T, H\]"),
    "beta of other channels": (delta(beta=V[..., :5]), ValueError, r"beta is of shape .*, or \[B, T, H, V\] = \[2, 5"),
    "decays of channels of beta": (
        delta(V, G[:1]),
        ValueError,
        r"g is of shape \[1, 5, 4\]; expected .* = \[2, 5, 4\]",
    ),
    "decays of a batch": (delta(g=G[0]), ValueError, r"g is of shape \[5, 4\]; expected \[B, T, H\] or \[B, T, H, K\]"),
    "decays of other channels": (
        delta(g=CHANNELS[..., :7]),
        ValueError,
        r"g has shape \[2, 5, 4, 7\]; expected \[B, T, H, K\] = \[2, 5, 4, 8\]",
    ),
    "decays of the heads of keys": (
        delta(g=CHANNELS[:, :, :2]),
        ValueError,
        r"g has shape \[2, 5, 2, 8\]; expected \[B, T, H, K\] = \[2, 5, 4, 8\]",
    ),
    "values of one step": (
        product(v=V),
        ValueError,
        r"v is of shape \[2, 5, 4, 6\]; expected \[B, T, n, H, V\], n steps per token as k has",
    ),
    "keys of one step": (product(k=Q), ValueError, r"v has shape \[2, 5, 3, 4, 6\]; expected \[B, T, H, V\]"),
    "queries of each step": (product(q=KEYS), ValueError, r"q is of shape .*; expected \[B, T, Hk, K\] with"),
    "steps of values": (product(v=VALUES[:, :, :2]), ValueError, r"v is of shape .*; expected .* = \[2, 5, 3, 4, 6\]"),
    "steps of beta": (product(beta=BETAS[..., :2]), ValueError, r"beta is of shape .*; expected .* = \[2, 5, 3, 4\]"),
    "decays of each step": (
        product(g=BETAS),
        ValueError,
        r"g is of shape .*; expected \[B, T, H, K\] = \[2, 5, 4, 8\]",
    ),
    "no values": (lambda: recurrent.scalar_decay(Q, Q, None, Q[..., 0]), TypeError, "v is None; expected an array"),
    "no heads and a beta per channel": (
        lambda: recurrent.gated_delta_rule(Q[:, :, :0], Q[:, :, :0], V, V),
        ValueError,
        "at least 1 of each",
    ),
    "heads of a beta per channel": (
        lambda: recurrent.gated_delta_rule(Q, Q, V[:, :, :3], V[:, :, :3]),
        ValueError,
        "q and k have 2 heads and v has 3; expected a multiple of them",
    ),
    "no steps": (product(k=KEYS[:, :, :0], v=VALUES[:, :, :0], beta=BETAS[:, :, :0]), ValueError, "at least one step"),
    "borders with a batch": (decay(cu_seqlens=[0, 5]), ValueError, r"cu_seqlens with a batch of 2; expected B = 1"),
    "borders of floats": (packed([0.0, 5.0]), TypeError, r"cu_seqlens has dtype float64; expected int32 or int64"),
    "borders of rank 2": (packed([[0, 5]]), ValueError, r"cu_seqlens has shape \[1, 2\]; expected \[N \+ 1\]"),
    "no borders": (packed(np.zeros(0, int)), ValueError, r"cu_seqlens has shape \[0\]"),
    "borders end early": (packed([0, 4]), ValueError, r"cu_seqlens is \[0, 4\]; expected numbers from 0 to T = 5"),
    "borders decrease": (packed([0, 4, 3, 5]), ValueError, r"cu_seqlens is \[0, 4, 3, 5\]; .* never decrease"),
    "a state for each": (
        packed([0, 2, 5], initial_state=STATE[:1]),
        ValueError,
        r"initial_state has shape \[1, 4, 8, 6\]",
    ),
    "x is a list": (space(x=[[1.0]]), TypeError, r"x is list; expected a torch tensor or a NumPy array"),
    "dt of channels": (space(dt=V), ValueError, r"dt has shape .*; expected \[B, T, H\] = \[2, 5, 4\]"),
    "A of groups": (space(A=np.zeros(2)), ValueError, r"A has shape \[2\]; expected \[H\] = \[4\]"),
    "C unlike B": (space(C=Q[..., :3]), ValueError, r"C has shape .*; expected that of B"),
    "groups": (space(B=V[:, :, :3], C=V[:, :, :3]), ValueError, r"B and C have 3 groups and x has 4 heads"),
    "D of states": (space(D=np.zeros((4, 8))), ValueError, r"D has shape \[4, 8\]; expected \[H, P\] = \[4, 6\]"),
    "z of another dtype": (space(z=V.astype(np.float16)), TypeError, r"z has dtype float16; expected float32"),
    "dt_bias": (space(dt_bias=np.zeros(3)), ValueError, r"dt_bias has shape \[3\]; expected \[H\]"),
    "a limit of one number": (
        space(dt_limit=0.1),
        TypeError,
        r"dt_limit is 0.1; expected two numbers, \(least, largest\)",
    ),
    "a limit in reverse": (
        space(dt_limit=(1, 0.1)),
        ValueError,
        r"dt_limit is \(1, 0.1\); expected \(least, largest\)",
    ),
    "unknown backend": (decay(backend="abacus"), ValueError, r"backend is 'abacus'; expected None or one of"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("backend", ["triton", "webgpu", "metal"])
def test_a_named_backend_never_falls_back(backend: str) -> None:
    # none of them computes float64, on any machine
    q, v, g = (x.astype(np.float64) for x in (Q, V, G))
    with pytest.raises(Unsupported) as error:
        decay(q, q, v, g, backend=backend)()
    assert error.value.backend == backend


def test_a_state_too_large() -> None:
    wide = np.ones((1, 1, 1, 1025), np.float32)
    with pytest.raises(Unsupported, match="a state has 1025 rows and 6 columns: at most 1024"):
        recurrent.linear_attention(wide, wide, V[:1, :1, :1])


def test_what_a_description_says() -> None:
    rows, values = Spec((1, 100, 2, 8), "bfloat16", "cpu"), Spec((1, 100, 4, 6), "bfloat16", "cpu")
    given = {"q": rows, "k": rows, "v": values, "cu_seqlens": Spec((4,), "int32", "cpu")}
    specs = {name: given.get(name) for name in MATRIX.names}
    p = MATRIX.describe(specs, MatrixOptions(feature_map="taylor", normalize=True))
    assert (p.N, p.H, p.Hk, p.F, p.columns) == (3, 4, 2, 1 + 8 + 36, 7)
    assert p.outputs == (Spec((1, 100, 4, 6), "bfloat16", "cpu"), Spec((3, 4, 45, 7), "float32", "cpu"))
    assert hash(p) == hash(MATRIX.describe(specs, MatrixOptions(feature_map="taylor", normalize=True)))


def test_numbers_of_numpy() -> None:
    """NumPy's integers and real numbers are those of Python."""
    np.testing.assert_array_equal(decay(chunk=np.int64(4))(), decay(chunk=4)())
    limits = (np.float32(0.25), np.float32(1)), (0.25, 1.0)
    np.testing.assert_array_equal(*(space(dt_limit=limit)() for limit in limits))
