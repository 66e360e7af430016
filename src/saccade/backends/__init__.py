"""The verbs of a backend, and the choice of a backend for a problem.

A backend is a module of this folder with the verbs of `Backend`; GPU backends share plan_encoding.py. A backend gets a
checked problem, its plan, and arrays of its own runtime. problem.py checks calls, plan.py decides which keys a tile
visits, and frameworks/ converts arrays. docs/recipes.md lists what a new backend touches.
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

# names of backends, each with the kinds of device for which it is the default
ORDER = {"cpu": ("cpu",), "triton": ("cuda",), "metal": ("mlx", "mps"), "webgpu": ("webgpu",)}


class Extras(NamedTuple):
    """The arguments of a call besides q, k and v.

    bias is broadcastable to [B, Hq, Tq, Tk], slopes is [1 | B, Hq], sinks is [Hq], and distances is [1 | B, Hq, n],
    whose last number is the bias at i - j = Tk - 1. All four are float32, or float64 for float64 inputs. gates is
    float64 [B, Tk, Hq]: running sums of log gates over positions. seed is the 64-bit key of the dropout. block_table is
    int32 [B, pages], for keys in pages. lengths is int32 [B], on the device: how many of the Tk keys each sequence has;
    its last query is aligned with its last key. descale has the factors of 8-bit q, k and v, float32 [H] or [B, H].
    If k and v are codes, k_scale and v_scale are bfloat16, with one scale per group along the last dimension.
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

    q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv]; with a block table, k and v are pages [n, page, Hk, D | Dv].
    """

    q: Any
    k: Any
    v: Any
    extras: Extras = Extras()


class Outputs(NamedTuple):
    """The results of a forward call and their cotangents, which a backward call reads.

    o, do: [B, Tq, Hq, Dv]. The others are [B, Tq, Hq]: lse; dlse, None for zero; entropy and dentropy, None without a
    gradient of the entropy; delta = Σ do · o - dlse + dentropy · entropy, which a backward computes if it is None.
    """

    o: Any
    lse: Any
    do: Any
    dlse: Any = None
    delta: Any = None
    entropy: Any = None
    dentropy: Any = None


class Backend(Protocol):
    """The verbs of a backend. Each uses its own kind of array; the CPU's are NumPy arrays, with bfloat16 as uint16.

    Verbs with a body here are optional: `load` gives this body to a module without that verb.
    """

    # for each verb, the options of a problem (`Problem.uses`) that it computes; a call with another option is refused
    TAKES: Mapping[str, Set[str]]
    # whether frameworks pass torch tensors unconverted, even those on the CPU
    TAKES_TENSORS: bool = False
    # the threads of this process that its calls use, if any
    THREADS: Threads | None = None
    # (x, target, scale, first, second, cos, sin, interleaved, how) -> whether it wrote what `Arrays.write` would write
    append: Callable[..., bool] | None = None
    # (k, v or None, arrays, starts) -> whether it wrote what `Arrays.write_rows` would write of plain numbers
    append_rows: Callable[..., bool] | None = None

    def limits(self, problem: Problem) -> Limits:
        """Tile sizes and memory limits for planning this problem, on the device where its arrays live."""
        ...

    def plan(self, problem: Problem) -> Plan:
        """The plan of a problem, made with `limits`."""
        ...

    def unsupported(self, problem: Problem) -> list[str]:
        """Every reason why this problem cannot be computed here, except options missing from TAKES."""
        ...

    def forward(self, problem: Problem, plan: Plan, inputs: Inputs, *, out_dtype: str | None = None) -> tuple[Any, ...]:
        """(o, lse, *more); o has out_dtype, by default the inputs' dtype, and the others have the accumulator's.

        more: the maximum and the entropy [B, Tq, Hq], those that the problem asks for.
        """
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
        """(dq, dk, dv, gradients of the fields of `Side` that grads names); the first three have out_dtype, by
        default the inputs' dtype.
        """
        ...

    def decode(self, problem: Problem, plan: Plan, inputs: Inputs) -> tuple[Any, ...]:
        """`forward` for few queries and many keys; the mask already includes the lengths."""
        ...

    @staticmethod
    def direct(problem: Problem, plan: Plan, kind: type, decode: bool) -> Any:
        """A fast call (threads, q, k, v, want_lse) -> (o, lse or None) for tensors of `kind`, or None if there is none.

        The call returns None for tensors whose layout it does not support. So does its attribute `backward`
        (threads, owners, do, q, k, v, o, lse, dlse or None) -> (dq, dk, dv).
        """
        return None

    @staticmethod
    def tangent(problem: Problem, plan: Plan, inputs: Inputs, o: Any, lse: Any, tangents: Inputs) -> tuple[Any, Any]:
        """The tangents of o and lse; those of the inputs are None where zero. Only with TAKES["tangent"]."""
        raise NotImplementedError

    @staticmethod
    def follows_lengths(problem: Problem, plan: Plan) -> bool:
        """Whether `decode` reads the lengths of sequences on the device, as `Extras.lengths`."""
        return False

    @staticmethod
    def explain(problem: Problem, plan: Plan) -> tuple[Plan, dict[str, str]]:
        """For `saccade explain`: the plan with the forward kernel's tiles, and the kernels with reasons."""
        return plan, {}

    @staticmethod
    def missing() -> list[str]:
        """Reasons why this backend cannot run anything on this machine."""
        return []

    @staticmethod
    def describe() -> dict[str, Any]:
        """What it runs on, for `saccade devices`. Raises Unsupported if it cannot run."""
        return {}


class Threads(Protocol):
    """The threads of this process that calls use; torch's number of threads can limit them too."""

    # the most threads that a call may use
    number: int

    def set_num_threads(self, n: int) -> None:
        """Use at most n threads, including the calling one."""
        ...

    def join_team(self, library: str | None) -> None:
        """Run calls on the OpenMP runtime at this path, or for None on the backend's own threads."""
        ...


class Recurrent(Protocol):
    """The verbs of a backend's module for recurrences. Arrays are passed by name; an omitted array is None."""

    # the options and optional arrays of a problem (its `uses`) that it supports; a call with another is refused
    TAKES: Set[str]
    TAKES_TENSORS: bool = False
    THREADS: Threads | None = None

    def unsupported(self, problem: Any) -> list[str]:
        """Every reason why this problem cannot be computed here, except options missing from TAKES."""
        ...

    def forward(self, problem: Any, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arrays that `problem.outputs` describes."""
        ...

    def backward(
        self, problem: Any, arrays: Mapping[str, Any], cotangents: Sequence[Any], needs: Set[str]
    ) -> dict[str, Any]:
        """Gradients by name, at least of the arrays that `needs` names; a cotangent of None means zero."""
        ...


def load(name: str, module: str = "") -> Any:
    """The backend of that name, or its submodule `module`, imported on first use.

    Raises ValueError for an unknown name, Unsupported for a backend that this build lacks.
    """
    if name not in ORDER:
        raise ValueError(f"backend is {name!r}; expected None or one of {', '.join(ORDER)}")
    package = f"{__name__}.{name}"
    path = f"{package}.{module}" if module else package
    try:
        return _with_defaults(importlib.import_module(path), Recurrent if module else Backend)
    except ModuleNotFoundError as error:
        if error.name == package or (not module and error.name == path):
            raise Unsupported(name, ["it is not in this build yet: leave backend out"]) from None
        if error.name == path:
            raise Unsupported(name, ["it has no such recurrences: leave backend out, or move the arrays"]) from None
        raise Unsupported(name, [f"it needs the package {error.name}: pip install it"]) from error


def _with_defaults(module: ModuleType, verbs: type) -> ModuleType:
    # default values and bodies of the Protocol; required verbs are not static methods, and are left out
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
    """The backend that computes this problem: `backend` if given, otherwise the one for the device of the arrays.

    A named backend never falls back to another. Raises Unsupported with every reason.
    """
    name = _name(problem.device, backend)
    return _able(name, load(name), lambda chosen: refusals(chosen, problem))


def choose_recurrent(problem: Described, backend: str | None = None) -> Recurrent:
    """`choose` for a recurrence: the module of the backend that computes its kind."""
    name = _name(problem.device, backend)
    return _able(name, load(name, problem.backend_module), lambda chosen: recurrent_refusals(chosen, problem))


def recurrent_refusals(backend: Recurrent, problem: Described) -> list[str]:
    """Every reason why a backend does not compute a recurrence."""
    lacks = [_OF_RECURRENCES.get(name, name) for name in sorted(problem.uses - backend.TAKES)]
    reasons = [f"{name} is not computed here: leave backend out, or move the arrays to the CPU" for name in lacks]
    return backend.unsupported(problem) + reasons


# options of recurrences whose names alone do not explain them
_OF_RECURRENCES = {
    "g": "a decay g",
    "rule": "the delta rule",
    "initial_dtype": "an initial state of 16 bits",
    "state_dtype": "a state returned in 16 bits",
}


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
