"""The verbs of a backend, and the choice of one.

A backend is a module of this folder with the verbs of `Backend`. It is not responsible for checking a call
(problem.py), for ranges of keys (plan.py), or for any framework's arrays (frameworks/): it gets a described problem,
its plan, and arrays of its own runtime. Adding one touches ORDER, and nothing else outside its folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from ..errors import Unsupported

if TYPE_CHECKING:
    from ..plan import Limits, Plan
    from ..problem import Problem
    from ..recurrent.family import Described

# backend, and the kinds of device whose arrays it takes when none is named
ORDER = {"cpu": ("cpu",), "triton": ("cuda",), "metal": ("mlx", "mps"), "webgpu": ("webgpu",)}


class Extras(NamedTuple):
    """What a call carries besides q, k and v.

    bias is broadcastable to [B, Hq, Tq, Tk], slopes is [1 | B, Hq], sinks is [Hq], all float32, or float64 for float64
    inputs. seed is the 64-bit key of the dropout. block_table is int32 [B, pages], for a paged source. lengths is int32
    [B], on the device: of the keys given only so many are there, and the last query meets the last of them. descale:
    the factors of 8-bit q, k and v, float32 [H] or [B, H]. k_scale, v_scale: where k and v are codes, bfloat16 like
    them but for the last dimension, which has one a group.
    """

    bias: Any = None
    slopes: Any = None
    sinks: Any = None
    seed: int = 0
    block_table: Any = None
    page_size: int = 0
    lengths: Any = None
    descale: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Backend(Protocol):
    """The verbs. Arrays are the backend's own kind; the CPU's are NumPy, with bfloat16 carried as uint16."""

    def limits(self, problem: Problem) -> Limits:
        """Tile sizes and memory to plan this problem with, on the device where its arrays live."""
        ...

    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason why this problem cannot be computed here; empty when it can."""
        ...

    def forward(
        self, problem: Problem, plan: Plan, q: Any, k: Any, v: Any, extras: Extras, *, out_dtype: str | None = None
    ) -> tuple[Any, Any]:
        """(o, lse); o in out_dtype, by default that of the inputs, lse in the accumulator's dtype."""
        ...

    def backward(
        self, problem: Problem, plan: Plan, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, extras: Extras, *,
        dlse: Any = None, delta: Any = None, grads: Set[str] = frozenset(), out_dtype: str | None = None,
    ) -> tuple[Any, Any, Any, dict[str, Any]]:  # fmt: skip
        """(dq, dk, dv, gradients of those among "bias", "slopes", "sinks" that grads names); the first three in
        out_dtype, by default that of the inputs. delta, Σ do · o - dlse, is taken from o and dlse where it is None.
        """
        ...

    def decode(self, problem: Problem, plan: Plan, q: Any, k: Any, v: Any, extras: Extras) -> tuple[Any, Any]:
        """forward for few queries and many keys; the mask already holds the lengths."""
        ...


class Recurrent(Protocol):
    """The verbs of a room of recurrences, a module in a backend's folder: arrays by name, None where left out."""

    def unsupported(self, problem: Any) -> list[str]:
        """Every reason why this problem cannot be computed here; empty when it can."""
        ...

    def forward(self, problem: Any, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """What `problem.outputs` describes."""
        ...

    def backward(
        self, problem: Any, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
    ) -> dict[str, Any]:
        """Gradients by name of at least those arrays that needs names; a cotangent is None where it is zero."""
        ...


def load(name: str, room: str = "") -> Any:
    """The backend of that name, or a room of it, imported at its first use.

    Raises ValueError for a name nobody knows, Unsupported for one that this build lacks.
    """
    if name not in ORDER:
        raise ValueError(f"backend is {name!r}; expected None or one of {', '.join(ORDER)}")
    package = f"{__name__}.{name}"
    module = f"{package}.{room}" if room else package
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == package or (not room and error.name == module):
            raise Unsupported(name, ["it is not in this build yet: leave backend out"]) from None
        if error.name == module:
            raise Unsupported(name, ["it has no such recurrences: leave backend out, or move the arrays"]) from None
        raise Unsupported(name, [f"it needs the package {error.name}: pip install it"]) from error


def choose(problem: Problem, backend: str | None = None) -> Backend:
    """The backend that computes this problem: the one named, else by where the arrays live.

    A named backend never falls back. Raises Unsupported with every reason.
    """
    return cast(Backend, _able(problem, _name(problem.device, backend), ""))


def choose_room(problem: Described, backend: str | None = None) -> Recurrent:
    """`choose` for a recurrence: the module of the backend that computes its kind."""
    return cast(Recurrent, _able(problem, _name(problem.device, backend), problem.room))


def _name(device: str, backend: str | None) -> str:
    if backend is None:
        kind = device.partition(":")[0]
        found = [name for name, kinds in ORDER.items() if kind in kinds]
        if not found:
            raise Unsupported(kind, [f"no backend takes arrays on {device}: move them to one of cpu, cuda, mps"])
        return found[0]
    if not isinstance(backend, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"backend is {type(backend).__name__}; expected None or one of {', '.join(ORDER)}")
    return backend


def _able(problem: Any, name: str, room: str) -> Any:
    chosen = load(name, room)
    reasons = chosen.unsupported(problem)
    if reasons:
        raise Unsupported(name, reasons)
    return chosen
