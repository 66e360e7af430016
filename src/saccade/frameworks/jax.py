"""Attention on JAX's CPU arrays, under jit, grad and vmap, through XLA's foreign function interface.

A call is checked and planned while JAX traces it. The compiled program contains the plan and calls the CPU core without
Python. Programs that are stored, by `jax.export` or in JAX's cache, run in any process that has imported this module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ..backends import Outputs, cpu
from ..backends.cpu.encoding import encode
from ..biases import check_log_f
from ..errors import Unsupported
from ..mask import Mask
from ..operands import Options, Request, Side
from ..plan import Plan, positions
from ..problem import Problem, check_gradients, describe
from .call import PlannedCall, find, make, rows_of, seed_value, spec

for _name, _handler in cpu.ffi_handlers().items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")

Arrays = dict[str, Any]
# arrays with a batch entry for each entry of the call
ROWS = ("q", "k", "v", "o", "lse", "do", "dlse")
# the side arrays of core/ffi.cpp, in their order
SIDE = ("bias", "slopes", "sinks", "table", "log_f")
# the options of a problem that the handlers read
TAKES = {"softcap", "sinks", "bias", "alibi", "relative", "gates", "dropout", "select"}
_words: weakref.WeakKeyDictionary[Plan, Any] = weakref.WeakKeyDictionary()


def attention(q: Any, k: Any, v: Any, request: Request, verb: str) -> tuple[Any, Any]:
    """(o, lse) of `saccade.attention`, differentiable once in reverse mode; verb: as for NumPy arrays."""
    call, arrays, lifted = _prepared(q, k, v, request)
    o, lse = call.differentiable()(arrays)
    return (o[0], lse[0]) if lifted else (o, lse)


def attention_backward(
    q: Any, k: Any, v: Any, outputs: Outputs, request: Request, grads: frozenset[str]
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(dq, dk, dv, extras) of `saccade.attention_backward`."""
    call, arrays, lifted = _prepared(q, k, v, request)
    rows = {name: _checked(name, x)[None] if lifted else _checked(name, x) for name, x in rows_of(outputs).items()}
    check_gradients(call.planned(arrays, grads).problem, {name: spec(x, "cpu") for name, x in rows.items()})
    more = call.backward(grads)({**arrays, **rows})
    first = [more.pop(name)[0] if lifted else more.pop(name) for name in "qkv"]
    of = request.side._asdict()
    return *first, {name: x.reshape(of[name].shape).astype(of[name].dtype) for name, x in more.items()}


def decode(q: Any, cache: Any, request: Request) -> tuple[Any, Any]:
    """Raises Unsupported."""
    raise Unsupported("jax", ["decode reads caches of NumPy arrays or tensors: call attention with the keys in use"])


class JaxCall(NamedTuple):
    """One call without its arrays. Its functions take a dict of the arrays that the call has: q, k, v, fields of `Side`
    in the accumulator's dtype, and the seed as two words.
    """

    mask: Mask | None
    options: Options

    def planned(self, arrays: Arrays, grads: frozenset[str] | None = None) -> PlannedCall:
        """The plan of the call; grads: as in `describe`."""
        specs = {name: spec(x, "cpu") for name, x in arrays.items()}
        q, k, v = (specs[name] for name in "qkv")
        side = Side(*map(specs.get, Side._fields))
        key = "jax", q, k, v, side, self.options, grads
        planned = find(self.mask, key)
        if planned is None:
            problem = describe(q, k, v, Request(self.mask, side, self.options), grads=grads)
            _check(problem)
            planned = make(self.mask, key, problem, self.options.backend)
        return planned

    def differentiable(self) -> Callable[[Arrays], tuple[Any, Any]]:
        """A function of the arrays that returns (o, lse), with a gradient."""

        @jax.custom_vjp
        def attend(arrays: Arrays) -> tuple[Any, Any]:
            return self.forward(decode=True)(arrays)

        def forward(arrays: Arrays) -> tuple[tuple[Any, Any], Any]:
            values = {name: x.value for name, x in arrays.items()}
            # a dict with the names of gradients as keys, because JAX keeps keys and traces values
            wanted = {name: None for name in SIDE if name in arrays and arrays[name].perturbed}
            o, lse = self.forward(decode=False)(values)
            return (o, lse), (values, o, lse, wanted)

        def backward(residuals: Any, cotangents: tuple[Any, Any]) -> tuple[Arrays]:
            values, o, lse, wanted = residuals
            rows = {"o": o, "lse": lse, **dict(zip(("do", "dlse"), cotangents, strict=True))}
            gradients = self.backward(frozenset(wanted))({**values, **{name: _numbers(x) for name, x in rows.items()}})
            return ({name: gradients.get(name) for name in values},)

        attend.defvjp(forward, backward, symbolic_zeros=True)
        return attend

    def forward(self, decode: bool) -> Callable[[Arrays], Any]:
        """A function of the arrays that returns (o, lse); decode: keys may be split, if no backward follows."""

        def compute(arrays: Arrays) -> Any:
            problem, plan, *_ = self.planned(arrays)
            split_keys = plan.split_keys if decode and problem.selection is None else 0
            q, v, wide = arrays["q"], arrays["v"], np.dtype(problem.accumulator)
            o = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), wide if len(plan.parts) > 1 else q.dtype)
            lse = jax.ShapeDtypeStruct(q.shape[:3], wide)
            call = jax.ffi.ffi_call("saccade_forward", (o, lse))
            o, lse = call(*_inputs(problem, plan, arrays), **self.attributes(problem), split_keys=np.int64(split_keys))
            return o.astype(q.dtype), lse

        return self.transformable(compute)

    def backward(self, wanted: frozenset[str]) -> Callable[[Arrays], Arrays]:
        """A function of the arrays, with o, lse, do and maybe dlse, that returns the gradients by name: those of q, k,
        v and of the side arrays in `wanted`.
        """

        def compute(arrays: Arrays) -> Arrays:
            problem, plan, *_ = self.planned(arrays, wanted)
            q, k, v = (arrays[name] for name in "qkv")
            wide = np.dtype(problem.accumulator)
            shapes = [(q.shape, wide if len(plan.parts) > 1 else q.dtype), (k.shape, k.dtype), (v.shape, v.dtype)]
            shapes += [(arrays[name].shape if name in wanted else (0,), wide) for name in SIDE]
            call = jax.ffi.ffi_call("saccade_backward", [jax.ShapeDtypeStruct(*x) for x in shapes])
            rows = [arrays["o"], arrays["lse"], arrays["do"], arrays.get("dlse", np.zeros(0, wide))]
            inputs = _inputs(problem, plan, arrays)
            results = call(*inputs, *rows, **self.attributes(problem), owners=np.int64(plan.owners))
            gradients = dict(zip((*"qkv", *SIDE), results, strict=True))
            gradients["q"] = gradients["q"].astype(q.dtype)
            return {name: x for name, x in gradients.items() if name in wanted or name in "qkv"}

        return self.transformable(compute, summed=bool(wanted))

    def attributes(self, problem: Problem) -> dict[str, Any]:
        """The numbers of the call, as attributes of the handlers."""
        scores, of = problem.scores, problem.selection
        floats = {"scale": scores.scale, "softcap": scores.softcap, "dropout": scores.dropout}
        ints = {"origin": self.options.origin, "block": of.block if of else 1, "rows": of.rows if of else 1}
        return {name: np.float64(x) for name, x in floats.items()} | {name: np.int64(x) for name, x in ints.items()}

    def transformable(self, compute: Callable[[Arrays], Any], summed: bool = False) -> Callable[[Arrays], Any]:
        """compute, with its rule for vmap: the axis is folded into the batch if that is exact, else it is a loop.

        summed: some results are sums over the batch.
        """
        mapped = custom_vmap(compute)

        def rule(size: int, batched: list[dict[str, bool]], arrays: Arrays) -> tuple[Any, Any]:
            (axes,) = batched
            if summed or not self._foldable(arrays, axes):
                results = jax.lax.map(
                    lambda entry: function({**arrays, **entry}), {name: arrays[name] for name in arrays if axes[name]}
                )
            else:
                rows = {name: _joined(x, size, axes[name]) for name, x in arrays.items() if name in ROWS}
                B = arrays["q"].shape[1 if axes["q"] else 0]
                results = jax.tree.map(lambda x: x.reshape(size, B, *x.shape[1:]), function({**arrays, **rows}))
            return results, jax.tree.map(lambda _: True, results)

        mapped.def_vmap(rule)
        function = jax.custom_jvp(mapped)
        function.defjvp(_no_second_derivative)
        return function

    def _foldable(self, arrays: Arrays, axes: dict[str, bool]) -> bool:
        # dropout depends on the batch entry, and arrays of the mask and side arrays may have one entry per batch entry
        side = {name: x for name, x in arrays.items() if name not in ROWS}
        alone = all(name == "sinks" or (name != "log_f" and x.shape[0] == 1) for name, x in side.items())
        return alone and not (self.mask is not None and self.mask.has_data) and not any(axes[name] for name in side)


def _numbers(x: Any) -> Any:
    dtype: Any = x.dtype
    return jnp.zeros(x.shape, dtype) if isinstance(x, SymbolicZero) else x


def _no_second_derivative(*_: Any) -> Any:
    raise Unsupported("jax", ["second derivatives are not supported for JAX arrays: torch tensors have them"])


def _joined(x: Any, size: int, batched: bool) -> Any:
    x = x if batched else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _inputs(problem: Problem, plan: Plan, arrays: Arrays) -> list[Any]:
    # in the order of Inputs in core/ffi.cpp; empty where the call has none
    words = _words.get(plan)
    if words is None:
        words = _words[plan] = encode(plan)
    none = np.zeros(0, problem.accumulator)
    selected = np.zeros(0, np.int32) if problem.selection is None else problem.selection.lists()
    side = [arrays.get(name, none) for name in SIDE]
    seed = arrays.get("seed", np.zeros(2, np.uint32))
    return [arrays["q"], arrays["k"], arrays["v"], words, *side, positions(problem), selected, seed]


def _check(problem: Problem) -> None:
    if lacking := sorted(problem.uses - TAKES):
        raise Unsupported("jax", [f"{name} is not computed for JAX arrays: leave it out" for name in lacking])


def _prepared(q: Any, k: Any, v: Any, request: Request) -> tuple[JaxCall, Arrays, bool]:
    # the call, its arrays with a batch, and whether the batch was added
    mask, side, options, seed = request
    if options.backend not in (None, "cpu"):
        raise Unsupported(options.backend, ["it computes no arrays of JAX: leave backend out, for the CPU"])
    if options.descale is not None:
        raise Unsupported("jax", ["8-bit floats are not computed for JAX arrays: cast them to bfloat16"])
    if type(options.deterministic) is not bool:
        raise Unsupported(
            "jax", [f"deterministic={options.deterministic!r} is not computed for JAX arrays: leave it out"]
        )
    q, k, v = (_checked(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    lifted = q.ndim == k.ndim == v.ndim == 3
    if lifted:
        q, k, v = q[None], k[None], v[None]
    side = side.checked(_checked)
    arrays = {"q": q, "k": k, "v": v, **{name: x for name, x in side._asdict().items() if x is not None}}
    call = JaxCall(mask, options)
    problem = call.planned(arrays).problem
    if side.log_f is not None and not isinstance(side.log_f, Tracer):
        check_log_f(side.log_f)
    for name, x in side._asdict().items():
        if x is not None:
            shape = {"bias": problem.scores.bias, "slopes": problem.scores.alibi}.get(name) or x.shape
            shape = (1, *shape) if name == "table" and x.ndim == 2 else shape
            arrays[name] = x.reshape(shape).astype(problem.accumulator)
    if problem.scores.dropout:
        arrays["seed"] = _seed(seed)
    return call, arrays, lifted


def _checked(name: str, x: Any) -> Any:
    if not isinstance(x, jax.Array):
        raise TypeError(f"{name} is {type(x).__name__}; expected an array of JAX, like q: jax.numpy.asarray(x)")
    if not all(type(n) is int for n in x.shape):
        raise Unsupported("jax", [f"{name} has the symbolic shape {list(x.shape)}; a plan needs integers"])
    if not isinstance(x, Tracer) and any(device.platform != "cpu" for device in x.devices()):
        raise Unsupported(
            "jax", [f"{name} lives on {x.devices()}: move it with jax.device_put(x, jax.devices('cpu')[0])"]
        )
    return x


def _seed(seed: Any) -> Any:
    # two words, the low one first
    if seed is None:
        raise ValueError(
            "dropout has no seed; expected one, because JAX would store a drawn seed in the compiled function: pass "
            "seed=, an integer or an array such as jax.random.bits(key)"
        )
    expected = "expected an integer, or uint32 or uint64 without dimensions, such as jax.random.bits(key)"
    kind, traced = seed.dtype.name if isinstance(seed, jax.Array) else "", isinstance(seed, Tracer)
    if kind.startswith("key") or (traced and kind not in ("uint32", "uint64")):
        raise TypeError(f"seed is {kind}{list(seed.shape)}; {expected}")
    if not traced:
        value = seed_value(seed)
        return np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)
    if seed.shape != ():
        raise TypeError(f"seed has shape {list(seed.shape)}; {expected}")
    high = (seed >> 32).astype(jnp.uint32) if seed.dtype.name == "uint64" else jnp.zeros((), jnp.uint32)
    return jnp.stack([seed.astype(jnp.uint32), high])
