"""The verbs of a backend, and the choice of one.

A backend is a module of this folder with the verbs of `Backend`; plan_encoding.py is shared by those of GPUs. It is not
responsible for checking a call (problem.py), for ranges of keys (plan.py), or for any framework's arrays (frameworks/):
it gets a described problem, its plan, and arrays of its own runtime. docs/recipes.md lists what a new one touches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence, Set
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import Unsupported
from ..problem import OPTIONS

if TYPE_CHECKING:
    from ..plan import Limits, Plan
    from ..problem import Problem
    from ..recurrent.family import Described

# backend, and the kinds of device whose arrays it takes when none is named
ORDER = {"cpu": ("cpu",), "triton": ("cuda",), "metal": ("mlx", "mps"), "webgpu": ("webgpu",)}


class Extras(NamedTuple):
    """What a call carries besides q, k and v.

    bias is broadcastable to [B, Hq, Tq, Tk], slopes is [1 | B, Hq], sinks is [Hq], distances is [1 | B, Hq, n], whose
    last number is the bias of i - j = Tk - 1, all float32, or float64 for float64 inputs. gates is float64 [B, Tk, Hq],
    running sums over positions. seed is the 64-bit key of the dropout. block_table is int32 [B, pages], for a paged
    source. lengths is int32 [B], on the device: of the keys given only so many are there, and the last query meets the
    last of them. descale: the factors of 8-bit q, k and v, float32 [H] or [B, H]. k_scale, v_scale: where k and v are
    codes, bfloat16 like them but for the last dimension, which has one a group.
    """

    bias: Any = None
    slopes: Any = None
    sinks: Any = None
    distances: Any = None
    gates: Any = None
    seed: int = 0
    block_table: Any = None
    page_size: int = 0
    lengths: Any = None
    descale: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Inputs(NamedTuple):
    """The arrays that attention reads.

    q is [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv]; with a block table k and v are pages
    [n, page, Hk, D | Dv].
    """

    q: Any
    k: Any
    v: Any
    extras: Extras = Extras()


class Outputs(NamedTuple):
    """The results of a forward call and their cotangents, which a backward call reads.

    o and do are [B, Tq, Hq, Dv], lse and dlse [B, Tq, Hq]; dlse is None where it is zero. delta, Σ do · o - dlse,
    is [B, Tq, Hq]; where it is None, the backward computes it.
    """

    o: Any
    lse: Any
    do: Any
    dlse: Any = None
    delta: Any = None


class Backend(Protocol):
    """The verbs of a backend. Arrays are of its own kind; the CPU's are NumPy's, with bfloat16 carried as uint16.

    A module that leaves out a verb with a body here has that body.
    """

    # by verb, the options of a problem (`Problem.uses`) that it computes; a call with any other is refused
    TAKES: Mapping[str, Set[str]]
    # whether frameworks hand over torch tensors as they are, also those on the CPU
    TAKES_TENSORS: bool = False
    # how many threads of the process its calls take, where they take any
    THREADS: Threads | None = None
    # (x, target, scale, first, second, cos, sin, interleaved, how) -> whether it did what `Arrays.write` of caches does
    append: Callable[..., bool] | None = None

    def limits(self, problem: Problem) -> Limits:
        """Tile sizes and memory to plan this problem with, on the device where its arrays live."""
        ...

    def plan(self, problem: Problem) -> Plan:
        """The plan of a problem, by `limits`."""
        ...

    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason, beside an option that TAKES lacks, why this problem cannot be computed here."""
        ...

    def forward(self, problem: Problem, plan: Plan, inputs: Inputs, *, out_dtype: str | None = None) -> tuple[Any, Any]:
        """(o, lse); o in out_dtype, by default that of the inputs, lse in the accumulator's dtype."""
        ...

    def backward(
        self,
        problem: Problem,
        plan: Plan,
        inputs: Inputs,
        outputs: Outputs,
        *,
        grads: Set[str] = frozenset(),
        out_dtype: str | None = None,
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """(dq, dk, dv, gradients of those fields of `Side` that grads names); the first three in
        out_dtype, by default that of the inputs.
        """
        ...

    def decode(self, problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Any, Any]:
        """forward for few queries and many keys; the mask already holds the lengths."""
        ...

    @staticmethod
    def direct(problem: Problem, plan: Plan, kind: type, decode: bool) -> Any:
        """A short way (threads, q, k, v, lse wanted) -> (o, lse or None) for tensors of `kind`, or None for none.

        It returns None for tensors that it was not made for. Its attribute `backward` (threads, owners, do, q, k, v, o,
        lse, dlse or None) -> (dq, dk, dv) may do so too.
        """
        return None

    @staticmethod
    def follows_lengths(problem: Problem, plan: Plan) -> bool:
        """Whether `decode` reads the lengths of sequences on the device, as `Extras.lengths`."""
        return False

    @staticmethod
    def explain(problem: Problem, plan: Plan) -> tuple[Plan, dict[str, str]]:
        """For `saccade explain`: the plan by the tiles of the forward kernel, the kernels, and why those."""
        return plan, {}

    @staticmethod
    def missing() -> list[str]:
        """What keeps this machine from running anything here."""
        return []

    @staticmethod
    def describe() -> dict[str, Any]:
        """What it runs on, for `saccade devices`. Raises Unsupported where there is nothing."""
        return {}


class Threads(Protocol):
    """The threads of this process that calls take, which torch has a number of too."""

    # how many threads a call may use
    number: int

    def set_num_threads(self, n: int) -> None:
        """Use at most n threads, the calling one among them."""
        ...

    def join_team(self, library: str | None) -> None:
        """Run calls by the OpenMP runtime at this path; None: by threads of its own."""
        ...


class Recurrent(Protocol):
    """The verbs of a room of recurrences, a module in a backend's folder: arrays by name, None where left out."""

    # the options and optional arrays of a problem (its `uses`) that it computes; a call with any other is refused
    TAKES: Set[str]
    TAKES_TENSORS: bool = False
    THREADS: Threads | None = None

    def unsupported(self, problem: Any) -> list[str]:
        """Every reason, beside an option that TAKES lacks, why this problem cannot be computed here."""
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
        return _with_defaults(importlib.import_module(module), Recurrent if room else Backend)
    except ModuleNotFoundError as error:
        if error.name == package or (not room and error.name == module):
            raise Unsupported(name, ["it is not in this build yet: leave backend out"]) from None
        if error.name == module:
            raise Unsupported(name, ["it has no such recurrences: leave backend out, or move the arrays"]) from None
        raise Unsupported(name, [f"it needs the package {error.name}: pip install it"]) from error


def _with_defaults(module: ModuleType, verbs: type) -> ModuleType:
    # what a Protocol gives a value or a body, but for its required verbs, which are no static methods
    for name, value in vars(verbs).items():
        optional = isinstance(value, staticmethod) or not callable(value)
        if optional and not name.startswith("_") and not hasattr(module, name):
            setattr(module, name, getattr(verbs, name))
    return module


def refusals(backend: Backend, problem: Problem) -> list[str]:
    """Every reason why a backend does not compute a problem."""
    return backend.unsupported(problem) + lacking(backend, problem)


def lacking(backend: Backend, problem: Problem) -> list[str]:
    """The options of a problem that a backend does not compute, as reasons."""
    verbs = ("forward", "backward") if problem.needs_grad else ("forward", "decode")
    reasons: list[str] = []
    for option in sorted(problem.uses):
        lacks = [verb for verb in verbs if option not in backend.TAKES[verb]]
        if lacks:
            way_out = "detach its arrays" if lacks == ["backward"] else "leave it out"
            reasons.append(f"{' and '.join(lacks)} with {OPTIONS.get(option, option)} is not computed here: {way_out}")
    return reasons


def choose(problem: Problem, backend: str | None = None) -> Backend:
    """The backend that computes this problem: the one named, else by where the arrays live.

    A named backend never falls back. Raises Unsupported with every reason.
    """
    name = _name(problem.device, backend)
    return _able(name, load(name), lambda chosen: refusals(chosen, problem))


def choose_room(problem: Described, backend: str | None = None) -> Recurrent:
    """`choose` for a recurrence: the module of the backend that computes its kind."""
    name = _name(problem.device, backend)
    return _able(name, load(name, problem.room), lambda chosen: room_refusals(chosen, problem))


def room_refusals(room: Recurrent, problem: Described) -> list[str]:
    """Every reason why a room of a backend does not compute a recurrence."""
    lacks = [_OF_RECURRENCES.get(name, name) for name in sorted(problem.uses - room.TAKES)]
    reasons = [f"{name} is not computed here: leave backend out, or move the arrays to the CPU" for name in lacks]
    return room.unsupported(problem) + reasons


# options of recurrences whose names alone say too little
_OF_RECURRENCES = {"g": "a decay g", "rule": "the delta rule"}


def _name(device: str, backend: str | None) -> str:
    if backend is None:
        kind = device.partition(":")[0]
        names = [name for name, kinds in ORDER.items() if kind in kinds]
        if not names:
            raise Unsupported(kind, [f"no backend takes arrays on {device}: move them to one of cpu, cuda, mps"])
        return names[0]
    if not isinstance(backend, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"backend is {type(backend).__name__}; expected None or one of {', '.join(ORDER)}")
    return backend


def _able(name: str, chosen: Any, refusals: Callable[[Any], list[str]]) -> Any:
    reasons = refusals(chosen)
    if reasons:
        raise Unsupported(name, reasons)
    return chosen
