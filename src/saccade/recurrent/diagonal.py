"""One call of a recurrence whose state is one number per channel and slot, checked once.

    h_t = a_t ⊙ h_{t-1} + b_t

Dimension key:

    B   batch                            T   tokens
    S   sequences: B, or by cu_seqlens   D   channels
    N   slots per channel                G   groups that share B_t and C_t: channel d reads group d // (D / G)
    K   width of a convolution

Layouts: u, x and similar arrays [B, T, D]; states [S, D, N], [S, D] and [S, D, K - 1].
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from ..operands import Spec, check_flag
from ..problem import LONGEST
from .family import Family, Specs, Uses, accumulator, check_array, check_floating, check_packed, chunk_of

WIDEST_CONV = 8
LONGEST_CHUNK = 1024


class ScanOptions(NamedTuple):
    """chunk: tokens between two states that a backward stores; None for the plan's choice."""

    delta_softplus: bool = False
    chunk: int | None = None
    backend: str | None = None


class GatedOptions(NamedTuple):
    """chunk: as in `ScanOptions`."""

    chunk: int | None = None
    backend: str | None = None


class ConvOptions(NamedTuple):
    """activation: "" for none."""

    activation: str = ""
    backend: str | None = None


@dataclass(frozen=True)
class Diagonal(Uses):
    """One call without its arrays; `chunk` as in the options. present: the names of its optional arrays."""

    backend_module: ClassVar[str] = "diagonal"
    known: ClassVar[Set[str]] = {*("B", "T", "S", "D", "dtype", "device"), *("N", "G", "K", "chunk", "present")}

    B: int
    T: int
    S: int
    D: int
    dtype: str
    device: str
    present: frozenset[str]

    @property
    def accumulator(self) -> str:
        """The dtype of states and sums."""
        return accumulator(self.dtype)

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a state."""
        return self.S, self.D

    @cached_property
    def outputs(self) -> tuple[Spec, ...]:
        """y [B, T, D] and the final state."""
        y = Spec((self.B, self.T, self.D), self.dtype, self.device)
        return y, Spec(self.state, self.accumulator, self.device)


@dataclass(frozen=True)
class Scan(Diagonal):
    """A selective scan. fixed_B, fixed_C: whether B, C are constant in time."""

    N: int
    G: int
    chunk: int
    fixed_B: bool = False
    fixed_C: bool = False
    delta_softplus: bool = False

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a state."""
        return self.S, self.D, self.N


@dataclass(frozen=True)
class GatedUnit(Diagonal):
    """An RG-LRU."""

    chunk: int


@dataclass(frozen=True)
class Convolution(Diagonal):
    """A causal convolution of each channel."""

    K: int
    activation: str = ""

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of a state."""
        return self.S, self.D, self.K - 1


def _tokens(specs: Specs, name: str) -> tuple[Spec, int, tuple[str, str]]:
    # the first array, the number of sequences, the dtypes that other arrays may have
    x = specs[name]
    assert x is not None
    check_floating(name, x, 3, "[B, T, D]")
    B, T, _ = x.shape
    if T >= LONGEST:
        raise ValueError(f"T is {T}; expected less than 2**30: split the call and carry the state")
    return x, check_packed(specs["cu_seqlens"], B, T), (x.dtype, accumulator(x.dtype))


def _state(specs: Specs, shape: tuple[int, ...], layout: str, x: Spec) -> None:
    state = specs["initial_state"]
    if state is not None:
        check_array("initial_state", state, shape, layout, (accumulator(x.dtype),), x)


def _groups(name: str, x: Spec, spec: Spec, N: int, dtypes: tuple[str, str]) -> int:
    # the number of groups of B or C; 0 if it is constant in time
    B, T, D = x.shape
    rank, layouts = len(spec.shape), "[B, T, G, N], [B, T, N], [D, N] or [N]"
    if rank == 4:
        G = int(spec.shape[2])
        if G < 1 or D % G:
            raise ValueError(f"{name} has {G} groups and u {D} channels; expected G to divide D")
        check_array(name, spec, (B, T, G, N), "[B, T, G, N]", dtypes, x)
        return G
    shapes = {1: (N,), 2: (D, N), 3: (B, T, N)}
    if rank not in shapes:
        raise ValueError(f"{name} has shape {list(spec.shape)}; expected {layouts}")
    check_array(name, spec, shapes[rank], f"with {rank} dimensions (of {layouts})", dtypes, x)
    return int(rank == 3)


def describe_scan(specs: Specs, options: ScanOptions) -> Scan:
    """Check a selective scan and describe it; specs by the names of `SELECTIVE_SCAN`.

    Raises ValueError or TypeError; the message says what was passed, what was expected and what to do.
    """
    u, S, dtypes = _tokens(specs, "u")
    A, B, C = specs["A"], specs["B"], specs["C"]
    assert A is not None
    assert B is not None
    assert C is not None
    D = u.shape[2]
    if len(A.shape) != 2 or A.shape[0] != D or A.shape[1] < 1:
        raise ValueError(f"A has shape {list(A.shape)}; expected [D, N] with D = {D} channels and N at least 1")
    N = A.shape[1]
    check_array("A", A, (D, N), "[D, N]", dtypes, u)
    for name in ("delta", "z"):
        spec = specs[name]
        if spec is not None:
            check_array(name, spec, u.shape, "that of u, [B, T, D]", dtypes, u)
    for name in ("D", "delta_bias"):
        spec = specs[name]
        if spec is not None:
            check_array(name, spec, (D,), "[D]", dtypes, u)
    of_B, of_C = _groups("B", u, B, N, dtypes), _groups("C", u, C, N, dtypes)
    if of_B and of_C and of_B != of_C:
        raise ValueError(f"B has {of_B} groups and C has {of_C}; expected the same")
    _state(specs, (S, D, N), "[B, D, N], or one per sequence of cu_seqlens", u)
    check_flag("delta_softplus", options.delta_softplus)
    sizes = u.shape[0], u.shape[1], S, D, u.dtype, u.device
    present, chunk = SELECTIVE_SCAN.present(specs), chunk_of(options.chunk, 64, LONGEST_CHUNK)
    return Scan(*sizes, present, N, of_B or of_C or 1, chunk, not of_B, not of_C, options.delta_softplus)


def describe_gated(specs: Specs, options: GatedOptions) -> GatedUnit:
    """`describe_scan` for an RG-LRU."""
    x, S, dtypes = _tokens(specs, "x")
    B, T, D = x.shape
    for name in ("r", "i"):
        spec = specs[name]
        assert spec is not None
        check_array(name, spec, x.shape, "that of x, [B, T, D]", dtypes, x)
    a_param = specs["a_param"]
    assert a_param is not None
    check_array("a_param", a_param, (D,), "[D]", dtypes, x)
    _state(specs, (S, D), "[B, D], or one per sequence of cu_seqlens", x)
    return GatedUnit(B, T, S, D, x.dtype, x.device, RG_LRU.present(specs), chunk_of(options.chunk, 64, LONGEST_CHUNK))


def describe_conv(specs: Specs, options: ConvOptions) -> Convolution:
    """`describe_scan` for a causal convolution."""
    x, S, dtypes = _tokens(specs, "x")
    B, T, D = x.shape
    weight, bias = specs["weight"], specs["bias"]
    assert weight is not None
    if len(weight.shape) != 2 or weight.shape[0] != D or not 1 <= weight.shape[1] <= WIDEST_CONV:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; expected [D, K] with D = {D}, and K from 1 to {WIDEST_CONV}"
        )
    K = weight.shape[1]
    check_array("weight", weight, (D, K), "[D, K]", dtypes, x)
    if bias is not None:
        check_array("bias", bias, (D,), "[D]", dtypes, x)
    _state(specs, (S, D, K - 1), "[B, D, K - 1], or one per sequence of cu_seqlens", x)
    if options.activation not in ("", "silu"):
        raise ValueError(f"activation is {options.activation!r}; expected None or 'silu'")
    return Convolution(B, T, S, D, x.dtype, x.device, CAUSAL_CONV1D.present(specs), K, options.activation)


STATE = ("initial_state?", "cu_seqlens?")
SELECTIVE_SCAN = Family(
    name="selective_scan",
    inputs=("u", "delta", "A", "B", "C", "D?", "z?", "delta_bias?", *STATE),
    integers=frozenset({"cu_seqlens"}),
    schema="bool delta_softplus, int? chunk, str? backend",
    outputs=("y", "final_state"),
    Options=ScanOptions,
    describe=describe_scan,
)
RG_LRU = Family(
    name="rg_lru",
    inputs=("x", "r", "i", "a_param", *STATE),
    integers=frozenset({"cu_seqlens"}),
    schema="int? chunk, str? backend",
    outputs=("y", "final_state"),
    Options=GatedOptions,
    describe=describe_gated,
)
CAUSAL_CONV1D = Family(
    name="causal_conv1d",
    inputs=("x", "weight", "bias?", *STATE),
    integers=frozenset({"cu_seqlens"}),
    schema="str activation, str? backend",
    outputs=("y", "final_state"),
    Options=ConvOptions,
    describe=describe_conv,
)
