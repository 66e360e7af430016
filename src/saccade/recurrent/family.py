"""The description of a family of recurrences for the frameworks: its arrays, its options, and how to check a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ..operands import DTYPES, Spec, in_use

Specs = Mapping[str, "Spec | None"]


class Described(Protocol):
    """A checked call without its arrays; frozen and hashable.

    backend_module: the module of a backend that computes it.
    """

    @property
    def backend_module(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def uses(self) -> frozenset[str]: ...
    @property
    def outputs(self) -> tuple[Spec, ...]: ...


class Uses:
    """The options in use, which both kinds of `Described` derive from their fields."""

    # fields that every backend supports, and the names of the optional arrays that the call has
    known: ClassVar[Set[str]]
    present: frozenset[str]

    @cached_property
    def uses(self) -> frozenset[str]:
        """The options and the optional arrays in use: a backend must support all of them."""
        return in_use(self, self.known) | self.present


@dataclass(frozen=True, eq=False)
class Family:
    """One operator saccade::<name> and its gradient.

    inputs: names of its arrays in order, optional ones with "?". integers: the names of those without a gradient.
    schema: the options as torch writes them, in the order of the fields of `Options`. describe(specs by name, options)
    checks and returns a `Described`.
    """

    name: str
    inputs: tuple[str, ...]
    integers: frozenset[str]
    schema: str
    outputs: tuple[str, ...]
    Options: type[Any]
    describe: Callable[[Specs, Any], Any]
    # those of the arrays without "?"; no cached_property, whose first use torch.compile cannot trace in Python 3.11
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(name.rstrip("?") for name in self.inputs))

    def present(self, specs: Specs) -> frozenset[str]:
        """The names of the optional arrays that the call has."""
        return frozenset(x.rstrip("?") for x in self.inputs if x.endswith("?") and specs[x.rstrip("?")] is not None)


def accumulator(dtype: str) -> str:
    """The dtype of states and sums: float64 for float64 inputs, else float32."""
    return "float64" if dtype == "float64" else "float32"


def check_array(
    name: str, spec: Spec, shape: tuple[int, ...], layout: str, dtypes: tuple[str, ...], like: Spec
) -> None:
    """Check the shape, dtype and device of an array; layout: the names of its dimensions for messages."""
    if tuple(spec.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(spec.shape)}; expected {layout} = {list(shape)}")
    if spec.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {spec.dtype}; expected {' or '.join(dict.fromkeys(dtypes))}: cast it first")
    if spec.device != like.device:
        raise ValueError(f"{name} lives on {spec.device} and the first array on {like.device}; move them together")


def check_floating(name: str, spec: Spec, rank: int, layout: str) -> None:
    """Check that an array has `rank` dimensions, none empty after B and T, and a supported dtype."""
    if len(spec.shape) != rank:
        raise ValueError(f"{name} has shape {list(spec.shape)}; expected {layout}")
    if spec.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {spec.dtype}; expected one of {', '.join(DTYPES)}: cast it first")
    if any(n < 1 for n in spec.shape[2:]):
        raise ValueError(f"{name} has shape {list(spec.shape)}; expected {layout} with at least 1 of each after T")


def check_packed(spec: Spec | None, B: int, T: int) -> int:
    """The number of sequences: B, or N for cu_seqlens [N + 1], which needs B = 1."""
    if spec is None:
        return B
    if spec.dtype not in ("int32", "int64"):
        raise TypeError(f"cu_seqlens has dtype {spec.dtype}; expected int32 or int64")
    if len(spec.shape) != 1 or spec.shape[0] < 1:
        raise ValueError(f"cu_seqlens has shape {list(spec.shape)}; expected [N + 1], the borders of N sequences")
    if B != 1:
        raise ValueError(f"cu_seqlens with a batch of {B}; expected B = 1: put the sequences one after the other")
    return spec.shape[0] - 1


def check_borders(borders: NDArray[Any], T: int) -> NDArray[np.int64]:
    """cu_seqlens as int64; raises ValueError unless it runs from 0 to T and never decreases."""
    borders = np.ascontiguousarray(borders, np.int64)
    if borders[0] != 0 or borders[-1] != T or (np.diff(borders) < 0).any():
        raise ValueError(f"cu_seqlens is {borders.tolist()}; expected numbers from 0 to T = {T} that never decrease")
    return borders


def chunk_of(chunk: int | None, default: int, longest: int) -> int:
    """The tokens of a chunk; raises TypeError unless chunk is None or an integer, ValueError beyond 1 to `longest`."""
    chunk = default if chunk is None else chunk
    if isinstance(chunk, bool) or not isinstance(chunk, Integral):
        raise TypeError(f"chunk is {chunk!r}; expected None or an integer, tokens computed at a time")
    if not 1 <= chunk <= longest:
        raise ValueError(f"chunk is {chunk}; expected 1 to {longest} tokens, or None for the plan's choice")
    return int(chunk)


def kind_of(x: Any) -> str:
    """The shape of x for a message, or its type."""
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"of shape {list(shape)}"
