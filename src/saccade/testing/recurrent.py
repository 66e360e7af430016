"""The catalogue of recurrences: random inputs, the public call and the oracle of each operator, and runs of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import recurrent
from ..arrays import namespace, numpy_dtype
from ..recurrent import reference
from ..recurrent.problem import features
from . import recurrent_oracles as oracles
from .compare import Met, measure_all
from .run import MOST_ORDERS, ORDERS
from .tensors import get, put

Array = NDArray[Any]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes as in `recurrent.problem`. borders: those of packed sequences, or None."""

    B: int = 2
    T: int = 65
    H: int = 4
    Hk: int = 2
    K: int = 8
    V: int = 12
    borders: tuple[int, ...] | None = None

    @property
    def N(self) -> int:
        """The number of sequences."""
        return self.B if self.borders is None else len(self.borders) - 1


@dataclass(frozen=True)
class Op:
    """A row of the catalogue. make(generator, sizes) returns its floating arrays in float64, with the initial state.

    call: the public function. options: its arguments besides arrays. oracle(arrays, options, dtype, cotangents) returns
    the outputs, or the gradients by name. accumulated: arrays in the accumulator's dtype. in_order(n, op, arrays,
    dtype, cotangents): the plain recurrence with its sums in the n-th order; None for that of matrix states.
    """

    name: str
    call: Callable[..., Any]
    make: Callable[[np.random.Generator, Sizes], Arrays]
    oracle: Callable[..., Any]
    options: Arrays = field(default_factory=dict)
    accumulated: frozenset[str] = frozenset({"initial_state"})
    in_order: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name


def make(op: Op, sizes: Sizes, dtype: str, seed: int = 0) -> Arrays:
    """The inputs of a row in `dtype`, with cu_seqlens where the sizes have borders."""
    wide, arrays = "float64" if dtype == "float64" else "float32", op.make(np.random.default_rng(seed), sizes)
    arrays = {n: x.astype(wide).astype(numpy_dtype(wide if n in op.accumulated else dtype)) for n, x in arrays.items()}
    return arrays if sizes.borders is None else {**arrays, "cu_seqlens": np.array(sizes.borders, np.int64)}


def expected(op: Op, arrays: Arrays, dtype: Any = np.float64, cotangents: Any = None) -> Arrays:
    """Outputs and, with cotangents, gradients ("dq", ...) by the oracle, every step rounded to `dtype`."""
    out: Arrays = dict(zip(("o", "state"), op.oracle(arrays, op.options, dtype, None), strict=True))
    if cotangents is not None:
        out.update({f"d{n}": x for n, x in op.oracle(arrays, op.options, dtype, cotangents).items()})
    return out


def computed(
    op: Op, arrays: Arrays, backend: str, cotangents: Any = None, *, state: bool | str = True, **options: Any
) -> Arrays:
    """The same as `expected`, by the public call on torch tensors and its autograd; state: the return_state."""
    import torch

    tensors = {n: put(x) for n, x in arrays.items()}
    leaves = {n: x.requires_grad_() for n, x in tensors.items() if cotangents is not None and x.is_floating_point()}
    results = op.call(**tensors, **op.options, **options, return_state=state, backend=backend)
    results = results if state else (results,)
    out = {name: get(x.detach()) for name, x in zip(("o", "state"), results, strict=False)}
    if cotangents is not None:
        torch.autograd.backward(results, [put(x) for x in cotangents[: len(results)]])
        out.update({f"d{n}": get(x.grad) for n, x in leaves.items()})
    return out


def cotangents(ref: Arrays, dtype: str, seed: int = 1) -> tuple[Array, Array]:
    """Random gradients of both outputs, that of o in `dtype`."""
    rng, wide = np.random.default_rng(seed), "float64" if dtype == "float64" else "float32"
    do, dstate = (rng.standard_normal(ref[n].shape).astype(wide) for n in ("o", "state"))
    return do.astype(numpy_dtype(dtype)), dstate


def verify(
    op: Op, sizes: Sizes, dtype: str, backend: str, seed: int = 0, *, backward: bool = True, **options: Any
) -> list[Met]:
    """The measures of every output and gradient of a row, by the tolerance rule."""
    arrays = make(op, sizes, dtype, seed)
    grad_outputs = cotangents(expected(op, arrays), dtype) if backward else None
    return compare(op, arrays, computed(op, arrays, backend, grad_outputs, **options), dtype, grad_outputs)


def compare(
    op: Op, arrays: Arrays, got: Arrays, dtype: str, grad_outputs: Any = None, plain_dtype: str = ""
) -> list[Met]:
    """The measures of results for these arrays and cotangents; as in `run.verify`, with several orders."""
    ref, kind = expected(op, arrays, cotangents=grad_outputs), numpy_dtype(plain_dtype or dtype)
    mets: list[Met] = []
    for orders in (ORDERS, MOST_ORDERS):
        plain = [(op.in_order or _in_order)(n, op, arrays, kind, grad_outputs) for n in range(orders)]
        mets = measure_all(got, ref, {name: np.stack([x[name] for x in plain]) for name in got}, kind)
        if all(met.ok for met in mets):
            break
    return mets


# the dimension of the key channels and of the value channels of each array, counted from the last
KEYS = {"q": 1, "k": 1, "B": 1, "C": 1, "g": 1, "initial_state": 2, "state": 2}
VALUES = {"v": 1, "x": 1, "z": 1, "o": 1, "initial_state": 1, "state": 1}


def _in_order(n: int, op: Op, arrays: Arrays, dtype: Any, grad_outputs: Any) -> Arrays:
    # the plain recurrence with its channels in the n-th order
    K, V = (arrays["q" if "q" in arrays else "B"].shape[-1], arrays["x" if "x" in arrays else "v"].shape[-1])
    rng = np.random.default_rng(n)
    keys, values = (rng.permutation(size) if n else np.arange(size) for size in (K, V))
    if "taylor" in op.name:
        keys = np.arange(K)

    def turned(name: str, x: Any, back: bool = False) -> Any:
        name = name if name in KEYS or name in VALUES else name[1:]
        if x is None or x.ndim < 4:
            return x
        for order, axes in ((keys, KEYS), (values, VALUES)):
            size = x.shape[-axes.get(name, 1)]
            if name in axes and size >= len(order):
                # further rows and columns (a normaliser, features) stay in place
                full = np.concatenate([np.argsort(order) if back else order, np.arange(len(order), size)])
                x = np.take(x, full, -axes[name])
        return x

    cotangents = grad_outputs and (turned("o", grad_outputs[0]), turned("state", grad_outputs[1]))
    results = expected(op, {name: turned(name, x) for name, x in arrays.items()}, dtype, cotangents)
    return {name: turned(name, x, True) for name, x in results.items()}


def _linear_attention(initial_state: Any = None, **arguments: Any) -> Any:
    # the state and its normaliser as one array, as in the oracle
    if not arguments.get("normalize", True):
        return recurrent.linear_attention(initial_state=initial_state, **arguments)
    state = None if initial_state is None else (initial_state[..., :-1], initial_state[..., -1])
    results = recurrent.linear_attention(initial_state=state, **arguments)
    if not arguments["return_state"]:
        return results
    o, (S, z) = results
    return o, namespace(S).concatenate([S, z[..., None]], -1)


def _rows(rng: np.random.Generator, s: Sizes, state: tuple[int, int] | None = None) -> Arrays:
    shapes = {"q": (s.B, s.T, s.Hk, s.K), "k": (s.B, s.T, s.Hk, s.K), "v": (s.B, s.T, s.H, s.V)}
    initial = rng.standard_normal((s.N, s.H, *(state or (s.K, s.V))))
    return {**{n: rng.standard_normal(shape) for n, shape in shapes.items()}, "initial_state": initial}


def _head_decay(rng: np.random.Generator, s: Sizes) -> Arrays:
    return {**_rows(rng, s), "g": -rng.exponential(0.3, (s.B, s.T, s.H))}


def _channel_decay(rng: np.random.Generator, s: Sizes) -> Arrays:
    return {**_rows(rng, s), "g": -rng.exponential(0.3, (s.B, s.T, s.H, s.K))}


def _unit_keys(rng: np.random.Generator, s: Sizes) -> Arrays:
    rows = _rows(rng, s)
    rows["k"] /= np.linalg.norm(rows["k"], axis=-1, keepdims=True)
    return {**rows, "beta": rng.uniform(0, 1, (s.B, s.T, s.H))}


def _gated_unit_keys(rng: np.random.Generator, s: Sizes) -> Arrays:
    return {**_unit_keys(rng, s), "g": -rng.exponential(0.3, (s.B, s.T, s.H))}


def _channels_unit_keys(rng: np.random.Generator, s: Sizes) -> Arrays:
    return {**_unit_keys(rng, s), "g": -rng.exponential(0.3, (s.B, s.T, s.H, s.K))}


def _householder(rng: np.random.Generator, s: Sizes) -> Arrays:
    # three steps per token
    steps = _unit_keys(rng, replace(s, T=3 * s.T))
    several = {name: steps[name].reshape(s.B, s.T, 3, *steps[name].shape[2:]) for name in ("k", "v", "beta")}
    g = -rng.exponential(0.3, (s.B, s.T, s.H))
    return {**several, "q": steps["q"][:, : s.T], "g": g, "initial_state": steps["initial_state"]}


def _with_sums(rng: np.random.Generator, s: Sizes) -> Arrays:
    rows = _rows(rng, s, (s.K, s.V + 1))
    # sums of weights are positive, and so is the normaliser
    return {**rows, "initial_state": abs(rows["initial_state"])}


def _with_taylor_sums(rng: np.random.Generator, s: Sizes) -> Arrays:
    rows = _rows(rng, s, (features(s.K, "taylor"), s.V + 1))
    # the state of some earlier keys, because any other state could belong to negative weights
    keys = reference.features(rng.standard_normal((s.N, s.H, 3, s.K)), "taylor", s.K**-0.5)
    values = np.concatenate([rng.standard_normal((s.N, s.H, 3, s.V)), np.ones((s.N, s.H, 3, 1))], -1)
    return {**rows, "initial_state": keys.swapaxes(-1, -2) @ values}


def _state_space(rng: np.random.Generator, s: Sizes) -> Arrays:
    rows = _rows(rng, s)
    # in a head that forgets nothing the gradient of A is a thousand times smaller than its terms: mostly rounding error
    return {
        "x": rows["v"],
        "dt": rng.standard_normal((s.B, s.T, s.H)) - 1,
        "A": -0.1 - rng.exponential(1, s.H),
        "B": rows["k"],
        "C": rows["q"],
        "D": rng.standard_normal(s.H),
        "z": rng.standard_normal(rows["v"].shape),
        "dt_bias": rng.standard_normal(s.H),
        "initial_state": rows["initial_state"],
    }


def _linear_op(name: str, make: Any = _with_sums, **options: Any) -> Op:
    return Op(f"linear-{name}", _linear_attention, make, oracles.linear, {"feature_map": name, **options})


_SSD = Op(
    "ssd",
    recurrent.ssd,
    _state_space,
    oracles.ssd,
    {"dt_softplus": True},
    frozenset({"initial_state", "A", "D", "dt_bias"}),
)
OPS = [
    Op("scalar_decay", recurrent.scalar_decay, _head_decay, oracles.matrix),
    Op("gated_linear", recurrent.gated_linear, _channel_decay, oracles.matrix),
    Op("delta_rule", recurrent.gated_delta_rule, _unit_keys, oracles.delta),
    Op("gated_delta_rule", recurrent.gated_delta_rule, _gated_unit_keys, oracles.delta),
    Op("gated_delta_rule-channels", recurrent.gated_delta_rule, _channels_unit_keys, oracles.delta),
    Op("gated_delta_rule-steps", recurrent.gated_delta_rule, _householder, oracles.product),
    _SSD,
    replace(_SSD, name="ssd-limited", options={"dt_softplus": True, "dt_limit": (0.1, 0.8)}),
    *(_linear_op(name) for name in ("elu+1", "relu", "exp")),
    _linear_op("taylor", _with_taylor_sums),
    replace(_linear_op("elu+1", causal=False), name="linear-all"),
    replace(_linear_op("elu+1", _rows, normalize=False), name="linear-sums"),
    replace(
        _linear_op("", _rows, normalize=False), name="linear-plain", options={"feature_map": None, "normalize": False}
    ),
]


def by_name(name: str) -> Op:
    """The row of that name."""
    return next(op for op in OPS if op.name == name)
