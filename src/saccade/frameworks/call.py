"""Describe a call, choose its backend and plan it, once per kind of call; every framework does this first."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..backends import Backend, Extras, Inputs, Outputs, choose
from ..biases import check_log_f, for_kernels, gradients_for_callers
from ..layout import warn_if_exchanged
from ..mask import Mask
from ..mask.checks import check_shapes
from ..operands import NO_SIDE, Options, Request, Side, Spec
from ..plan import Plan, sees_later_keys
from ..problem import Problem, check_kind
from .source import STRIDED, Source, first_of_side, in_use, with_gates

# the most calls that are cached: for all masks without arrays, and for each mask with arrays
MOST_CALLS = 512
MOST_CALLS_OF_MASK = 64
NO_EXTRAS = Extras()


class LentArrays(NamedTuple):
    """One call on arrays: its plan, the arrays with a batch, and whether the batch was added (`lifted`)."""

    planned: PlannedCall
    inputs: Inputs
    lifted: bool


def first_keys(cache: Any, lengths: Any, request: Request, *, cut: bool = True) -> tuple[int, Request]:
    """(longest, request) such that queries see only the keys in use; cache, lengths and cut: as in `in_use`."""
    batch, capacity = cache.k.shape[:2]
    longest, mask = in_use(lengths, batch, capacity, request.mask, cut=cut)
    request = with_gates(request, getattr(cache, "gates", None))
    side = first_of_side(request.side, longest, capacity)
    if mask is not request.mask or side is not request.side:
        request = Request(mask, side, request.options, request.seed)
    return longest, request


class PlannedCall(NamedTuple):
    """A checked and planned call, valid for every call with the same key.

    direct: the backend's shortcuts (`direct`) per kind of call, which the framework stores here.
    """

    problem: Problem
    plan: Plan
    backend: Backend
    direct: dict[bool, Any]


_calls: dict[Hashable, PlannedCall] = {}
_lock = threading.Lock()


def find(mask: Mask | None, key: Hashable) -> PlannedCall | None:
    """The plan of a call whose `key` (shapes, dtypes, options; not the mask) was seen with this mask."""
    try:
        if mask is None:
            return _calls.get(key)
        if type(mask) is not Mask:
            return None
        of_mask = mask.key
        return (_with_arrays(mask, of_mask) if of_mask[2] else _calls).get((key, of_mask))
    except TypeError:
        # an unhashable argument has a wrong type; `describe` raises the error about it
        return None


def make(mask: Mask | None, key: Hashable, problem: Problem, backend: str | None) -> PlannedCall:
    """Check and plan a call, and store it for `find`.

    Only the first call of a kind is checked, so `key` must contain everything that `problem` was described from.
    """
    check_kind(mask)
    table: dict[Any, Any] = _calls
    if mask is not None:
        of_mask = mask.key
        key = key, of_mask
        table = _with_arrays(mask, of_mask) if of_mask[2] else _calls
    planned = _make(mask, problem, backend)
    with _lock:
        limit = MOST_CALLS if table is _calls else MOST_CALLS_OF_MASK
        while len(table) >= limit:
            del table[next(iter(table))]
        table[key] = planned
    return planned


def prepare(
    place: str, q: Any, k: Any, v: Any, request: Request, grads: frozenset[str] | None = None, source: Source = STRIDED
) -> tuple[PlannedCall, Extras]:
    """The plan of a call on arrays [B, T, H, D] at `place` with NumPy side arrays, and the extras for its backend.

    grads: as in `describe`. source: how k and v are stored.
    """
    mask, side, options, seed = request
    specs = NO_SIDE if side is NO_SIDE else side.map(lambda x: spec(x, place))
    # the key has the dtypes themselves: computing their names would take longer than all the rest
    key = place, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, specs, options, grads, source.key
    planned = find(mask, key)
    if planned is None:
        factors = specs_of(options.descale, np.ndarray, lambda x: spec(x, place))
        request = Request(mask, specs, options._replace(descale=factors))
        problem = source.describe(spec(q, place), spec(k, place), spec(v, place), request, grads)
        planned = make(mask, key, problem, options.backend)
    scores = planned.problem.scores
    if side is NO_SIDE and seed is None and not scores.dropout:
        return planned, source.carried(NO_EXTRAS)
    if seed is None:
        seed = int(np.random.default_rng().integers(1 << 63)) if scores.dropout else 0
    side = side if side is NO_SIDE else _widened(side, planned.problem, options)
    return planned, source.carried(Extras(*side, seed_value(seed)))


def _widened(side: Side, problem: Problem, options: Options) -> Side:
    # in the accumulator's dtype, and in the shapes that backends expect
    if side.log_f is not None and not options.summed:
        check_log_f(side.log_f)
    side = for_kernels(side, options, problem.Tq, problem.Tk)
    wide = side._replace(log_f=None).map(lambda x: x.astype(problem.accumulator, copy=False))
    bias = None if wide.bias is None else wide.bias.reshape(problem.scores.bias)
    slopes = None if wide.slopes is None else wide.slopes.reshape(problem.scores.alibi)
    return wide._replace(bias=bias, slopes=slopes, log_f=side.log_f)


def specs_of(descale: Any, array: type, one: Callable[[Any], Spec]) -> Any:
    """The factors of 8-bit floats as specs; anything but arrays of this framework stays, and `describe` refuses it."""
    if not isinstance(descale, (tuple, list)):
        return descale
    factors: list[Any] = list(descale)  # pyright: ignore[reportUnknownArgumentType]
    return tuple(one(x) if isinstance(x, array) else x for x in factors)


def spec(x: Any, place: str) -> Spec:
    """The Spec of an array with a NumPy dtype."""
    return Spec(x.shape, name_of(x.dtype), place)


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """The name of a NumPy dtype. NumPy takes microseconds to build it each time."""
    return dtype.name


def rows_of(outputs: Outputs) -> dict[str, Any]:
    """The arrays by name that a backward call has besides its forward call; optional ones only if they are not None."""
    if (outputs.entropy is None) != (outputs.dentropy is None):
        raise ValueError("one of entropy and dentropy is None; expected both, or neither")
    more = {name: getattr(outputs, name) for name in ("dlse", "entropy", "dentropy")}
    required = {"do": outputs.do, "o": outputs.o, "lse": outputs.lse}
    return required | {name: x for name, x in more.items() if x is not None}


def gradients_of(request: Request, more: dict[str, Any], Tk: int) -> dict[str, Any]:
    """The gradients by name, in the shapes and dtypes of their side arrays."""
    arrays = request.side._asdict()
    more = gradients_for_callers(more, request.side, request.options.origin, Tk)
    return {name: x.reshape(arrays[name].shape).astype(arrays[name].dtype, copy=False) for name, x in more.items()}


def _with_arrays(mask: Mask, of_mask: tuple[Any, ...]) -> dict[Any, Any]:
    # the calls of a mask with arrays, stored with the mask because ids of arrays are valid while it lives; calls for
    # earlier contents are removed
    if any(version < 0 for _, version in of_mask[2]):
        return {}
    memo = memo_of(mask)
    calls = memo.get("calls")
    if calls is None or calls[0] != of_mask:
        calls = memo["calls"] = of_mask, {}
    return calls[1]


def memo_of(mask: Mask) -> dict[Any, Any]:
    """A dict that lives as long as this mask object."""
    if mask.memo is None:
        mask.memo = {}
    return mask.memo


def _make(mask: Mask | None, problem: Problem, backend: str | None) -> PlannedCall:
    if mask is not None and mask.has_data:
        # a copy: results stored with a mask must not refer to it, otherwise neither is ever freed
        mask = Mask.unflatten(*mask.snapshot().flatten())
        problem = replace(problem, mask=mask)
    if mask is not None:
        check_mask(mask, problem)
    chosen = choose(problem, backend)
    warn_if_exchanged(problem.Tq, problem.Tk, problem.Hk)
    check_gates(problem)
    return PlannedCall(problem, chosen.plan(problem), chosen, {})


def check_gates(problem: Problem) -> None:
    """Raise ValueError for gates with a mask that lets a query see a later key, for which gates are not defined."""
    if problem.scores.gates and sees_later_keys(problem):
        raise ValueError("gates need a mask that lets no query see a later key: add & saccade.mask.causal() to it")


def check_mask(mask: Mask, problem: Problem) -> None:
    """Check the shapes of a mask's arrays, and their contents if they are on the host."""
    sizes = (problem.B, problem.Tq, problem.Tk, problem.Hq)
    if all(getattr(array, "is_cpu", True) for array in mask.flatten()[2]):
        mask.check(*sizes)
    else:
        check_shapes(mask, *sizes)


def seed_value(seed: Any) -> int:
    """The 64-bit key of the dropout from an integer or a 0-d integer array."""
    expected = "expected an integer or a 0-d integer array, 0 <= seed < 2**64, or None"
    shape = () if type(seed) is int else getattr(seed, "shape", ())
    try:
        if type(seed) is bool or shape != ():
            raise TypeError
        # not `index` of an int, which torch.compile may have as a symbol
        value = seed if type(seed) is int else operator.index(getattr(seed, "item", lambda: seed)())
    except TypeError:
        value = f"of shape {list(shape)}" if shape else repr(seed)
        raise TypeError(f"seed is {type(seed).__name__} {value}; {expected}") from None
    if not 0 <= value < 1 << 64:
        raise ValueError(f"seed is {value}; {expected}")
    return value
