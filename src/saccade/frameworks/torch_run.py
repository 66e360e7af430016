"""Calls of a backend on torch tensors, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends import Extras, Inputs, Outputs
from ..biases import check_log_f, for_kernels
from ..errors import Unsupported
from ..operands import NO_SIDE, Request, Side, Spec
from ..problem import OPTIONS, Problem, check_gradients
from .call import NO_EXTRAS, PlannedCall, find, make, rows_of
from .source import STRIDED, Source
from .torch_state import capsule

_WORDS = 1 << 64
# the tensors among `Extras`, except the block table
_TENSORS = "bias", "slopes", "sinks", "distances", "gates", "k_scale", "v_scale"
# torch's and Saccade's numbers of threads at the last call
_threads: tuple[int, int] | None = None


def spec(x: Tensor) -> Spec:
    """The Spec of a tensor: shape, dtype name and device name."""
    return Spec(tuple(x.shape), str(x.dtype)[6:], str(x.device))


def prepare(
    q: Tensor, k: Tensor, v: Tensor, request: Request, grads: frozenset[str] | None = None, source: Source = STRIDED
) -> PlannedCall:
    """Check a call, choose its backend and plan it, or find its kind in the cache.

    grads: as in `describe`. source: how k and v are stored.
    """
    mask, side, options, _ = request
    if side.log_f is not None and side.log_f.is_cpu and not options.summed:
        check_log_f(side.log_f)
    kinds = None if side is NO_SIDE else side.map(_kind)
    arrays = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    key = arrays, kinds, options, grads, source.key
    planned = find(mask, key)
    if planned is None:
        problem = describe_tensors(q, k, v, request, grads, source)
        planned = make(mask, key, problem, options.backend)
    return planned


def _kind(x: Tensor) -> Any:
    return x.shape, x.dtype, x.device


def describe_tensors(
    q: Tensor, k: Tensor, v: Tensor, request: Request, grads: Set[str] | None = None, source: Source = STRIDED
) -> Problem:
    """`describe` for tensors, whose sizes may be symbolic."""
    request = request._replace(side=request.side.map(spec))
    return source.describe(spec(q), spec(k), spec(v), request, grads)


def check_rows(problem: Problem, outputs: Outputs) -> None:
    """`check_gradients` for tensors."""
    check_gradients(problem, {name: spec(x) for name, x in rows_of(outputs).items()})


def forward(planned: PlannedCall, q: Tensor, k: Tensor, v: Tensor, extras: Extras, verb: str) -> tuple[Tensor, ...]:
    """(o, lse, *more) of tensors that fit the plan; extras: from `carried`.

    verb: "forward" if a backward may follow; "decode"; "result", a decode whose lse may be left out (None).
    """
    problem, plan, backend, direct = planned
    q, k, v = positive(q, k, v)
    threads, decode = follow_threads(backend), verb != "forward"
    short = direct.get(decode)
    if short is None:
        short = direct[decode] = backend.direct(problem, plan, Tensor, decode) or _nothing
    results = short(threads, q, k, v, verb != "result")
    if results is not None:
        return results
    give = giver(backend)
    inputs = Inputs(give(dense(q)), give(dense(k)), give(dense(v)), _lent(extras, give))
    o, *rows = (backend.decode if decode else backend.forward)(problem, plan, inputs)
    return tensor(o, q.dtype), *map(tensor, rows)


def decode(planned: PlannedCall, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, ...]:
    """(o, lse, *more) of the last queries of sequences whose lengths [B] are on the device, in extras."""
    problem, plan, backend, _ = planned
    q, k, v = positive(q, k, v)
    return backend.decode(problem, plan, Inputs(dense(q), dense(k), dense(v), extras))


def positive(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the numbers in memory that they stand for: kernels do not know torch's negative bit."""
    if q.is_neg() or k.is_neg() or v.is_neg():
        return q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    return q, k, v


def _nothing(*_: Any) -> None:
    return None


def backward(
    planned: PlannedCall, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, extras: Extras, grads: Set[str]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(dq, dk, dv, side gradients) of tensors that fit the plan; the last is a dict of the names in `grads`."""
    problem, plan, backend, direct = planned
    o, lse, do, dlse, _, entropy, dentropy = outputs
    q, k, v = positive(q, k, v)
    do, dlse = do.resolve_neg(), None if dlse is None else dlse.resolve_neg()
    threads = follow_threads(backend)
    short = getattr(direct.get(False), "backward", None)
    if short is not None:
        gradients = short(threads, plan.owners, do, q, k, v, o, lse, dlse)
        if gradients is not None:
            return (*gradients, {})
    give = giver(backend)
    inputs = Inputs(give(dense(q)), give(dense(k)), give(dense(v)), _lent(extras, give))
    of_rows = [None if x is None else give(dense(x)) for x in (dlse, None, entropy, dentropy)]
    outputs = Outputs(give(dense(o)), give(dense(lse)), give(dense(do)), *of_rows)
    dq, dk, dv, more = backend.backward(problem, plan, inputs, outputs, grads=grads)
    extra = {name: tensor(x) for name, x in more.items()}
    return tensor(dq, q.dtype), tensor(dk, q.dtype), tensor(dv, q.dtype), extra


def tangent(planned: PlannedCall, inputs: Inputs, o: Tensor, lse: Tensor, tangents: Inputs) -> tuple[Tensor, Tensor]:
    """The tangents of o and lse, from those of tensors that fit the plan."""
    problem, plan, backend, _ = planned
    refuse_tangent(backend, problem)
    follow_threads(backend)
    give = giver(backend)

    def lend(x: Inputs) -> Inputs:
        q, k, v = (None if y is None else give(dense(y)) for y in x[:3])
        return Inputs(q, k, v, _lent(x.extras, give))

    to, tlse = backend.tangent(problem, plan, lend(inputs), give(dense(o)), give(dense(lse)), lend(tangents))
    return tensor(to, o.dtype), tensor(tlse)


def refuse_tangent(backend: Any, problem: Problem) -> None:
    """Raise Unsupported unless a backend computes the tangents of a problem."""
    name, takes = backend.__name__.rpartition(".")[2], backend.TAKES.get("tangent")
    if takes is None:
        raise Unsupported(name, ["forward-mode derivatives are not computed here: use the backend cpu or triton"])
    if lacks := sorted(problem.uses - takes):
        names = ", ".join(str(OPTIONS.get(option, option)) for option in lacks)
        raise Unsupported(name, [f"forward-mode derivatives with {names} are not computed here: leave it out"])


def gradients_like(side: Side, more: dict[str, Tensor]) -> Side:
    """The gradients of `backward` in the shapes, dtypes and order of the side arrays; None if missing."""
    of = side._asdict()
    return Side(**{name: x.reshape(of[name].shape).to(of[name].dtype).contiguous() for name, x in more.items()})


def widen(q: Tensor, request: Request, Tk: int) -> Side:
    """The side arrays in the form and dtype that kernels read for inputs like q; differentiable."""
    side = request.side
    # Dynamo of torch 2.9 does not compare tuples by identity
    if not torch.compiler.is_compiling() and side is NO_SIDE:
        return side
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if side.bias is not None and side.bias.dim() < 4:
        side = side._replace(bias=side.bias[(None,) * (4 - side.bias.dim())])
    side = for_kernels(side, request.options, q.shape[1], Tk)
    return side._replace(log_f=None).map(lambda x: x.to(dtype))._replace(log_f=side.log_f)


def signed(seed: int) -> int:
    """A 64-bit seed as int64, for a tensor; `int(tensor) % 2**64` is the seed again."""
    return seed - _WORDS if seed >= _WORDS // 2 else seed


def unsigned(seed: Tensor | None) -> int:
    """The 64-bit seed in an int64 tensor; 0 for None."""
    return 0 if seed is None else int(seed) % _WORDS


def carried(seed: int, *side: Tensor | None) -> Extras:
    """The extras of a call from a seed and the side arrays that `widen` returned."""
    if not seed and side == NO_SIDE:
        return NO_EXTRAS
    bias, slopes, sinks, distances, sums = side
    slopes = slopes[None] if slopes is not None and slopes.dim() == 1 else slopes
    return Extras(bias, slopes, sinks, distances, sums, seed)


def _lent(extras: Extras, give: Callable[[Tensor], Any]) -> Extras:
    # the extras as arrays of the backend
    if give is tensor or extras is NO_EXTRAS:
        return extras
    arrays = {name: getattr(extras, name) for name in _TENSORS}
    return extras._replace(**{name: give(x) for name, x in arrays.items() if x is not None})


def dense(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, which kernels need; they read any other strides."""
    return x.contiguous() if x.stride(-1) != 1 and x.shape[-1] != 1 else x


def giver(backend: Any) -> Callable[[Tensor], Any]:
    """A function from a tensor to the kind of array that this backend takes."""
    return tensor if backend.TAKES_TENSORS else lent


def lent(x: Tensor) -> Any:
    """A CPU tensor as a NumPy array that shares its memory; a tensor on another device as it is."""
    if not x.is_cpu:
        return x
    if x.is_neg():
        x = x.resolve_neg()
    return _read(_Lent(x.view(torch.uint16) if x.dtype is torch.bfloat16 else x))


# NumPy before 2.1 does not know the capsules that may be written to, and before 2.2.5 it never writes to theirs
_read: Callable[[Any], Any] = np.from_dlpack if np.lib.NumpyVersion(np.__version__) >= "2.2.5" else np.asarray


class _Lent:
    """A tensor that NumPy can read. Unlike `Tensor.numpy` it keeps the storage resizable, which FSDP needs."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return capsule(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    @property
    def __array_interface__(self) -> dict[str, Any]:
        x, dtype = self.tensor, np.dtype(str(self.tensor.dtype)[6:])
        strides = tuple(s * dtype.itemsize for s in x.stride())
        # no array is at address 0
        place = x.data_ptr() or id(x), False
        return {"version": 3, "shape": tuple(x.shape), "typestr": dtype.str, "strides": strides, "data": place}


def tensor(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A result of a backend as a tensor; dtype: the dtype of numbers whose bits it carries (bfloat16 as uint16)."""
    if isinstance(x, Tensor):
        return x
    x = torch.from_numpy(x)
    return x if dtype is None or x.dtype is dtype else x.view(dtype)


def _openmp() -> str | None:
    # the path of the OpenMP runtime that torch ships, on systems that list it
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libgomp" in line}
    except OSError:
        return None
    return next((path for path in sorted(paths) if "/torch" in path), None)


def follow_threads(backend: Any) -> int:
    """The threads of a call: torch's or Saccade's setting, the one that changed last; at first the smaller one."""
    global _threads
    host = backend.THREADS
    if host is None:
        return 1
    threads, ours = torch.get_num_threads(), host.number
    if _threads == (threads, ours):
        return ours
    if _threads is None or _threads[0] != threads:
        ours = min(threads, ours) if _threads is None else threads
        host.set_num_threads(ours)
    # share torch's threads only if the numbers agree; otherwise the runtime would start and end threads at each change
    host.join_team(_openmp() if ours == threads else None)
    _threads = threads, ours
    return ours
