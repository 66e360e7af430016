"""Describe, choose, plan, once for each kind of call: what every framework does before it calls a backend."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..backends import Backend, choose
from ..mask import Mask, keys
from ..mask.checks import check_shapes
from ..plan import Plan, make_plan
from ..problem import Problem

# calls remembered, of masks without arrays and with each mask that holds arrays
KEPT = 512
KEPT_WITH_MASK = 64


class Alibi(NamedTuple):
    """The bias -slope * |i + offset - j|: slopes [Hq] or [B, Hq], an array of the same framework as q."""

    slopes: Any


class Options(NamedTuple):
    """What a call says besides its arrays."""

    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    descale: Any = None
    deterministic: bool = True
    backend: str | None = None


class Ready(NamedTuple):
    """A call that is checked and planned; it holds for every call with the same key."""

    problem: Problem
    plan: Plan
    backend: Backend


_calls: dict[Hashable, Ready] = {}
_lock = threading.Lock()


def ready(mask: Mask | None, key: tuple[Any, ...], describe: Callable[[], Problem], backend: str | None) -> Ready:
    """The plan of a call, from the table if `key` (shapes, dtypes, options; not the mask) was seen with this mask.

    Only the first call of a kind is checked, so `key` must hold all that `describe` looks at.
    """
    if mask is None:
        table: dict[Any, Any] = _calls
    elif type(mask) is not Mask:
        describe()
        raise TypeError(f"mask is {type(mask).__name__}; expected None or an expression of saccade.mask")
    else:
        key = (*key, mask.key)
        table = _calls
        if mask.has_data:
            # ids of arrays hold only as long as the mask lives, so its plans stay with it
            table = kept_with(mask) if all(version >= 0 for _, version in key[-1][2]) else {}
    try:
        found = table.get(key)
    except TypeError:
        # an argument that cannot be a key is of a wrong type, and describe says which
        found = None
    if found is None:
        found = _make(mask, describe(), backend)
        with _lock:
            limit = KEPT if table is _calls else KEPT_WITH_MASK
            while len(table) >= limit:
                del table[next(iter(table))]
            table[key] = found
    return found


def kept_with(mask: Mask) -> dict[Any, Any]:
    """What lives as long as this mask object."""
    if mask.memo is None:
        mask.memo = {}
    return mask.memo


def _make(mask: Mask | None, problem: Problem, backend: str | None) -> Ready:
    if mask is not None and mask.has_data:
        # a twin shares the arrays: what a mask keeps must not lead back to it, or both outlive their last user
        mask = Mask.unflatten(*mask.flatten())
        problem = replace(problem, mask=mask)
    if mask is not None:
        check_mask(mask, problem)
    chosen = choose(problem, backend)
    return Ready(problem, make_plan(problem, chosen.limits()), chosen)


def check_mask(mask: Mask, problem: Problem) -> None:
    """Check a mask's arrays: their shapes, and their contents where these are on the host."""
    sizes = (problem.B, problem.Tq, problem.Tk, problem.Hq)
    if all(getattr(array, "is_cpu", True) for array in mask.flatten()[2]):
        mask.check(*sizes)
    else:
        check_shapes(mask, *sizes)


def seed_value(seed: Any) -> int:
    """An integer, or a 0-d integer array, as the 64-bit key of the dropout."""
    expected = "expected an integer or a 0-d integer array, 0 <= seed < 2**64, or None"
    shape = getattr(seed, "shape", ())
    try:
        if type(seed) is bool or shape != ():
            raise TypeError
        value = operator.index(seed.item() if hasattr(seed, "item") else seed)
    except TypeError:
        given = f"of shape {list(shape)}" if shape else repr(seed)
        raise TypeError(f"seed is {type(seed).__name__} {given}; {expected}") from None
    if not 0 <= value < 1 << 64:
        raise ValueError(f"seed is {value}; {expected}")
    return value


def in_use(lengths: Any, batch: int, capacity: int, mask: Mask | None) -> tuple[int, Mask | None]:
    """(longest, mask) that let a query see the keys in use alone: read `longest` keys of the cache, under `mask`.

    lengths: integers [B] on the host. Where the batch is not ragged and the mask holds nothing of the capacity's size,
    the keys beyond are cut off and the mask stays as it is; else keys(lengths) joins it.
    """
    if getattr(lengths, "shape", None) != (batch,):
        raise ValueError(f"the cache has lengths of shape {getattr(lengths, 'shape', None)}; expected [B] = [{batch}]")
    stops: tuple[int, ...] = tuple(lengths.tolist())
    longest = max(stops, default=0)
    if longest > capacity or min(stops, default=0) < 0:
        raise ValueError(f"the cache has lengths {list(stops)}; expected 0 <= length <= its capacity, {capacity}")
    if mask is None or (type(mask) is Mask and not mask.has_data and "keys(" not in mask.flatten()[0]):
        if stops.count(longest) == batch:
            return longest, mask
        return longest, _under(mask, stops)
    if type(mask) is not Mask:
        return capacity, mask
    return capacity, _under(mask, stops)


@lru_cache(maxsize=64)
def _under(mask: Mask | None, stops: tuple[int, ...]) -> Mask:
    # one mask for all layers of a step, so that they share its plan
    used = keys(np.array(stops, np.int32))
    return used if mask is None else mask & used
